"""Clocks: what time it is for the actors, and when virtual time may jump.

Owns the two clocks. Timers, ``self.now()`` and ``run(until=...)`` use the host's clock; deadlines of asks
and retry delays are always real time, because engines and networks are. The idea of a clock that jumps
over idle time is trio's ``MockClock`` (``autojump``).
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Protocol

Seconds = float | int | timedelta


def seconds(value: Seconds) -> float:
    """A duration as seconds; accepts numbers and ``timedelta``."""
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


class Clock(Protocol):
    """What a host asks of a clock. Times are seconds since 1970 (Unix)."""

    virtual: bool
    seed: int

    def now(self) -> float:
        """The current time."""
        ...


class WallClock:
    """Real time."""

    virtual = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def now(self) -> float:
        return time.time()


class VirtualClock:
    """Time that stands still while anything is left to do, and jumps to the next timer when nothing is.

    The host keeps the reached time in its journal, so a restarted simulation continues at the time where
    it stopped.

    Args:
        seed: fixes ``random``, the actors' own ``self.random``, and the order of timers due at the same time.
        start: the first instant, seconds since 1970; default 2000-01-01T00:00:00Z, so that runs compare.
    """

    virtual = True

    def __init__(self, seed: int = 0, start: float = 946_684_800.0) -> None:
        self.seed = seed
        self.start = start
        self.random = random.Random(seed)
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, when: float) -> None:
        """Jump to ``when``; never backwards. Called by the host when nothing is left to do."""
        self._now = max(self._now, when)
