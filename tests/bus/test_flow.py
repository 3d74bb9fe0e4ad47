"""Flow control: a slow receiver makes its senders wait, and nobody's memory grows."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from offbook.bus import Broker, Delivery, connect
from offbook.bus.credit import MESSAGES
from offbook.bus.errors import MailboxFull


async def test_a_sleeping_consumer_makes_producers_wait(endpoint: str) -> None:
    """Bounded: what the consumer buffers, plus what the broker queues, plus the sender's window."""
    async with Broker(endpoint) as broker, connect(endpoint) as server, connect(endpoint) as bus:
        await server.serve("v/*")
        finished = 0

        async def produce() -> None:
            nonlocal finished
            await bus.tell("v/a", {"n": 1})
            finished += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(3000):
                tasks.start_soon(produce)
            with anyio.fail_after(20):
                while broker.statistics().queued < MESSAGES:
                    await anyio.sleep(0.005)
            for _ in range(20):  # time for more to arrive, if anything let it
                await bus.publish("tick", None)
            statistics = broker.statistics()
            assert statistics.delivered <= MESSAGES
            assert statistics.queued <= MESSAGES
            assert finished == 0
            taken = 0
            async for delivery in server.deliveries():  # it wakes up
                await delivery.accept()
                taken += 1
                if taken == 3000:
                    break
        assert finished == 3000


async def test_a_full_receiver_is_named_when_the_time_is_up(endpoint: str) -> None:
    async with Broker(endpoint), connect(endpoint) as server, connect(endpoint) as bus:
        await server.serve("v/*")
        async with anyio.create_task_group() as tasks:
            for _ in range(2 * MESSAGES):
                tasks.start_soon(bus.tell, "v/a", {"n": 1})
            for _ in range(3):
                await bus.publish("tick", None)
            with pytest.raises(MailboxFull, match="v/b"):
                await bus.tell("v/b", {"n": 2}, timeout=0.05)
            tasks.cancel_scope.cancel()


async def test_one_slow_kind_does_not_hold_up_another(endpoint: str, kit: Any) -> None:
    async with (
        Broker(endpoint),
        connect(endpoint) as slow,
        kit.serving(endpoint, "quick/*", kit.echo),
        connect(endpoint) as bus,
        anyio.create_task_group() as tasks,
    ):
        await slow.serve("slow/*")
        for _ in range(3 * MESSAGES):
            tasks.start_soon(bus.tell, "slow/a", {"n": 1})
        with anyio.fail_after(10):
            for _ in range(50):
                assert await bus.ask("quick/a", {"n": 2}) == {"n": 2}
        tasks.cancel_scope.cancel()


async def test_bytes_queued_for_one_receiver_are_bounded(endpoint: str) -> None:
    full = 0
    broker = Broker(endpoint, queue_bytes=1_000_000)
    async with broker, connect(endpoint) as server, connect(endpoint) as bus:
        await server.serve("v/*")

        async def produce() -> None:
            nonlocal full
            try:
                await bus.tell("v/a", bytes(1_000_000 // 4), type="T")
            except MailboxFull:
                full += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(produce)
            with anyio.fail_after(20):
                while full == 0:
                    await bus.publish("tick", None)
            assert broker.statistics().queued <= 4
            tasks.cancel_scope.cancel()


async def test_a_slow_reader_of_a_stream_makes_its_sender_wait(endpoint: str, kit: Any) -> None:
    total = 2000
    sent = 0

    async def handler(delivery: Delivery) -> None:
        nonlocal sent
        for number in range(total):
            await delivery.progress(number)
            sent += 1
        await delivery.reply("done")

    async with (
        Broker(endpoint),
        kit.serving(endpoint, "v/*", handler),
        connect(endpoint) as bus,
        bus.stream("v/a", {}) as reply,
    ):
        with anyio.fail_after(20):
            while sent < MESSAGES:
                await bus.publish("tick", None)
        for _ in range(10):
            await bus.publish("tick", None)
        assert sent == MESSAGES
        assert [piece async for piece in reply] == list(range(total))
        assert reply.result == "done"


async def test_a_sender_that_waits_for_a_reader_stops_when_the_reader_leaves(endpoint: str, kit: Any) -> None:
    ended = anyio.Event()

    async def handler(delivery: Delivery) -> None:
        while not delivery.cancelled.is_set():
            await delivery.progress("x")
        ended.set()

    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:
        async with bus.stream("v/a", {}) as reply:
            async for _ in reply:
                break
        with anyio.fail_after(10):
            await ended.wait()


async def test_deliveries_read_with_short_cancel_scopes_lose_none_of_5000(endpoint: str) -> None:
    total = 5000
    got: list[int] = []
    cancelled = 0

    async with Broker(endpoint), connect(endpoint) as server, connect(endpoint) as bus:
        await server.serve("v/*")

        async def produce(lane: int) -> None:
            for number in range(lane, total, 20):
                await bus.tell("v/a", {"n": number})

        async with anyio.create_task_group() as tasks:
            for lane in range(20):
                tasks.start_soon(produce, lane)
            deliveries = server.deliveries()
            with anyio.fail_after(60):
                while len(got) < total:
                    with anyio.move_on_after((len(got) + cancelled) % 5 * 0.0001) as scope:
                        async for delivery in deliveries:
                            got.append(delivery.decode()["n"])
                            await delivery.accept()
                    cancelled += scope.cancelled_caught
                    if len(got) == total:
                        break
    assert sorted(got) == list(range(total))
    assert cancelled > 10


async def test_asks_given_up_while_queued_are_never_delivered(endpoint: str) -> None:
    async with Broker(endpoint) as broker, connect(endpoint) as server, connect(endpoint) as bus:
        await server.serve("v/*")
        async with anyio.create_task_group() as tasks:
            for _ in range(4 * MESSAGES):
                tasks.start_soon(bus.ask, "v/a", {"n": 1})
            with anyio.fail_after(20):
                while broker.statistics().queued < MESSAGES:
                    await bus.publish("tick", None)
            tasks.cancel_scope.cancel()
        await bus.publish("tick", None)
        assert (broker.statistics().queued, broker.statistics().pending) == (0, 0)
        await server.publish("tick", None)  # behind the cancellations, on the same connection
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bus.tell, "v/a", {"n": 2})
            with anyio.fail_after(10):
                async for delivery in server.deliveries():
                    assert delivery.decode() == {"n": 2}
                    await delivery.accept()
                    break
