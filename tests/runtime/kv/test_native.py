"""The native kernel against plain NumPy attention over what MLX dequantises."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbook.runtime.kv import native, native_library
from offbook.runtime.kv.native import LayerHandle, StepTables

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

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


def run_decode(pool: Pool, rows: Rows, seed: int = 1, sinks: Array | None = None) -> None:
    """One decode step; checks what it wrote and what it gave back."""
    s, rng, count = pool.shape, np.random.default_rng(seed), len(rows.lengths)
    q = rng.standard_normal((count, s.heads * s.rep, s.dk), np.float32)
    k = rng.standard_normal((count, s.heads, s.dk), np.float32)
    v = None if s.latent else rng.standard_normal((count, s.heads, s.dv), np.float32)
    got = pool.layer.decode(rows.tables(), q, k, v, sinks=sinks)
    for i in range(count):
        place, offset = divmod(rows.lengths[i] - 1 - rows.sealed[i], GROUP)
        page = rows.pages[i][place]
        np.testing.assert_array_equal(pool.tensors["tail.k"][page][:, offset], bf16(k[i]))
        if v is not None:
            np.testing.assert_array_equal(pool.tensors["tail.v"][page][:, offset], bf16(v[i]))
        keys, values = pool.history(rows.blocks[i], rows.pages[i], rows.sealed[i], rows.lengths[i])
        seen, scale = slice(rows.starts[i], None), s.dk**-0.5
        want = attention(q[i][:, None], keys[:, seen], values[:, seen], scale, softcap=s.softcap, sinks=sinks)
        close(got[i], want[0])


@pytest.fixture(params=["plain", "avx2", "avx512"])
def every_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run with each instruction set this machine has."""
    try:
        native.instruction_set(request.param)
    except ValueError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    native.instruction_set()


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_equals_plain_attention(shape: Shape, every_set: str) -> None:
    rows, slots, pages = lay_out([1, 64, 191, 192, 600])
    run_decode(Pool(shape, slots, pages), rows)


BOUNDARIES = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 449, 5000]


@pytest.mark.parametrize("length", BOUNDARIES)
def test_decode_at_every_boundary(length: int) -> None:
    rows, slots, pages = lay_out([length])
    run_decode(Pool(Shape(), slots, pages), rows)


STARTS = [0, 1, 63, 64, 100, 255, 256, 300, 383, 384, 500, 511, 512, 639, 640, 700, 767]


