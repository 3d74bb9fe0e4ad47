"""Topics: numbered, retained events.

Owns what a topic is: the events' sequence numbers (from 1, no gaps), which are still retained, that one
publication id has one effect, and the :class:`TopicStore` protocol through which a durable store (the
journal's) is plugged in. The default store keeps them in memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from offbook.bus.body import decode_as, decode_body

REMEMBERED_IDS = 65536
"""Publication ids the in-memory store remembers per topic, beyond those of retained events."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A publication before it has a number. ``id`` identifies it for good; ``body`` is opaque."""

    id: str
    body: bytes
    type: str = ""
    sender: str = ""
    traceparent: str = ""


class Event(Record, frozen=True, kw_only=True):
    """A retained event of a topic, with its sequence number."""

    seq: int

    def decode(self, *types: type[Any]) -> Any:
        """The body as an object: as that of ``types`` whose name the event has; plain if none are given.

        Raises:
            UnknownMessageType: none of ``types`` has that name.
            BadMessage: the body does not decode.
        """
        return decode_as(self.type, self.body, types) if types else decode_body(self.body)


class TopicStore(Protocol):
    """Where a broker keeps events. Called by one task at a time for writes; reads may overlap.

    An implementation must not block the event loop.
    """

    async def append(self, topic: str, records: Sequence[Record]) -> list[int]:
        """Retain records in order; return once they are as durable as this store makes them.

        Returns:
            One number per record: the next ones of the topic, or for an id that was appended before
            (also within this call) the number it got then, without a second effect.
        """
        ...

    async def read(self, topic: str, after: int, limit: int) -> list[Event]:
        """Up to ``limit`` retained events with ``seq > after``, ascending."""
        ...

    async def bounds(self, topic: str) -> tuple[int, int]:
        """``(first retained seq, last seq)``; ``(n + 1, n)`` when none is retained."""
        ...


class _Log:
    __slots__ = ("bytes", "events", "ids", "last")

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.ids: OrderedDict[str, int] = OrderedDict()
        self.last = 0
        self.bytes = 0


class MemoryTopicStore:
    """Keeps the most recent events of each topic in memory.

    Args:
        retain: events kept per topic.
        retain_bytes: bytes of bodies kept per topic (at least the newest event stays).
    """

    def __init__(self, *, retain: int = 10_000, retain_bytes: int = 64 * 1024 * 1024) -> None:
        self._retain = retain
        self._retain_bytes = retain_bytes
        self._logs: dict[str, _Log] = {}

    async def append(self, topic: str, records: Sequence[Record]) -> list[int]:
        log = self._logs.setdefault(topic, _Log())
        numbers = []
        for record in records:
            seq = log.ids.get(record.id)
            if seq is None:
                log.last = seq = log.last + 1
                log.ids[record.id] = seq
                log.events.append(
                    Event(
                        id=record.id,
                        body=record.body,
                        type=record.type,
                        sender=record.sender,
                        traceparent=record.traceparent,
                        seq=seq,
                    )
                )
                log.bytes += len(record.body)
            numbers.append(seq)
        while len(log.events) > self._retain or (log.bytes > self._retain_bytes and len(log.events) > 1):
            log.bytes -= len(log.events.popleft().body)
        while len(log.ids) > self._retain + REMEMBERED_IDS:
            log.ids.popitem(last=False)
        return numbers

    async def read(self, topic: str, after: int, limit: int) -> list[Event]:
        log = self._logs.get(topic)
        if log is None or not log.events:
            return []
        return slice_events(log.events, after, limit)

    async def bounds(self, topic: str) -> tuple[int, int]:
        log = self._logs.get(topic)
        if log is None:
            return 1, 0
        return (log.events[0].seq if log.events else log.last + 1), log.last


def slice_events(events: deque[Event], after: int, limit: int) -> list[Event]:
    """Up to ``limit`` of ``events`` (gapless, ascending) with ``seq > after``."""
    if not events:
        return []
    start = max(0, after + 1 - events[0].seq)
    # Indexing a deque is slow in its middle; readers are nearly always at its end.
    return [events[index] for index in range(start, min(start + limit, len(events)))]
