"""Durable state: which fields of an actor are stored, and how they become bytes and come back.

Owns the stored form of an actor's state. It is a msgpack map of the annotated fields, written with the
class's ``state_version``. Every encoded state is decoded again before it is accepted, so a value that
would not come back as it is (a wrong type, a foreign object, a subclass with extra fields) is refused when
the turn commits, with its path, and never found out after a restart.

Stored fields that the class does not have are *carried*: kept as their bytes, unread, and written again with
every commit. So a field that one release adds survives a roll-back to the one before, and a removed field is
there again when its annotation is. ``migrate_from`` is how a class lets go of one: what it returns is all
there is. This holds for the actor's own fields; structs inside them are read and written as their class has
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from offbook.bus.errors import InvalidRequest, StateNotLoadable, StateNotStorable

from .message import names

_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.msgpack.Encoder().encode
_encode_sorted = msgspec.msgpack.Encoder(order="deterministic").encode

S = TypeVar("S")

Migrate = Callable[[int, dict[str, Any]], dict[str, Any]]

Carried = dict[str, msgspec.Raw]

_CARRIED = "_offbook_carried"
"""Attribute of actors and loaded states: the fields that the class does not have."""


def carried(holder: Any) -> Carried:
    """The stored fields that the class of an actor, or of a loaded state, does not have."""
    found: Carried = getattr(holder, _CARRIED, {})
    return found


class StateSchema:
    """The stored fields of one actor class.

    Args:
        kind: the actor kind, for error messages.
        fields: name -> type of each stored field, in order.
        defaults: name -> default of the fields that have one.
        version: the class's ``state_version``.
        migrate: the class's ``migrate_from``, if it has one.
    """

    def __init__(
        self,
        kind: str,
        fields: Mapping[str, Any],
        defaults: Mapping[str, Any],
        version: int = 1,
        migrate: Migrate | None = None,
    ) -> None:
        self.kind = kind
        self.names = frozenset(fields)
        self.required = tuple(name for name in fields if name not in defaults)
        self.version = version
        self._migrate = migrate
        self._struct: type[msgspec.Struct] = msgspec.defstruct(
            f"{kind}_state",
            [_field(name, kind_of, defaults) for name, kind_of in fields.items()],
            kw_only=True,
            dict=True,  # for what is carried along
        )
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(self._struct)

    def initial(self, values: Mapping[str, Any], *, like: Any = None) -> bytes:
        """The stored form of a new actor's state; it carries what the actor ``like`` does.

        Raises:
            InvalidRequest: a required field is missing, a field is unknown, or a value has the wrong type.
        """
        unknown = values.keys() - self.names
        if unknown:
            raise InvalidRequest(
                f"{self.kind} has no state field {names(unknown)}; it has {names(self.names)}",
                fields=sorted(unknown),
            )
        missing = [name for name in self.required if name not in values]
        if missing:
            raise InvalidRequest(
                f"{self.kind} needs a value for {names(missing)}, which has no default", fields=missing
            )
        try:
            return self.dump(_carry(self._struct(**values), carried(like)))[0]
        except StateNotStorable as exc:
            raise InvalidRequest(exc.message, exc.details) from exc

    def install(self, target: Any, state: msgspec.Struct) -> None:
        """Set the fields of an actor instance from a loaded state."""
        for name in self.names:
            object.__setattr__(target, name, getattr(state, name))
        _carry(target, carried(state))

    def capture(self, source: Any) -> msgspec.Struct:
        """The current field values of an actor instance.

        Raises:
            StateNotStorable: a field was deleted.
        """
        values = {}
        for name in self.names:
            try:
                values[name] = getattr(source, name)
            except AttributeError:
                raise StateNotStorable(
                    f"{self.kind}: the state field $.{name} was deleted", path=f"$.{name}"
                ) from None
        return _carry(self._struct(**values), carried(source))

    def dump(self, state: msgspec.Struct) -> tuple[bytes, msgspec.Struct]:
        """The stored form, and the state as a restart would see it.

        Raises:
            StateNotStorable: with the path of the offending value, such as ``$.rumours[3]``.
        """
        try:
            raw = _encode(state)
        except Exception as exc:
            path = _unencodable(state, "$") or "$"
            raise StateNotStorable(f"{self.kind}: {path} cannot be stored: {exc}", path=path) from exc
        try:
            again: msgspec.Struct = self._decoder.decode(raw)
        except Exception as exc:
            path = _path_in(str(exc))
            raise StateNotStorable(
                f"{self.kind}: {path} would not load again: {exc}", path=path, reason=str(exc)
            ) from exc
        if _encode(again) != raw and _encode_sorted(again) != _encode_sorted(state):
            path = _difference(msgspec.to_builtins(state), msgspec.to_builtins(again), "$")
            raise StateNotStorable(
                f"{self.kind}: {path} would lose data when it is stored; its value does not match the "
                f"annotated type exactly",
                path=path,
            )
        kept = carried(state)
        if kept:
            raw = _encode(_fields(raw) | kept)
        return raw, _carry(again, kept)

    def load(self, raw: bytes, version: int, actor: str) -> msgspec.Struct:
        """A stored state.

        Raises:
            StateNotLoadable: it does not fit the class; names the stored version and the field.
        """
        if version > self.version:
            raise StateNotLoadable(
                f"{actor}: stored state has version {version}, but the class knows only {self.version}; "
                f"run the newer code",
                version=version,
                known=self.version,
            )
        try:
            if version < self.version and self._migrate is not None:
                old = msgspec.msgpack.decode(raw)
                new = self._migrate(version, old)
                if not isinstance(new, dict):
                    raise TypeError(f"migrate_from must return a dict, not {type(new).__name__}")
                raw = _encode(new)
            state: msgspec.Struct = self._decoder.decode(raw)
            kept = {name: value.copy() for name, value in _fields(raw).items() if name not in self.names}
        except Exception as exc:
            path = _path_in(str(exc))
            hint = (
                "give the new field a default, or raise state_version and write migrate_from"
                if version == self.version
                else f"check migrate_from for version {version}"
            )
            raise StateNotLoadable(
                f"{actor}: stored state of version {version} does not fit version {self.version} of the "
                f"class: {exc}; {hint}",
                version=version,
                known=self.version,
                path=path,
            ) from exc
        return _carry(state, kept)


def _carry(holder: S, kept: Carried) -> S:
    if kept or carried(holder):
        setattr(holder, _CARRIED, kept)
    return holder


class _Factory:
    """Copies a mutable default, so that instances never share it."""

    __slots__ = ("value",)
    shared: ClassVar[tuple[type, ...]] = (int, float, str, bytes, bool, type(None), tuple, frozenset)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return copy.deepcopy(self.value)


def _field(name: str, kind: Any, defaults: Mapping[str, Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
    if name not in defaults:
        return name, kind
    value = defaults[name]
    if isinstance(value, _Factory.shared):
        return name, kind, value
    return name, kind, msgspec.field(default_factory=_Factory(value))


def _path_in(text: str) -> str:
    """The ``$.a[0]`` path of a msgspec error; ``$`` if it has none."""
    start = text.rfind("`$")
    if start < 0:
        missing = text.split("required field `", 1)
        return f"$.{missing[1].split('`', 1)[0]}" if len(missing) == 2 else "$"
    return text[start + 1 :].split("`", 1)[0]


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        return [(f"{path}.{name}", getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, dict):
        inner: list[tuple[str, Any]] = []
        for key, item in value.items():
            inner += [(f"{path}[{key!r}]", key), (f"{path}[{key!r}]", item)]
        return inner
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [(f"{path}.{name}", getattr(value, name)) for name in value.__dataclass_fields__]
    return []


def _unencodable(value: Any, path: str, seen: tuple[int, ...] = ()) -> str | None:
    """The path of the innermost value that msgspec cannot encode."""
    if id(value) in seen:
        return path  # a cycle
    try:
        _encode(value)
    except Exception:
        for inner_path, inner in _children(value, path):
            found = _unencodable(inner, inner_path, (*seen, id(value)))
            if found is not None:
                return found
        return path
    return None


def _difference(left: Any, right: Any, path: str) -> str:
    """The path of the first difference between two plain values."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in left:
            if key not in right:
                return f"{path}.{key}"
            if left[key] != right[key]:
                return _difference(left[key], right[key], f"{path}.{key}")
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            if one != other:
                return _difference(one, other, f"{path}[{index}]")
    return path
