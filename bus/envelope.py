"""The envelope: what the bus knows about a message, and its bytes.

Owns the message kinds, the envelope's fields, their limits, and message ids. On the wire a message is
a *pair* of frames: a header (one version byte, then the envelope as a msgpack array) and the raw body.
PROTOCOL.md is the contract; this file implements it.
"""

from __future__ import annotations

import enum
import os
import time
from typing import Annotated

import msgspec

from offbook.bus.errors import ProtocolError

VERSION = 1
"""First byte of every header. A reader refuses headers of another version."""

MAX_BODY = 16 * 1024 * 1024
"""Largest body in bytes."""

MAX_HEADER = 256 * 1024
"""Largest header in bytes: a call chain of the longest addresses fits."""

MAX_CHAIN = 256

_PREFIX = bytes([VERSION])


class Kind(enum.IntEnum):
    """What a message is. The numbers are the protocol's; see PROTOCOL.md."""

    HELLO = 1
    WELCOME = 2
    PING = 3
    PONG = 4
    BYE = 5

    TELL = 10
    ASK = 11
    STREAM = 12
    ACCEPT = 13
    REPLY = 14
    PROGRESS = 15
    FAIL = 16
    CANCEL = 17

    SERVE = 20
    UNSERVE = 21
    CREDIT = 22

    PUBLISH = 30
    SUBSCRIBE = 31
    UNSUBSCRIBE = 32
    EVENT = 33


Id = Annotated[str, msgspec.Meta(max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=640)]


class Envelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The header of one message.

    Attributes:
        kind: what it is.
        id: the message's own id; unique, chosen by who made it (``new_id()``), 1 to 128 characters.
            Delivering the same id twice is a retry of the same message.
        to: address (``kind/key``), topic, or pattern, by kind.
        sender: address of who sent it, for the receiver's eyes; ``""`` if it has none.
        correlation: id of the message that this one answers or refers to, or ``""``.
        deadline: unix time in seconds after which nobody waits any more; 0 if never.
        chain: addresses that wait for this ask, outermost first (see ``CycleError``).
        traceparent: W3C trace context, or ``""``.
        type: name of the body's type, or ``""``.
        seq: a number whose meaning depends on the kind: sequence number of an event, amount of credit.
    """

    kind: Kind
    id: Id = ""
    to: Text = ""
    sender: Text = ""
    correlation: Id = ""
    deadline: float = 0.0
    chain: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_CHAIN)] = ()
    traceparent: Annotated[str, msgspec.Meta(max_length=128)] = ""
    type: Annotated[str, msgspec.Meta(max_length=256)] = ""
    seq: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_header(envelope: Envelope) -> bytes:
    """The header frame: version byte and msgpack array."""
    return _PREFIX + _encoder.encode(envelope)


def decode_header(header: bytes) -> Envelope:
    """Decode and check one header frame.

    Unknown trailing fields are ignored, so later minor versions may add some.

    Raises:
        ProtocolError: empty, too long, another version, or not an envelope.
    """
    if not 1 < len(header) <= MAX_HEADER:
        raise ProtocolError(f"a header of {len(header)} bytes; expected 2 to {MAX_HEADER}")
    if header[0] != VERSION:
        raise ProtocolError(f"header version {header[0]}; this side speaks version {VERSION}")
    try:
        return _decoder.decode(memoryview(header)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a header that does not decode: {exc}") from exc


class _Ids:
    """UUIDv7 (RFC 9562) as 32 hex digits, strictly increasing within a process."""

    def __init__(self) -> None:
        self._last = 0

    def __call__(self) -> str:
        # 48 bits of milliseconds and a 12-bit fraction of a millisecond (method 3 of the RFC's 6.2).
        tick = time.time_ns() * 4096 // 1_000_000
        if tick <= self._last:
            tick = self._last + 1
        self._last = tick
        tail = int.from_bytes(os.urandom(8), "big") & 0x3FFF_FFFF_FFFF_FFFF
        return f"{tick >> 12:012x}7{tick & 0xFFF:03x}{0x8000_0000_0000_0000 | tail:016x}"


new_id = _Ids()
"""Make a fresh message id: ``new_id() -> str``, 32 hex digits that sort by time."""
