"""A message that waits for an agent is a hint to load its memory; whatever is at work, it is not lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbook.runtime.engine import hints
from tests.runtime.engine.replies import Engine


def stored(one: Any, text: Any, agent: str) -> None:
    """An agent of 600 tokens that is on disk only."""
    one.run(agent, text[:600], max_tokens=1)
    one.evict(agent)
    for group in one.loop.pool.groups:
        one.call(group.forget_content)


def kept(one: Any) -> list[str]:
    return [agent for agent, _ in one.call(lambda: list(one.loop.hints.kept))]


def loaded(one: Any) -> None:
    """Wait until what has changed has been looked at, and nothing loads any more."""
    while one.call(lambda: one.loop.scheduler.changed or bool(one.loop.memory.loading)):
        pass


def test_a_second_turn_of_another_agent_does_not_keep_a_hint_from_being_followed(
    engine: Engine, gate: Any, ids: Any, tmp_path: Path
) -> None:
    one, text = engine("llama", tmp_path), ids(620)
    stored(one, text, "a")
    held = gate(one, "decode")
    turns = [one.start("b", ids(40, 2), max_tokens=40), one.start("b", ids(50, 2), max_tokens=1)]
    held.wait()
    held.step()
    held.wait()  # the second turn has been tried, and waits for the first
    began = one.loop.call(
        lambda: (one.loop.prefetch(("a", ""), text[:600]), list(one.loop.memory.loading))[1]
    )
    held.open()
    assert began.result(60) == [("a", "")]
    for turn in turns:
        turn.wait()
    loaded(one)
    assert one.counters["prefetches"] == 1


def test_a_hint_that_would_take_what_a_turn_waits_for_is_followed_after_it(
    engine: Engine, gate: Any, ids: Any, tmp_path: Path
) -> None:
    one, text = engine("llama", tmp_path, slots=6, pages=9), ids(620)
    stored(one, text, "a")
    held = gate(one, "decode")
    first = one.start("b", ids(900, 2), max_tokens=20)
    held.wait()
    second = one.start("c", ids(900, 3), max_tokens=1)
    held.step()
    held.wait()
    hinted = one.loop.call(
        lambda: (one.loop.prefetch(("a", ""), text[:600]), one.loop.scheduler.queue[0].waits_for)[1]
    )
    held.open()
    assert hinted.result(60) == "memory that running turns hold"
    first.wait()
    second.wait()
    loaded(one)
    assert kept(one) == []
    assert one.counters["prefetches"] == 1
    assert one.run("a", text, max_tokens=1).usage.source == "warm"
    assert one.counters["restores"] == 1


def test_a_hint_that_comes_with_a_turn_is_followed_when_that_has_begun(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    one, text = engine("llama", tmp_path), ids(620)
    stored(one, text, "a")
    turn = one.job("b", ids(40, 2), max_tokens=1)
    one.call(lambda: (one.loop.submit(turn.job), one.loop.prefetch(("a", ""), text[:600])))
    turn.wait()
    loaded(one)
    assert one.counters["prefetches"] == 1


def test_hints_are_few_and_do_not_last(
    engine: Engine, gate: Any, ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "MAX_HINTS", 2)
    one, texts = engine("llama", tmp_path, slots=6, pages=9), [ids(620, seed) for seed in range(4)]
    for i, text in enumerate(texts):
        stored(one, text, f"a{i}")
    held = gate(one, "decode")
    turn = one.start("b", ids(1000, 9), max_tokens=20)
    held.wait()

    def hint() -> list[Any]:
        for i, text in enumerate(texts):
            one.loop.prefetch((f"a{i}", ""), text[:600])
        return list(one.loop.hints.kept)

    found = one.loop.call(hint)
    held.step()
    held.wait()
    assert found.result(60) == [("a2", ""), ("a3", "")]
    forgotten = one.loop.call(lambda: one.loop.forget_agent("a3"))
    monkeypatch.setattr(hints, "WAITING_SECONDS", -1.0)
    late = one.loop.call(lambda: one.loop.prefetch(("a2", ""), texts[2][:600]))
    held.open()
    turn.wait()
    assert forgotten.result(60) is not None
    late.result(60)
    loaded(one)
    assert kept(one) == []
    assert "prefetches" not in one.counters


def test_hints_outlive_a_change_of_the_budget(engine: Engine, gate: Any, ids: Any, tmp_path: Path) -> None:
    one, text = engine("llama", tmp_path, slots=6, pages=9), ids(620)
    stored(one, text, "a")
    held = gate(one, "decode")
    turn = one.start("b", ids(1000, 9), max_tokens=20)
    held.wait()
    one.loop.post(lambda: one.loop.prefetch(("a", ""), text[:600]))
    resized = one.loop.resize(120 << 20)
    held.open()
    turn.wait()
    resized.result(60)
    loaded(one)
    assert one.counters["prefetches"] == 1
