"""Credit: what is in transit is bounded, in order, and never leaks."""

from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from offbook.bus.credit import Gate, Returns, Window


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=200))
def test_what_is_in_transit_stays_within_the_window(steps: list[tuple[bool, int]]) -> None:
    window, returns = Window(8, 100), Returns(8, 100)
    transit: list[int] = []
    for send, size in steps:
        if send and window.open:
            window.take(size)
            transit.append(size)
        elif not send and transit:
            due = returns.consumed(transit.pop(0))
            if due is not None:
                window.give(*due)
        assert len(transit) <= 8
        assert sum(transit) <= 100 + 50


@given(st.integers(1, 40), st.integers(1, 500), st.lists(st.integers(0, 200), min_size=1, max_size=60))
def test_a_consumer_that_keeps_up_never_stops_the_sender(messages: int, bytes: int, sizes: list[int]) -> None:
    window, returns = Window(messages, bytes), Returns(messages, bytes)
    for size in sizes:
        assert window.open
        window.take(size)
        due = returns.consumed(size)
        if due is not None:
            window.give(*due)


def test_credit_never_exceeds_the_window_whatever_the_peer_claims() -> None:
    window = Window(4, 100)
    window.give(10**9, 10**12)
    window.give(-5, -5)
    assert (window.messages, window.bytes) == (4, 100)


async def test_waiters_are_admitted_in_order() -> None:
    gate = Gate(1, 100)
    assert gate.try_take(1)
    order: list[int] = []

    async def sender(number: int) -> None:
        await gate.take(1)
        order.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(sender, number)
            await checkpoint()
        for _ in range(5):
            assert not gate.try_take(1)
            gate.give(1, 1)
            await checkpoint()
    assert order == [0, 1, 2, 3, 4]


async def test_a_waiter_cancelled_as_its_credit_comes_passes_it_on() -> None:
    gate = Gate(1, 100)
    assert gate.try_take(1)
    scope = anyio.CancelScope()
    taken: list[str] = []

    async def first() -> None:
        with scope:
            await gate.take(1)
            taken.append("first")

    async def second() -> None:
        await gate.take(1)
        taken.append("second")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await checkpoint()
            tasks.start_soon(second)
            await checkpoint()
            gate.give(1, 1)
            scope.cancel()
            await checkpoint()
            await checkpoint()
            if taken == ["first"]:  # which of the two came first is the event loop's choice
                gate.give(1, 1)
    assert taken in (["second"], ["first", "second"])


async def test_credit_of_an_earlier_generation_is_void() -> None:
    gate = Gate(1, 100)
    assert gate.try_take(1)
    seen: list[int] = []

    async def sender() -> None:
        seen.append(await gate.take(1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender)
        await checkpoint()
        gate.give(1, 1)
        gate.reset(1, 100)
    assert seen == [0]
    assert gate.generation == 1
    assert gate.try_take(1)
