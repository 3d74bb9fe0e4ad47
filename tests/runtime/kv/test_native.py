"""The native kernel's decode steps against plain NumPy attention over what MLX dequantises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_pool import BLOCK, GROUP, SHAPES, Array, Pool, Rows, Shape, attention, bf16, close, lay_out

from offbook.runtime.kv import native

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))


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
