"""Bodies of the bus's own messages (handshake, credit, failure). See PROTOCOL.md."""

from __future__ import annotations

import msgspec

from offbook.bus import credit
from offbook.bus.envelope import MAX_BODY
from offbook.bus.errors import OffbookError, ProtocolError, to_wire


class Hello(msgspec.Struct, kw_only=True):
    """A peer introduces itself.

    Attributes:
        name: its name, unique among the connected peers.
        instance: random text of the client object; a reconnecting client has the same one, and so takes
            over its own earlier session instead of being refused as a second peer of that name.
        window, window_bytes: how many deliveries, and bytes of them, it buffers.
    """

    name: str
    instance: str
    window: int = credit.MESSAGES
    window_bytes: int = credit.BYTES


class Welcome(msgspec.Struct, kw_only=True):
    """The broker accepts a peer. ``heartbeat`` and ``patience`` in seconds, sizes in bytes.

    Attributes:
        heartbeat: the peer sends something at least this often (``PING`` if nothing else).
        patience: who hears nothing for this long takes the connection for lost.
        window, window_bytes: credit for requests, for each kind of target on its own.
    """

    heartbeat: float
    patience: float
    max_body: int = MAX_BODY
    window: int = credit.MESSAGES
    window_bytes: int = credit.BYTES


_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_welcome = msgspec.msgpack.Decoder(Welcome)
_int = msgspec.msgpack.Decoder(int)

pack = _encoder.encode


def unpack_hello(body: bytes) -> Hello:
    """Decode a ``HELLO``; raises ``ProtocolError``."""
    try:
        hello = _hello.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a HELLO that does not decode: {exc}") from exc
    if not (0 < hello.window <= 65536 and 0 < hello.window_bytes <= 2**31):
        raise ProtocolError(f"a HELLO with a window of {hello.window} messages, {hello.window_bytes} bytes")
    return hello


def unpack_welcome(body: bytes) -> Welcome:
    """Decode a ``WELCOME``; raises ``ProtocolError``."""
    try:
        return _welcome.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a WELCOME that does not decode: {exc}") from exc


def unpack_bytes_credit(body: bytes) -> int:
    """The bytes part of a ``CREDIT``; raises ``ProtocolError``."""
    if not body:
        return 0
    try:
        return _int.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a CREDIT that does not decode: {exc}") from exc


def pack_error(exc: BaseException) -> bytes:
    """The body of a ``FAIL`` or ``BYE``."""
    wire = to_wire(exc)
    try:
        return pack(wire)
    except (TypeError, ValueError, OverflowError, RecursionError):
        code = exc.code if isinstance(exc, OffbookError) else "RemoteError"
        return pack({"code": code, "message": str(exc)[:1000], "details": {}})