@pytest.mark.parametrize("start", STARTS)
def test_a_window_may_start_anywhere(start: int, every_set: str) -> None:
    """Inside a block, a group or the tail; the slots of blocks before it may be gone."""
    rows, slots, pages = lay_out([768], [start])
    run_decode(Pool(Shape(rep=2), slots, pages), rows)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    rep=st.integers(1, 8),
    dk=st.integers(1, 20).map(lambda n: n * 8),
    bits=st.sampled_from([(4, 4), (8, 4), (4, 8), (16, 16), (4, 16)]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_decode_of_any_rows(
    lengths: list[int], rep: int, dk: int, bits: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    starts = [data.draw(st.integers(0, n - 1)) for n in lengths]
    widths = st.integers(1, 20).map(lambda n: n * 8) if bits[1] == 16 else st.sampled_from([64, 128])
    shape = Shape(rep=rep, dk=dk, dv=data.draw(widths), key_bits=bits[0], value_bits=bits[1])
    rows, slots, pages = lay_out(lengths, starts, seed)
    run_decode(Pool(shape, slots, pages, seed), rows)


def test_unwritten_memory_does_not_leak_into_results(every_set: str) -> None:
    """Free places of a page and unsealed groups of a block may hold anything, NaN included."""
    rows, slots, pages = lay_out([321])
    pool = Pool(Shape(), slots, pages)
    sealed, nan = rows.sealed[0], 0x7FC0
    slot, page = rows.blocks[0][-1], rows.pages[0][-1]
    pool.tensors["k.scales"][slot, ..., sealed % BLOCK // GROUP :] = nan
    pool.tensors["v.scales"][slot, :, sealed % BLOCK :] = nan
    for name in ("tail.k", "tail.v"):
        pool.tensors[name][page, :, (321 - sealed) % GROUP :] = nan
    run_decode(pool, rows)


def test_a_tail_may_have_any_number_of_pages() -> None:
    """A scheme may keep more than 128 tokens at 16 bits."""
    rows = Rows([700], [[]], [list(range(11))], [0], [150])
    run_decode(Pool(Shape(), slots=1, pages=11), rows)


def test_sinks_take_their_share() -> None:
    rows, slots, pages = lay_out([300, 5])
    run_decode(Pool(Shape(), slots, pages), rows, sinks=np.linspace(-2, 6, 6, dtype=np.float32))


def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads() -> None:
    rows, slots, pages = lay_out([5000, 1, 700, 257, 3000], [0, 0, 333, 0, 0])
    pool = Pool(Shape(heads=3), slots, pages)
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((5, heads, 64), np.float32) for heads in (9, 3, 3))
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_threads(threads)
            results += [pool.layer.decode(rows.tables(), q, k, v) for _ in range(3)]
    finally:
        native.set_threads(native.default_threads())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    for i in range(5):
        alone = pool.layer.decode(rows.tables(i), q[i : i + 1], k[i : i + 1], v[i : i + 1])
        np.testing.assert_array_equal(alone[0], results[0][i])


def test_strided_arguments_are_read_where_they_are() -> None:
    rows, slots, pages = lay_out([400, 200])
    pool = Pool(Shape(), slots, pages)
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((h, 2, 64), np.float32).swapaxes(0, 1) for h in (6, 2, 2))
    got = pool.layer.decode(rows.tables(), q, k, v)
    want = pool.layer.decode(rows.tables(), *(np.ascontiguousarray(x) for x in (q, k, v)))
    np.testing.assert_array_equal(got, want)


# ---- prefill


def run_prefill(
    pool: Pool,
    history: int,
    tokens: int,
    window: int | None = None,
    sinks: Array | None = None,
    seed: int = 5,
) -> None:
    s, rng = pool.shape, np.random.default_rng(seed)
    rows, _, _ = lay_out([history], [max(0, history - window + 1) if window else 0])
    q = rng.standard_normal((tokens, s.heads * s.rep, s.dk), np.float32)
    k = rng.standard_normal((tokens, s.heads, s.dk), np.float32)
    v = None if s.latent else rng.standard_normal((tokens, s.heads, s.dv), np.float32)
    before = {name: tensor.copy() for name, tensor in pool.tensors.items()}
    got = pool.layer.prefill(rows.tables(), 0, q, k, v, window=window, sinks=sinks)
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, pool.tensors[name], err_msg="a prefill writes nothing")
    keys, values = pool.history(rows.blocks[0], rows.pages[0], rows.sealed[0], history)
    keys = np.concatenate([keys, k.swapaxes(0, 1)], 1)
    values = np.concatenate([values, (k[..., : s.dv] if v is None else v).swapaxes(0, 1)], 1)
    query, key = history + np.arange(tokens)[:, None], np.arange(history + tokens)
    mask = (key <= query) & (key > query - (window or len(key)))
    q, scale = q.swapaxes(0, 1), s.dk**-0.5
    close(got, attention(q, keys, values, scale, softcap=s.softcap, sinks=sinks, mask=mask))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_equals_plain_attention(shape: Shape, every_set: str) -> None:
    _, slots, pages = lay_out([450])
    run_prefill(Pool(shape, slots, pages), 450, 40)


LENGTHS = [(0, 1), (0, 65), (1, 2), (64, 63), (128, 300), (256, 1), (700, 7), (2000, 33)]


