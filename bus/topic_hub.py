"""The broker's side of topics: takes publications in, pumps events out.

Owns publish order (one writer task, batches that a durable store can commit together) and
subscriptions. Nothing is queued for a subscriber: each has a position in the retained log and credit,
and one task that reads on from there, so a slow subscriber costs its position and no memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import anyio
import anyio.abc
import anyio.lowlevel

from offbook.bus.address import check_topic
from offbook.bus.body import check_size
from offbook.bus.courier import Courier
from offbook.bus.credit import Window
from offbook.bus.envelope import Envelope, Kind
from offbook.bus.errors import InvalidRequest, OffbookError, ProtocolError, RemoteError
from offbook.bus.peer import PUBLISH_CREDIT, Peer
from offbook.bus.recent import RecentEvents
from offbook.bus.topics import TOPICS, Event, Record, TopicStore, slice_events

RECENT = 1024
"""Newest events per topic kept at hand, so that live subscribers do not read the store."""

RECENT_BYTES = 8 * 1024 * 1024
RECENT_TOTAL = 64 * 1024 * 1024
"""Bytes of such events' bodies per topic, and of all topics."""

AT_HAND = 1024
"""Topics without a subscription that are kept at hand; further ones are looked up in the store again."""

SUBSCRIPTIONS = TOPICS
"""Subscriptions of one peer at most: one for each topic."""

PUMP_BATCH = 64
"""Events one subscription sends before others get their turn."""


class Publication:
    """A publication on its way to the store."""

    __slots__ = ("id", "peer", "record", "topic")

    def __init__(self, peer: Peer, id: str, topic: str, record: Record) -> None:
        self.peer = peer
        self.id = id
        self.topic = topic
        self.record = record


class _Topic:
    __slots__ = ("last", "loaded", "subscriptions")

    def __init__(self) -> None:
        self.loaded = False
        self.last = 0
        self.subscriptions: set[_Subscription] = set()


class _Subscription:
    __slots__ = ("cursor", "id", "peer", "scope", "signal", "topic", "window")

    def __init__(self, peer: Peer, id: str, topic: str) -> None:
        self.peer = peer
        self.id = id
        self.topic = topic
        self.window = Window()
        self.cursor = 0
        self.signal = anyio.Event()
        self.scope = anyio.CancelScope()


