"""A message as its receiver sees it, and how it is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from offbook.bus.body import decode_as, decode_body, encode_body
from offbook.bus.control import pack_error
from offbook.bus.credit import Gate
from offbook.bus.envelope import Envelope, Kind, new_id

if TYPE_CHECKING:
    from offbook.bus.link import Link


class Delivery:
    """A tell, ask or stream for an address that this peer serves.

    Answer it once: a tell with :meth:`accept` when it is safe here, an ask or a stream with
    :meth:`reply`, any of them with :meth:`fail`. Later answers are ignored, and so are answers that
    nobody waits for any more.

    Attributes:
        envelope: who asks what of whom; see :class:`offbook.bus.Envelope`.
        body: the raw bytes; :meth:`decode` turns them into an object.
        cancelled: set when nobody waits for the answer any more: the asker cancelled, its deadline
            passed, it vanished, or the connection to the broker was lost.
    """

    __slots__ = ("_answered", "_gate", "_link", "_open", "body", "cancelled", "envelope")

    def __init__(self, link: Link, envelope: Envelope, body: bytes, open: dict[str, Delivery]) -> None:
        self._link = link
        self._open = open
        self._answered = False
        self._gate = Gate() if envelope.kind is Kind.STREAM else None
        self.envelope = envelope
        self.body = body
        self.cancelled = anyio.Event()

    def __repr__(self) -> str:
        envelope = self.envelope
        return f"<Delivery {envelope.kind.name} {envelope.type!r} to {envelope.to!r} id {envelope.id}>"

    @property
    def expects_reply(self) -> bool:
        """True for asks and streams, False for tells."""
        return self.envelope.kind is not Kind.TELL

    @property
    def answered(self) -> bool:
        """True once this side has answered it."""
        return self._answered

    def decode(self, *types: type[Any]) -> Any:
        """The body as an object: as that of ``types`` whose name the envelope has; plain if none are given.

        Raises:
            UnknownMessageType: none of ``types`` has that name.
            BadMessage: the body does not decode.
        """
        if not types:
            return decode_body(self.body)
        return decode_as(self.envelope.type, self.body, types)

    async def accept(self) -> None:
        """A tell: it is safe here; the sender's ``tell`` returns. Does nothing for asks."""
        if not self.expects_reply:
            self._answer(Kind.ACCEPT, "", b"")

    async def reply(self, body: Any = None, *, type: str | None = None) -> None:
        """Answer with ``body`` (anything that can be packed; ``bytes`` are taken as packed already).

        For a tell this is :meth:`accept`.

        Raises:
            MessageTooLarge: more than 16 MiB; the delivery is still unanswered.
        """
        if not self.expects_reply:
            await self.accept()
            return
        self._answer(Kind.REPLY, *encode_body(body, type))

    async def fail(self, exc: BaseException) -> None:
        """Answer with an error; the asker's call raises it."""
        self._answer(Kind.FAIL, "", pack_error(exc))

    async def progress(self, body: Any, *, type: str | None = None) -> None:
        """Send a piece to an asker who streams; does nothing for others, or when nobody waits any more.

        Waits while the asker is 256 pieces behind.
        """
        if self._gate is None or self._answered:
            return
        name, data = encode_body(body, type)
        if not self._gate.try_take(len(data)):
            await self._wait_for_room(self._gate, len(data))
        if not self._answered and not self.cancelled.is_set():
            self._link.post(
                Envelope(kind=Kind.PROGRESS, id=new_id(), correlation=self.envelope.id, type=name), data
            )

    async def _wait_for_room(self, gate: Gate, size: int) -> None:
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await self.cancelled.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop)
            await gate.take(size)
            tasks.cancel_scope.cancel()

    def give(self, messages: int, bytes: int) -> None:
        """The asker consumed pieces (called by the client)."""
        if self._gate is not None:
            self._gate.give(messages, bytes)

    def _answer(self, kind: Kind, type: str, data: bytes) -> None:
        if self._answered:
            return
        self._answered = True
        if self.cancelled.is_set():
            return  # the same question may have been asked again: this would be taken for its answer
        self._open.pop(self.envelope.id, None)
        self._link.post(Envelope(kind=kind, id=new_id(), correlation=self.envelope.id, type=type), data)