@pytest.mark.parametrize(("history", "tokens"), LENGTHS)
@pytest.mark.parametrize("window", [None, 50, 300])
def test_prefill_of_any_length_behind_any_history(history: int, tokens: int, window: int | None) -> None:
    _, slots, pages = lay_out([history])
    run_prefill(Pool(Shape(), slots, pages), history, tokens, window)


def test_prefill_with_sinks() -> None:
    _, slots, pages = lay_out([300])
    run_prefill(Pool(Shape(), slots, pages), 300, 20, sinks=np.linspace(-2, 6, 6, dtype=np.float32))


def test_a_prefilled_token_has_the_same_bits_on_any_number_of_threads() -> None:
    rows, slots, pages = lay_out([1000])
    pool, rng = Pool(Shape(), slots, pages), np.random.default_rng(8)
    q, k, v = (rng.standard_normal((150, heads, 64), np.float32) for heads in (6, 2, 2))
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_threads(threads)
            results.append(pool.layer.prefill(rows.tables(), 0, q, k, v))
    finally:
        native.set_threads(native.default_threads())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


# ---- sealing and dequantising


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sealing_equals_mx_quantize_to_the_bit(shape: Shape, every_set: str) -> None:
    pool = Pool(shape, slots=3, pages=4)
    s, t = shape, pool.tensors
    t["tail.k"][1, :, :, 0] = 0  # constant channels: zero and not
    t["tail.k"][2, :, :, 1] = bf16(np.array([0.7]))
    t["tail.k"][2, :, :, 2] = bf16(np.abs(wide(t["tail.k"][2, :, :, 2])) + 100)
    pool.layer.seal([1, 2], [2, 0], [3, 0])

    def check(name: str, floats: mx.array, bits: int, group: int, into: tuple[Any, ...]) -> None:
        packed, scales, biases = mx.quantize(floats, group_size=group, bits=bits)
        per = into[-1]
        words = slice(per.start * packed.shape[-1], per.stop * packed.shape[-1]) if len(into) == 4 else per
        np.testing.assert_array_equal(t[f"{name}.packed"][(*into[:-1], words)], np.array(packed))
        for part, want in (("scales", scales), ("biases", biases)):
            np.testing.assert_array_equal(t[f"{name}.{part}"][into], np.array(want.view(mx.uint16)))

    for page, slot, group in ((1, 2, 3), (2, 0, 0)):
        tokens = slice(group * GROUP, (group + 1) * GROUP)
        if s.key_bits == 16:
            np.testing.assert_array_equal(t["k.raw"][slot][:, tokens], t["tail.k"][page])
        else:
            keys = mx.contiguous(mx.array(t["tail.k"][page]).view(mx.bfloat16).swapaxes(1, 2))
            check("k", keys, s.key_bits, GROUP, (slot, slice(None), slice(None), slice(group, group + 1)))
        if s.latent:
            continue
        if s.value_bits == 16:
            np.testing.assert_array_equal(t["v.raw"][slot][:, tokens], t["tail.v"][page])
        else:
            values = mx.array(t["tail.v"][page]).view(mx.bfloat16)
            check("v", values, s.value_bits, s.group, (slot, slice(None), tokens))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantised_history_equals_mx_dequantize(shape: Shape, every_set: str) -> None:
    rows, slots, pages = lay_out([70, 777])
    pool, tables = Pool(shape, slots, pages), rows.tables()
    whole = [pool.history(rows.blocks[i], rows.pages[i], rows.sealed[i], rows.lengths[i]) for i in (0, 1)]
    for row, start, stop in ((0, 0, 70), (1, 0, 777), (1, 130, 700), (1, 320, 321), (1, 650, 651)):
        keys, values = pool.layer.dequantise(tables, row, start, stop)
        np.testing.assert_allclose(keys, whole[row][0][:, start:stop], rtol=1e-6, atol=1e-6)
        assert (values is None) == shape.latent
        if values is not None:
            np.testing.assert_allclose(values, whole[row][1][:, start:stop], rtol=1e-6, atol=1e-6)


# ---- threads and processes


