"""Whoever waits or has to leave is told why: in ``Stats``, and in the error of a deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbook.bus.errors import DeadlineExceeded
from tests.runtime.engine.replies import Engine

MIB = 1 << 20


def waiting(one: Any, held: Any) -> dict[str, str]:
    """Who waits for what, as ``Stats`` say after one more turn of the loop."""
    held.step()
    held.wait()
    stats = one.loop.call(one.loop.stats)
    held.step()
    found: dict[str, str] = stats.result(60).waiting
    held.wait()
    return found


def test_a_turn_that_waits_for_a_change_of_the_budget_says_so(
    engine: Engine, gate: Any, ids: Any, tmp_path: Path
) -> None:
    one = engine("llama", tmp_path)
    held = gate(one, "decode")
    first = one.start("a", ids(40), max_tokens=50)
    held.wait()
    resized = one.loop.resize(120 * MIB)
    second, third = one.start("b", ids(40, 2), max_tokens=1), one.start("c", ids(40, 3))
    assert waiting(one, held) == dict.fromkeys("bc", "a change of the memory budget")
    one.loop.post(lambda: setattr(third.job, "deadline", 0.0))
    held.open()
    with pytest.raises(DeadlineExceeded, match="waiting for a change of the memory budget"):
        third.wait()
    first.wait()
    resized.result(60)
    second.wait()
    assert one.stats.waiting == {}


def test_a_turn_beyond_those_that_run_at_one_time_says_so(
    engine: Engine, gate: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbook.runtime.engine.scheduler.MAX_ROWS", 1)
    one = engine()
    held = gate(one, "decode")
    first = one.start("a", ids(40), max_tokens=50)
    held.wait()
    second, third = one.start("b", ids(40, 2), max_tokens=1), one.start("c", ids(40, 3))
    assert waiting(one, held) == dict.fromkeys("bc", "one of 1 turns to end: no more run at one time")
    one.loop.post(lambda: setattr(third.job, "deadline", 0.0))
    held.open()
    with pytest.raises(DeadlineExceeded, match="waiting for one of 1 turns"):
        third.wait()
    first.wait()
    second.wait()


def test_a_turn_keeps_its_reason_until_it_has_been_tried_again(engine: Engine, gate: Any, ids: Any) -> None:
    """Between the end of another turn and the next admission a deadline may pass, or somebody may ask."""
    one = engine(slots=4, pages=12)
    held = gate(one, "decode")
    first = one.start("a", ids(900), max_tokens=20)
    held.wait()
    second = one.start("b", ids(900, 2), max_tokens=1)
    assert waiting(one, held) == {"b": "memory that running turns hold"}
    asked = one.loop.call(lambda: (one.loop.scheduler.look_again(), one.loop.stats().waiting)[1])
    held.open()
    assert asked.result(60) == {"b": "memory that running turns hold"}
    first.wait()
    second.wait()


def test_an_eviction_says_for_whom(engine: Engine, ids: Any, tmp_path: Path) -> None:
    one = engine("llama", tmp_path, slots=4, pages=12)
    one.run("ann", ids(900), max_tokens=1)
    one.run("bob", ids(900, 2), max_tokens=1)
    [why] = one.stats.decisions
    assert why.startswith("evicted ann: room for bob (")


def test_decisions_outlive_a_change_of_the_budget_which_explains_its_own(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    one = engine("llama", tmp_path, slots=4, pages=12)
    one.run("ann", ids(900), max_tokens=1)
    one.run("bob", ids(900, 2), max_tokens=1, pinned=True)
    one.loop.resize(120 * MIB).result(60)
    before, after = one.stats.decisions
    assert before.startswith("evicted ann: room for bob (")
    assert after.startswith("evicted bob: the memory budget becomes 120 MiB")
    assert after.endswith("pinned")
    one.run("cid", ids(900, 3), max_tokens=1)
    one.run("dan", ids(900, 4), max_tokens=1)
    assert len(one.stats.decisions) == 3
