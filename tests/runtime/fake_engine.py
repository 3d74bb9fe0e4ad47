"""An engine process without a model, as a child of a Runtime in tests: the actors' FakeEngine, served.

Like the real one it says when it is ready, and ends when its parent is gone: a test may SIGKILL that.
"""

import json
import os
import sys

import anyio

from offbook.actors.testing import FakeEngine
from offbook.bus.errors import UnknownModel, to_wire
from offbook.runtime.engine.process import note_ready, parent_gone


async def main() -> None:
    config = json.loads(sys.argv[sys.argv.index("--config") + 1])
    if config["model"] == "missing":
        with open(os.environ["OFFBOOK_ENGINE_ERROR"], "w") as file:
            json.dump(to_wire(UnknownModel("there is no model 'missing'")), file)
        raise SystemExit(78)
    engine = FakeEngine(config["endpoint"])
    async with anyio.create_task_group() as tasks:

        async def orphaned() -> None:
            await parent_gone()
            tasks.cancel_scope.cancel()

        async def serve() -> None:
            async with anyio.create_task_group() as inner:
                await inner.start(engine.run)
                note_ready()
            tasks.cancel_scope.cancel()

        tasks.start_soon(orphaned)
        tasks.start_soon(serve)


anyio.run(main)
