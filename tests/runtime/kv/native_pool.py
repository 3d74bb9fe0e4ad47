"""What tests of the native kernel share: random pool memory, tables, plain attention in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from offbook.runtime.kv.native import LayerHandle, StepTables

BLOCK, GROUP = 256, 64
Array = NDArray[Any]


def sealed_of(tokens: int) -> int:
    return max(0, tokens - 128) // GROUP * GROUP


def bf16(x: Array) -> Array:
    """Round to bfloat16; the bits."""
    return np.array(mx.array(x.astype(np.float32)).astype(mx.bfloat16).view(mx.uint16))


def wide(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Shape:
    heads: int = 2
    rep: int = 3
    dk: int = 64
    dv: int = 64
    key_bits: int = 4
    value_bits: int = 4
    group: int = 64
    latent: bool = False
    softcap: float | None = None

    def __str__(self) -> str:
        kind = "latent-" if self.latent else ""
        cap = f"-cap{self.softcap}" if self.softcap else ""
        return (
            f"{kind}{self.heads}x{self.rep}-k{self.dk}q{self.key_bits}-"
            f"v{self.dv}q{self.value_bits}g{self.group}{cap}"
        )


class Pool:
    """Random pool memory of one layer and its handle; ``history`` gives it back through ``mx.dequantize``."""

    def __init__(self, shape: Shape, slots: int, pages: int, seed: int = 0) -> None:
        self.shape = s = shape
        rng = np.random.default_rng(seed)
        self.tensors: dict[str, Array] = {}
        t = self.tensors

        def packed(name: str, lead: tuple[int, ...], elements: int, bits: int, group: int) -> None:
            t[f"{name}.packed"] = rng.integers(0, 2**32, (*lead, elements * bits // 32), np.uint32)
            t[f"{name}.scales"] = bf16(rng.uniform(-1, 1, (*lead, elements // group)) * 4 / 2**bits)
            t[f"{name}.biases"] = bf16(rng.uniform(-1, 1, (*lead, elements // group)))

        if s.key_bits == 16:
            t["k.raw"] = bf16(rng.standard_normal((slots, s.heads, BLOCK, s.dk)))
        else:
            packed("k", (slots, s.heads, s.dk), BLOCK, s.key_bits, GROUP)
        t["tail.k"] = bf16(rng.standard_normal((pages, s.heads, GROUP, s.dk)))
        if not s.latent:
            if s.value_bits == 16:
                t["v.raw"] = bf16(rng.standard_normal((slots, s.heads, BLOCK, s.dv)))
            else:
                packed("v", (slots, s.heads, BLOCK), s.dv, s.value_bits, s.group)
            t["tail.v"] = bf16(rng.standard_normal((pages, s.heads, GROUP, s.dv)))
        self.layer = LayerHandle(
            query_heads=s.heads * s.rep,
            heads=s.heads,
            key_width=s.dk,
            value_width=s.dv,
            tensors=t,
            latent=s.latent,
            softcap=s.softcap,
        )

    def _floats(self, name: str, bits: int, group: int) -> Array:
        if bits == 16:
            return wide(self.tensors[f"{name}.raw"])
        scales, biases = (mx.array(wide(self.tensors[f"{name}.{part}"])) for part in ("scales", "biases"))
        packed = mx.array(self.tensors[f"{name}.packed"])
        x = np.array(mx.dequantize(packed, scales, biases, group_size=group, bits=bits))
        return x.swapaxes(-1, -2) if name == "k" else x

    def history(self, blocks: list[int], pages: list[int], sealed: int, length: int) -> tuple[Array, Array]:
        """Keys and values of positions 0..length-1: [heads, length, width] float64."""
        s = self.shape
        out: list[Array] = []
        for name, bits, group in (("k", s.key_bits, GROUP), ("v", s.value_bits, s.group)):
            if name == "v" and s.latent:
                out.append(out[0][..., : s.dv])
                continue
            floats, tail = self._floats(name, bits, group), wide(self.tensors[f"tail.{name}"])
            none = tail[0][:, :0]
            old = np.concatenate([none, *(floats[max(slot, 0)] for slot in blocks)], axis=1)[:, :sealed]
            new = np.concatenate([none, *(tail[page] for page in pages)], axis=1)[:, : length - sealed]
            out.append(np.concatenate([old, new], axis=1).astype(np.float64))
        return out[0], out[1]


@dataclass
class Rows:
    """Block and page tables of several rows."""

    lengths: list[int]
    blocks: list[list[int]]
    pages: list[list[int]]
    sealed: list[int]
    starts: list[int]

    def tables(self, only: int | None = None) -> StepTables:
        pick = slice(None) if only is None else slice(only, only + 1)
        return StepTables(
            self.blocks[pick], self.pages[pick], self.sealed[pick], self.lengths[pick], self.starts[pick]
        )


def lay_out(lengths: list[int], starts: list[int] | None = None, seed: int = 0) -> tuple[Rows, int, int]:
    """Tables at random without overlap, and the slots and pages there must be."""
    rng = np.random.default_rng(seed)
    sealed = [sealed_of(n) for n in lengths]
    need_blocks = [-(-s // BLOCK) for s in sealed]
    need_pages = [-(-(n - s) // GROUP) for n, s in zip(lengths, sealed, strict=True)]
    slots, pages = sum(need_blocks) + 1, sum(need_pages) + 1
    slot_ids, page_ids = rng.permutation(slots).tolist(), rng.permutation(pages).tolist()
    blocks = [[slot_ids.pop() for _ in range(n)] for n in need_blocks]
    tails = [[page_ids.pop() for _ in range(n)] for n in need_pages]
    starts = starts or [0] * len(lengths)
    for table, start in zip(blocks, starts, strict=True):
        gone = min(start // BLOCK, len(table))
        table[:gone] = [-1] * gone
    return Rows(lengths, blocks, tails, sealed, starts), slots, pages


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Array | None = None,
    mask: Array | None = None,
) -> Array:
    """q [Hq, L, Dk], k and v [Hkv, N, D] in float64 -> [L, Hq, Dv]."""
    rep = len(q) // len(k)
    k, v = np.repeat(k, rep, 0), np.repeat(v, rep, 0)
    scores = scale * (q.astype(np.float64) @ k.swapaxes(1, 2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    out: Array = (p / total) @ v
    return out.swapaxes(0, 1)


def close(got: Array, want: Array) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1.0, float(np.abs(want).max())))


SHAPES = [
    Shape(),
    Shape(heads=1, rep=1),
    Shape(key_bits=8, value_bits=8),
    Shape(key_bits=8, value_bits=4, rep=8),
    Shape(key_bits=16, value_bits=16),
    Shape(key_bits=4, value_bits=16, dk=80, dv=80, rep=2),
    Shape(dk=96, dv=96, group=32, rep=4),
    Shape(dk=128, dv=128, rep=7),
    Shape(dk=128, dv=128, group=128),
    Shape(dk=192, dv=128, heads=1, rep=2),
    Shape(dk=256, dv=256, heads=1, rep=3, value_bits=8, group=128),
    Shape(dk=256, dv=256, heads=1, rep=4),
    Shape(dk=256, dv=256, heads=1, rep=5, value_bits=8, group=32),
    Shape(dk=72, dv=40, key_bits=16, value_bits=16, rep=9),
    Shape(dk=8, dv=8, key_bits=4, value_bits=16),
    Shape(heads=1, rep=16, dk=576, dv=512, latent=True),
    Shape(heads=1, rep=3, dk=72, dv=40, latent=True, key_bits=8),
    Shape(heads=1, rep=2, dk=96, dv=64, latent=True, key_bits=16),
    Shape(softcap=5.0),
]
