"""Turns together: each says what it says alone, and who goes first."""

from __future__ import annotations

import time
from typing import Any

import pytest

from offbook.runtime.engine.job import AGING_SECONDS
from tests.runtime.engine.replies import Engine, alone, assert_same, greedy, tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma-96", "lfm2", "latent"])
def test_turns_of_any_length_together_say_what_each_says_alone(
    architecture: str, engine: Engine, ids: Any
) -> None:
    one = engine(architecture)
    prompts = [ids(length, length) for length in (3, 30, 90, 97, 200, 700)]
    turns = [one.job(f"a{i}", prompt, sampling=greedy(4 + i)) for i, prompt in enumerate(prompts)]
    one.submit(*turns)
    two = engine(architecture)
    for i, prompt in enumerate(prompts):
        assert_same(turns[i].wait(), two.run("alone", prompt, sampling=greedy(4 + i)))
    assert one.counters["decode_rows"] > one.counters["decode_steps"]


def test_reading_ahead_in_the_same_batch_does_not_mix_up_the_rows(engine: Engine, ids: Any) -> None:
    one, prompt = engine(), ids(40, 1)
    reading = one.job("reader", ids(30, 2), observe=True)
    speaking = one.job("speaker", prompt, sampling=greedy(4), priority=-1)
    one.submit(reading, speaking)
    reading.wait()
    assert_same(speaking.wait(), engine().run("alone", prompt, sampling=greedy(4)))


def test_what_was_read_ahead_is_hot(engine: Engine, ids: Any) -> None:
    one, text = engine(), ids(120)
    assert one.observe("a", text[:100], kept=20).tokens == 80
    usage = one.run("a", text, max_tokens=1).usage
    assert (usage.source, usage.reused_tokens) == ("hot", 100)


def test_new_work_is_admitted_while_others_decode(engine: Engine, gate: Any, ids: Any) -> None:
    one = engine()
    held = gate(one, "decode")
    long = one.start("long", ids(40), max_tokens=40)
    held.wait()
    short = one.start("short", ids(40, 2), max_tokens=2)
    held.open()
    short.wait()
    long.wait()
    assert short.order < long.order


def test_two_turns_of_one_agent_are_served_one_after_the_other_as_they_came(
    engine: Engine, gate: Any, ids: Any
) -> None:
    one = engine()
    held = gate(one, "prefill")
    other = one.start("other", ids(20, 3))
    held.wait()
    text = ids(80)
    first = one.job("a", text[:50], max_tokens=3)
    second = one.job("a", text, max_tokens=3, priority=5, deadline=time.monotonic() + 100)
    one.submit(first, second)
    held.open()
    replies = [turn.wait() for turn in (first, second, other)]
    assert first.order < second.order
    assert replies[1].usage.source == "hot"
    assert tokens(replies[1], text) == alone(engine, text, max_tokens=3)


def test_the_next_turn_of_an_agent_begins_as_soon_as_the_last_has_ended(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No idle wait in between: the loop never blocks while a queued turn could begin."""
    one = engine()
    waits: list[int] = []
    drain = one.loop._drain

    def watched(*, block: bool) -> None:
        if block and one.loop.scheduler.queue:
            waits.append(len(one.loop.scheduler.queue))
        drain(block=block)

    monkeypatch.setattr(one.loop, "_drain", watched)
    turns = [one.job("a", ids(20), max_tokens=2) for _ in range(4)]
    one.submit(*turns)
    for turn in turns:
        turn.wait()
    assert waits == []


def test_a_turn_with_higher_priority_goes_first(engine: Engine, gate: Any, ids: Any) -> None:
    one = engine()
    held = gate(one, "prefill")
    blocker = one.start("blocker", ids(600, 9), max_tokens=1)
    held.wait()
    low = one.job("low", ids(600, 1), max_tokens=1)
    high = one.job("high", ids(600, 2), max_tokens=1, priority=1)
    one.submit(low, high)
    held.open()
    for turn in (blocker, low, high):
        turn.wait()
    assert high.order < low.order


def test_one_who_has_waited_long_goes_before_others_of_higher_priority(
    engine: Engine, gate: Any, ids: Any
) -> None:
    """A level for every ten seconds: nobody is passed without end, and far deadlines are no lower class."""
    one = engine()
    held = gate(one, "prefill")
    blocker = one.start("blocker", ids(600, 9), max_tokens=1)
    held.wait()
    old, low, high = (
        one.job(name, ids(600, i), max_tokens=1, priority=priority, deadline=time.monotonic() + deadline)
        for i, (name, priority, deadline) in enumerate([("old", -1, 900), ("low", 0, 60), ("high", 1, 60)])
    )
    old.job.arrived -= 2 * AGING_SECONDS + 1
    one.submit(low, high, old)
    held.open()
    for turn in (blocker, old, low, high):
        turn.wait()
    assert high.order < low.order
    assert old.order < low.order
