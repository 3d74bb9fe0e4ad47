"""Asking an engine that may be about to be there: it loads its model, or is started again.

Owns how long to wait for it, and what is said when that was not enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from offbook.actors.lm import ENGINE_ADDRESS, EngineStats, SetMemory, Stats
from offbook.bus import Bus
from offbook.bus.errors import ConnectionLost, EngineBusy, NoSuchActor

PATIENCE_S = 60.0
"""Seconds to wait for an engine that loads: most models take less."""

LOOK_S = 0.1


async def ask_engine(
    bus: Bus, request: Stats | SetMemory, *, expected: Callable[[], bool], patience: float = PATIENCE_S
) -> EngineStats:
    """Ask the engine, waiting for it as long as it is ``expected``.

    Raises:
        EngineBusy: it was still loading after ``patience`` seconds.
        NoSuchActor: there is none, and none is expected.
    """
    end = time.monotonic() + patience
    while True:
        try:
            stats: EngineStats = await bus.ask(ENGINE_ADDRESS, request, timeout=120, returns=EngineStats)
            return stats
        except (NoSuchActor, ConnectionLost) as exc:
            if not expected():
                raise
            if time.monotonic() >= end:
                raise EngineBusy(
                    f"the engine is loading its model and not ready after {patience:g} s; try again later"
                ) from exc
        await anyio.sleep(LOOK_S)
