"""A failing row fails alone, and a failing loop goes on."""

from __future__ import annotations

from typing import Any

import pytest

from offbook.actors.lm import SamplingParams
from offbook.bus.errors import EngineFailed
from tests.runtime.engine.replies import TOPS, Engine, assert_same, greedy


def test_a_row_whose_forward_fails_fails_alone(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    prompts = {name: ids(40, i) for i, name in enumerate(("x", "bad", "y"))}
    decode = one.loop.batch.decode
    calls: list[int] = []

    def failing(tables: Any, row_tokens: Any) -> Any:
        calls.append(len(tables))
        if len(calls) > 4 and any(table.agent == "bad" for table in tables):
            raise RuntimeError("no such expert")
        return decode(tables, row_tokens)

    monkeypatch.setattr(one.loop.batch, "decode", failing)
    turns = {name: one.job(name, prompt, sampling=greedy(12)) for name, prompt in prompts.items()}
    one.submit(*turns.values())
    with pytest.raises(EngineFailed, match=r"bad.*no such expert"):
        turns["bad"].wait()
    two = engine()
    for name in ("x", "y"):
        assert_same(turns[name].wait(), two.run(name, prompts[name], sampling=greedy(12)))
    monkeypatch.undo()
    again, expected = (each.run("bad", prompts["bad"], sampling=greedy(12)) for each in (one, two))
    assert_same(again, expected)


def test_a_prefill_that_fails_for_one_fails_for_one(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    prompts = {name: ids(40, i) for i, name in enumerate(("x", "bad", "y"))}
    prefill = one.loop.batch.prefill

    def failing(tables: Any, chunks: Any, *, logits: bool) -> Any:
        if any(table.agent == "bad" for table in tables):
            raise RuntimeError("no such expert")
        return prefill(tables, chunks, logits=logits)

    monkeypatch.setattr(one.loop.batch, "prefill", failing)
    turns = {name: one.job(name, prompt, sampling=greedy(4)) for name, prompt in prompts.items()}
    one.submit(*turns.values())
    with pytest.raises(EngineFailed):
        turns["bad"].wait()
    two = engine()
    for name in ("x", "y"):
        assert_same(turns[name].wait(), two.run(name, prompts[name], sampling=greedy(4)))


def test_a_row_that_cannot_draw_fails_alone_and_costs_the_others_nothing(engine: Engine, ids: Any) -> None:
    """The step has been taken when drawing fails: nobody's token may be read twice."""
    one = engine()
    prompts = {name: ids(40, i) for i, name in enumerate(("x", "bad", "y"))}
    sampling = SamplingParams(max_tokens=12, temperature=0.5, seed=1, logprobs=TOPS)
    turns = {name: one.job(name, prompt, sampling=sampling) for name, prompt in prompts.items()}
    sampler = turns["bad"].job.sampler
    draw = sampler.draw

    def failing(logits: Any, history: Any) -> int:
        if len(turns["bad"].job.generated) == 4:
            raise ValueError("impossible value")
        return int(draw(logits, history))

    sampler.draw = failing
    one.submit(*turns.values())
    with pytest.raises(EngineFailed, match="impossible value"):
        turns["bad"].wait()
    two = engine()
    for name in ("x", "y"):
        assert_same(turns[name].wait(), two.run(name, prompts[name], sampling=sampling))


def test_an_action_that_raises_does_not_end_the_engine(engine: Engine, ids: Any) -> None:
    one = engine()

    def broken() -> None:
        raise RuntimeError("not mine")

    one.loop.post(broken)
    assert one.run("a", ids(20), max_tokens=1).usage.generated_tokens == 1
    assert one.counters["failed_actions"] == 1


def test_a_failing_turn_of_the_loop_ends_its_jobs_and_the_engine_goes_on(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug in planning")

    monkeypatch.setattr(one.loop.memory, "plan", broken)
    with pytest.raises(EngineFailed, match="a bug in planning"):
        one.run("a", ids(20))
    monkeypatch.undo()
    assert one.run("a", ids(20), max_tokens=1).usage.generated_tokens == 1
    assert not one.loop.died


def test_an_engine_that_cannot_go_on_says_so(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()

    def broken() -> None:
        raise RuntimeError("for ever")

    monkeypatch.setattr(one.loop, "_expire", broken)
    one.start("a", ids(20))
    one.loop._done.result(60)
    assert one.loop.died
