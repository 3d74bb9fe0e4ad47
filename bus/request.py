"""A request as its sender sees it: sent, waiting, answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from offbook.bus.body import decode_body
from offbook.bus.envelope import Envelope
from offbook.bus.errors import OffbookError
from offbook.bus.inbox import Inbox

if TYPE_CHECKING:
    from offbook.bus.link import Link


class Request:
    """One message that expects exactly one answer.

    Attributes:
        link: the session it was sent on, or None while it has not been.
        reply, body: the answer's envelope and body, once there is one.
        error: what the answer raises, if it is an error.
        pieces: for streams, where progress goes.
    """

    __slots__ = ("body", "data", "done", "envelope", "error", "link", "pieces", "reply")

    def __init__(self, envelope: Envelope, data: bytes, pieces: Inbox[bytes] | None = None) -> None:
        self.envelope = envelope
        self.data = data
        self.done = anyio.Event()
        self.link: Link | None = None
        self.reply: Envelope | None = None
        self.body = b""
        self.error: OffbookError | None = None
        self.pieces = pieces

    def answer(self, reply: Envelope, body: bytes) -> None:
        """The answer came."""
        self.reply = reply
        self.body = body
        self._finish()

    def fail(self, error: OffbookError) -> None:
        """It failed."""
        self.error = error
        self._finish()

    def _finish(self) -> None:
        if not self.done.is_set():
            self.done.set()
        if self.pieces is not None:
            self.pieces.close(self.error)

    def result(self, returns: type[Any] | None) -> Any:
        """The answer's object, or raise its error."""
        if self.error is not None:
            raise self.error
        if not self.body and returns is None:
            return None
        return decode_body(self.body, returns)
