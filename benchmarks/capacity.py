"""How many agents fit: real pools with the true cache shapes of three large models.

For each model and context length a pool is allocated as an engine allocates it, with the default scheme for
the model's shapes, at a budget this machine can spare, and its size is taken from MLX. Agents take their
blocks and pages from it until it is full; one agent's memory is really written (chunks of 512 tokens of
random keys and values through the very code that prefills), and every other must hold as much as that one.
The count for 10.2 GB then comes from filling the tables of a pool of that size, less what MLX was seen to
take beyond the accounting.

``agents`` are at rest with exactly so many tokens, hot tail included; ``speaking`` is how many could have
any length up to that at once while all decode (one page more, windows not aligned to blocks).

Beside them stand the paper's FP16 and 4-bit columns, and its 4-bit scheme in the same memory here: mlx-lm's
``QuantizedKVCache``, 4 bits, groups of 64, window layers at full length, MLA with decompressed heads, one
agent of 4,096 tokens really allocated. GB are 2^30 bytes, as memory is counted: the paper's 24 Gemma agents
of 4K, 453 MB each by its own scheme, do not fit 10.2e9 bytes. ``decimal`` counts those that fit 10.2e9.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from benchmarks import common

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache

from offbook.runtime.kv.arrays import PoolArrays
from offbook.runtime.kv.cache import BatchQuantizedKVCache, Step
from offbook.runtime.kv.memory import KVMemory, Plan
from offbook.runtime.kv.pool import BlockPool, PoolExhausted
from offbook.runtime.kv.profile import default_scheme
from offbook.runtime.kv.scheme import BLOCK, GROUP, KVScheme
from offbook.runtime.kv.spec import LayerSpec, ModelCacheSpec
from offbook.runtime.kv.table import ABSENT, AgentTable
from offbook.runtime.supervisor import PoolSizes, agent_share, pool_sizes

TARGET_BYTES = int(10.2 * (1 << 30))
DECIMAL_BYTES = int(10.2e9)
CHUNK = 512
LENGTHS = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}


def _gemma3_12b() -> ModelCacheSpec:
    windows = [None if index % 6 == 5 else 1024 for index in range(48)]
    return ModelCacheSpec(
        tuple(
            LayerSpec(index, "full" if window is None else "window", 8, 256, 256, window)
            for index, window in enumerate(windows)
        )
    )


def _deepseek_v2_lite() -> ModelCacheSpec:
    return ModelCacheSpec(tuple(LayerSpec(index, "latent", 1, 512 + 64, 512) for index in range(27)))


def _llama31_8b() -> ModelCacheSpec:
    return ModelCacheSpec(tuple(LayerSpec(index, "full", 8, 128, 128) for index in range(32)))


def smollm2() -> ModelCacheSpec:
    return ModelCacheSpec(tuple(LayerSpec(index, "full", 3, 64, 64) for index in range(30)))


@dataclass(frozen=True)
class Model:
    """Shapes, and the paper's agents in 10.2 GB at 4K, 8K, 16K and 32K.

    Attributes:
        plain: heads, key and value widths of what the paper caches in every layer.
    """

    title: str
    spec: ModelCacheSpec
    plain: tuple[int, int, int]
    paper_fp16: tuple[int, ...]
    paper_q4: tuple[int, ...]


MODELS = {
    "gemma3_12b": Model("Gemma 3 12B", _gemma3_12b(), (8, 256, 256), (6, 3, 1, 0), (24, 12, 6, 3)),
    "deepseek_v2_lite": Model(
        "DeepSeek-Coder-V2-Lite", _deepseek_v2_lite(), (16, 192, 128), (9, 4, 2, 1), (33, 16, 8, 4)
    ),
    "llama31_8b": Model("Llama 3.1 8B", _llama31_8b(), (8, 128, 128), (19, 9, 4, 2), (70, 35, 17, 8)),
}


class Filled:
    """A pool of one model, allocated, and the agents in it.

    Attributes:
        nbytes: bytes of the pool's arrays. reported: what MLX's memory grew by when they were made.
    """

    def __init__(self, spec: ModelCacheSpec, scheme: KVScheme, sizes: PoolSizes) -> None:
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        self.spec, self.scheme = spec, scheme
        self.pool = make_pool(spec, sizes)
        host = mx.default_device() == mx.Device(mx.cpu)
        self.arrays = PoolArrays(spec, scheme, sizes.group_slots, sizes.pages, host=host)
        self.reported = mx.get_active_memory() - before
        self.nbytes = self.arrays.nbytes
        self.memory = KVMemory(spec, scheme, "0" * 32, self.arrays, self.pool, None, lambda loading: None)

    def prefill(self, agent: str, tokens: int, seed: int = 0) -> AgentTable:
        """One agent of random keys and values, through the code that prefills."""
        table = self.memory.start((agent, ""), Plan("cold", 0))
        assert isinstance(table, AgentTable)
        table.ids = np.random.default_rng(seed).integers(0, 1 << 15, tokens).astype(np.uint32)
        new: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}
        for layer in self.spec.attention_layers:
            widths = (layer.key_width, 0 if layer.kind == "latent" else layer.value_width)
            if widths not in new:
                new[widths] = _random(layer, widths)
        while table.tokens < tokens:
            step = Step(self.arrays, self.pool, [table], [min(CHUNK, tokens - table.tokens)], decoding=False)
            for cache in step.caches:
                assert isinstance(cache, BatchQuantizedKVCache)
                layer = cache.layer
                cache.update_and_fetch(
                    *new[layer.key_width, 0 if layer.kind == "latent" else layer.value_width]
                )
            step.commit()
            self.memory.after_step(table)
        return table


def _random(layer: LayerSpec, widths: tuple[int, int]) -> tuple[mx.array, mx.array]:
    pair = [mx.random.normal((1, layer.heads, CHUNK, width)) for width in widths]
    mx.eval(pair)
    return pair[0], pair[1]


def make_pool(spec: ModelCacheSpec, sizes: PoolSizes) -> BlockPool:
    groups = [(group.name, slots) for group, slots in zip(spec.groups, sizes.group_slots, strict=True)]
    return BlockPool(groups, sizes.pages)


def occupy(pool: BlockPool, spec: ModelCacheSpec, scheme: KVScheme, agent: str, tokens: int) -> AgentTable:
    """An agent's table as it is at rest with ``tokens`` tokens, its slots and pages taken from the pool."""
    table = AgentTable(agent, "", spec.groups, scheme, tokens=tokens, sealed=scheme.sealed(tokens))
    for index, group in enumerate(spec.groups):
        held = group.blocks(tokens, table.sealed)
        table.slots[index] = [ABSENT] * (-(-table.sealed // BLOCK) - held)
        table.slots[index] += [pool.groups[index].take() for _ in range(held)]
    table.pages = [pool.pages.take() for _ in range(-(-(tokens - table.sealed) // GROUP))]
    return table


def fill(pool: BlockPool, spec: ModelCacheSpec, scheme: KVScheme, tokens: int) -> list[AgentTable]:
    """Agents of ``tokens`` tokens until the pool has no room for another."""
    tables: list[AgentTable] = []
    try:
        while True:
            tables.append(occupy(pool, spec, scheme, f"agent-{len(tables)}", tokens))
    except PoolExhausted:
        return tables


def measure(model: Model, length: int, scheme: KVScheme, budget: int, written: int) -> dict[str, Any]:
    """Agents of ``length`` tokens in this machine's budget and in 10.2 GB."""
    spec = model.spec
    least = spec.agent_bytes(length, scheme)
    here = Filled(spec, scheme, pool_sizes(spec, scheme, max(budget, least), context=length, at_rest=True))
    if length <= written:
        table = here.prefill("written", length)
        real = table.held()
        here.memory.drop(("written", ""))
        assert real == agent_share(spec, scheme, length, at_rest=True), (real, length)
    agents = fill(here.pool, spec, scheme, length)
    held = sum(table.nbytes(spec.page_bytes) for table in agents)
    overhead = here.reported / here.nbytes
    result = {
        "agents_here": len(agents),
        "budget_here": max(budget, least),
        "pool_bytes": here.nbytes,
        "mlx_bytes": here.reported,
        "bytes_per_agent": held / len(agents) * overhead,
        "unused": 1 - held / here.nbytes,
        "written": length <= written,
    }
    del here, agents
    gc.collect()
    mx.clear_cache()
    for key, nbytes in (("agents", TARGET_BYTES), ("decimal", DECIMAL_BYTES)):
        whole = int(nbytes / max(1.0, overhead))
        resting = pool_sizes(spec, scheme, whole, context=length, at_rest=True)
        result[key] = len(fill(make_pool(spec, resting), spec, scheme, length))
    whole = int(TARGET_BYTES / max(1.0, overhead))
    speaking = pool_sizes(spec, scheme, whole, context=length)
    blocks, pages = agent_share(spec, scheme, length)
    result["speaking"] = min(
        *(have // need for have, need in zip(speaking.group_slots, blocks, strict=True)),
        speaking.pages // pages,
    )
    return result


def plain_bytes(model: Model) -> int:
    """Bytes MLX takes for one agent of 4,096 tokens by the paper's scheme."""
    heads, key_width, value_width = model.plain
    gc.collect()
    mx.clear_cache()
    keys, values = (
        mx.random.normal((1, heads, CHUNK, width)).astype(mx.bfloat16) for width in (key_width, value_width)
    )
    mx.eval(keys, values)
    before = mx.get_active_memory()
    caches = [QuantizedKVCache(group_size=64, bits=4) for _ in model.spec.layers]
    for cache in caches:
        for _ in range(4096 // CHUNK):
            cache.update_and_fetch(keys, values)
            mx.eval(cache.keys, cache.values)
    gc.collect()
    return int(mx.get_active_memory() - before)


def smollm2_ratio() -> float:
    """What a SmolLM2 agent of 4,096 tokens, really written, holds, over its 16-bit KV."""
    spec, tokens = smollm2(), 4096
    scheme = default_scheme(spec, common.EMBEDDED)
    filled = Filled(spec, scheme, pool_sizes(spec, scheme, 2 * spec.agent_bytes(tokens, scheme)))
    table = filled.prefill("one", tokens)
    assert table.tokens == tokens
    blocks, pages = table.held()
    arrays, spec_bytes = filled.arrays, 0
    for group, held, slots in zip(spec.groups, blocks, filled.arrays.group_slots, strict=True):
        whole = sum(a.nbytes for layer in group.layers for a in arrays.blocks[layer.index].values())
        spec_bytes += held * whole // slots
    whole = sum(a.nbytes for tensors in arrays.pages.values() for a in tensors.values())
    spec_bytes += pages * whole // arrays.page_count
    return spec_bytes / spec.fp16_bytes(tokens)


def main() -> None:
    args = common.arguments(__doc__ or "")
    budget, written = (1 << 30, 4096) if args.quick else (3 << 30, 8192)
    summary: dict[str, Any] = {}
    detail: dict[str, Any] = {}
    rows = []
    for name, model in MODELS.items():
        plain = plain_bytes(model)
        scheme = default_scheme(model.spec)
        detail[name] = {"plain_bytes_4k": plain, "scheme": scheme.describe()}
        for index, (label, length) in enumerate(LENGTHS.items()):
            found = detail[f"{name}.{label}"] = measure(model, length, scheme, budget, written)
            summary[f"agents.{name}.{label}"] = found["agents"]
            summary[f"agents_decimal.{name}.{label}"] = found["decimal"]
            summary[f"speaking.{name}.{label}"] = found["speaking"]
            summary[f"bytes_per_agent.{name}.{label}"] = found["bytes_per_agent"]
            paper = model.paper_q4[index]
            alike = TARGET_BYTES * 4096 // (plain * length)
            summary[f"plain_q4_here.{name}.{label}"] = alike
            rows.append(
                [
                    f"{model.title} {label.upper()}",
                    model.paper_fp16[index],
                    paper,
                    alike,
                    found["agents"],
                    f"{found['agents'] / paper:.2f}x",
                    found["decimal"],
                    found["speaking"],
                    f"{found['bytes_per_agent'] / 1e6:.0f} MB",
                    f"{found['agents_here']} in {found['mlx_bytes'] / 1e9:.2f} GB",
                ]
            )
            common.console.print(f"{rows[-1][0]}: {rows[-1][-1]}")
    columns = [
        "model",
        "FP16",
        "Q4",
        "Q4 here",
        "ours",
        "of Q4",
        "decimal",
        "speaking",
        "an agent",
        "allocated",
    ]
    common.table("Agents that fit in 10.2 GB", columns, rows)
    summary["smollm2_bytes_ratio_4k"] = smollm2_ratio()
    common.report(args, summary, **detail)


if __name__ == "__main__":
    main()
