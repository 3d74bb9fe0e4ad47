"""Loads that somebody waits for, and loads that nobody wants any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.bus.errors import Cancelled
from offbook.runtime.engine.job import Phase
from offbook.runtime.store.prefetch import Load
from tests.runtime.engine.replies import Engine, cancel


@pytest.fixture
def busy_disk() -> Iterator[Callable[[Any], list[threading.Event]]]:
    """``busy_disk(harness)`` keeps the store's two loader threads reading until their events are set."""
    made: list[threading.Event] = []

    def keep(one: Any) -> list[threading.Event]:
        ends = [threading.Event(), threading.Event()]
        made.extend(ends)
        reading = threading.Barrier(3)

        def read(end: threading.Event) -> None:
            reading.wait(30)
            assert end.wait(60)

        one.loop.store._loader.submit([Load(lambda _, end=end: read(end), -1) for end in ends])  # type: ignore[misc]
        reading.wait(30)
        return ends

    yield keep
    for end in made:
        end.set()


def on_disk(one: Any, ids: Any, *agents: str) -> dict[str, Any]:
    """Agents of 600 tokens that are on disk only, and what they go on with."""
    texts = {agent: ids(620, seed) for seed, agent in enumerate(agents)}
    for agent, text in texts.items():
        one.run(agent, text[:600], max_tokens=1)
    one.evict()
    for group in one.loop.pool.groups:
        one.call(group.forget_content)
    return texts


def until_loading(one: Any, turn: Any) -> None:
    end = time.monotonic() + 30
    while one.call(lambda: turn.job.phase) is not Phase.LOADING:
        assert time.monotonic() < end, turn.job.phase


def test_a_cancelled_turn_gives_back_its_slots_though_the_disk_is_busy(
    engine: Engine, ids: Any, tmp_path: Path, busy_disk: Any
) -> None:
    one = engine("llama", tmp_path)
    text = on_disk(one, ids, "a")["a"]
    ends = busy_disk(one)
    turn = one.start("a", text)
    until_loading(one, turn)
    assert one.used() != (0, 0)
    cancel(one, turn)
    with pytest.raises(Cancelled):
        turn.wait()
    one.call(lambda: None)  # the load's end, posted by its cancelling
    assert one.used() == (0, 0)
    assert not one.call(lambda: one.loop.memory.loading)
    counters = one.counters
    assert (counters.get("load_failures"), counters["cancelled_loads"]) == (None, 1)
    assert "load_ms.count" not in counters
    for end in ends:
        end.set()
    assert one.run("a", text, max_tokens=1).usage.source == "warm"


def test_a_turn_whose_memory_is_prefetched_behind_others_goes_before_them(
    engine: Engine, ids: Any, tmp_path: Path, busy_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine("llama", tmp_path)
    texts = on_disk(one, ids, "b", "c", "a")
    loaded: list[str] = []
    real = one.loop.memory.loader._loaded

    def note(loading: Any) -> None:
        loaded.append(loading.key[0])
        real(loading)

    monkeypatch.setattr(one.loop.memory.loader, "_loaded", note)
    ends = busy_disk(one)
    for agent, text in texts.items():
        one.call(lambda agent=agent, text=text: one.loop.prefetch((agent, ""), text[:600]))
    turn = one.start("a", texts["a"], max_tokens=1)
    until_loading(one, turn)
    ends[0].set()  # one thread: what is read first is done first
    usage = turn.wait().usage
    assert (usage.source, usage.reused_tokens) == ("warm", 600)
    assert usage.load_ms > 0
    while one.call(lambda: one.loop.memory.loading):
        pass
    assert loaded == ["a", "b", "c"]
    assert one.counters["restores"] == 3


def test_a_cancelled_turn_ends_the_load_that_was_begun_ahead_of_it(
    engine: Engine, ids: Any, tmp_path: Path, busy_disk: Any
) -> None:
    one = engine("llama", tmp_path)
    text = on_disk(one, ids, "a")["a"]
    busy_disk(one)
    one.call(lambda: one.loop.prefetch(("a", ""), text[:600]))
    turn = one.start("a", text)
    until_loading(one, turn)
    cancel(one, turn)
    with pytest.raises(Cancelled):
        turn.wait()
    one.call(lambda: None)
    assert one.used() == (0, 0)


def test_a_turn_with_another_history_waits_for_the_load_and_then_says_what_is_right(
    engine: Engine, ids: Any, tmp_path: Path, busy_disk: Any
) -> None:
    one = engine("llama", tmp_path)
    text = on_disk(one, ids, "a")["a"]
    ends = busy_disk(one)
    one.call(lambda: one.loop.prefetch(("a", ""), text[:600]))
    turn = one.start("a", np.concatenate([text[:300], ids(60, 7)]), max_tokens=1)
    one.call(lambda: None)
    one.call(lambda: None)
    assert one.stats.waiting == {"a": "its memory is loading"}
    assert one.call(lambda: one.loop.memory.loading["a", ""].priority) == 0
    for end in ends:
        end.set()
    assert turn.wait().usage.reused_tokens <= 300
    one.check()
