"""The outbox: what committed turns sent, on its way to the receivers.

Owns delivery. Messages of one sender to one receiver travel one after another, in their order, each until
the receiver has stored it; a receiver without room makes its senders wait. What can never arrive goes to
the dead letters. After a restart the journal's outbox is sent again under the same ids, which receivers
know.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from offbook.bus.errors import (
    ActorStopped,
    BadMessage,
    InvalidAddress,
    InvalidRequest,
    MessageTooLarge,
    NoSuchActor,
    OffbookError,
    TooManyTopics,
    UnknownMessageType,
)

from . import statements
from .journal import Journal, JournalFailed
from .quiet import Quiet
from .records import Outgoing
from .supervision import Failure

if TYPE_CHECKING:
    from offbook.bus.client import Bus

log = logging.getLogger("offbook.actors.outbox")

_NEVER = (
    ActorStopped, BadMessage, InvalidAddress, InvalidRequest, MessageTooLarge, TooManyTopics,
    UnknownMessageType,
)  # fmt: skip
_PATIENCE = 60.0
"""Seconds to wait for a receiver that nobody serves (its host may be starting)."""

_DELAY = (0.02, 1.0)
_ATTEMPT = 30.0
"""Seconds for one attempt."""

_CROWDED = 1000
"""Undelivered messages of one actor above which its next turn waits, at most ``_HOLD_BACK`` seconds."""

_HOLD_BACK = 30.0

Lane = tuple[str, str, bool]


class Outbox:
    """Sends committed messages.

    Args:
        published: called with topic and sequence number once a publication is retained.
        failed: called with what could not be delivered.
    """

    def __init__(
        self,
        bus: Bus,
        journal: Journal,
        quiet: Quiet,
        *,
        published: Callable[[str, int], None],
        failed: Callable[[Failure, BaseException], None],
    ) -> None:
        self._bus = bus
        self._journal = journal
        self._quiet = quiet
        self._published = published
        self._failed = failed
        self._lanes: dict[Lane, deque[Outgoing]] = {}
        self._unsent: Counter[str] = Counter()
        self._progress = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Send what an earlier run left, and from now on what is added."""
        self._tasks = tasks
        self.add(await self._journal.do("outbox", statements.load_outbox))

    def add(self, rows: Iterable[Outgoing]) -> None:
        """Committed messages, in order."""
        assert self._tasks is not None
        for row in rows:
            self._unsent[row.sender] += 1
            lane = (row.sender, row.target, row.topic)
            waiting = self._lanes.get(lane)
            if waiting is not None:
                waiting.append(row)
                continue
            self._lanes[lane] = deque((row,))
            self._quiet.take()
            self._tasks.start_soon(self._drive, lane)

    def unsent(self, sender: str) -> int:
        """How many messages of an actor no receiver has stored yet."""
        return self._unsent[sender]

    async def room(self, sender: str) -> None:
        """Wait while an actor has very many messages on their way, though not for ever."""
        if self._unsent[sender] < _CROWDED:
            return
        with anyio.move_on_after(_HOLD_BACK):
            while self._unsent[sender] >= _CROWDED:
                await self._progress.wait()

    async def _drive(self, lane: Lane) -> None:
        """Send a lane's messages until none waits."""
        rows = self._lanes[lane]
        try:
            while rows:
                row = rows[0]
                await self._deliver(row)
                rows.popleft()
                self._unsent[row.sender] -= 1
                if not self._unsent[row.sender]:
                    del self._unsent[row.sender]
                self._progress.set()
                self._progress = anyio.Event()
        finally:
            del self._lanes[lane]
            self._quiet.give()

    async def _deliver(self, row: Outgoing) -> None:
        """Until the receiver has it, or nobody ever will."""
        start = time.monotonic()
        delay, longest = _DELAY
        tries = 0
        while True:
            tries += 1
            try:
                await self._send(row)
            except OffbookError as exc:
                waited = time.monotonic() - start
                if await self._gives_up(row, exc, waited) and await self._bury(row, exc, tries):
                    return
                log.debug("%s to %s waits: %s", row.sender, row.target, exc)
            else:
                # Not awaited: if the process ends first, the receiver sees the same id again.
                self._journal.post("sent", lambda db: statements.sent(db, [row.seq]))
                return
            await anyio.sleep(delay)
            delay = min(delay * 2, longest)

    async def _send(self, row: Outgoing) -> None:
        if row.topic:
            seq = await self._bus.publish(
                row.target, row.body, id=row.id, type=row.type, sender=row.sender, traceparent=row.traceparent
            )
            self._published(row.target, seq)
        else:
            await self._bus.tell(
                row.target,
                row.body,
                timeout=_ATTEMPT,
                id=row.id,
                type=row.type,
                sender=row.sender,
                traceparent=row.traceparent,
            )

    async def _gives_up(self, row: Outgoing, exc: OffbookError, waited: float) -> bool:
        if isinstance(exc, _NEVER):
            return True
        if not isinstance(exc, NoSuchActor):
            return False
        # A host that knows the kind says so for good; the broker only says that nobody serves it now.
        if "host" in exc.details:
            return True
        if waited <= _PATIENCE:
            return False
        # An actor of this journal exists, and its class is yet to be registered.
        try:
            return not await self._journal.do("exists", lambda db: statements.exists(db, row.target))
        except JournalFailed:
            return False

    async def _bury(self, row: Outgoing, exc: OffbookError, tries: int) -> bool:
        """Give a message up; False if the journal cannot note that now."""
        reason = f"{type(exc).__name__}: {exc}"
        try:
            await self._journal.do(
                "bury-outgoing", lambda db: statements.bury_outgoing(db, row, reason, tries, time.time())
            )
        except JournalFailed:
            return False
        self._failed(Failure(row.sender, row.id, row.type, reason, tries, "dead letter"), exc)
        return True
