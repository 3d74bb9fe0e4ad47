"""An engine process without a model, as a child of a Runtime in tests: the actors' FakeEngine, served."""

import json
import os
import sys

import anyio

from offbook.actors.testing import FakeEngine
from offbook.bus.errors import UnknownModel, to_wire


async def main() -> None:
    config = json.loads(sys.argv[sys.argv.index("--config") + 1])
    if config["model"] == "missing":
        with open(os.environ["OFFBOOK_ENGINE_ERROR"], "w") as file:
            json.dump(to_wire(UnknownModel("there is no model 'missing'")), file)
        raise SystemExit(78)
    await FakeEngine(config["endpoint"]).run()


anyio.run(main)
