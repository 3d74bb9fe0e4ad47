"""Agents with a common prefix: attention to it as one product, against each agent for itself.

Per shape one decode step of 8 agents of 4K tokens, of which they share 3K: once with the prefix in the same
slots (as the pool has it), once with copies of it in slots of each agent's own (the same numbers, so the
results must be the same bits, which is checked). Layers are taken in turn, so that each finds its memory
cold, and the two ways interleave. Times are medians per layer; a ratio is the time with copies over the time
shared. "portable" is the same question put to MLX's packed products, without softmax and tails.

Run: ``python -m benchmarks.shared_prefix --json OUT``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from offbook.runtime.kv import native
from offbook.runtime.kv.native import StepTables

from .common import arguments, console, mx, report
from .native_kernel import BLOCK, Case, in_turn, quartiles, with_threads

SHAPES: dict[str, tuple[int, int, int, int]] = {
    "smollm2_135m": (3, 3, 64, 64),
    "gemma3_270m": (1, 4, 256, 256),
    "llama31_8b": (8, 4, 128, 128),
    "one_query_head_a_kv_head": (8, 1, 64, 64),
    "seven_query_heads_a_kv_head": (2, 7, 64, 64),
    "deepseek_v2_lite": (1, 16, 576, 512),
}
"""KV heads, query heads per KV head, key width, value width."""


class Team(Case):
    """Rows that begin alike: ``tables`` with copies, ``shared`` with the slots of the first row."""

    def __init__(self, shape: tuple[int, int, int, int], tokens: int, rows: int, prefix: int) -> None:
        super().__init__(*shape, tokens, rows)
        same = prefix // BLOCK
        for blocks in self.blocks[1:]:
            for name, tensor in self.tensors.items():
                if not name.startswith("tail."):
                    tensor[blocks[:same]] = tensor[self.blocks[0][:same]]
        self.slots = [self.blocks[0][:same] + blocks[same:] for blocks in self.blocks]
        self.shared = StepTables(self.slots, self.pages, [self.sealed] * rows, [tokens] * rows)
        alone, together = (
            self.layer.decode(tables, self.q, self.k, self.v) for tables in (self.tables, self.shared)
        )
        if not np.array_equal(alone, together):
            sys.exit(f"{shape}: a shared prefix changes the result")

    def decode_shared(self) -> None:
        self.layer.decode(self.shared, self.q, self.k, self.v, self.out)


def measure(
    shape: tuple[int, int, int, int], threads: int, seconds: float, rows: int = 8, tokens: int = 4096
) -> dict[str, float]:
    """Median milliseconds a layer with copies and shared, and their ratio."""
    layers = [Team(shape, tokens, rows, tokens * 3 // 4)]
    size = sum(tensor.nbytes for tensor in layers[0].tensors.values())
    while len(layers) < max(2, min(12, -(-(96 << 20) // size))):
        layers.append(Team(shape, tokens, rows, tokens * 3 // 4))
    half = len(layers) // 2
    calls: dict[str, Callable[[], object]] = {
        "copies": with_threads(threads, in_turn([layer.decode for layer in layers])),
        "shared": with_threads(
            threads, in_turn([layer.decode_shared for layer in layers[half:] + layers[:half]])
        ),
    }
    found = {name: median for name, (_, median, _) in quartiles(calls, seconds).items()}
    native.set_threads(native.default_threads())
    return found | {"ratio": found["copies"] / found["shared"]}


def portable(rows: int, seconds: float) -> dict[str, float]:
    """MLX's packed products over the flat list of blocks: each row's own, or a shared block once."""
    team = Team(SHAPES["smollm2_135m"], 4096, rows, 3072)
    heads, rep, width = team.heads, team.rep, team.dk
    pool = {name: mx.array(tensor) for name, tensor in team.tensors.items()}
    scales = {name: array.view(mx.bfloat16) for name, array in pool.items() if array.dtype == mx.uint16}
    q = mx.array(team.q).reshape(rows, heads, rep, width)
    same = 3072 // BLOCK

    def products(slots: list[int], queries: mx.array) -> mx.array:
        at = mx.array(slots)
        k = [pool["k.packed"][at], scales["k.scales"][at], scales["k.biases"][at]]
        v = [pool["v.packed"][at], scales["v.scales"][at], scales["v.biases"][at]]
        s = mx.quantized_matmul(queries, *k, transpose=False, group_size=64, bits=4)
        return mx.quantized_matmul(mx.softmax(s, axis=-1), *v, transpose=False, group_size=64, bits=4)

    every = [slot for blocks in team.blocks for slot in blocks]
    of_row = mx.array(np.repeat(np.arange(rows), len(team.blocks[0])))
    own = [slot for blocks in team.blocks for slot in blocks[same:]]
    of_own = mx.array(np.repeat(np.arange(rows), len(team.blocks[0]) - same))
    together = q.swapaxes(0, 1).reshape(1, heads, rows * rep, width)

    def shared() -> None:
        mx.eval(
            products(team.slots[0][:same], mx.broadcast_to(together, (same, heads, rows * rep, width))),
            products(own, q[of_own]),
        )

    found = quartiles({"copies": lambda: mx.eval(products(every, q[of_row])), "shared": shared}, seconds)
    times = {name: median for name, (_, median, _) in found.items()}
    return times | {"ratio": times["copies"] / times["shared"]}


def planning() -> float:
    """Microseconds to find the runs of 16 rows of 4K tokens, once per step and layer group."""
    team, times = Team((1, 1, 64, 64), 4096, 16, 3072), []
    for _ in range(200):
        tables = StepTables(team.slots, team.pages, [team.sealed] * 16, [4096] * 16)
        started = time.perf_counter()
        tables.share()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def main() -> None:
    options = arguments(__doc__ or "")
    if not native.available():
        sys.exit(native.unavailable_reason())
    seconds = 0.5 if options.quick else 3.0
    best = native.default_threads()
    summary: dict[str, Any] = {"instruction_set": native.instruction_set(), "threads": best}
    detail: dict[str, Any] = {"shapes": {}, "agents": {}}
    for name, shape in SHAPES.items():
        for threads in sorted({1, best}):
            found = measure(shape, threads, seconds)
            detail["shapes"].setdefault(name, {})[f"threads_{threads}"] = found
            console.print(
                f"{name:<28} {threads} threads: {found['copies']:8.3f} ms with copies, "
                f"{found['shared']:8.3f} shared: {found['ratio']:.2f}"
            )
            summary[f"ratio_{name}" + ("_one_thread" if threads < best else "")] = round(found["ratio"], 3)
    for agents in (2, 4, 16):
        found = measure(SHAPES["smollm2_135m"], best, seconds, rows=agents)
        detail["agents"][agents] = found
        console.print(f"smollm2_135m, {agents} agents: {found['ratio']:.2f}")
    detail["portable"] = portable(8, seconds)
    summary["ratio_portable"] = round(detail["portable"]["ratio"], 3)
    summary["planning_us_16_rows_4k"] = round(planning(), 1)
    report(options, summary, **detail)


if __name__ == "__main__":
    main()