def test_calls_from_several_threads_take_turns() -> None:
    rows, slots, pages = lay_out([2000, 900])
    pools = [Pool(Shape(), slots, pages, seed) for seed in range(3)]
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((2, h, 64), np.float32) for h in (6, 2, 2))
    wants = [pool.layer.decode(rows.tables(), q, k, v) for pool in pools]
    wrong: list[int] = []

    def call(i: int) -> None:
        tables = rows.tables()
        for _ in range(50):
            if not np.array_equal(pools[i].layer.decode(tables, q, k, v), wants[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_starts_its_own_threads() -> None:
    rows, slots, pages = lay_out([3000])
    pool = Pool(Shape(), slots, pages)
    q, k, v = (np.ones((1, h, 64), np.float32) for h in (6, 2, 2))
    want = pool.layer.decode(rows.tables(), q, k, v)

    def child() -> None:
        same = np.array_equal(pool.layer.decode(rows.tables(), q, k, v), want)
        os._exit(0 if same else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0


# ---- wrong arguments


def test_contradicting_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        StepTables([[0]], [[0]], [63], [100])
    with pytest.raises(ValueError, match="0 blocks"):
        StepTables([[]], [[0, 1]], [64], [100])
    with pytest.raises(ValueError, match="1 pages"):
        StepTables([[0]], [[0]], [64], [200])
    with pytest.raises(ValueError, match="no slot"):
        StepTables([[-1]], [[0]], [64], [100])
    with pytest.raises(ValueError, match="one of each"):
        StepTables([[0]], [[0]], [64], [100, 3])


def test_wrong_shapes_and_slots_are_refused_before_any_memory_is_touched() -> None:
    rows, slots, pages = lay_out([400])
    pool, tables = Pool(Shape(), slots, pages), rows.tables()
    q, k, v = (np.ones((1, h, 64), np.float32) for h in (6, 2, 2))
    with pytest.raises(ValueError, match=r"queries is float32 \[1, 2, 64\]: expected float32 \[1, 6, 64\]"):
        pool.layer.decode(tables, k, k, v)
    with pytest.raises(ValueError, match="float64"):
        pool.layer.decode(tables, q.astype(np.float64), k, v)
    with pytest.raises(ValueError, match="values are missing"):
        pool.layer.decode(tables, q, k, None)
    with pytest.raises(ValueError, match="contiguous"):
        pool.layer.decode(tables, np.ones((1, 6, 128), np.float32)[..., ::2], k, v)
    with pytest.raises(ValueError, match="this layer has"):
        pool.layer.decode(StepTables([[slots, 1]], rows.pages, rows.sealed, rows.lengths), q, k, v)
    with pytest.raises(ValueError, match="no page place"):
        pool.layer.decode(StepTables([[0]], [[]], [64], [64]), q, k, v)
    short = {**pool.tensors, "k.scales": pool.tensors["k.scales"][..., :3]}
    with pytest.raises(ValueError, match=r"k\.scales"):
        LayerHandle(query_heads=6, heads=2, key_width=64, value_width=64, tensors=short)
    with pytest.raises(ValueError, match="out of range"):
        pool.layer.seal([0], [slots], [0])


def test_a_missing_kernel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_library", None)
    monkeypatch.setattr(native_library, "_reason", None)
    monkeypatch.setenv("OFFBOOK_NATIVE", "0")
    assert not native.available()
    assert "OFFBOOK_NATIVE" in str(native.unavailable_reason())
    pool = np.zeros((1, 1, BLOCK, 64), np.uint16)
    with pytest.raises(native.NativeUnavailable, match="OFFBOOK_NATIVE"):
        LayerHandle(query_heads=1, heads=1, key_width=64, value_width=64, tensors={"k.raw": pool})
    monkeypatch.setattr(native_library, "_reason", None)
    monkeypatch.delenv("OFFBOOK_NATIVE")
    monkeypatch.setattr(native_library.importlib.util, "find_spec", lambda name: None)
    assert "compiler" in str(native.unavailable_reason())
