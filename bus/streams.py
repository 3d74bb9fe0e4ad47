"""Two things a client reads from: the pieces of a streamed reply, and the events of a topic."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from offbook.bus.body import decode_body
from offbook.bus.credit import Returns
from offbook.bus.envelope import Envelope
from offbook.bus.errors import InvalidRequest, OffbookError
from offbook.bus.inbox import Inbox
from offbook.bus.request import Request
from offbook.bus.topics import Event

if TYPE_CHECKING:
    from offbook.bus.exchange import Exchange


class ReplyStream:
    """An ask whose progress can be read while it is worked on.

    ``async with bus.stream(...) as reply: async for piece in reply: ...``, then :attr:`result`. Leaving
    the block early cancels the ask at its receiver. A reader that falls behind makes the sender wait.
    """

    def __init__(
        self,
        exchange: Exchange,
        request: Request,
        pieces: Inbox[bytes],
        returns: type[Any] | None,
        yields: type[Any] | None,
    ) -> None:
        self._exchange = exchange
        self._request = request
        self._pieces = pieces
        self._returns = returns
        self._yields = yields
        self._credit = Returns()

    async def __aenter__(self) -> ReplyStream:
        await self._exchange.within_deadline(self._request, self._exchange.send(self._request))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.forget(self._request)

    def __aiter__(self) -> ReplyStream:
        return self

    async def __anext__(self) -> Any:
        """The next piece; raises the ask's error if it failed."""
        piece = await self._exchange.within_deadline(self._request, self._pieces.get())
        due = self._credit.consumed(len(piece))
        if due is not None:
            self._exchange.give_credit(self._request.link, self._request.envelope.id, *due)
        return decode_body(piece, self._yields)

    @property
    def result(self) -> Any:
        """The final reply, once the iteration has ended.

        Raises:
            InvalidRequest: it has not ended yet.
        """
        if not self._request.done.is_set():
            raise InvalidRequest("a stream's result is there after its last piece; iterate to the end first")
        return self._request.result(self._returns)

    async def final(self) -> Any:
        """Skip what pieces remain and return the result."""
        async for _ in self:
            pass
        return self.result


class Subscription:
    """The events of a topic, in order.

    ``async with bus.subscribe(topic, after=seq) as events: async for event in events: ...``. On entry it
    is active: every later publication will be seen. It survives a lost connection, going on where it
    was. A reader that falls behind costs nothing but its position in the retained log.

    Attributes:
        topic: its name.
        active: the broker has confirmed it.
        position: sequence number of the last event received.
        start: the one after which the broker began; below what was asked for if it lost its log since.
        missed: events that were no longer retained when this subscription came to them.
    """

    def __init__(self, exchange: Exchange, id: str, topic: str, after: int | None) -> None:
        self._exchange = exchange
        self._inbox: Inbox[Event] = Inbox()
        self._credit = Returns()
        self._after = after
        self.id = id
        self.topic = topic
        self.position = -1 if after is None else after
        self.start = self.position
        self.active = False
        self.missed = 0

    async def __aenter__(self) -> Subscription:
        await self._exchange.start_subscription(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.end_subscription(self)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event. Cancelling loses nothing."""
        event = await self._inbox.get()
        due = self._credit.consumed(len(event.body))
        if due is not None:
            self._exchange.give_credit(None, self.id, *due)
        return event

    # Called by the client

    def started(self, seq: int) -> None:
        """The broker activated it at position ``seq``."""
        self.active = True
        self.position = self.start = seq

    def add(self, envelope: Envelope, body: bytes) -> None:
        """An event came."""
        if envelope.seq <= self.position:
            return  # seen before the connection was lost
        self.missed += envelope.seq - self.position - 1
        self.position = envelope.seq
        self._inbox.put(
            Event(
                id=envelope.id,
                body=body,
                type=envelope.type,
                sender=envelope.sender,
                traceparent=envelope.traceparent,
                seq=envelope.seq,
            )
        )

    def close(self, error: OffbookError | None) -> None:
        """No more events will come."""
        self._inbox.close(error)


class Deliveries:
    """What arrives for the addresses this peer serves; see :meth:`Bus.deliveries`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __aiter__(self) -> Deliveries:
        return self

    async def __anext__(self) -> Any:
        return await self._exchange.next_delivery()


__all__ = ["Deliveries", "ReplyStream", "Subscription"]
