"""Messages: what actors exchange, their stable names, and how they become bytes.

Owns the base classes and the codec. A message travels under its *tag*: the class name, or the one given
with ``class Heard(Message, tag="village.heard")``. The tag, not the Python path, is what is stored and
sent, so a class may move to another module. Fields may be added if they have defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec

from offbook.bus.errors import BadMessage, InvalidRequest

T = TypeVar("T")


class Message(msgspec.Struct, tag=True):
    """Base of what users send. A subclass declares its fields::

    class Heard(Message):
        text: str
    """


class Request(Message, Generic[T], tag=True):
    """A message that wants an answer of type ``T``::

    class Ask(Request[str]):
        question: str
    """

    async def progress(self, piece: Any) -> None:
        """Send a piece of the answer ahead, from inside the handler of this request.

        Ephemeral: it goes to the asker if one is listening, and is never stored.

        Raises:
            InvalidRequest: called outside the handler of a request.
        """
        from .turn import current_turn  # the turn imports messages

        turn = current_turn.get()
        if turn is None:
            raise InvalidRequest("progress() works only inside the handler of the request")
        await turn.progress(piece)


def tag_of(message: msgspec.Struct | type[msgspec.Struct]) -> str:
    """The name under which a message travels and is stored."""
    cls = message if isinstance(message, type) else type(message)
    tag = cls.__struct_config__.tag
    return str(tag) if tag is not None else cls.__name__


@lru_cache(maxsize=4096)
def reply_type(cls: type[msgspec.Struct]) -> Any:
    """The declared reply type of a request class; ``Any`` for other structs."""
    for base in cls.__mro__:
        for origin in getattr(base, "__orig_bases__", ()):
            if get_origin(origin) is Request:
                (argument,) = get_args(origin)
                return Any if isinstance(argument, TypeVar) else argument
    return Any


def encode(value: Any) -> bytes:
    """A message or reply as msgpack.

    Raises:
        InvalidRequest: the value cannot be encoded; the message says why.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise InvalidRequest(f"{type(value).__name__} cannot be sent: {exc}") from exc


@lru_cache(maxsize=4096)
def _decoder(cls: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(cls)


def check_type(cls: Any) -> None:
    """Refuse a type that no body can decode to.

    Raises:
        TypeError: says what in it is not supported.
    """
    if cls is not Any:
        _decoder(cls)


def decode(body: bytes, cls: Any, *, tag: str = "") -> Any:
    """A message of class ``cls`` from its bytes.

    Raises:
        BadMessage: the body is not a ``cls``; the message names the field.
    """
    try:
        return _decoder(cls).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        name = tag or getattr(cls, "__name__", str(cls))
        raise BadMessage(f"the body is not a {name}: {exc}", type=name) from exc


def derive_id(*parts: str | int) -> str:
    """An id that is the same for the same parts: what a repeated turn sends, it sends under the same id."""
    text = "\x1f".join(str(part) for part in parts)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def names(values: Iterable[str]) -> str:
    """``'a', 'b'`` for error messages; ``none`` if there are none."""
    return ", ".join(repr(value) for value in sorted(values)) or "none"
