"""Ask a villager from another process, while it runs: ``python examples/ask.py ann "What is new?"``."""

import sys

import anyio

from offbook.bus import connect


async def main(name: str = "ann", question: str = "What is new?", *_: str) -> None:
    async with connect("village") as bus:
        async with bus.stream(f"villager/{name}", {"type": "Ask", "question": question}, timeout=60) as reply:
            async for piece in reply:
                print(piece, end="", flush=True)
        print()


anyio.run(main, *sys.argv[1:])
