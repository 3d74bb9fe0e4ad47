"""Roles for tests that kill real processes: ``python child.py ROLE ENDPOINT ...``."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from offbook.bus import Broker, connect

sys.path.insert(0, str(Path(__file__).parents[1]))
from orphan import end_with_parent


def say(text: str) -> None:
    print(text, flush=True)


async def echo(endpoint: str) -> None:
    """Serve echo/*; say what arrives."""
    async with connect(endpoint, name="echo") as bus:
        await bus.serve("echo/*")
        say("ready")
        async for delivery in bus.deliveries():
            if delivery.expects_reply:
                await delivery.reply(delivery.decode())
            else:
                await delivery.accept()


async def silent(endpoint: str) -> None:
    """Serve silent/*, and never answer."""
    async with connect(endpoint, name="silent") as bus:
        await bus.serve("silent/*")
        say("ready")
        async for delivery in bus.deliveries():
            say(f"got {delivery.envelope.id}")


async def ask(endpoint: str, to: str) -> None:
    """Ask once, for as long as it takes."""
    async with connect(endpoint, name="asker") as bus:
        say("asking")
        try:
            say(repr(await bus.ask(to, {"type": "Q"}, timeout=60)))
        except Exception as exc:
            say(repr(exc))


async def last_words(endpoint: str) -> None:
    """Answer one ask and end at once, without closing anything."""
    import os

    async with connect(endpoint, name="last") as bus:
        await bus.serve("last/*")
        say("ready")
        async for delivery in bus.deliveries():
            await delivery.reply("farewell")
            await anyio.sleep(0.05)  # the process lives just long enough for the bytes to leave
            os._exit(0)


async def broker(endpoint: str) -> None:
    async with Broker(endpoint):
        say("ready")
        await anyio.sleep_forever()


end_with_parent()
anyio.run({f.__name__: f for f in (echo, silent, ask, last_words, broker)}[sys.argv[1]], *sys.argv[2:])
