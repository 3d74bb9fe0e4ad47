"""The native kernel against MLX operations: one layer, decode and short prefill, on this machine.

Run: ``python benchmarks/native_kernel.py``. Times are medians of interleaved repeats, per call; the
spread shown is the middle half. OpenBLAS is loaded first when there is one, as the engine does.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

for name in ("libopenblas.so.0",):
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        BLAS = "OpenBLAS"
    except OSError:
        BLAS = "MLX's own"

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from offbook.runtime.kv import native  # noqa: E402
from offbook.runtime.kv.native import LayerHandle, StepTables  # noqa: E402

BLOCK, GROUP = 256, 64
Array = NDArray[Any]


def bf16(x: Array) -> Array:
    return np.array(mx.array(x.astype(np.float32)).astype(mx.bfloat16).view(mx.uint16))


class Case:
    """Rows of equal length in a random pool."""

    def __init__(
        self, heads: int, rep: int, dk: int, dv: int, tokens: int, rows: int, *, bits: int = 4
    ) -> None:
        rng = np.random.default_rng(0)
        self.heads, self.rep, self.dk, self.dv, self.bits = heads, rep, dk, dv, bits
        latent = dk == 576
        self.sealed = (tokens - 128) // GROUP * GROUP
        per, per_pages = -(-self.sealed // BLOCK), 3
        slots, pages = per * rows, per_pages * rows
        t: dict[str, Array] = {}
        t["k.packed"] = rng.integers(0, 2**32, (slots, heads, dk, BLOCK * bits // 32), np.uint32)
        t["v.packed"] = rng.integers(0, 2**32, (slots, heads, BLOCK, dv * bits // 32), np.uint32)
        for part in ("scales", "biases"):
            t[f"k.{part}"] = bf16(rng.uniform(-1, 1, (slots, heads, dk, BLOCK // GROUP)) / 8)
            t[f"v.{part}"] = bf16(rng.uniform(-1, 1, (slots, heads, BLOCK, dv // GROUP)) / 8)
        t["tail.k"] = bf16(rng.standard_normal((pages, heads, GROUP, dk)))
        t["tail.v"] = bf16(rng.standard_normal((pages, heads, GROUP, dv)))
        self.arrays = {name: mx.array(value) for name, value in t.items()}
        if latent:
            t = {name: value for name, value in t.items() if not name.startswith(("v.", "tail.v"))}
        self.tensors = t
        self.layer = LayerHandle(
            query_heads=heads * rep, heads=heads, key_width=dk, value_width=dv, tensors=t, latent=latent
        )
        blocks = np.arange(slots).reshape(rows, per).tolist()
        self.pages = np.arange(pages).reshape(rows, per_pages).tolist()
        self.tables = StepTables(blocks, self.pages, [self.sealed] * rows, [tokens] * rows)
        self.blocks, self.tokens, self.rows, self.latent = blocks, tokens, rows, latent
        shape = (rows, heads * rep, dk)
        self.q = rng.standard_normal(shape, np.float32)
        self.k = rng.standard_normal((rows, heads, dk), np.float32)
        self.v = None if latent else rng.standard_normal((rows, heads, dv), np.float32)
        self.out = np.empty((rows, heads * rep, dv), np.float32)

    def decode(self) -> None:
        self.layer.decode(self.tables, self.q, self.k, self.v, self.out)


def quartiles(
    calls: dict[str, Callable[[], object]], seconds: float = 1.0
) -> dict[str, tuple[float, float, float]]:
    """Interleaved repeats; lower quartile, median and upper quartile in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: tuple(np.percentile(t, (25, 50, 75))) for name, t in times.items()}  # type: ignore[misc]


def show(title: str, calls: dict[str, Callable[[], object]]) -> None:
    print(title)
    for name, (low, median, high) in quartiles(calls).items():
        print(f"    {name:<34}{median:9.3f} ms  ({low:.3f} to {high:.3f})")
    sys.stdout.flush()


def in_turn(calls: list[Callable[[], None]]) -> Callable[[], None]:
    """One call after the other, as a step goes through its layers: each finds its memory cold."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def with_threads(threads: int, call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        native.set_threads(threads)
        call()

    return run


def with_set(name: str, call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        native.instruction_set(name)
        call()
        native.instruction_set()

    return run


def float_attention(case: Case) -> Callable[[], None]:
    """MLX's fused attention over an unquantised float32 cache of the same length, per row."""
    heads, n = case.heads, case.tokens
    k, v = (mx.random.normal((case.rows, heads, n, width)) for width in (case.dk, case.dv))
    q = mx.array(case.q)[:, :, None]
    mx.eval(k, v, q)
    return lambda: mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=case.dk**-0.5))


def packed_operations(case: Case) -> Callable[[], None]:
    """``mx.quantized_matmul`` over the gathered blocks (no tail, no softmax joins: a lower bound)."""
    a, heads, rep, bits = case.arrays, case.heads, case.rep, case.bits
    scales = {name: a[name].view(mx.bfloat16) for name in a if name.endswith(("scales", "biases"))}
    q = mx.array(np.repeat(case.q.reshape(case.rows, heads, rep, case.dk), len(case.blocks[0]), 0))

    def run() -> None:
        s = mx.quantized_matmul(
            q,
            a["k.packed"],
            scales["k.scales"],
            scales["k.biases"],
            transpose=False,
            group_size=64,
            bits=bits,
        )
        p = mx.softmax(s, axis=-1)
        o = mx.quantized_matmul(
            p,
            a["v.packed"],
            scales["v.scales"],
            scales["v.biases"],
            transpose=False,
            group_size=64,
            bits=bits,
        )
        mx.eval(o.reshape(case.rows, -1, heads, rep, case.dv).sum(1))

    return run


