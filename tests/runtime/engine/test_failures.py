"""A failing row fails alone, and a failing loop goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
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


def test_a_row_whose_logits_are_no_numbers_fails_alone(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    decode = one.loop.batch.decode

    def failing(tables: Any, row_tokens: Any) -> Any:
        logits = decode(tables, row_tokens)
        bad = mx.array([[table.agent == "bad"] for table in tables])
        return mx.where(mx.logical_and(bad, mx.arange(logits.shape[-1]) == 7), mx.nan, logits)

    monkeypatch.setattr(one.loop.batch, "decode", failing)
    turns = {name: one.job(name, ids(40, i), sampling=greedy(6)) for i, name in enumerate(("x", "bad"))}
    one.submit(*turns.values())
    with pytest.raises(EngineFailed, match=r"bad.*not numbers"):
        turns["bad"].wait()
    assert_same(turns["x"].wait(), engine().run("x", ids(40, 0), sampling=greedy(6)))


@pytest.mark.parametrize("step", ["start", "after_step"])
def test_memory_that_fails_for_one_fails_for_one(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    one = engine()
    real = getattr(one.loop.memory, step)

    def failing(what: Any, *rest: Any) -> Any:
        if (what[0] if step == "start" else what.agent) == "bad":
            raise OSError("no such page")
        return real(what, *rest)

    monkeypatch.setattr(one.loop.memory, step, failing)
    turns = {name: one.job(name, ids(40, i), sampling=greedy(6)) for i, name in enumerate(("x", "bad", "y"))}
    one.submit(*turns.values())
    with pytest.raises(EngineFailed, match=r"bad.*no such page"):
        turns["bad"].wait()
    two = engine()
    for i, name in ((0, "x"), (2, "y")):
        assert_same(turns[name].wait(), two.run(name, ids(40, i), sampling=greedy(6)))


def test_a_load_that_fails_in_its_end_fails_its_own_turn(
    engine: Engine, ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, text = engine("llama", tmp_path), ids(620)
    one.run("a", text[:600], max_tokens=1)
    one.evict("a")

    def failing(*args: Any) -> Any:
        raise RuntimeError("no such slot")

    monkeypatch.setattr(one.loop.memory, "finish", failing)
    turn = one.start("a", text)
    with pytest.raises(EngineFailed, match="no such slot"):
        turn.wait()
    monkeypatch.undo()
    assert one.run("b", ids(40), max_tokens=1).usage.generated_tokens == 1
    assert one.run("a", text, max_tokens=1).usage.source == "warm"
    one.check()


def test_an_action_that_raises_does_not_end_the_engine(engine: Engine, ids: Any) -> None:
    one = engine()

    def broken() -> None:
        raise RuntimeError("not mine")

    one.loop.post(broken)
    assert one.run("a", ids(20), max_tokens=1).usage.generated_tokens == 1
    assert one.counters["failed_actions"] == 1


def test_a_failing_turn_of_the_loop_is_logged_ends_its_jobs_and_the_engine_goes_on(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug in planning")

    monkeypatch.setattr(one.loop.memory, "plan", broken)
    with pytest.raises(EngineFailed, match="a bug in planning"):
        one.run("a", ids(20))
    monkeypatch.undo()
    [record] = [record for record in caplog.records if record.exc_info]
    assert "a (queued)" in record.getMessage()
    assert "a bug in planning" in str(record.exc_info[1] if record.exc_info else "")
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


# ---- the watchdog


@pytest.mark.parametrize(
    ("died", "started", "says"),
    [(False, "time.monotonic()", "a step has not ended"), (True, "0.0", "the step thread has ended")],
)
def test_the_watchdog_ends_an_engine_that_is_stuck_or_dead(died: bool, started: str, says: str) -> None:
    """And says where every thread stands."""
    script = f"""
import logging, time
from offbook.runtime.engine import process
logging.basicConfig()
process.STUCK_SECONDS = 0.01
class Loop:
    died, step_started = {died}, {started}
process.watch(Loop())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 70
    assert says in done.stderr
    assert ("most recent call first" in done.stderr) is not died


def test_the_watchdog_sees_every_kind_of_work(engine: Engine, ids: Any, gate: Any) -> None:
    one = engine()
    assert one.call(lambda: one.loop.step_started) > 0  # an action that was posted
    for step in ("prefill", "decode"):
        held = gate(one, step)
        turn = one.start(step, ids(20), max_tokens=2)
        held.wait()
        assert one.loop.step_started > 0
        held.open()
        turn.wait()
    one.call(lambda: None)
    assert one.loop.step_started == 0 or not one.loop.scheduler.idle
