"""A cell: the place of one active actor. Its mailbox, its committed state, one turn at a time.

Owns the life of the instance in memory (activate, roll back, passivate), and the way of one message through a
turn: try, commit, or what the supervisor decides. What waits, and in which order, is ``mailbox.py``'s.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from offbook.bus.errors import (
    ActorFailed,
    ActorStopped,
    BadMessage,
    Cancelled,
    DeadlineExceeded,
    NoSuchActor,
    OffbookError,
    StateNotLoadable,
    UnknownMessageType,
)

from . import statements
from .actor import Actor, ActorSpec, turn_random
from .instance import Instance
from .journal import RETRY_AFTER, JournalFailed
from .lm import MemoryRef
from .mailbox import Mailbox
from .message import encode
from .reasons import reason_of
from .records import Inbound, Mode, Outgoing, TurnRecord
from .statements import TurnLost
from .stray import own_errors
from .supervision import ASKERS_OWN, Failure, RestartWindow, Verdict, decide, for_asker
from .turn import Turn, TurnPort, current_turn

if TYPE_CHECKING:
    from offbook.bus.delivery import Delivery

    from .stage import Stage

log = logging.getLogger("offbook.actors")

_HOPELESS = (BadMessage, UnknownMessageType)
"""A message that fails like this fails again; it is not retried."""


class CellPort(TurnPort, Protocol):
    """What a cell needs of its host."""

    stopping: bool
    stage: Stage
    engine_waits: Counter[str]

    def committed(self, record: TurnRecord, outgoing: list[Outgoing], born: list[Inbound]) -> None: ...

    def failed(self, failure: Failure, exc: BaseException) -> None: ...

    async def room_to_send(self, actor: str) -> None: ...

    def forget(self, actor: str) -> None: ...

    def prefetch(self, memory: MemoryRef) -> None: ...


class Cell:
    """One actor in memory.

    Attributes:
        mailbox: the messages that wait, the one being handled first.
        state: ``idle``, ``running``, ``retrying`` (waits before it tries a message again), ``held`` (earlier
            messages are being read) or ``stopped``.
        stopped: why the actor was stopped, or empty.
    """

    def __init__(self, port: CellPort, spec: ActorSpec, actor_id: str) -> None:
        self.port = port
        self.spec = spec
        self.id = actor_id
        self.mailbox = Mailbox()
        self.state = "idle"
        self.stopped = ""
        self.rested_at = 0.0
        self._cut = False  # the last try was cancelled from outside
        self.instance = Instance(port.journal, spec, actor_id)
        self._hinted = False
        self._window = RestartWindow(spec.supervision)
        self._trying: Inbound | None = None

    # -- the mailbox --------------------------------------------------------------------------------------

    def put(self, message: Inbound, delivery: Delivery | None = None) -> None:
        """Add a stored message; one that is here already is not added twice."""
        if self.stopped:
            return  # it waits in the journal
        if self.mailbox.put(message, delivery) and self.state == "idle":
            self.state = "running"
            self.port.stage.started(self)

    def hold(self) -> None:
        """Begin nothing until ``release``: messages that came earlier are being read from the journal."""
        self.state = "held"

    def release(self, rows: Iterable[Inbound]) -> None:
        """Go on, with what the journal had and what has come meanwhile."""
        for row in rows:
            self.mailbox.put(row)
        self.state = "idle"
        if self.mailbox:
            self.state = "running"
            self.port.stage.started(self)

    def wait_for(self, message_id: str, delivery: Delivery) -> bool:
        """Let one more asker wait for a message; False if it is not here."""
        return not self.stopped and self.mailbox.join(message_id, delivery)

    @property
    def asleep(self) -> bool:
        """Nothing of the actor is in memory."""
        return self.state == "idle" and self.instance.snapshot is None and not self.mailbox

    async def dismiss(self, error: OffbookError) -> None:
        """Tell those who wait for answers that none will come, and drop their questions.

        The turn that is being tried ends by itself: nobody waits for it any more.
        """
        for message in list(self.mailbox)[1:]:
            if self.mailbox.askers(message):
                self.port.journal.post("drop", partial(statements.drop, message=message))
        for delivery in self.mailbox.release_askers(self.mailbox):
            await delivery.fail(error)

    # -- the loop -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle messages until none waits. The host runs one of these per cell at a time."""
        self._hinted = False
        try:
            while self.mailbox and not self.stopped:
                self.state = "running"
                message = self.mailbox.begin()
                try:
                    await self._handle(message)
                except JournalFailed as exc:
                    await self._wait_for_journal(message, exc)
        finally:
            if self.stopped:
                await self._abandon()
            if self.port.stopping:  # a commit that was on its way has counted the next try
                self.take_back_tries()
            self.state = "stopped" if self.stopped else "idle"
            self.rested_at = time.monotonic()
            self.port.stage.rested(self)

    async def passivate(self) -> None:
        """Leave memory; messages that arrive meanwhile wake the actor again. Run by the host."""
        try:
            await self.instance.retire()
            self.instance.unload()
        finally:
            await self.run()

    async def _wait_for_journal(self, message: Inbound, exc: JournalFailed) -> None:
        """Nothing can be written. That is not the message's fault: it stays, and only askers are told."""
        self.port.failed(
            Failure(self.id, message.id, message.type, exc.message, message.tries, "waits for the journal"),
            exc,
        )
        message.counted = message.tries > 0
        await self.instance.retire()
        for delivery in self.mailbox.release_askers([message]):
            await delivery.fail(exc)
        self.state = "retrying"
        await anyio.sleep(RETRY_AFTER)

    async def _handle(self, message: Inbound) -> None:
        """One message, until it is committed, given up, or nobody wants it any more."""
        policy = self.spec.supervision
        while True:
            gone = self._unwanted(message)
            if gone is not None:
                await self._drop(message, gone)
                return
            actor = await self._activate(message)
            if actor is None:
                return
            if not message.counted:
                if message.tries >= policy.max_tries:
                    text = f"gave up after {policy.max_tries} tries that ended with the process or an error"
                    await self._give_up(message, ActorFailed(f"{self.id}: {text}", actor=self.id), text)
                    return
                await self.port.journal.do(
                    "try", lambda db: statements.begin_try(db, message, message.tries + 1)
                )
                message.tries += 1
                message.counted = True
            await self.port.room_to_send(self.id)
            message.counted = False
            self._trying = message
            if self.port.engine_waits[self.id]:  # an earlier process asked, and that question still waits
                self.waits_for_engine(True)
            error = await self._try(message, actor)
            if error is None or not self.port.stopping:
                self._trying = None
            if error is None or self.stopped:
                return
            if not await self._failed(message, error):
                return

    def _unwanted(self, message: Inbound) -> OffbookError | None:
        if message.mode is not Mode.ASK:
            return None
        waiting = self.mailbox.askers(message)
        if waiting and all(one.cancelled.is_set() for one in waiting):
            return Cancelled(f"the question to {self.id} was cancelled")
        if message.deadline and message.deadline <= time.time():
            return DeadlineExceeded(f"{self.id} did not come to this question before its deadline")
        return None

    async def _failed(self, message: Inbound, error: BaseException) -> bool:
        """Decide about a failed try; True to try again."""
        policy = self.spec.supervision
        await self.instance.retire()
        if self.port.stopping and message.mode is not Mode.ASK:
            await anyio.sleep_forever()  # not the message's fault; the host is about to end this task
        if isinstance(error, TurnLost):
            self.mailbox.leave(message)
            return False
        if isinstance(error, JournalFailed):
            raise error
        cancelled = isinstance(error, Cancelled) or (
            isinstance(error, DeadlineExceeded) and self._unwanted(message) is not None
        )
        if self._cut and cancelled and message.mode is Mode.ASK and self._unwanted(message) is None:
            # Asked again while the turn that nobody waited for was ending: that one does not count.
            message.tries -= 1
            self._store_tries(message, message.tries)
            return True
        if cancelled and message.mode is Mode.ASK:
            await self._drop(
                message, for_asker(self.id, error) if not isinstance(error, Cancelled) else error
            )
            return False
        if message.mode is Mode.ASK and isinstance(error, ASKERS_OWN):
            log.info("%s refused %s: %s", self.id, message.type, error)
            await self.port.journal.do("drop", lambda db: statements.drop(db, message))
            await self._fail(message, for_asker(self.id, error))
            return False
        verdict = decide(policy, is_ask=message.mode is Mode.ASK, tries=message.tries)
        if isinstance(error, _HOPELESS) and verdict is Verdict.RETRY:
            verdict = Verdict.DEAD_LETTER
        text = reason_of(error)
        self.port.failed(
            Failure(self.id, message.id, message.type, text, message.tries, verdict.value), error
        )
        if verdict is Verdict.REPORT:
            await self.port.journal.do("drop", lambda db: statements.drop(db, message))
            await self._fail(message, for_asker(self.id, error))
        elif verdict is Verdict.DEAD_LETTER:
            await self._bury(message, for_asker(self.id, error), text)
        if not self._window.restart():
            self._stop(f"more than {policy.intensity} failures within {policy.period:.0f} s", message)
            return False
        if verdict is Verdict.RETRY:
            self.state = "retrying"
            await anyio.sleep(policy.delay(message.tries, error))
            self.state = "running"
            return True
        return False

    def _stop(self, reason: str, message: Inbound) -> None:
        self.stopped = reason
        stopped = ActorStopped(f"{self.id} was stopped: {reason}", actor=self.id)
        self.port.failed(Failure(self.id, message.id, message.type, reason, message.tries, "stop"), stopped)

    async def _abandon(self) -> None:
        """Nothing more is handled: tell those who wait. The messages stay in the journal."""
        await self.instance.retire()
        error = ActorStopped(f"{self.id} was stopped: {self.stopped}", actor=self.id)
        while self.mailbox:
            await self._fail(self.mailbox[0], error)

    async def _bury(self, message: Inbound, error: OffbookError, reason: str) -> None:
        await self.port.journal.do("bury", lambda db: statements.bury(db, message, reason, time.time()))
        await self._fail(message, error)

    async def _give_up(self, message: Inbound, error: OffbookError, reason: str) -> None:
        """Bury a message without a try; nobody has heard of its failures in an earlier process."""
        verdict = Verdict.DEAD_LETTER.value
        self.port.failed(Failure(self.id, message.id, message.type, reason, message.tries, verdict), error)
        await self._bury(message, error, reason)

    async def _drop(self, message: Inbound, error: OffbookError) -> None:
        """Forget a question that nobody waits for; who asks it again meanwhile does so anew."""
        self.mailbox.ending = message.seq
        try:
            await self.port.journal.do("drop", lambda db: statements.drop(db, message))
        finally:
            self.mailbox.ending = -1
        await self._fail(message, error)

    async def _fail(self, message: Inbound, error: OffbookError) -> None:
        waiting = self.mailbox.askers(message)
        self.mailbox.leave(message)
        for delivery in waiting:
            await delivery.fail(error)

    # -- one try ------------------------------------------------------------------------------------------

    def waits_for_engine(self, waits: bool) -> None:
        """Calls of this turn, or of one that it waits for, wait for the engine, or do so no more.

        A process that ends meanwhile, as it may again and again while a large model loads, is not the
        message's fault: as stored, the try does not count until the engine has answered.
        """
        message = self._trying
        if message is not None and not self.port.stopping:
            self._store_tries(message, message.tries - waits)

    def take_back_tries(self) -> None:
        """The host stops in order: tries that have begun, or were about to, do not count."""
        for message in self.mailbox:
            if message is self._trying or message.counted:
                self._store_tries(message, message.tries - 1)

    def _store_tries(self, message: Inbound, tries: int) -> None:
        """In order with the journal's other work, so a turn that goes on has its try counted first."""
        self.port.journal.post("try", partial(statements.begin_try, message=message, tries=tries))

    async def _activate(self, message: Inbound) -> Actor | None:
        """Load the actor; None if it cannot be, and the message has been dealt with.

        That is before the try is counted: a state that does not fit the class is mended by another class.
        """
        try:
            return await self.instance.activate()
        except NoSuchActor as exc:
            await self._give_up(message, exc, exc.message)
            return None
        except StateNotLoadable as exc:
            if message.counted:
                message.counted = False
                message.tries -= 1
                self._store_tries(message, message.tries)
            self.stopped = exc.message
            self.port.failed(
                Failure(self.id, message.id, message.type, exc.message, message.tries, "stop"), exc
            )
            await self._fail(message, exc)
            return None

    async def _try(self, message: Inbound, actor: Actor) -> BaseException | None:
        """Run one turn; None if it committed, else the error."""
        self._hint()
        calls = {}
        if message.tries > 1 or message.recovered:
            calls = await self.port.journal.do("calls", lambda db: statements.get_calls(db, message))

        async def progress(piece: Any) -> None:
            body = encode(piece)
            for delivery in self.mailbox.askers(message):
                await delivery.progress(body)

        memory = self.instance.memory
        turn = Turn(
            self.port,
            message,
            random=turn_random(self.port.clock.seed, self.id, message.id),
            memory=memory.copy() if memory is not None else None,
            calls=calls,
            progress=progress,
        )
        object.__setattr__(actor, "_turn", turn)
        result, error = await self._guarded(turn)
        object.__setattr__(actor, "_turn", None)
        if error is None:
            try:
                with anyio.CancelScope(shield=True):  # what the journal takes, the asker is told
                    await self._commit(turn, result)
            except Exception as exc:
                error = exc
        return error

    async def _guarded(self, turn: Turn) -> tuple[Any, BaseException | None]:
        """Run the handler within its deadline, and only as long as someone waits."""
        message = turn.message
        result: Any = None
        error: BaseException | None = None
        token = current_turn.set(turn)
        scope = anyio.CancelScope()
        if message.mode is Mode.ASK and message.deadline:
            scope.deadline = anyio.current_time() + message.deadline - time.time()
        try:
            with scope:
                async with anyio.create_task_group() as tasks:
                    turn.tasks = tasks
                    if self.mailbox.askers(message):
                        tasks.start_soon(self._watch, message, scope)
                    try:
                        with own_errors():
                            result = await self.instance.dispatch(turn)
                    except (Exception, SystemExit) as exc:
                        error = exc
                    finally:
                        turn.closed = True
                    tasks.cancel_scope.cancel()
        except (Exception, BaseExceptionGroup) as exc:  # a task that the handler left behind
            error = error or exc
        finally:
            current_turn.reset(token)
        self._cut = scope.cancelled_caught and error is None
        if self._cut:
            error = self._unwanted(message) or Cancelled(f"the turn of {self.id} was cancelled")
        return result, error

    def _hint(self) -> None:
        """Let the engine load an agent's memory while its handler gets going."""
        hinted, self._hinted = self._hinted, True
        memory = None if hinted else self.instance.reference()
        if memory is not None:
            self.port.prefetch(memory)

    async def _watch(self, message: Inbound, scope: anyio.CancelScope) -> None:
        """Cancel the turn once every asker has gone."""
        while True:
            pending = [one for one in self.mailbox.askers(message) if not one.cancelled.is_set()]
            if not pending:
                scope.cancel()
                return
            await pending[0].cancelled.wait()

    # -- the commit ---------------------------------------------------------------------------------------

    async def _commit(self, turn: Turn, result: Any) -> None:
        """Write the turn, then let its effects out."""
        message = turn.message
        record, snapshot, state = self.instance.record(turn, result)
        clock_now = self.port.clock.now()
        upcoming = self._upcoming()
        outgoing, born = await self.port.journal.do(
            "turn", lambda db: statements.commit(db, record, upcoming, clock_now, time.time())
        )
        if upcoming is not None:
            upcoming.tries += 1
            upcoming.counted = True
        self.instance.committed(turn, snapshot, state)
        waiting = self.mailbox.askers(message)
        self.mailbox.leave(message)
        self.port.committed(record, outgoing, born)
        if turn.forgotten:
            self.port.forget(self.id)
        for delivery in waiting:
            await delivery.reply(record.reply or b"\xc0")

    def _upcoming(self) -> Inbound | None:
        """The next message, if its try can be counted with the commit of this turn."""
        if len(self.mailbox) < 2 or self.port.stopping:
            return None
        following = self.mailbox[1]
        return following if not following.counted and not following.tries else None
