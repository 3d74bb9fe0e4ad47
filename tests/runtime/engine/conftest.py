"""Engines over tiny models, and gates that hold their step thread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook.runtime.engine.job import Phase
from offbook.runtime.supervisor import PoolSizes
from tests.runtime.engine.harness import Characters, Gate, Harness, Loaded


@pytest.fixture
def engine(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Harness]]:
    """Starts engines: ``engine("llama", tmp_path, slots=4, pages=6)``. At the end nothing may be leaked.

    With ``slots`` and ``pages`` the pool has just these, whatever the budget.
    """
    made: list[Harness] = []

    def start(
        model: Any = "llama",
        folder: Path | None = None,
        *,
        slots: int | None = None,
        pages: int = 12,
        **options: Any,
    ) -> Harness:
        if slots is not None:

            def sizes(spec: Any, scheme: Any, nbytes: int) -> PoolSizes:
                return PoolSizes((slots,) * len(spec.groups), pages, nbytes)

            monkeypatch.setattr("offbook.runtime.engine.loop.pool_sizes", sizes)
        # A copy: an engine on the CPU changes the layers of its model, and the tiny ones are shared.
        own = copy.deepcopy(tiny(model) if isinstance(model, str) else model)
        harness = Harness(own, folder, **options)
        made.append(harness)
        return harness

    yield start
    for harness in made:
        if not harness.loop.died:
            harness.stop()
        pool, memory = harness.loop.pool, harness.loop.memory
        assert not harness.loop.scheduler.running
        assert not harness.loop.scheduler.queue
        pool.check()
        for key in [key for key in memory.tables if key not in memory.loading]:
            memory.drop(key)
        if not memory.loading:
            assert [group.used for group in pool.groups] == [0] * len(pool.groups)
            assert pool.pages.used == 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gate]:
    """``gate(harness, "decode")`` holds the step thread before a kind of step, until released."""

    def make(harness: Harness, step: str) -> Gate:
        held = Gate()
        real = getattr(harness.loop.batch, step)

        def gated(*args: Any, **kwargs: Any) -> Any:
            held.pass_through()
            return real(*args, **kwargs)

        monkeypatch.setattr(harness.loop.batch, step, gated)
        gates.append(held)
        return held

    gates: list[Gate] = []
    return make


@pytest.fixture(scope="session")
def phase() -> type[Phase]:
    return Phase


@pytest.fixture(scope="session")
def characters() -> type[Characters]:
    return Characters


@pytest.fixture(scope="session")
def loaded_like() -> type[Loaded]:
    return Loaded
