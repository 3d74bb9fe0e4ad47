"""Timers: due ones become messages.

Owns when the journal is looked at. A timer leaves the table in the transaction that puts its message into the
mailbox, so it fires once. With a wall clock, due times are compared with the time of day again and again:
a clock set forward fires what is due, a clock set back makes no periodic timer wait longer than its period.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from functools import partial

import anyio
import msgspec

from . import statements, timer_statements
from .clock import Clock, VirtualClock
from .journal import RETRY_AFTER, Journal, JournalFailed
from .quiet import Quiet
from .records import Inbound

log = logging.getLogger("offbook.actors.timers")

_LOOK = 5.0
"""Seconds between looks at a wall clock while a timer is set: how late a change of the clock is noticed."""

_CLOCK_KEY = "clock"
_BACKWARDS = 1.0
"""A step back of the wall clock that counts as one, in seconds; smaller ones are adjustments."""


class VirtualTime(msgspec.Struct):
    """What the journal keeps of a virtual clock, in seconds since 1970."""

    start: float
    now: float


class Timers:
    """Fires durable timers into mailboxes."""

    def __init__(
        self, journal: Journal, clock: Clock, quiet: Quiet, deliver: Callable[[list[Inbound]], None]
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._quiet = quiet
        self._deliver = deliver
        self._changed = anyio.Event()
        self.fired = 0

    async def restore(self) -> None:
        """Continue where the journal's last run stopped."""
        raw = await self._journal.do("meta", lambda db: statements.get_meta(db, _CLOCK_KEY))
        clock = self._clock
        if isinstance(clock, VirtualClock):
            if raw is not None:
                kept = msgspec.msgpack.decode(raw, type=VirtualTime)
                clock.start = kept.start
                clock.advance_to(kept.now)
            else:
                await self._keep()
        elif raw is not None and msgspec.msgpack.decode(raw, type=VirtualTime).now > clock.now() + _BACKWARDS:
            await self._pull()

    def wake(self) -> None:
        """A timer was set or cancelled."""
        self._changed.set()

    async def fire(self) -> float | None:
        """Deliver what is due now; returns when the next timer is due."""
        with self._quiet.held():
            while True:
                now, seed = self._clock.now(), self._clock.seed
                kept = self._time(now)
                messages, due = await self._journal.do("fire", partial(_fire, now=now, seed=seed, kept=kept))
                self.fired += len(messages)
                self._deliver(messages)
                if due is None or due > self._clock.now():
                    return due

    async def run(self) -> None:
        """Watch a wall clock until cancelled."""
        while True:
            self._changed = anyio.Event()
            try:
                due = await self.fire()
            except JournalFailed as exc:
                log.error("no timer fires: %s", exc)
                await anyio.sleep(RETRY_AFTER)
                continue
            if due is None:
                await self._changed.wait()
                continue
            before, start = self._clock.now(), time.monotonic()
            with anyio.move_on_after(min(max(due - before, 0.0), _LOOK)):
                await self._changed.wait()
            if self._clock.now() - before < time.monotonic() - start - _BACKWARDS:
                with contextlib.suppress(JournalFailed):  # the next look sees it again
                    await self._pull()

    async def advance(self, when: float) -> None:
        """Move a virtual clock and keep its time."""
        assert isinstance(self._clock, VirtualClock)
        self._clock.advance_to(when)
        await self._keep()

    def _time(self, now: float) -> bytes:
        return msgspec.msgpack.encode(VirtualTime(getattr(self._clock, "start", now), now))

    async def _keep(self) -> None:
        kept = self._time(self._clock.now())
        await self._journal.do("clock", lambda db: statements.put_meta(db, _CLOCK_KEY, kept))

    async def _pull(self) -> None:
        now = self._clock.now()
        await self._journal.do("pull", lambda db: timer_statements.pull_timers(db, now))


def _fire(
    db: sqlite3.Connection, *, now: float, seed: int, kept: bytes
) -> tuple[list[Inbound], float | None]:
    fired = timer_statements.fire(db, now, seed)
    statements.put_meta(db, _CLOCK_KEY, kept)
    return fired
