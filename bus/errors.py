"""Every error that offbook raises on purpose, and how errors travel.

Owns the exception classes and their wire form. An error crosses the bus as its ``code`` (the class
name), its message and its ``details``; the other side raises the same class again. A code that this
side does not know, or a foreign exception, becomes :class:`RemoteError`, which keeps the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

_MESSAGE_LIMIT = 8 * 1024
"""Characters of an error's message that travel: an error must never be too large to be delivered."""


class OffbookError(Exception):
    """Base of all typed errors.

    Attributes:
        code: stable name of the kind of error; equals the class name.
        message: what was wrong, with what value, and what to do.
        details: the same facts for programs; plain msgpack values only.
    """

    code: ClassVar[str] = "OffbookError"
    known: ClassVar[dict[str, type[OffbookError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.code = cls.__name__
        # The first class of a name owns it, so a user's subclass cannot take over a code of ours.
        OffbookError.known.setdefault(cls.code, cls)

    def __init__(self, message: str = "", details: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = {**(details or {}), **more}

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, details={self.details!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.details))


class InvalidAddress(OffbookError):
    """An actor address, topic or pattern that is not well formed."""


class NoSuchActor(OffbookError):
    """Nobody serves this address, or its host knows no such actor."""


class ActorStopped(OffbookError):
    """The actor was stopped, before or while it handled the message."""


class ActorFailed(OffbookError):
    """The actor's handler raised; its turn was rolled back."""


class DeadlineExceeded(OffbookError):
    """The answer did not come in time."""


class CycleError(OffbookError):
    """An ask whose target is already waiting in the same chain of calls; ``details["chain"]`` names it."""

    @classmethod
    def closing(cls, chain: Sequence[str], to: str) -> CycleError:
        """The error for an ask to ``to``, which waits in ``chain`` already."""
        whole = [*chain, to]
        return cls(f"an ask that would wait for itself: {' -> '.join(whole)}", chain=whole)


class MailboxFull(OffbookError):
    """The receiver has no room, and did not make any in time."""


class TooManyTopics(OffbookError):
    """A new topic would be one more than the broker retains; ``details["limit"]`` says how many that is."""


class MessageTooLarge(OffbookError):
    """A body above the limit; ``details`` has ``size`` and ``limit`` in bytes."""


class UnknownMessageType(OffbookError):
    """The receiver has no message type of this name."""


class BadMessage(OffbookError):
    """A body that does not decode as its type says."""


class EngineBusy(OffbookError):
    """The engine's queue is full; try again later."""


class ContextTooLarge(OffbookError):
    """A turn that could never fit into the model's context or the memory budget."""


class InvalidRequest(OffbookError):
    """An argument out of range: sampling values, an empty prompt, a timeout of zero."""


class EngineFailed(OffbookError):
    """The engine failed while it worked on this request."""


class StateNotStorable(OffbookError):
    """An actor's state holds a value that cannot be stored; ``details["path"]`` says where."""


class StateNotLoadable(OffbookError):
    """Stored state does not fit the class any more; names the version and the field."""


class UnknownModel(OffbookError):
    """A model reference that names nothing."""


class ModelError(OffbookError):
    """A model that cannot be fetched, verified, converted, loaded or served."""


class ConnectionLost(OffbookError):
    """The connection to the broker or serving peer broke; the message may or may not have taken effect."""


class ProtocolError(OffbookError):
    """A peer that breaks the bus's rules, or is refused by them."""


class EndpointInUse(OffbookError):
    """Another broker already listens on this endpoint."""


class Cancelled(OffbookError):
    """The request was cancelled before it finished."""


class RemoteError(OffbookError):
    """An error whose class is not known here; ``details["code"]`` has the code it came with."""


class _Wire(msgspec.Struct, omit_defaults=True):
    code: str
    message: str = ""
    details: dict[str, Any] = {}


def _plain(value: Any) -> Any:
    """A msgpack-able copy of ``value``; what cannot be packed becomes its repr."""
    try:
        return msgspec.to_builtins(value)
    except Exception:
        return repr(value)


def in_words(exc: BaseException) -> str:
    """``"ValueError: what was wrong"``, also of an exception whose own text cannot be made."""
    name = type(exc).__name__
    try:
        return f"{name}: {exc}"
    except Exception as error:
        return f"{name} (its text could not be made: {type(error).__name__})"


def to_wire(exc: BaseException) -> dict[str, Any]:
    """The wire form of an error: ``{"code", "message", "details"}``, plain values only.

    Any exception is accepted; a foreign one travels as ``RemoteError`` with its class name in
    ``details["code"]``.
    """
    if isinstance(exc, OffbookError):
        details = {str(key): _plain(value) for key, value in exc.details.items()}
        return {"code": exc.code, "message": exc.message[:_MESSAGE_LIMIT], "details": details}
    name = type(exc).__name__
    message = in_words(exc)[:_MESSAGE_LIMIT]
    return {"code": RemoteError.code, "message": message, "details": {"code": name}}


def from_wire(data: dict[str, Any] | bytes) -> OffbookError:
    """The exception for a wire form (a mapping, or its msgpack bytes). Never raises on bad input."""
    try:
        if isinstance(data, (bytes, bytearray, memoryview)):
            wire = msgspec.msgpack.decode(data, type=_Wire)
        else:
            wire = msgspec.convert(data, type=_Wire)
    except msgspec.MsgspecError as exc:
        return RemoteError(f"an error arrived that does not decode: {exc}", code="")
    cls = OffbookError.known.get(wire.code)
    if cls is None:
        return RemoteError(wire.message, {**wire.details, "code": wire.code})
    try:
        return cls(wire.message, wire.details)
    except TypeError:  # a user's subclass with another signature
        return RemoteError(wire.message, {**wire.details, "code": wire.code})
