"""Peers come, go, cancel and fail at random: every request ends, and nothing is left over."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import pytest

from offbook.bus import Broker, Delivery, connect
from offbook.bus.errors import ActorFailed, ConnectionLost, DeadlineExceeded, NoSuchActor, OffbookError


@pytest.mark.parametrize("seed", range(4))
async def test_every_request_ends_and_nothing_leaks(endpoint: str, kit: Any, seed: int) -> None:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    requests = 1200

    async def answer(delivery: Delivery) -> None:
        number = delivery.decode()["n"]
        mood = number % 7
        if mood == 0:
            await delivery.cancelled.wait()  # never answers by itself
        elif mood == 1:
            await delivery.fail(ActorFailed("no"))
        else:
            for piece in range(mood):
                await delivery.progress(piece)
            await delivery.reply(number)

    async def server(stop: anyio.Event) -> None:
        """Serves for a while, goes, and comes back."""
        while not stop.is_set():
            async with connect(endpoint) as bus, anyio.create_task_group() as tasks:

                async def work(bus: Any, tasks: Any) -> None:
                    async for delivery in bus.deliveries():
                        tasks.start_soon(answer, delivery)

                tasks.start_soon(work, bus, tasks)
                await bus.serve("v/*")
                with anyio.move_on_after(rng.uniform(0.02, 0.3)):
                    await stop.wait()
                tasks.cancel_scope.cancel()

    async def request(bus: Any, number: int) -> None:
        body = {"n": number}
        try:
            with anyio.move_on_after(rng.choice([0.001, 0.05, 5, 5, 5])) as scope:
                if number % 3 == 0:
                    await bus.tell(f"v/{number}", body, timeout=rng.choice([0.02, 1]))
                elif number % 3 == 1:
                    assert await bus.ask(f"v/{number}", body, timeout=rng.choice([0.02, 1])) == number
                else:
                    async with bus.stream(f"v/{number}", body, timeout=rng.choice([0.02, 1])) as reply:
                        pieces = [piece async for piece in reply]
                        assert pieces == list(range(number % 7))
                        assert reply.result == number
            outcomes["cancelled" if scope.cancelled_caught else "answered"] += 1
        except (ActorFailed, ConnectionLost, DeadlineExceeded, NoSuchActor) as exc:
            outcomes[exc.code] += 1

    async with Broker(endpoint) as broker, connect(endpoint, name="steady") as steady:
        stop = anyio.Event()
        async with anyio.create_task_group() as servers:
            servers.start_soon(server, stop)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as clients:

                    async def asker(numbers: range) -> None:
                        for number in numbers:
                            if number % 40 == 0:  # a client that does not stay
                                async with connect(endpoint) as bus:
                                    await request(bus, number)
                            else:
                                await request(steady, number)

                    for lane in range(30):
                        clients.start_soon(asker, range(lane, requests, 30))
            stop.set()
        assert outcomes.total() == requests
        assert outcomes["answered"] > 0
        # Nothing is left of all that, and no credit has leaked: more than a window of messages passes.
        await kit.eventually(lambda: broker.statistics().peers == 1)
        statistics = broker.statistics()
        assert (statistics.pending, statistics.queued, statistics.malformed) == (0, 0, 0)
        async with kit.serving(endpoint, "v/*", kit.echo), anyio.create_task_group() as tasks:
            for number in range(600):
                tasks.start_soon(steady.tell, "v/a", {"n": number})
        assert not steady._exchange._requests


async def test_errors_of_the_bus_are_the_only_ones(endpoint: str) -> None:
    """Whatever goes wrong in a call is an OffbookError: one except clause catches it."""
    async with Broker(endpoint), connect(endpoint) as bus:
        for call in (
            lambda: bus.ask("v/a", {}),
            lambda: bus.tell("no address", {}),
            lambda: bus.ask("v/a", object()),
            lambda: bus.publish("t\n", 1),
        ):
            with pytest.raises(OffbookError):
                await call()
