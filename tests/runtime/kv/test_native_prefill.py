"""The native kernel's prefills, and sealing, to the bit, against NumPy and MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from native_pool import (
    GROUP,
    SHAPES,
    Array,
    Pool,
    Rows,
    Shape,
    attention,
    bf16,
    close,
    lay_out,
    sealed_of,
    wide,
)

from offbook.runtime.kv import native

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))


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
    k = wide(bf16(rng.standard_normal((tokens, s.heads, s.dk), np.float32)))
    v = None if s.latent else wide(bf16(rng.standard_normal((tokens, s.heads, s.dv), np.float32)))
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


SPLITS = [(0, 5, 14), (60, 6, 15), (70, 1, 30), (190, 1, 2), (130, 40, 61), (650, 6, 15), (2000, 20, 84)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_tokens_read_in_two_lots_have_the_bits_they_have_in_one(
    shape: Shape, window: int | None, every_set: str
) -> None:
    for history, first, total in SPLITS:
        assert sealed_of(history + first) == sealed_of(history)
        rows, slots, pages = lay_out([history], [max(0, history - window + 1) if window else 0])
        pool, rng = Pool(shape, slots, pages + 2), np.random.default_rng(8)
        free = [page for page in range(pages + 2) if page not in rows.pages[0]]
        q = rng.standard_normal((total, shape.heads * shape.rep, shape.dk), np.float32)
        k = wide(bf16(rng.standard_normal((total, shape.heads, shape.dk), np.float32)))
        v = None if shape.latent else wide(bf16(rng.standard_normal((total, shape.heads, shape.dv))))

        def read(start: int, stop: int, rows: Rows = rows, pool: Pool = pool, **of: Any) -> Array:
            parts = (None if of[x] is None else of[x][start:stop] for x in "qkv")
            return pool.layer.prefill(rows.tables(), 0, *parts, window=window)  # type: ignore[arg-type]

        whole = read(0, total, q=q, k=k, v=v)
        parts = [read(0, first, q=q, k=k, v=v)]
        rows.lengths[0] += first
        while len(rows.pages[0]) * GROUP < rows.lengths[0] - rows.sealed[0]:
            rows.pages[0].append(free.pop())
        for at in range(first):
            page, place = divmod(history + at - rows.sealed[0], GROUP)
            pool.tensors["tail.k"][rows.pages[0][page], :, place] = bf16(k[at])
            if v is not None:
                pool.tensors["tail.v"][rows.pages[0][page], :, place] = bf16(v[at])
        parts.append(read(first, total, q=q, k=k, v=v))
        np.testing.assert_array_equal(np.concatenate(parts), whole, err_msg=f"{history} + {first} of {total}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_the_last_tokens_alone_attend_with_the_bits_they_have_among_all(
    shape: Shape, window: int | None, every_set: str
) -> None:
    for history, tokens in ((0, 5), (70, 128), (650, 9)):
        rows, slots, pages = lay_out([history], [max(0, history - window + 1) if window else 0])
        pool, rng = Pool(shape, slots, pages), np.random.default_rng(9)
        q = rng.standard_normal((tokens, shape.heads * shape.rep, shape.dk), np.float32)
        k = rng.standard_normal((tokens, shape.heads, shape.dk), np.float32)
        v = None if shape.latent else rng.standard_normal((tokens, shape.heads, shape.dv), np.float32)
        whole = pool.layer.prefill(rows.tables(), 0, q, k, v, window=window)
        for asked in (1, 4, 0):
            some = q[tokens - asked :]
            got = pool.layer.prefill(rows.tables(), 0, some, k, v, window=window)
            np.testing.assert_array_equal(got, whole[tokens - asked :], err_msg=f"{asked} of {tokens}")


def test_queries_without_keys_are_refused() -> None:
    rows, slots, pages = lay_out([70])
    q, k, v = (np.zeros((count, heads, 64), np.float32) for count, heads in ((3, 6), (2, 2), (2, 2)))
    with pytest.raises(ValueError, match="queries of 3 tokens, keys of 2"):
        Pool(Shape(), slots, pages).layer.prefill(rows.tables(), 0, q, k, v)


# ---- sealing and dequantising


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sealing_equals_mx_quantize_to_the_bit(shape: Shape, every_set: str) -> None:
    pool = Pool(shape, slots=3, pages=4)
    s, t = shape, pool.tensors
    t["tail.k"][1, :, :, 0] = 0  # constant channels: zero and not
    t["tail.k"][2, :, :, 1] = bf16(np.array([0.7]))
    t["tail.k"][2, :, :, 2] = bf16(np.abs(wide(t["tail.k"][2, :, :, 2])) + 100)
    native.seal([pool.layer] * 2, [1, 2], [2, 0], [3, 0])

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