def prefill_calls(case: Case, tokens: int) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((tokens, case.heads * case.rep, case.dk), np.float32)
    k = rng.standard_normal((tokens, case.heads, case.dk), np.float32)
    v = rng.standard_normal((tokens, case.heads, case.dv), np.float32)
    out = np.empty((tokens, case.heads * case.rep, case.dv), np.float32)
    a, n = case.arrays, case.sealed
    qm, km, vm = (mx.array(np.ascontiguousarray(x.swapaxes(0, 1)))[None] for x in (q, k, v))
    scales = {
        name: a[name].view(mx.bfloat16).astype(mx.float32)
        for name in a
        if name.endswith(("scales", "biases"))
    }

    def operations() -> None:
        ks = mx.dequantize(
            a["k.packed"], scales["k.scales"], scales["k.biases"], group_size=64, bits=case.bits
        )
        vs = mx.dequantize(
            a["v.packed"], scales["v.scales"], scales["v.biases"], group_size=64, bits=case.bits
        )
        ks = ks.transpose(1, 0, 3, 2).reshape(1, case.heads, -1, case.dk)[:, :, :n]
        vs = vs.transpose(1, 0, 2, 3).reshape(1, case.heads, -1, case.dv)[:, :, :n]
        ks, vs = mx.concatenate([ks, km], 2), mx.concatenate([vs, vm], 2)
        mx.eval(mx.fast.scaled_dot_product_attention(qm, ks, vs, scale=case.dk**-0.5, mask="causal"))

    tables = StepTables(case.blocks, [[]], [n], [n])

    def both() -> None:
        keys, values = case.layer.dequantise(tables, 0)
        ks, vs = (
            mx.concatenate([mx.array(keys)[None], km], 2),
            mx.concatenate([mx.array(values)[None], vm], 2),
        )
        mx.eval(mx.fast.scaled_dot_product_attention(qm, ks, vs, scale=case.dk**-0.5, mask="causal"))

    return {
        "native": lambda: case.layer.prefill(tables, 0, q, k, v, out),
        "native dequantise + MLX attention": both,
        "MLX dequantise + MLX attention": operations,
    }


def main() -> None:
    if not native.available():
        sys.exit(native.unavailable_reason())
    best, threads = native.instruction_set(), native.default_threads()
    print(
        f"kernel {best}, {threads} threads, MLX {mx.__version__} on {mx.default_device()} with {BLAS} BLAS\n"
    )
    for rows, tokens in ((1, 1024), (1, 4096), (8, 4096)):
        case = Case(3, 3, 64, 64, tokens, rows)
        calls: dict[str, Callable[[], object]] = {
            "native": with_threads(threads, case.decode),
            "native, one thread": with_threads(1, case.decode),
            "MLX packed operations": packed_operations(case),
            "MLX float32 attention": float_attention(case),
        }
        show(f"decode, {rows} rows of {tokens}, 3 KV heads, 9 query heads, width 64", calls)
        native.set_threads(threads)
    layers = [Case(3, 3, 64, 64, 4096, 1) for _ in range(60)]
    cold = in_turn([layer.decode for layer in layers])
    show(
        "decode, 1 row of 4096, 60 layers in turn (48 MB of packed KV: from memory, not from caches)",
        {"native": with_threads(threads, cold), "native, one thread": with_threads(1, cold)},
    )
    native.set_threads(threads)
    del layers, cold
    case = Case(3, 3, 64, 64, 4096, 1)
    sets: dict[str, Callable[[], object]] = {}
    for name in ("avx512", "avx2", "plain"):
        try:
            native.instruction_set(name)
        except ValueError:
            continue
        sets[name] = with_set(name, case.decode)
    native.instruction_set()
    show("decode by instruction set, 1 row of 4096", sets)
    for title, case in (
        ("8 KV heads, 32 query heads, width 128", Case(8, 4, 128, 128, 4096, 1)),
        ("Gemma: 1 KV head, 4 query heads, width 256", Case(1, 4, 256, 256, 4096, 1)),
        ("8 bits, 3 KV heads, 9 query heads, width 64", Case(3, 3, 64, 64, 4096, 1, bits=8)),
        ("latent 576, 16 query heads", Case(1, 16, 576, 512, 4096, 1)),
    ):
        show(f"decode, 1 row of 4096, {title}", {"native": case.decode})
    case = Case(3, 3, 64, 64, 4096, 1)
    dequantise: dict[str, Callable[[], object]] = {"native": lambda: case.layer.dequantise(case.tables, 0)}
    show("dequantise 4096 tokens", dequantise)
    for tokens in (2, 8, 32, 128, 512, 1024):
        show(
            f"prefill of {tokens} behind 4032 sealed tokens, 3 KV heads, 9 query heads",
            prefill_calls(case, tokens),
        )


if __name__ == "__main__":
    main()
