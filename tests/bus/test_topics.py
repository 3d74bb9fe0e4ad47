"""Topics: numbers without gaps, replay, one effect per id, nothing lost after subscribing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.bus import Broker, Bus, Event, MemoryTopicStore, Record, Subscription, connect
from offbook.bus.errors import InvalidRequest, RemoteError


async def read(events: Subscription, count: int) -> list[tuple[int, Any]]:
    got: list[tuple[int, Any]] = []
    with anyio.fail_after(20):
        while len(got) < count:
            event = await events.__anext__()
            got.append((event.seq, event.decode()))
    return got


async def fill(bus: Bus, topic: str, numbers: Sequence[int]) -> None:
    async with anyio.create_task_group() as tasks:
        for number in numbers:
            tasks.start_soon(bus.publish, topic, number)


async def test_what_is_published_right_after_subscribing_arrives(endpoint: str) -> None:
    async with Broker(endpoint), connect(endpoint) as publisher:
        for number in range(100):
            async with connect(endpoint) as bus, bus.subscribe("square") as events:
                assert await publisher.publish("square", {"type": "Heard", "n": number}) == number + 1
                with anyio.fail_after(10):
                    event = await events.__anext__()
                assert (event.seq, event.type, event.decode()) == (number + 1, "Heard", {"n": number})


async def test_the_same_id_has_one_effect_and_one_number(endpoint: str) -> None:
    async with Broker(endpoint) as broker, connect(endpoint) as bus, connect(endpoint) as other:
        async with bus.subscribe("t") as events:
            assert await bus.publish("t", 1, id="opening") == 1
            assert await bus.publish("t", 2) == 2
            assert await other.publish("t", "again", id="opening") == 1
            assert await other.publish("elsewhere", 1, id="opening") == 1
            assert await bus.publish("t", 3) == 3
            assert await read(events, 3) == [(1, 1), (2, 2), (3, 3)]
        assert broker.statistics().repeated_publications == 1


async def test_replay_from_any_retained_number(endpoint: str) -> None:
    async with Broker(endpoint), connect(endpoint) as bus:
        await fill(bus, "t", range(2000))  # beyond what is kept at hand for live readers
        for after in (0, 1, 999, 1990, 1999):
            async with bus.subscribe("t", after=after) as events:
                got = await read(events, min(1500, 2000 - after))
                assert [seq for seq, _ in got] == list(range(after + 1, after + 1 + len(got)))
                assert events.missed == 0


async def test_replay_goes_over_into_live_events_without_gap_or_repetition(endpoint: str) -> None:
    async with Broker(endpoint), connect(endpoint) as bus, connect(endpoint) as reader:
        await fill(bus, "t", range(300))
        async with reader.subscribe("t", after=0) as events, anyio.create_task_group() as tasks:
            tasks.start_soon(fill, bus, "t", range(700))
            assert [seq for seq, _ in await read(events, 1000)] == list(range(1, 1001))


async def test_events_no_longer_retained_are_counted_as_missed(endpoint: str) -> None:
    async with Broker(endpoint, topic_store=MemoryTopicStore(retain=10)), connect(endpoint) as bus:
        await fill(bus, "t", range(2000))
        async with bus.subscribe("t", after=5) as events:
            assert (await read(events, 1))[0][0] == 5 + events.missed + 1
            assert events.missed > 0


async def test_a_slow_subscriber_holds_up_nobody_and_loses_nothing(endpoint: str) -> None:
    async with (
        Broker(endpoint) as broker,
        connect(endpoint) as bus,
        connect(endpoint) as slow,
        slow.subscribe("t") as sleepy,
        bus.subscribe("t") as quick,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill, bus, "t", range(1500))
            assert len(await read(quick, 1500)) == 1500
        # 1500 to the quick one, and no more than a window to the one that does not read
        assert broker.statistics().events <= 1500 + 256
        assert [seq for seq, _ in await read(sleepy, 1500)] == list(range(1, 1501))


async def test_every_subscriber_sees_the_same_order(endpoint: str) -> None:
    async with (
        Broker(endpoint),
        connect(endpoint) as one,
        connect(endpoint) as two,
        one.subscribe("t") as first,
        two.subscribe("t") as second,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(fill, one, "t", range(200))
        tasks.start_soon(fill, two, "t", range(200, 400))
        assert await read(first, 400) == await read(second, 400)


async def test_a_subscription_ends_with_its_block(endpoint: str) -> None:
    async with Broker(endpoint) as broker, connect(endpoint) as bus:
        async with bus.subscribe("t") as events:
            assert broker.statistics().subscriptions == 1
        await bus.publish("t", 1)
        assert broker.statistics().subscriptions == 0
        with pytest.raises(StopAsyncIteration):
            await events.__anext__()


class FailingStore(MemoryTopicStore):
    """A store on a full disk, and one that may not be readable."""

    full = True
    unreadable = False

    async def read(self, topic: str, after: int, limit: int) -> list[Event]:
        if self.unreadable:
            raise OSError("input/output error")
        return await super().read(topic, after, limit)

    async def append(self, topic: str, records: Sequence[Record]) -> list[int]:
        if self.full:
            raise OSError("no space left on device")
        return await super().append(topic, records)


async def test_a_store_that_fails_is_the_publishers_news_and_nobody_elses(endpoint: str) -> None:
    store = FailingStore()
    async with Broker(endpoint, topic_store=store), connect(endpoint) as bus, bus.subscribe("t") as events:
        for _ in range(300):  # more than the window: failures must give credit back
            with pytest.raises(RemoteError, match="no space left"):
                await bus.publish("t", 1)
        store.full = False
        assert await bus.publish("t", 2) == 1
        assert await read(events, 1) == [(1, 2)]


async def test_publications_beyond_the_window_wait_their_turn(endpoint: str) -> None:
    async with Broker(endpoint) as broker, connect(endpoint) as bus:
        await fill(bus, "t", range(3000))
        assert broker.statistics().published == 3000


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=20),
    st.integers(1, 12),
    st.integers(0, 40),
    st.integers(1, 10),
)
def test_the_memory_store_keeps_its_promises(
    batches: list[list[int]], retain: int, after: int, limit: int
) -> None:
    async def check() -> None:
        store = MemoryTopicStore(retain=retain)
        numbers: dict[str, int] = {}
        for batch in batches:
            ids = [str(number) for number in batch]
            got = await store.append("t", [Record(id=i, body=i.encode()) for i in ids])
            for i, seq in zip(ids, got, strict=True):
                assert seq == numbers.setdefault(i, len(numbers) + 1)
        first, last = await store.bounds("t")
        assert last == len(numbers)
        assert first == max(1, last - retain + 1)
        events = await store.read("t", after, limit)
        start = max(after + 1, first)
        assert [e.seq for e in events] == list(range(start, min(start + limit, last + 1)))
        assert all(numbers[e.body.decode()] == e.seq for e in events)

    anyio.run(check)


async def test_subscribing_twice_under_one_id_is_refused(endpoint: str) -> None:
    async with Broker(endpoint), connect(endpoint) as bus, bus.subscribe("t") as events:
        again = bus.subscribe("t")
        again.id = events.id
        with pytest.raises(InvalidRequest, match="active already"):
            await again.__aenter__()


async def test_a_store_that_cannot_be_read_ends_the_subscription_with_its_error(endpoint: str) -> None:
    store = FailingStore()
    store.full = False
    async with Broker(endpoint, topic_store=store), connect(endpoint) as bus:
        await fill(bus, "t", range(1500))  # the first ones are no longer at hand
        store.unreadable = True
        async with bus.subscribe("t", after=0) as events:
            with pytest.raises(RemoteError, match="input/output error"):
                await read(events, 1)
        async with bus.subscribe("t", after=1490) as events:
            assert len(await read(events, 10)) == 10


async def test_subscribing_and_serving_wait_for_a_broker_that_is_away(endpoint: str, kit: Any) -> None:
    first = anyio.CancelScope()

    async def run(scope: anyio.CancelScope) -> None:
        with scope:
            await Broker(endpoint).run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, first)
        async with connect(endpoint) as bus:
            first.cancel()
            await bus.wait_lost()
            ready: list[str] = []

            async def subscribe() -> None:
                async with bus.subscribe("t") as events:
                    ready.append("subscribed")
                    assert (await events.__anext__()).decode() == 1

            async def serve() -> None:
                await bus.serve("v/*")
                ready.append("serving")

            async with anyio.create_task_group() as waiting:
                waiting.start_soon(subscribe)
                waiting.start_soon(serve)
                second = anyio.CancelScope()
                tasks.start_soon(run, second)
                await kit.eventually(lambda: len(ready) == 2)
                await bus.publish("t", 1)
        second.cancel()
