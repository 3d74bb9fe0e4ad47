"""Topics are bounded: how many there are, and what is kept of them in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.bus import Broker, Event, MemoryTopicStore, Record, connect, topic_hub
from offbook.bus.errors import InvalidRequest, TooManyTopics
from offbook.bus.recent import RecentEvents


async def test_a_topic_too_many_is_refused_and_the_others_go_on(endpoint: str) -> None:
    async with Broker(endpoint, topic_store=MemoryTopicStore(max_topics=3)), connect(endpoint) as bus:
        for name in ("a", "b", "c"):
            assert await bus.publish(name, 1, id="first") == 1
        with pytest.raises(TooManyTopics, match=r"there are 3 topics.*'d' cannot be one more") as caught:
            await bus.publish("d", 1)
        assert caught.value.details["limit"] == 3
        async with bus.subscribe("d") as events:  # begins no topic
            assert await bus.publish("a", 2) == 2
            assert await bus.publish("a", 1, id="first") == 1
            with pytest.raises(TooManyTopics):
                await bus.publish("d", 1)
            with anyio.move_on_after(0.05) as silence:
                await events.__anext__()
            assert silence.cancelled_caught


async def test_topics_that_nobody_reads_are_not_kept_at_hand(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_hub, "AT_HAND", 8)
    async with Broker(endpoint) as broker, connect(endpoint) as bus:
        hub = broker._hub
        hub._tidy_at = 8
        async with bus.subscribe("t0") as events:
            for round_ in range(1, 3):
                for number in range(100):
                    assert await bus.publish(f"t{number}", number) == round_
                assert len(hub._topics) <= 2 * 8
                assert (await events.__anext__()).seq == round_
        async with bus.subscribe("t1", after=0) as events:  # long forgotten, and in the store
            assert [(await events.__anext__()).seq for _ in range(2)] == [1, 2]
            assert await bus.publish("t1", 1) == 3
            assert (await events.__anext__()).seq == 3


async def test_a_peer_has_so_many_subscriptions(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_hub, "SUBSCRIPTIONS", 2)
    async with Broker(endpoint), connect(endpoint) as bus, bus.subscribe("a"), bus.subscribe("b"):
        with pytest.raises(InvalidRequest, match="2 subscriptions"):
            async with bus.subscribe("c"):
                pass
        async with connect(endpoint) as other, other.subscribe("c"):
            pass


async def test_the_memory_store_keeps_so_many_bytes_in_all() -> None:
    store = MemoryTopicStore(total_bytes=1000)
    for number in range(50):
        assert await store.append(f"t{number % 5}", [Record(id=str(number), body=bytes(100))])
    kept = [await store.read(f"t{topic}", 0, 100) for topic in range(5)]
    assert [[event.seq for event in events] for events in kept] == [[9, 10]] * 5
    assert await store.bounds("t0") == (9, 10)
    assert await store.append("t0", [Record(id="0", body=bytes(100))]) == [1]  # the id is still known


def event(seq: int, size: int) -> Event:
    return Event(id=str(seq), body=bytes(size), seq=seq)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=60),
    st.integers(1, 6),
    st.integers(1, 100),
    st.integers(1, 200),
)
def test_recent_events_are_the_newest_within_all_bounds(
    added: list[tuple[int, int]], most: int, topic_bytes: int, total_bytes: int
) -> None:
    kept = RecentEvents(events=most, topic_bytes=topic_bytes, total_bytes=total_bytes)
    seqs: dict[str, int] = {}
    size: Callable[[Any], int] = lambda events: sum(len(one.body) for one in events)  # noqa: E731
    for number, nbytes in added:
        topic = f"t{number}"
        seqs[topic] = seqs.get(topic, 0) + 1
        kept.add(topic, event(seqs[topic], nbytes))
        assert kept.of(topic)[-1].seq == seqs[topic]
        assert kept.bytes == sum(size(kept.of(name)) for name in seqs)
        assert kept.bytes <= total_bytes or kept.bytes == nbytes
        for name, last in seqs.items():
            events = kept.of(name)
            assert [one.seq for one in events] == list(range(last - len(events) + 1, last + 1))
            assert len(events) <= most
            assert size(events) <= topic_bytes or len(events) == 1
    kept.drop("t0")
    assert not kept.of("t0")
