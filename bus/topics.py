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
from offbook.bus.errors import TooManyTopics
from offbook.bus.recent import RecentEvents

TOPICS = 50_000
"""Topics that a store keeps: enough for one per actor of a large team, and an end for who makes up names."""

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

        Raises:
            TooManyTopics: the topic is new, and there are as many as the store keeps.
        """
        ...

    async def read(self, topic: str, after: int, limit: int) -> list[Event]:
        """Up to ``limit`` retained events with ``seq > after``, ascending."""
        ...

    async def bounds(self, topic: str) -> tuple[int, int]:
        """``(first retained seq, last seq)``; ``(n + 1, n)`` when none is retained."""
        ...


def check_topic_count(count: int, limit: int, topic: str) -> None:
    """Refuse a new topic beyond ``limit``; ``count`` is how many there are.

    Raises:
        TooManyTopics: names the topic, and what to do.
    """
    if count >= limit:
        raise TooManyTopics(
            f"there are {count} topics, as many as are retained, so {topic!r:.100} cannot be one more: "
            "use fewer names (an id belongs into the event, not into the name of its topic)",
            limit=limit,
        )


class _Log:
    __slots__ = ("ids", "last")

    def __init__(self) -> None:
        self.ids: OrderedDict[str, int] = OrderedDict()
        self.last = 0


class MemoryTopicStore:
    """Keeps the most recent events of each topic in memory.

    Args:
        retain: events kept per topic.
        retain_bytes: bytes of bodies kept per topic.
        total_bytes: bytes of bodies kept in all; the topics that were quiet for longest lose theirs first.
        max_topics: topics that there may be.
    """

    def __init__(
        self,
        *,
        retain: int = 10_000,
        retain_bytes: int = 64 * 1024 * 1024,
        total_bytes: int = 512 * 1024 * 1024,
        max_topics: int = TOPICS,
    ) -> None:
        self._retain = retain
        self._max_topics = max_topics
        self._logs: dict[str, _Log] = {}
        self._events = RecentEvents(events=retain, topic_bytes=retain_bytes, total_bytes=total_bytes)

    async def append(self, topic: str, records: Sequence[Record]) -> list[int]:
        log = self._logs.get(topic)
        if log is None:
            check_topic_count(len(self._logs), self._max_topics, topic)
            log = self._logs[topic] = _Log()
        numbers = []
        for record in records:
            seq = log.ids.get(record.id)
            if seq is None:
                log.last = seq = log.last + 1
                log.ids[record.id] = seq
                self._events.add(
                    topic,
                    Event(
                        id=record.id,
                        body=record.body,
                        type=record.type,
                        sender=record.sender,
                        traceparent=record.traceparent,
                        seq=seq,
                    ),
                )
            numbers.append(seq)
        while len(log.ids) > self._retain + REMEMBERED_IDS:
            log.ids.popitem(last=False)
        return numbers

    async def read(self, topic: str, after: int, limit: int) -> list[Event]:
        return slice_events(self._events.of(topic), after, limit)

    async def bounds(self, topic: str) -> tuple[int, int]:
        log = self._logs.get(topic)
        if log is None:
            return 1, 0
        events = self._events.of(topic)
        return (events[0].seq if events else log.last + 1), log.last


def slice_events(events: deque[Event], after: int, limit: int) -> list[Event]:
    """Up to ``limit`` of ``events`` (gapless, ascending) with ``seq > after``."""
    if not events:
        return []
    start = max(0, after + 1 - events[0].seq)
    # Indexing a deque is slow in its middle; readers are nearly always at its end.
    return [events[index] for index in range(start, min(start + limit, len(events)))]
