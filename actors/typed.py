"""Typed replies as their caller sees them: from a type to the JSON schema an engine holds a reply to.

Owns the schema of ``returns=`` and the refusal of types whose JSON schema says less than their decoder asks.
"""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec
from msgspec import inspect

from offbook.bus.errors import InvalidRequest


def schema_of(returns: Any) -> dict[str, Any]:
    """The JSON schema of a type; a reply of that schema decodes as the type.

    Raises:
        InvalidRequest: the type has none, or one that leaves out what decoding asks for.
    """
    try:
        schema = msgspec.json.schema(returns)
        _check(inspect.type_info(returns), getattr(returns, "__name__", str(returns)), set())
    except TypeError as exc:
        raise InvalidRequest(f"returns={returns!r} has no JSON schema: {exc}") from exc
    _without_sets(schema)
    return schema


def _refuse(where: str, feature: str, instead: str) -> NoReturn:
    raise InvalidRequest(
        f"returns: {where}: a reply cannot be held to {feature}: {instead}", feature=feature, where=where
    )


def _check(kind: inspect.Type, where: str, seen: set[int]) -> None:
    """Look for types that JSON schemas do not express, in everything the type is made of."""
    if id(kind) in seen:
        return
    seen.add(id(kind))
    match kind:
        case inspect.DateTimeType(tz=tz) if tz is not True:
            _refuse(where, "a datetime that may have no zone", "use Annotated[datetime, Meta(tz=True)]")
        case inspect.TimeType(tz=None):
            _refuse(where, "a time with or without zone", "say which: Annotated[time, Meta(tz=True)]")
        case inspect.DictType(key_type=key) if not _is_text(key):
            _refuse(where, "keys that are no texts", "use str, Literal or a str Enum as the keys' type")
    if isinstance(
        kind, inspect.StructType | inspect.TypedDictType | inspect.NamedTupleType | inspect.DataclassType
    ):
        for field in kind.fields:
            _check(field.type, f"{where}.{field.name}", seen)
        return
    for name in getattr(kind, "__struct_fields__", ()):
        value = getattr(kind, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, inspect.Type):
                _check(part, where, seen)


def _is_text(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.Metadata):
        return _is_text(kind.type)
    if isinstance(kind, inspect.LiteralType):
        return all(isinstance(value, str) for value in kind.values)
    if isinstance(kind, inspect.EnumType):
        return all(isinstance(member.value, str) for member in kind.cls)
    return isinstance(kind, inspect.StrType | inspect.AnyType)


def _without_sets(node: Any) -> None:
    """Sets are arrays; items that repeat are lost in decoding, which matters only to a least size."""
    if isinstance(node, dict):
        if node.get("uniqueItems") is True and node.get("minItems", 0) <= 1:
            del node["uniqueItems"]
        for value in node.values():
            _without_sets(value)
    elif isinstance(node, list):
        for value in node:
            _without_sets(value)