class TopicHub:
    """Runs inside the broker."""

    def __init__(self, store: TopicStore, out: Courier) -> None:
        self._store = store
        self._out = out
        self._topics: dict[str, _Topic] = {}
        self._tidy_at = AT_HAND
        self._recent = RecentEvents(events=RECENT, topic_bytes=RECENT_BYTES, total_bytes=RECENT_TOTAL)
        self._queue: deque[Publication] = deque()
        self._queued = anyio.Event()
        self._subscriptions: dict[tuple[bytes, str], _Subscription] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self.published = 0
        self.repeated = 0
        self.events = 0

    @property
    def subscriptions(self) -> int:
        return len(self._subscriptions)

    async def run(self) -> None:
        """Write publications and pump subscriptions until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            while True:
                await self._queued.wait()
                self._queued = anyio.Event()
                batch = list(self._queue)
                self._queue.clear()
                by_topic: dict[str, list[Publication]] = {}
                for publication in batch:
                    by_topic.setdefault(publication.topic, []).append(publication)
                for topic, publications in by_topic.items():
                    await self._append(topic, publications)
                self._tidy()

    def publish(self, peer: Peer, envelope: Envelope, body: bytes) -> None:
        """Take a publication in; its peer gets ``REPLY`` with the number once the store has it."""
        if not peer.take_request(PUBLISH_CREDIT, len(body)):
            raise ProtocolError("a publication without credit")
        try:
            check_topic(envelope.to)
            check_size(len(body))
            if not envelope.id:
                raise InvalidRequest(f"a publication to {envelope.to!r} without an id")
        except OffbookError as exc:
            self._out.fail(peer, envelope.id, exc)
            self._out.return_credit(peer, PUBLISH_CREDIT, len(body))
            return
        record = Record(
            id=envelope.correlation or envelope.id,
            body=body,
            type=envelope.type,
            sender=envelope.sender,
            traceparent=envelope.traceparent,
        )
        self._queue.append(Publication(peer, envelope.id, envelope.to, record))
        self._queued.set()

    async def _append(self, name: str, publications: list[Publication]) -> None:
        try:
            topic = await self._loaded(name)
            numbers = await self._store.append(name, [p.record for p in publications])
        except Exception as exc:  # a store's failure (full disk) is the publisher's news, not our end
            error = exc if isinstance(exc, OffbookError) else RemoteError(f"cannot retain the event: {exc!r}")
            for publication in publications:
                self._written(publication)
                self._out.fail(publication.peer, publication.id, error)
            return
        for publication, seq in zip(publications, numbers, strict=True):
            if seq > topic.last:
                topic.last = seq
                self.published += 1
                record = publication.record
                self._recent.add(
                    name,
                    Event(
                        id=record.id,
                        body=record.body,
                        type=record.type,
                        sender=record.sender,
                        traceparent=record.traceparent,
                        seq=seq,
                    ),
                )
            else:
                self.repeated += 1
            self._written(publication)
            self._out.send(
                publication.peer, Envelope(kind=Kind.REPLY, correlation=publication.id, seq=seq), b""
            )
        for subscription in topic.subscriptions:
            subscription.signal.set()

    def _written(self, publication: Publication) -> None:
        self._out.return_credit(publication.peer, PUBLISH_CREDIT, len(publication.record.body))

    def _tidy(self) -> None:
        """Forget topics that nobody reads; by the writer between its batches, when it holds none."""
        if len(self._topics) <= self._tidy_at:
            return
        unread = [name for name, topic in self._topics.items() if not topic.subscriptions]
        for name in unread[: len(self._topics) - AT_HAND]:
            del self._topics[name]
            self._recent.drop(name)
        self._tidy_at = max(AT_HAND, 2 * len(self._topics))  # so that looking through them pays

    def _topic(self, name: str) -> _Topic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = _Topic()
        return topic

    async def _loaded(self, name: str) -> _Topic:
        topic = self._topic(name)
        if not topic.loaded:
            _, last = await self._store.bounds(name)
            if not topic.loaded:
                topic.last = max(topic.last, last)
                topic.loaded = True
        return topic

    def subscribe(self, peer: Peer, envelope: Envelope) -> None:
        """Start a subscription after event ``envelope.seq`` (-1: from now on).

        The peer gets ``REPLY`` with the position once it is active: every later event will reach it.
        """
        key = (peer.route, envelope.id)
        try:
            check_topic(envelope.to)
            if not envelope.id or key in self._subscriptions:
                raise InvalidRequest(f"a subscription with id {envelope.id!r} is active already")
            if len(peer.subscriptions) >= SUBSCRIPTIONS:
                raise InvalidRequest(
                    f"peer {peer.name!r} has {SUBSCRIPTIONS} subscriptions, the most there may be"
                )
        except OffbookError as exc:
            self._out.fail(peer, envelope.id, exc)
            return
        subscription = self._subscriptions[key] = _Subscription(peer, envelope.id, envelope.to)
        peer.subscriptions.add(envelope.id)
        assert self._tasks is not None, "the hub runs as long as the broker does"
        self._tasks.start_soon(self._pump, subscription, envelope.seq)

    def unsubscribe(self, peer: Peer, id: str) -> None:
        """End a subscription; unknown ones are ignored."""
        subscription = self._subscriptions.pop((peer.route, id), None)
        if subscription is not None:
            peer.subscriptions.discard(id)
            subscription.scope.cancel()

    def unsubscribe_all(self, ids: Iterable[str], peer: Peer) -> None:
        """The peer has gone."""
        for id in list(ids):
            self.unsubscribe(peer, id)

    def credit(self, peer: Peer, id: str, messages: int, bytes: int) -> bool:
        """A subscriber consumed events; False if there is no such subscription."""
        subscription = self._subscriptions.get((peer.route, id))
        if subscription is None:
            return False
        subscription.window.give(messages, bytes)
        subscription.signal.set()
        return True

    async def _pump(self, subscription: _Subscription, after: int) -> None:
        with subscription.scope:
            # From here on: a topic that is read is not forgotten.
            topic = self._topic(subscription.topic)
            topic.subscriptions.add(subscription)
            try:
                await self._loaded(subscription.topic)
                # A position beyond the end comes from a log that was lost since: start at the end.
                subscription.cursor = topic.last if after < 0 else min(after, topic.last)
                peer, id = subscription.peer, subscription.id
                self._out.send(peer, Envelope(kind=Kind.REPLY, correlation=id, seq=subscription.cursor), b"")
                while True:
                    if not (subscription.window.open and subscription.cursor < topic.last):
                        await subscription.signal.wait()
                        subscription.signal = anyio.Event()
                        continue
                    await self._send_events(subscription, topic)
            except Exception as exc:  # the store failed: this subscription ends with an error, alone
                self._out.fail(subscription.peer, subscription.id, exc)
            finally:
                topic.subscriptions.discard(subscription)
                key = (subscription.peer.route, subscription.id)
                if self._subscriptions.get(key) is subscription:
                    self.unsubscribe(subscription.peer, subscription.id)

    async def _send_events(self, subscription: _Subscription, topic: _Topic) -> None:
        limit = min(PUMP_BATCH, subscription.window.messages)
        await anyio.lowlevel.checkpoint()
        recent = self._recent.of(subscription.topic)
        if recent and subscription.cursor + 1 >= recent[0].seq:
            events = slice_events(recent, subscription.cursor, limit)
        else:
            events = await self._store.read(subscription.topic, subscription.cursor, limit)
        if not events:  # everything up to the end is no longer retained
            subscription.cursor = topic.last
            return
        for event in events:
            if not subscription.window.open:
                break
            envelope = Envelope(
                kind=Kind.EVENT,
                id=event.id,
                to=subscription.topic,
                sender=event.sender,
                correlation=subscription.id,
                traceparent=event.traceparent,
                type=event.type,
                seq=event.seq,
            )
            self._out.send(subscription.peer, envelope, event.body)
            subscription.window.take(len(event.body))
            subscription.cursor = event.seq
            self.events += 1
