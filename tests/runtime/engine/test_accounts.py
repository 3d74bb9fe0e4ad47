"""What an engine says it uses is what MLX has given out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

MIB = 1 << 20


@pytest.mark.parametrize("architecture", ["llama", "gemma-300", "lfm2", "latent"])
def test_all_memory_is_accounted_for_and_the_budget_holds(
    architecture: str, engine: Callable[..., Any], ids: Any, tmp_path: Path
) -> None:
    outside = mx.get_active_memory()  # other tests' models
    one = engine(architecture, tmp_path, budget=112 * MIB)
    texts = [ids(700, seed) for seed in range(6)]
    for i, text in enumerate(texts):
        one.run(f"a{i}", text[:600], max_tokens=1)
    busy = one.stats
    mine = one.loop.weights_bytes + one.loop.arrays.nbytes
    assert busy.weights_bytes + busy.pool_bytes == mine
    assert mine <= busy.used_bytes + outside
    assert busy.used_bytes - outside <= mine + one.loop.workspace
    assert one.loop.peak_bytes - outside <= busy.budget_bytes
    # Tables are all that holds pool memory, and it can be used again at once.
    assert busy.pool_used_bytes == sum(agent.resident_bytes for agent in busy.agents)
    one.evict()
    assert one.stats.pool_used_bytes == 0
    assert [one.run(f"a{i}", text, max_tokens=2).usage.source for i, text in enumerate(texts)] == ["warm"] * 6
    one.evict()
    assert one.call(mx.get_active_memory) - outside <= mine + MIB // 2
