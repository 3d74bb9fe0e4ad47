"""An actor in memory: what was committed last, and the object that its handlers run on.

Owns loading, rolling back (a failed object is thrown away, the committed state stays), calling the right
handler, and turning what a handler left behind into the record that is committed.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from offbook.bus.body import check_size
from offbook.bus.errors import BadMessage, NoSuchActor, UnknownMessageType

from . import statements
from .actor import Actor, ActorSpec, make, unknown_type
from .journal import Journal
from .lm import MemoryRef
from .memory import AgentMemory
from .message import decode, encode
from .records import Inbound, Mode, Snapshot, TurnRecord
from .rows import BORN_TYPE, TICK_TYPE, tick_timer
from .stray import own_errors
from .turn import Turn

log = logging.getLogger("offbook.actors")


class Instance:
    """The loaded part of a cell.

    Attributes:
        snapshot: the committed state; None while nothing is loaded.
        memory: the committed memory; None for actors without one.
        actor: the live object; None after a failed turn, until the next one.
        new: ``on_start`` has not been committed with a turn yet.
    """

    def __init__(self, journal: Journal, spec: ActorSpec, actor_id: str) -> None:
        self.spec = spec
        self.id = actor_id
        self.snapshot: Snapshot | None = None
        self.memory: AgentMemory | None = None
        self.actor: Actor | None = None
        self.new = False
        self._journal = journal

    async def activate(self) -> Actor:
        """Bring the actor into memory.

        Raises:
            NoSuchActor: the journal has no such actor.
            StateNotLoadable: its state does not fit the class.
        """
        if self.actor is not None:
            return self.actor
        if self.snapshot is None:
            self.snapshot = await self._journal.do("load", lambda db: statements.load(db, self.id))
            if self.snapshot is None:
                raise NoSuchActor(f"there is no {self.id}", actor=self.id)
            if hasattr(self.spec.cls, "persona"):
                self.memory = AgentMemory.load(self.snapshot.memory, self.snapshot.segments)
        state = self.spec.schema.load(self.snapshot.state, self.snapshot.version, self.id)
        self.actor = make(self.spec, self.id, self.snapshot.turns, state)
        self.new = True
        return self.actor

    async def retire(self) -> None:
        """Let the live object go; what was committed stays loaded."""
        actor, self.actor = self.actor, None
        if actor is None or type(actor).on_stop is Actor.on_stop:
            return
        object.__setattr__(actor, "_turn", None)
        try:
            with own_errors():
                await actor.on_stop()
        except Exception as exc:
            log.error("%s: on_stop failed: %s", self.id, exc, exc_info=exc)

    def unload(self) -> None:
        """Free what was committed, too."""
        self.snapshot = self.memory = None

    def reference(self) -> MemoryRef | None:
        """The agent's memory for a hint to the engine; None if there is nothing to load."""
        if self.memory is None or not self.memory.tokens or self.actor is None:
            return None
        try:
            persona = getattr(self.actor, "persona", str)()
        except Exception:  # the user's method; whoever needs the persona will see the error
            return None
        if not isinstance(persona, str):
            return None
        return self.memory.reference(self.id, persona, pinned=getattr(self.actor, "pinned", False))

    async def dispatch(self, turn: Turn) -> Any:
        """Call what the message asks for."""
        actor, message = self.actor, turn.message
        assert actor is not None
        if self.new:
            self._add_missing_ticks(turn)
            await actor.on_start()
        if message.type == BORN_TYPE:
            return await actor.on_spawn()
        if message.type == TICK_TYPE and message.mode is Mode.TIMER:
            name = msgspec.msgpack.decode(message.body, type=str)
            if name not in self.spec.ticks:
                turn.cancel(f"@{name}")  # the class has no such method any more
                return None
            return await getattr(actor, name)()
        handler = self.spec.handlers.get(message.type)
        if handler is None:
            raise UnknownMessageType(unknown_type(self.spec, message.type), type=message.type)
        return await getattr(actor, handler.name)(decode(message.body, handler.message, tag=message.type))

    def _add_missing_ticks(self, turn: Turn) -> None:
        """Timers of ``@every`` methods that the class got after the actor was made."""
        assert self.snapshot is not None
        for name, period in self.spec.ticks.items():
            if f"@{name}" not in self.snapshot.ticks:
                timer = tick_timer(self.id, name, period, turn.now())
                turn.timers[timer.name] = timer

    def record(self, turn: Turn, result: Any) -> tuple[TurnRecord, Snapshot, msgspec.Struct]:
        """What a finished turn commits, the snapshot after it, and the state as a restart would see it.

        Raises:
            StateNotStorable: with the path of the value.
            TypeError, MessageTooLarge, InvalidRequest: the answer is not what the request declares, or
                cannot be sent.
        """
        actor, snapshot, message = self.actor, self.snapshot, turn.message
        assert actor is not None
        assert snapshot is not None
        schema = self.spec.schema
        raw, state = schema.dump(schema.capture(actor))
        unchanged = raw == snapshot.state and snapshot.version == schema.version
        memory, growth = turn.memory.changes() if turn.memory is not None else (None, None)
        record = TurnRecord(
            actor=self.id,
            kind=self.spec.kind,
            message=message,
            turn=snapshot.turns + 1,
            version=schema.version,
            state=None if unchanged else raw,
            memory=memory,
            growth=growth,
            reply=self._reply(message, result),
            outbox=turn.outbox,
            timers=list(turn.timers.values()),
            cancelled=sorted(turn.cancelled),
            subscribed=[topic for topic, wanted in turn.subscriptions.items() if wanted],
            unsubscribed=[topic for topic, wanted in turn.subscriptions.items() if not wanted],
            forks=turn.forks,
        )
        ticks = snapshot.ticks | {f"@{name}" for name in self.spec.ticks}
        after = Snapshot(self.id, self.spec.kind, schema.version, raw, record.turn, None, (), ticks)
        return record, after, state

    def committed(self, turn: Turn, snapshot: Snapshot, state: msgspec.Struct) -> None:
        """The record is in the journal: the next turn sees what a restart would see."""
        assert self.actor is not None
        self.snapshot = snapshot
        if turn.memory is not None:
            self.memory = turn.memory.copy()
        self.new = False
        self.spec.schema.install(self.actor, state)
        object.__setattr__(self.actor, "_turns", snapshot.turns)

    def _reply(self, message: Inbound, result: Any) -> bytes | None:
        """The encoded answer, checked against the type that the request declares."""
        if message.mode is not Mode.ASK:
            return None
        body = encode(result)
        check_size(len(body))
        handler = self.spec.handlers[message.type]
        if handler.reply is not Any:
            try:
                decode(body, handler.reply)
            except BadMessage as exc:
                raise TypeError(
                    f"{self.spec.cls.__name__}.{handler.name} must answer with {handler.reply}, "
                    f"not {type(result).__name__}: {exc.message}"
                ) from exc
        return body
