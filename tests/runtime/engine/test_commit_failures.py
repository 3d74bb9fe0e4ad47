"""A step's KV that cannot be put into one row's memory is that row's failure: nobody else notices."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from offbook.bus.errors import EngineFailed
from offbook.runtime.kv import native
from offbook.runtime.kv.cache import Step
from tests.runtime.engine.replies import Engine, greedy

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))


class Failing:
    """Makes putting KV of one agent into its memory fail, from the time it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agent: str, how: str = "_commit_prefill") -> None:
        self.on, self.agent = False, agent
        monkeypatch.setattr(Step, how, self._or_fail(getattr(Step, how)))

    def _or_fail(self, real: Any) -> Any:
        def act(step: Step, row: Any, *rest: Any) -> Any:
            table = step.tables[row] if isinstance(row, int) else row
            if self.on and table.agent == self.agent:
                raise MemoryError("no memory to seal with")
            return real(step, row, *rest)

        return act


def assert_equal(reply: Any, expected: Any) -> None:
    """The same bits, not just the same ids."""
    assert reply.logprobs
    assert (reply.appended, reply.logprobs) == (expected.appended, expected.logprobs)


def test_of_prompts_that_are_read_together_one_cannot_be_kept(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    prompts = {
        name: ids(150 if name == "long" else 40, i) for i, name in enumerate(("x", "bad", "y", "long"))
    }
    Failing(monkeypatch, "bad").on = True
    turns = {name: one.job(name, prompt, sampling=greedy(12)) for name, prompt in prompts.items()}
    one.submit(*turns.values())
    with pytest.raises(EngineFailed, match=r"bad.*no memory to seal with"):
        turns["bad"].wait()
    two = engine()
    for name in ("x", "y", "long"):
        assert_equal(turns[name].wait(), two.run(name, prompts[name], sampling=greedy(12)))
    one.check()


def test_of_rows_that_seal_in_one_step_one_cannot(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    prompts = {name: ids(40, i) for i, name in enumerate(("x", "bad", "y"))}
    Failing(monkeypatch, "bad", "_seal_page").on = True
    turns = {name: one.job(name, prompt, sampling=greedy(170)) for name, prompt in prompts.items()}
    one.submit(*turns.values())
    with pytest.raises(EngineFailed, match=r"bad.*no memory to seal with"):
        turns["bad"].wait()
    two = engine()
    for name in ("x", "y"):
        assert_equal(turns[name].wait(), two.run(name, prompts[name], sampling=greedy(170)))
    one.check()


def test_a_prompt_beside_a_row_that_fails_is_cut_where_it_would_have_been(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engine(), engine()
    first, rest = ids(180, 1), ids(300, 2)
    for each in (one, two):
        each.run("x", first, sampling=greedy(4))
    both = one.loop.batch.both
    failed = threading.Event()

    def failing(tables: Any, tokens: Any, joining: Any, chunks: Any, *, logits: bool) -> Any:
        if not failed.is_set() and any(table.agent == "x" for table in joining):
            failed.set()
            raise RuntimeError("no such expert")
        return both(tables, tokens, joining, chunks, logits=logits)

    monkeypatch.setattr(one.loop.batch, "both", failing)
    beside = one.start("beside", ids(40, 3), sampling=greedy(200))
    beside.first_piece()
    prompt = np.concatenate([first, rest])
    reply = one.run("x", prompt, sampling=greedy(8))
    assert failed.is_set()
    assert_equal(reply, two.run("x", prompt, sampling=greedy(8)))
    one.call(lambda: one.loop.cancel(beside.job))


def test_an_opening_that_cannot_be_kept_is_nobodys_failure(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engine(read_ahead=True), engine()
    failing, read = Failing(monkeypatch, "x"), one.loop.openings.read

    def reading(unless: Any) -> None:
        failing.on = True
        read(unless)
        failing.on = False

    monkeypatch.setattr(one.loop.openings, "read", reading)
    for each in (one, two):
        each.say("x", "hello", sampling=greedy(4))
    end = time.monotonic() + 10
    while not one.counters.get("failed_openings"):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert one.used() == (0, 0)
    assert_equal(one.say("x", "go on", sampling=greedy(4)), two.say("x", "go on", sampling=greedy(4)))
