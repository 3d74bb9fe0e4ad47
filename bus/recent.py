"""The newest events of many topics, within bounds: so many per topic, so many bytes of it, so many in all.

Owns these bounds. What is above them goes: the oldest events of a topic, and in all those of the topics that
were quiet for longest.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbook.bus.topics import Event

_NONE: deque[Event] = deque(maxlen=0)


class _Shelf:
    __slots__ = ("bytes", "events")

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.bytes = 0


class RecentEvents:
    """Events by topic, each topic's without gaps.

    Args:
        events: kept of one topic at most.
        topic_bytes: of bodies, kept of one topic at most.
        total_bytes: of bodies, kept in all at most. The event that was added last always stays.
    """

    def __init__(self, *, events: int, topic_bytes: int, total_bytes: int) -> None:
        self._most = events
        self._topic_bytes = topic_bytes
        self._total_bytes = total_bytes
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()  # the longest quiet first
        self.bytes = 0

    def of(self, topic: str) -> deque[Event]:
        """What is kept of a topic, in order; to be read only."""
        shelf = self._shelves.get(topic)
        return _NONE if shelf is None else shelf.events

    def add(self, topic: str, event: Event) -> None:
        """Keep an event. If it does not follow the topic's newest one, the older ones go."""
        shelf = self._shelves.get(topic)
        if shelf is not None and shelf.events[-1].seq + 1 != event.seq:
            self.drop(topic)
            shelf = None
        if shelf is None:
            shelf = self._shelves[topic] = _Shelf()
        else:
            self._shelves.move_to_end(topic)
        shelf.events.append(event)
        shelf.bytes += len(event.body)
        self.bytes += len(event.body)
        while len(shelf.events) > 1 and (len(shelf.events) > self._most or shelf.bytes > self._topic_bytes):
            self._pop(shelf)
        while self.bytes > self._total_bytes:
            quiet, oldest = next(iter(self._shelves.items()))
            if oldest is shelf and len(shelf.events) == 1:
                break
            self._pop(oldest)
            if not oldest.events:
                del self._shelves[quiet]

    def drop(self, topic: str) -> None:
        """Keep nothing of a topic."""
        shelf = self._shelves.pop(topic, None)
        if shelf is not None:
            self.bytes -= shelf.bytes

    def _pop(self, shelf: _Shelf) -> None:
        size = len(shelf.events.popleft().body)
        shelf.bytes -= size
        self.bytes -= size
