"""The host: a process's actors, and everything that keeps them going.

Owns the parts and their lifetimes: journal, bus, ingress, outbox, topics, timers, and the cells of the actors
that are in memory. What a part does is in its own file; the host connects them.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Collection
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from offbook.bus.address import check_kind, parse_address
from offbook.bus.client import Bus, connect
from offbook.bus.errors import (
    ActorStopped,
    InvalidRequest,
    NoSuchActor,
    OffbookError,
)

from . import deadletters, statements
from .actor import Actor, ActorSpec, address_of, spec_of
from .agent import Agent
from .clock import Clock, Seconds, VirtualClock, WallClock
from .control import ActorPage, DeadResult, ListActors
from .directory import Directory
from .engine import PATIENCE, Engine
from .ingress import Ingress
from .introspect import answer, page_of
from .journal import Journal
from .listening import Listener
from .lm import Forget, MemoryRef, Prefetch
from .message import decode
from .outbox import Outbox
from .outside import Outside
from .questions import Questions
from .quiet import Quiet
from .records import Birth, DeadLetter, Inbound, Outgoing, TurnRecord
from .running import RunReport, run_virtual, run_wall
from .speech import new_memory
from .stage import Stage
from .supervision import Failure
from .timers import Timers

if TYPE_CHECKING:
    from offbook.bus.delivery import Delivery

log = logging.getLogger("offbook.actors")

KEEP_DONE = 7 * 86400.0
"""Seconds for which handled message ids are remembered. Senders repeat within minutes, or after a restart."""

_KEPT_FAILURES = 1000

_GOODBYE = 5.0
"""Seconds for all ``on_stop`` hooks together when the host stops."""


class Host(Outside):
    """Hosts actors: ``async with Host("village", journal_path=..., endpoint=...) as host``.

    Args:
        name: the host's name; it answers questions about itself at ``host/NAME``.
        journal_path: the SQLite file of the journal; or pass an open ``journal``, which stays open.
        endpoint: the broker: a runtime's name (default: ``name``), ``ipc://...`` or ``tcp://...``.
        clock: ``WallClock()`` (default) or ``VirtualClock(seed)``.
        mailbox_limit: messages that may wait for one actor.
        max_active: actors kept in memory while idle; further ones leave it, the least recently used first.
        passivate_after: real seconds after which an idle actor leaves memory.
        engine_patience: seconds for which calls wait for an engine that is away.
        peers: kinds of addresses that other processes serve. Messages to them wait while their process is
            away; to a kind that nobody knows they are refused (:mod:`offbook.actors.directory`).
    """

    def __init__(
        self,
        name: str,
        *,
        journal_path: str | os.PathLike[str] | None = None,
        journal: Journal | None = None,
        endpoint: str | None = None,
        clock: Clock | None = None,
        mailbox_limit: int = 1000,
        max_active: int = 1000,
        passivate_after: float = 60.0,
        engine_patience: float = PATIENCE,
        peers: Collection[str] = (),
    ) -> None:
        if (journal is None) == (journal_path is None):
            raise InvalidRequest("a host needs either journal_path or an open journal")
        parse_address(f"host/{name}")
        self.name = name
        self.clock: Clock = clock or WallClock()
        self.mailbox_limit = mailbox_limit
        self.turns = 0
        self.failures: deque[Failure] = deque(maxlen=_KEPT_FAILURES)
        self.failed_count = 0
        self._reported = 0
        self.engine_waits: Counter[str] = Counter()
        self.quiet = Quiet()
        self._path = journal_path
        self._given = journal
        self._endpoint = endpoint or name
        self._patience = engine_patience
        self._peers = tuple(check_kind(peer) for peer in peers)
        self._kinds: dict[str, ActorSpec] = {}
        self._births: dict[str, Birth | None] = {}
        self._unserved: set[str] = set()
        self.stage = Stage(self, self.quiet, max_resting=max_active, rest=passivate_after)
        self._registering = anyio.Lock()
        self._stack = AsyncExitStack()
        self.stopping = False

    # -- life -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Host:
        await self._stack.__aenter__()
        try:
            await self._start()
        except BaseException as exc:
            await self._stack.__aexit__(type(exc), exc, exc.__traceback__)
            raise
        return self

    async def _start(self) -> None:
        if self._given is not None:
            self.journal = self._given
        else:
            assert self._path is not None
            self.journal = await Journal.open(self._path)
            self._stack.push_async_callback(self.journal.close)
        self.bus: Bus = await self._stack.enter_async_context(
            connect(self._endpoint, name=f"host.{self.name}")
        )
        self.engine = Engine(self.bus, patience=self._patience)
        self.questions = Questions(self.bus)
        self.directory = Directory(self.bus, self.journal, self._kinds.keys, self._peers)
        self._outbox = Outbox(
            self.bus,
            self.journal,
            self.quiet,
            published=self.expect,
            failed=self.failed,
        )
        self._ingress = Ingress(self, self.quiet)
        self._listener = Listener(self.bus, self.journal, self.quiet, self)
        self._timers = Timers(self.journal, self.clock, self.quiet, self.deliver)
        self._stack.push_async_callback(self._retire_all)
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self.stage.start(self._tasks)
        await self._timers.restore()
        await self.bus.serve(f"host/{self.name}")
        self._tasks.start_soon(self._serve)
        self._tasks.start_soon(self._ingress.run)
        await self._outbox.start(self._tasks)
        await self._listener.start(self._tasks)
        self._tasks.start_soon(self._prune)
        if not self.clock.virtual:
            self._tasks.start_soon(self._timers.run)

    async def stop(self) -> None:
        """Take nothing more on, and tell those who wait for answers. Messages stay in the journal."""
        self.stopping = True
        stopped = ActorStopped(f"the host {self.name} stops")
        self._ingress.take_back_tries()
        with anyio.CancelScope(shield=True):
            for cell in self.stage:
                cell.take_back_tries()
                await cell.dismiss(stopped)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        self._tasks.cancel_scope.cancel()
        try:
            await self._stack.__aexit__(None, None, None)
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from group.exceptions[0].__cause__
            raise

    async def _retire_all(self) -> None:
        """Let the actors in memory close what they hold."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GOODBYE):
            for cell in self.stage:
                await cell.instance.retire()

    async def register(self, *classes: type[Actor]) -> None:
        """Make every key of these classes reachable, and go on with what their actors had left to do.

        Raises:
            TypeError: a class is not well formed, or another class of the same kind is registered.
            ProtocolError: another host serves this kind.
        """
        for cls in classes:
            spec = spec_of(cls)
            async with self._registering:
                known = self._kinds.get(spec.kind)
                if known is not None:
                    if known.cls is not cls:
                        raise TypeError(
                            f"{known.cls!r} and {cls!r} are both of kind {spec.kind!r}; set kind = ..."
                        )
                    await self._serve_kind(spec.kind)
                    continue
                if spec.kind in ("host", "engine"):
                    raise TypeError(
                        f"the kind {spec.kind!r} is offbook's own; set kind = ... on {cls.__name__}"
                    )
                for topic in spec.topics:
                    await self._listener.ensure(topic)
                self._births[spec.kind] = _birth(spec, {}) if not spec.schema.required else None
                self.stage.hold(spec.kind)  # topics and timers may bring something while that is read
                self._kinds[spec.kind] = spec
                try:
                    # What was accepted earlier goes first.
                    await self._recover(spec)
                except BaseException:
                    del self._kinds[spec.kind]
                    raise
                self._unserved.add(spec.kind)
                await self._serve_kind(spec.kind)

    async def _serve_kind(self, kind: str) -> None:
        """Take what others send to a kind. If that fails, its actors here go on with what they had, and with
        topics and timers; registering the class again tries again."""
        if kind in self._unserved:
            await self.bus.serve(f"{kind}/*")
            self._unserved.discard(kind)

    async def _prune(self) -> None:
        """Forget the ids of messages that were handled long ago."""
        while True:
            before = time.time() - KEEP_DONE
            self.journal.post("prune", partial(statements.prune_done, before=before))
            await anyio.sleep(3600)

    async def _recover(self, spec: ActorSpec) -> None:
        """Put what an earlier run had accepted back into the mailboxes."""
        with self.quiet.held():
            try:
                rows = await self.journal.do("mailboxes", lambda db: statements.mailboxes(db, spec.kind))
            except BaseException:
                self.stage.withdraw(spec.kind)
                raise
            self.stage.release(spec, rows)

    async def _serve(self) -> None:
        async for delivery in self.bus.deliveries():
            await self._ingress.admit(delivery)

    # -- what users call ------------------------------------------------------------------------------------

    async def spawn(self, cls: type[Actor], key: str, **state: Any) -> str:
        """Create an actor unless it exists, and return its address. ``state`` is for a new one only.

        Raises:
            InvalidAddress: the key is not legal.
            InvalidRequest: a required field is missing, unknown, or of another type.
        """
        spec = spec_of(cls)
        address = address_of(spec, key)
        await self.register(cls)
        birth: Birth | None = None
        wrong: InvalidRequest | None = None
        try:
            birth = _birth(spec, state)
        except InvalidRequest as exc:
            wrong = exc
        with self.quiet.held():
            if birth is None:
                if not await self.journal.do("exists", lambda db: statements.exists(db, address)):
                    assert wrong is not None
                    raise wrong
                return address
            made, now = birth, self.clock.now()
            with anyio.CancelScope(shield=True):  # what the journal takes, the mailbox gets
                born = await self.journal.do(
                    "spawn", lambda db: statements.spawn(db, address, made, now), admits=True
                )
                if born is not None:
                    self.deliver(born)
                    self.created(spec)
        return address

    async def idle(self) -> None:
        """Return once nothing is left to do now: no message waits, no turn runs, nothing is on its way."""
        await self.quiet.wait()

    async def run(self, until: Seconds | datetime | None = None) -> RunReport:
        """Keep going until a time of the host's clock, and report what happened.

        Args:
            until: with a virtual clock, seconds from the beginning of the journal's time (so the same script
                goes on after a restart), with a wall clock, seconds from now; or an absolute ``datetime``.
                None: a virtual clock runs until no timer is left, a wall clock until cancelled.
        """
        turns = self.turns
        self.directory.complete = True
        if isinstance(self.clock, VirtualClock):
            await run_virtual(self.clock, self._timers, self.quiet, until)
        else:
            await run_wall(self.clock, until)
        return self.report(turns)

    def report(self, turns: int) -> RunReport:
        """What happened since ``turns`` turns had been made; of failures, all that no report has listed yet.

        So those are in it, too, that befell what an earlier run had left, before ``run`` was called.
        """
        new = min(self.failed_count - self._reported, len(self.failures))
        self._reported = self.failed_count
        recent = tuple(self.failures)[len(self.failures) - new :]
        return RunReport(self.turns - turns, recent, self.clock.now())

    async def restart(self, actor: str) -> None:
        """Let a stopped actor go on with the messages it had left.

        Raises:
            NoSuchActor: there is no such actor here.
        """
        spec = self.spec(parse_address(actor).kind)
        if spec is None:
            raise NoSuchActor(f"no actor of the kind of {actor} here", actor=actor)
        cell = self.stage.find(actor)
        if cell is not None and not cell.stopped:
            return
        self.stage.drop(actor)
        fresh = self.stage.cell(spec, actor)
        fresh.hold()  # what comes while its messages are read does not go first
        with self.quiet.held():
            try:
                rows = await self.journal.do("mailbox", lambda db: statements.mailbox(db, actor))
            except BaseException as exc:
                reason = cell.stopped if cell is not None else f"its messages could not be read: {exc}"
                fresh.stopped, fresh.state = reason, "stopped"
                fresh.mailbox.wake()  # a stopped actor's mailbox keeps nobody waiting
                with anyio.CancelScope(shield=True):
                    await fresh.dismiss(ActorStopped(f"{actor} was stopped: {reason}", actor=actor))
                raise
            fresh.release(rows)
            if fresh.asleep:
                self.stage.drop(actor)

    async def actors(self, *, after: str = "", prefix: str = "", limit: int = 1000) -> ActorPage:
        """A page of the actors, in order of their ids; see :class:`ActorPage`."""
        return await page_of(self, ListActors(after=after, prefix=prefix, limit=limit))

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """The most recent dead letters, newest first."""
        return await self.journal.do("dead", lambda db: deadletters.newest(db, limit))

    async def resend(self, *numbers: int) -> DeadResult:
        """Send dead letters again, by their numbers (``DeadLetter.seq``), each as a new message."""
        with self.quiet.held(), anyio.CancelScope(shield=True):  # what the journal takes is sent
            sent = await self.journal.do("resend", lambda db: deadletters.resend(db, numbers, time.time()))
            self._outbox.add(sent.outgoing)
            self.deliver(sent.inbound)
        return sent.result

    async def drop_dead(self, *numbers: int) -> DeadResult:
        """Delete dead letters, by their numbers."""
        return await self.journal.do("drop-dead", lambda db: deadletters.drop(db, numbers))

    # -- the port of cells, turns, ingress and listener -----------------------------------------------------

    def spec(self, kind: str) -> ActorSpec | None:
        """The registered class of a kind."""
        return self._kinds.get(kind)

    def kinds(self) -> list[str]:
        """The registered kinds."""
        return sorted(self._kinds)

    def birth(self, spec: ActorSpec) -> Birth | None:
        """How an actor begins that was never spawned; None if it cannot."""
        return self._births.get(spec.kind)

    def created(self, spec: ActorSpec) -> None:
        """An actor begins to exist, and its ``@every`` timers with it."""
        if spec.ticks:
            self._timers.wake()

    def deliver(self, messages: list[Inbound]) -> None:
        """Put stored messages into mailboxes; those of kinds not registered yet wait in the journal."""
        for message in messages:
            spec = self._kinds.get(message.actor.partition("/")[0])
            if spec is not None:
                self.stage.cell(spec, message.actor).put(message)

    def committed(self, record: TurnRecord, outgoing: list[Outgoing], born: list[Inbound]) -> None:
        """A turn is in the journal: let its effects out."""
        self.turns += 1
        self._outbox.add(outgoing)
        self.deliver(born)
        if record.timers or record.cancelled or record.forks:
            self._timers.wake()

    def failed(self, failure: Failure, exc: BaseException) -> None:
        """Keep a failure and say so."""
        self.failures.append(failure)
        self.failed_count += 1
        log.error(
            "%s failed on %s (try %d, %s): %s",
            failure.actor, failure.type, failure.tries, failure.verdict, failure.error,
            exc_info=None if isinstance(exc, OffbookError) else exc,
        )  # fmt: skip

    def unsent(self, actor: str) -> int:
        """Messages of an actor that are on their way."""
        return self._outbox.unsent(actor)

    def engine_wait(self, message: Inbound, waits: bool) -> None:
        """A turn, and with it those that wait for its answer, waits for the engine, or does so no more."""
        for actor in (*message.chain, message.actor):
            self.engine_waits[actor] += 1 if waits else -1
            if self.engine_waits[actor] != waits:
                continue  # others of its calls wait, too
            if not waits:
                del self.engine_waits[actor]
            cell = self.stage.find(actor)
            if cell is not None:
                cell.waits_for_engine(waits)

    async def room_to_send(self, actor: str) -> None:
        """Hold an actor back that sends faster than its receivers take."""
        await self._outbox.room(actor)

    async def room_for(self, actor: str) -> None:
        """Wait for room in a mailbox."""
        while True:
            cell = self.stage.find(actor)
            if cell is None or cell.stopped or len(cell.mailbox) < self.mailbox_limit:
                return
            await cell.mailbox.room.wait()

    def deaf_kinds(self, type: str, body: bytes) -> set[str]:
        """Registered kinds that do not take a message type."""
        deaf = set()
        checked: set[Any] = set()
        for kind, spec in self._kinds.items():
            handler = spec.handlers.get(type)
            if handler is None:
                deaf.add(kind)
            elif handler.message not in checked:
                decode(body, handler.message, tag=type)
                checked.add(handler.message)
        return deaf

    async def ensure_topic(self, topic: str) -> None:
        """Follow a topic."""
        await self._listener.ensure(topic)

    def expect(self, topic: str, seq: int) -> None:
        """Something was published here: things are not quiet until it is delivered here, too."""
        self._listener.expect(topic, seq)

    def prefetch(self, memory: MemoryRef) -> None:
        """Tell the engine that an agent will speak soon."""
        self._tasks.start_soon(self.engine.hint, Prefetch(memory=memory))

    def forget(self, actor: str) -> None:
        """Tell the engine that an agent's KV is not needed any more."""
        self._tasks.start_soon(self.engine.hint, Forget(agent=actor))

    def control(self, delivery: Delivery) -> bool:
        """Answer questions about the host itself."""
        if delivery.envelope.to != f"host/{self.name}":
            return False
        self._tasks.start_soon(answer, self, delivery)
        return True


def _birth(spec: ActorSpec, state: dict[str, Any]) -> Birth:
    return Birth(
        kind=spec.kind,
        version=spec.schema.version,
        state=spec.schema.initial(state),
        topics=spec.topics,
        ticks=tuple(spec.ticks.items()),
        first_turn=spec.has_first_turn,
        memory=new_memory(spec.cls.salt) if issubclass(spec.cls, Agent) else None,
    )
