"""An engine loop served as ``engine/main`` on a bus of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from offbook.actors.lm import Stats
from offbook.bus import Broker, Bus, connect
from offbook.bus.errors import OffbookError
from offbook.runtime.engine.actor import EngineActor

ENGINE = "engine/main"


@asynccontextmanager
async def serving(harness: Any) -> AsyncIterator[Bus]:
    """The harness's loop served on a broker of its own; a client of it."""
    folder = tempfile.mkdtemp(prefix="obt-")  # Not under tmp_path: the path of a Unix socket must be short.
    endpoint = f"ipc://{folder}/bus.sock"
    try:
        async with (
            Broker(endpoint),
            connect(endpoint) as engine_bus,
            connect(endpoint) as bus,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(EngineActor(engine_bus, harness.loop).run)
            while True:
                try:
                    await bus.ask(ENGINE, Stats(), timeout=10)
                    break
                except OffbookError as error:
                    if error.code != "NoSuchActor":
                        raise
                    await anyio.sleep(0.01)
            yield bus
            tasks.cancel_scope.cancel()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
