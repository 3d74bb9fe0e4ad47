"""Running: letting time pass until an end.

Owns what ``until`` means. A wall clock passes by itself. A virtual clock jumps to the next timer whenever
nothing is left to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import anyio

from .clock import Clock, Seconds, VirtualClock, seconds
from .quiet import Quiet
from .supervision import Failure
from .timers import Timers

Until = Seconds | datetime | None

_LOOK = 60.0
"""Seconds between looks at a wall clock, which somebody may change."""


@dataclass(frozen=True)
class RunReport:
    """What happened during ``run()``: turns committed, the host's clock at the end, and failures: failed
    turns and dead letters since the last report, or since the host began."""

    turns: int
    failures: tuple[Failure, ...]
    now: float


async def run_wall(clock: Clock, until: Until) -> None:
    """Return after ``until`` seconds from now, or at a time; never, if it is None."""
    if until is None:
        await anyio.sleep_forever()
        return
    end = until.timestamp() if isinstance(until, datetime) else clock.now() + seconds(until)
    while (left := end - clock.now()) > 0:  # noqa: ASYNC110  # clocks have no events
        await anyio.sleep(min(left, _LOOK))


async def run_virtual(clock: VirtualClock, timers: Timers, quiet: Quiet, until: Until) -> None:
    """Return ``until`` seconds after the beginning of the simulation, or at a time, or without timers."""
    if until is None:
        end = float("inf")
    else:
        end = until.timestamp() if isinstance(until, datetime) else clock.start + seconds(until)
    while True:
        await quiet.wait()
        due = await timers.fire()
        if quiet.holds:
            continue
        if due is None or due > end:
            if end != float("inf"):
                await timers.advance(end)
            return
        await timers.advance(due)
