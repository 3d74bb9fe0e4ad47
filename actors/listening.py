"""Listening: topic events on their way into mailboxes.

Owns the host's position in each topic. An event and the new position are stored together, so every
subscriber gets every event once, whatever ends the process. A subscriber whose mailbox is full holds the
topic up; the broker keeps the events meanwhile.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc

from offbook.bus.errors import BadMessage, OffbookError

from . import topic_statements
from .journal import Journal
from .quiet import Quiet
from .records import Inbound, Mode

if TYPE_CHECKING:
    from offbook.bus.client import Bus
    from offbook.bus.topics import Event

log = logging.getLogger("offbook.actors.listening")


class Mailboxes(Protocol):
    """What the listener needs of its host."""

    def deaf_kinds(self, type: str, body: bytes) -> set[str]:
        """Registered kinds that do not take this message.

        Raises:
            BadMessage: some take it, and the body does not decode.
        """
        ...

    async def room_for(self, actor: str) -> None:
        """Wait until an actor's mailbox has room."""
        ...

    def deliver(self, messages: list[Inbound]) -> None:
        """Put stored messages into mailboxes."""
        ...


class Listener:
    """Follows topics and delivers their events."""

    def __init__(self, bus: Bus, journal: Journal, quiet: Quiet, mailboxes: Mailboxes) -> None:
        self._bus = bus
        self._journal = journal
        self._quiet = quiet
        self._mailboxes = mailboxes
        self._tasks: anyio.abc.TaskGroup | None = None
        self._active: dict[str, anyio.Event] = {}
        self._position: dict[str, int] = {}
        self._expected: dict[str, int] = {}

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Follow the topics that actors subscribed to in earlier runs."""
        self._tasks = tasks
        for topic in await self._journal.do("topics", topic_statements.subscribed_topics):
            await self.ensure(topic)

    async def ensure(self, topic: str) -> None:
        """Follow a topic; returns once events from now on will be delivered."""
        active = self._active.get(topic)
        if active is None:
            assert self._tasks is not None
            active = self._active[topic] = anyio.Event()
            self._tasks.start_soon(self._follow, topic, active)
        await active.wait()

    def expect(self, topic: str, seq: int) -> None:
        """This process published event ``seq``: things are not quiet until it is delivered here."""
        if topic not in self._active or self._position.get(topic, 0) >= seq:
            return
        if topic not in self._expected:
            self._quiet.take()
        self._expected[topic] = max(seq, self._expected.get(topic, 0))

    async def _follow(self, topic: str, active: anyio.Event) -> None:
        delay = 0.05
        while True:
            try:
                await self._read(topic, active)
            except OffbookError as exc:
                log.info("topic %s: %s; following it again", topic, exc)
            await anyio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _read(self, topic: str, active: anyio.Event) -> None:
        after, head = await self._journal.do("cursor", lambda db: topic_statements.position(db, topic))
        async with self._bus.subscribe(topic, after=after) as events:
            if after is None or events.start < after:
                after = events.start
                await self._begin(topic, after)
            self._reached(topic, after)
            self.expect(topic, head)  # an earlier run ended before it was delivered
            active.set()
            async for event in events:
                if event.seq <= self._position[topic]:
                    await self._begin(topic, event.seq - 1)
                if event.seq > self._position[topic] + 1:
                    log.warning(
                        "topic %s: events %d to %d are not retained any more",
                        topic, self._position[topic] + 1, event.seq - 1,
                    )  # fmt: skip
                with self._quiet.held():
                    await self._take(topic, event)
                    self._reached(topic, event.seq)

    async def _begin(self, topic: str, seq: int) -> None:
        """Deliver what comes after ``seq``: the topic is new here, or its log was lost and counts anew."""
        await self._journal.do("set-cursor", lambda db: topic_statements.begin(db, topic, seq))
        self._position[topic] = seq

    def _reached(self, topic: str, seq: int) -> None:
        """No event up to ``seq`` comes any more: it was delivered, or was there before this host listened."""
        self._position[topic] = seq
        if topic in self._expected and self._expected[topic] <= seq:
            del self._expected[topic]
            self._quiet.give()

    async def _take(self, topic: str, event: Event) -> None:
        """Store one event for all who hear it."""
        pattern = Inbound(
            id="",
            actor="",
            type=event.type,
            body=event.body,
            mode=Mode.TOPIC,
            sender=event.sender,
            traceparent=event.traceparent,
        )
        try:
            deaf = self._mailboxes.deaf_kinds(event.type, event.body)
        except BadMessage as exc:
            reason = exc.message
            log.error("topic %s, event %d from %s: %s", topic, event.seq, event.sender or "outside", exc)
            await self._journal.do(
                "bury-event",
                lambda db: topic_statements.bury_event(
                    db, topic, event.seq, event.id, pattern, reason, time.time()
                ),
            )
            return
        for actor in await self._journal.do(
            "subscribers", lambda db: topic_statements.subscribers(db, topic)
        ):
            if actor.partition("/")[0] not in deaf:
                await self._mailboxes.room_for(actor)
        stored = await self._journal.do(
            "event",
            lambda db: topic_statements.deliver_event(db, topic, event.seq, pattern, deaf, time.time()),
        )
        self._mailboxes.deliver(stored)
