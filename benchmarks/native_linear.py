"""The native kernel for linear layers of few rows against MLX with OpenBLAS, on this machine.

Layers: SmolLM2's shapes, over more weights than the caches hold, as a step goes through its layers. Then
whole steps of the model with mlx-lm's own caches, with our layers and without. All interleaved in one
run; minima and medians, because on a busy machine only the minimum tells what the code can do.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import common
from benchmarks.team import load_embedded

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from offbook.runtime.kv import native
from offbook.runtime.models import linear

SHAPES = {
    "q: 576 to 576": (576, 576),
    "gate: 576 to 1536": (576, 1536),
    "down: 1536 to 576": (1536, 576),
    "head: 576 to 49152": (576, 49152),
}
ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
MORE_ROWS = (64, 128, 256)
"""Around the limit."""

COLD_BYTES = 100 << 20
"""Weights that one variant goes through before it comes back to the first."""


def in_turn(layers: list[nn.Module], x: mx.array) -> Callable[[], float]:
    """Seconds of one layer after the other: each finds its weights cold."""
    turn: Iterator[nn.Module] = itertools.cycle(layers)

    def run() -> float:
        layer = next(turn)
        return common.timed(lambda: mx.eval(layer(x)))

    return run


def layers(repeats: int, rows: tuple[int, ...]) -> tuple[list[list[Any]], dict[str, float]]:
    table, summary = [], {}
    for name, (inputs, outputs) in SHAPES.items():
        count = max(2, COLD_BYTES // (4 * inputs * outputs))
        plain = [nn.Linear(inputs, outputs, bias=False) for _ in range(count)]
        ours = [nn.Linear(inputs, outputs, bias=False) for _ in range(count)]
        mx.eval([layer.parameters() for layer in plain + ours])
        for layer in ours:
            linear.install(layer, limit=max(MORE_ROWS))
        for m in rows:
            x = mx.random.normal((m, inputs))
            mx.eval(x)
            times = common.interleaved(
                {"ours": in_turn(ours, x), "mlx": in_turn(plain, x)}, max(repeats, count)
            )
            fast, slow = times["ours"], times["mlx"]
            table.append(
                [name, m, *row(fast, 1e6), *row(slow, 1e6), min(slow) / min(fast), ratio(slow, fast)]
            )
            summary[f"{name.split(':')[0]}_{m}"] = ratio(slow, fast)
    return table, summary


def row(seconds: list[float], unit: float) -> list[float]:
    return [min(seconds) * unit, common.median(seconds) * unit]


def ratio(slow: list[float], fast: list[float]) -> float:
    return common.median(slow) / common.median(fast)


def steps(repeats: int) -> tuple[list[list[Any]], dict[str, float]]:
    ours, plain = load_embedded(plain=True).model, load_embedded(plain=True).model
    linear.install(ours)

    def step(model: nn.Module, rows: int, tokens: int) -> Callable[[], float]:
        caches = make_prompt_cache(model)
        ids = mx.array([[7 + (13 * r + t) % 1000 for t in range(tokens)] for r in range(rows)])

        def work() -> None:
            for cache in caches:
                cache.offset = 0
            hidden = model.model(ids, cache=caches)
            mx.eval(model.model.embed_tokens.as_linear(hidden[:, -1:]))

        work()
        return lambda: common.timed(work)

    table, summary = [], {}
    cases = {
        **{f"decode, {rows} rows": (rows, 1) for rows in (1, 8, 16)},
        **{f"prefill of {tokens}": (1, tokens) for tokens in (12, 32)},
    }
    for name, (rows, tokens) in cases.items():
        times = common.interleaved(
            {"ours": step(ours, rows, tokens), "mlx": step(plain, rows, tokens)}, repeats
        )
        fast, slow = times["ours"], times["mlx"]
        table.append([name, *row(fast, 1e3), *row(slow, 1e3), min(slow) / min(fast), ratio(slow, fast)])
        summary[name.replace(", ", "_").replace(" ", "_")] = ratio(slow, fast)
    return table, summary


def main() -> None:
    args = common.arguments(__doc__ or "")
    if not native.available():
        sys.exit(native.unavailable_reason())
    rows, by_layer = layers(15 if args.quick else 40, (1, 8, 16) if args.quick else ROWS)
    columns = ["ours, min", "median", "MLX, min", "median", "x, minima", "x, medians"]
    common.table("One layer, microseconds", ["layer", "rows", *columns], rows)
    if not args.quick:
        rows, _ = layers(20, MORE_ROWS)
        common.table("More rows, microseconds", ["layer", "rows", *columns], rows)
    rows, by_step = steps(8 if args.quick else 25)
    common.table("One step of the model, milliseconds", ["step", *columns], rows)
    common.report(args, {**by_layer, **by_step})


if __name__ == "__main__":
    main()
