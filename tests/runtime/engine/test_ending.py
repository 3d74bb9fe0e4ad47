"""Turns that are cancelled, come late or never fit: all they held is given back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.bus.errors import Cancelled, ContextTooLarge, DeadlineExceeded, EngineBusy
from offbook.runtime.engine import assembly
from offbook.runtime.kv.scheme import KVScheme
from tests.runtime.engine.replies import Engine, assert_same, cancel, greedy, idle


def test_a_turn_cancelled_in_the_queue_never_begins(engine: Engine, ids: Any) -> None:
    one = engine()
    turn = one.job("a", ids(40))
    one.call(lambda: (one.loop.submit(turn.job), one.loop.cancel(turn.job)))
    with pytest.raises(Cancelled):
        turn.wait()
    assert idle(one)
    assert one.used() == (0, 0)


def test_a_turn_cancelled_while_it_loads_gives_its_slots_back(
    engine: Engine, ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, text = engine("llama", tmp_path), ids(620)
    one.run("a", text[:600], max_tokens=1)
    one.evict("a")
    load = one.loop.store.load_tail
    pending: list[Any] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        done = load(*args, **kwargs)
        later = type(done)()
        later.set_running_or_notify_cancel()  # it is being read: too late to cancel it
        pending.append((done, later))
        return later

    monkeypatch.setattr(one.loop.store, "load_tail", slow)
    turn = one.start("a", text)
    while not pending:
        one.call(lambda: None)
    cancel(one, turn)
    with pytest.raises(Cancelled):
        turn.wait()
    assert idle(one)
    assert one.used() != (0, 0)
    done, later = pending[0]
    later.set_result(done.result(30))
    one.call(lambda: None)
    assert one.used() == (0, 0)
    monkeypatch.undo()
    assert one.run("a", text, max_tokens=1).usage.source == "warm"


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_a_turn_cancelled_at_work_is_over_within_a_step(
    engine: Engine, gate: Any, ids: Any, step: str
) -> None:
    one, prompt = engine(), ids(1500)
    held = gate(one, step)
    turn = one.start("a", prompt, max_tokens=50)
    held.wait()
    held.step()
    held.wait()
    cancel(one, turn)
    held.open()
    with pytest.raises(Cancelled):
        turn.wait()
    assert idle(one)
    one.evict("a")
    assert one.used() == (0, 0)


def test_a_cancelled_turn_leaves_nothing_of_itself_in_the_next(engine: Engine, ids: Any) -> None:
    def exact() -> Any:
        return engine(scheme=KVScheme.uniform(None))

    one, text = exact(), ids(300)
    one.run("a", text[:200], max_tokens=1)
    turn = one.start("a", text, max_tokens=400)
    turn.first_piece()
    cancel(one, turn)
    with pytest.raises(Cancelled):
        turn.wait()
    other = np.concatenate([text[:250], ids(20, 5)])
    assert_same(one.run("a", other, sampling=greedy(4)), exact().run("b", other, sampling=greedy(4)))


def test_cancelling_at_the_last_token_is_harmless(engine: Engine, ids: Any) -> None:
    one = engine()
    turn = one.start("a", ids(20), max_tokens=1)
    assert turn.wait().finish_reason == "length"
    cancel(one, turn)
    assert idle(one)
    assert one.run("a", ids(30), max_tokens=1).usage.generated_tokens == 1


def test_a_passed_deadline_ends_a_turn_in_the_queue_and_at_work(engine: Engine, gate: Any, ids: Any) -> None:
    one = engine()
    held = gate(one, "decode")
    working = one.start("a", ids(40), max_tokens=50)
    held.wait()
    queued = one.start("b", ids(40, 2), deadline=time.monotonic() - 1)
    one.loop.post(lambda: setattr(working.job, "deadline", 0.0))
    held.open()
    for turn in (queued, working):
        with pytest.raises(DeadlineExceeded):
            turn.wait()
    assert idle(one)


def test_a_full_queue_refuses_at_once(
    engine: Engine, gate: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbook.runtime.engine.scheduler.MAX_QUEUE", 3)
    one = engine()
    held = gate(one, "prefill")
    turns = [one.job(f"a{i}", ids(20, i), max_tokens=1) for i in range(5)]
    one.submit(*turns)
    refused = turns[3:]
    for turn in refused:
        with pytest.raises(EngineBusy, match="3 turns wait"):
            turn.wait()
    held.open()
    for turn in turns[:3]:
        turn.wait()


def test_a_turn_that_can_never_fit_is_refused_at_once_and_evicts_nobody(engine: Engine, ids: Any) -> None:
    one = engine("llama", slots=4, pages=12)
    one.run("small", ids(100), max_tokens=1)
    with pytest.raises(ContextTooLarge, match=r"1153|at most"):
        one.run("large", ids(1200), max_tokens=300)
    assert one.run("small", ids(100), max_tokens=1).usage.source == "hot"


def test_a_budget_that_leaves_nothing_is_refused_with_what_it_takes(engine: Engine) -> None:
    with pytest.raises(ContextTooLarge, match="give at least"):
        engine(budget=96 << 20)


def test_the_budget_that_is_advised_is_rounded_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine().loop
    other = one.weights_bytes + 2 * one.spec.agent_bytes(1024, one.scheme)
    least = (500 << 20) + 1
    monkeypatch.setattr(assembly, "workspace_bytes", lambda *_: least - other)
    with pytest.raises(ContextTooLarge, match="give at least 501 MiB"):
        engine(budget=400 << 20)
