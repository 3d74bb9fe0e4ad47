"""Bodies: from what a caller passes to bytes with a type name, and back.

Owns the rules of conversion. The bus itself never looks into a body.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from offbook.bus.envelope import MAX_BODY
from offbook.bus.errors import BadMessage, InvalidRequest, MessageTooLarge, UnknownMessageType

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_plain_decoder = msgspec.msgpack.Decoder()


def type_name(cls: type) -> str:
    """The name under which a type travels: a Struct's tag if that is text, else the class name."""
    config = getattr(cls, "__struct_config__", None)
    tag = getattr(config, "tag", None)
    return tag if isinstance(tag, str) else cls.__name__


def encode_body(body: Any, type: str | None = None) -> tuple[str, bytes]:
    """Turn what a caller passes into ``(type name, bytes)``.

    ``bytes`` are taken as encoded already. A dict gives its ``"type"`` key to the type name, the rest
    is packed. A Struct's type name is its tag or class name. Other values are packed with type ``""``.
    ``type`` overrides the name.

    Raises:
        MessageTooLarge: more than 16 MiB.
        InvalidRequest: a value that msgpack cannot hold.
    """
    name = ""
    if isinstance(body, (bytes, bytearray, memoryview)):
        data = bytes(body)
    else:
        if isinstance(body, msgspec.Struct):
            name = type_name(body.__class__)
        elif isinstance(body, dict) and isinstance(body.get("type"), str):
            name = body["type"]
            body = {key: value for key, value in body.items() if key != "type"}
        try:
            data = _encoder.encode(body)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise InvalidRequest(f"a body of type {body.__class__.__name__} cannot be packed: {exc}") from exc
    check_size(len(data))
    return (name if type is None else type), data


def check_size(size: int) -> None:
    """Raise ``MessageTooLarge`` for a body of ``size`` bytes above the limit."""
    if size > MAX_BODY:
        raise MessageTooLarge(
            f"a body of {size} bytes is above the limit of {MAX_BODY}; send it in parts or by reference",
            size=size,
            limit=MAX_BODY,
        )


def decode_body(body: bytes, type: type[T] | None = None) -> T:
    """Decode a body: to plain objects, or as ``type``.

    Raises:
        BadMessage: the bytes are not msgpack, or do not fit the type; the text has the path.
    """
    try:
        if type is None:
            return cast(T, _plain_decoder.decode(body))
        return msgspec.msgpack.decode(body, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        wanted = "msgpack" if type is None else getattr(type, "__name__", str(type))
        raise BadMessage(f"a body of {len(body)} bytes does not decode as {wanted}: {exc}") from exc


def decode_as(name: str, body: bytes, types: tuple[type[Any], ...]) -> Any:
    """Decode ``body`` as the one of ``types`` that travels under ``name``.

    Raises:
        UnknownMessageType: none of them does.
        BadMessage: the body does not decode as that type.
    """
    for candidate in types:
        if type_name(candidate) == name:
            return decode_body(body, candidate)
    raise UnknownMessageType(
        f"no message type {name!r} here; known: {', '.join(sorted(map(type_name, types))) or 'none'}",
        type=name,
    )
