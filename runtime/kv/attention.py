"""Attention over the pool: one interface, several ways to do it.

``install`` rebinds the module-level name ``scaled_dot_product_attention`` in the modules a model's
layers come from to a dispatcher: our caches are attended here, every other cache passes through to
mlx-lm. Nothing else of a model is patched.

* ``decode_portable``: MLX operations on the packed blocks of all rows as one flat list, so the number
  of operations does not grow with the rows and nothing is padded.
* ``prefill``: one layer of one row at a time is dequantised and given to MLX's fused attention.
* the native CPU kernel (``native.py``) reads the pool in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from offbook.bus.errors import ModelError

from .arrays import PoolArrays, from_bits
from .cache import BatchQuantizedKVCache, CausalMask, FlatIndex, Step
from .scheme import BLOCK, GROUP
from .spec import LayerSpec, value_bits, value_group
from .table import AgentTable

NAME = "scaled_dot_product_attention"


def install(model: nn.Module) -> list[str]:
    """Route the model's attention through the dispatcher. Returns the modules that were rebound.

    Idempotent. Raises:
        ModelError: no module of the model calls the shared attention function.
    """
    rebound = []
    for name in sorted({type(module).__module__ for _, module in model.named_modules()}):
        module = sys.modules[name]
        original = getattr(module, NAME, None)
        if original is None or not callable(original):
            continue
        if not getattr(original, "offbook", False):
            setattr(module, NAME, dispatcher(original))
        rebound.append(name)
    if not rebound:
        raise ModelError(
            f"{type(model).__module__}: no layer of this model calls mlx-lm's shared {NAME}, "
            "so its attention cannot read the block pool; use another architecture"
        )
    return rebound


def dispatcher(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A function in place of ``original`` that attends to our caches and passes others through."""

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        **extra: Any,
    ) -> mx.array:
        attend = getattr(cache, "attend", None)
        if attend is not None:  # a recording cache of the self-check
            return attend(queries, keys, values, scale, mask, **extra)  # type: ignore[no-any-return]
        if isinstance(cache, BatchQuantizedKVCache):
            if mask is not None and not isinstance(mask, CausalMask):
                raise ModelError(
                    f"layer {cache.layer.index} attends with a mask of its own ({type(mask).__name__}); "
                    "only causal and sliding-window attention can be served"
                )
            return attend_step(cache, queries, keys, values, scale, **extra)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **extra)

    scaled_dot_product_attention.offbook = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def attend_step(
    cache: BatchQuantizedKVCache,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of one layer in one step: queries [rows, query heads, length, width]."""
    step = cache.step
    if step.decoding:
        if step.native is not None:
            return step.native.decode(cache, queries, keys, values, scale, sinks)  # type: ignore[no-any-return]
        return decode_portable(step, cache.layer, queries, keys, values, scale, sinks)
    if step.native is not None:  # 5 to 15 times faster than below at any length (benchmarks/native_kernel.py)
        native = [
            step.native.prefill(cache, row, queries[row], keys[row], values[row], scale, sinks)
            for row in range(len(step.tables))
        ]
        return mx.stack(native)
    group = step.group_of[cache.layer.index]
    rows = [
        prefill(
            step.arrays,
            cache.layer,
            table,
            group,
            queries[row : row + 1],
            keys[row : row + 1],
            values[row : row + 1],
            scale,
            sinks,
        )
        for row, table in enumerate(step.tables)
    ]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)


# ---- decode, in MLX operations


def decode_portable(
    step: Step,
    layer: LayerSpec,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """One new token per row against the packed blocks, the pages and itself.

    Softmax is assembled from three parts (blocks, pages, the token itself) by the usual running
    maximum, per row, with scatter operations.

    A block that several rows share is listed once for each. Listing it once with all their queries gains
    nothing on the CPU (MLX unpacks a block anew for each query row: a ratio of 1.02 by
    ``benchmarks/shared_prefix.py``), and where the number of queries chooses MLX's product, a row would
    have other bits beside sharers than alone.
    """
    arrays = step.arrays
    rows, query_heads, _, width = queries.shape
    heads, repeats = layer.heads, query_heads // layer.heads
    q = (queries * scale).reshape(rows, heads, repeats, width)
    latent = layer.kind == "latent"
    own_values = keys[..., : layer.value_width] if latent else values
    own = mx.sum(q * keys.reshape(rows, heads, 1, width), axis=-1)  # [rows, heads, repeats]
    top = own if sinks is None else mx.maximum(own, sinks.reshape(1, heads, repeats).astype(own.dtype))
    parts: list[tuple[FlatIndex, mx.array, bool]] = []
    for index, packed in zip(step.flat(layer), (True, False), strict=True):
        if index is not None:
            scores = block_scores(arrays, layer, index, q) if packed else page_scores(arrays, layer, index, q)
            scores = mx.where(index.visible, scores, -mx.inf)
            top = top.at[index.rows].maximum(mx.max(scores, axis=-1))
            parts.append((index, scores, packed))
    weight = mx.exp(own - top)
    total = weight
    if sinks is not None:
        total = total + mx.exp(sinks.reshape(1, heads, repeats).astype(own.dtype) - top)
    out = weight[..., None] * own_values.reshape(rows, heads, 1, -1)
    for index, scores, packed in parts:
        p = mx.exp(scores - top[index.rows][..., None])
        total = total.at[index.rows].add(mx.sum(p, axis=-1))
        product = block_outputs if packed else page_outputs
        out = out.at[index.rows].add(product(arrays, layer, index, p))
    return (out / total[..., None]).reshape(rows, query_heads, 1, -1)


def block_scores(arrays: PoolArrays, layer: LayerSpec, index: FlatIndex, q: mx.array) -> mx.array:
    """q·K of every block: [blocks, heads, repeats, 256]."""
    pool, bits = arrays.blocks[layer.index], arrays.layer_scheme(layer).key_bits
    mine = q[index.rows]
    if bits is None:
        keys = from_bits(arrays.take(pool["k.raw"], index.slots)).astype(q.dtype)
        return mine @ keys.swapaxes(-1, -2)
    packed, scales, biases = (arrays.take(pool[f"k.{part}"], index.slots) for part in PARTS)
    return mx.quantized_matmul(
        mine,
        packed,
        from_bits(scales),
        from_bits(biases),
        transpose=False,
        group_size=GROUP,
        bits=bits,
    )


def block_outputs(arrays: PoolArrays, layer: LayerSpec, index: FlatIndex, p: mx.array) -> mx.array:
    """p·V of every block: [blocks, heads, repeats, value width]."""
    pool, scheme = arrays.blocks[layer.index], arrays.layer_scheme(layer)
    if layer.kind == "latent":
        width = layer.value_width
        if scheme.key_bits is None:
            return p @ from_bits(arrays.take(pool["k.raw"], index.slots))[..., :width].astype(p.dtype)
        packed, scales, biases = (arrays.take(pool[f"k.{part}"], index.slots)[:, :, :width] for part in PARTS)
        transpose, bits = True, scheme.key_bits
        group: int | None = GROUP
    else:
        value = value_bits(layer, scheme)
        if value is None:
            return p @ from_bits(arrays.take(pool["v.raw"], index.slots)).astype(p.dtype)
        packed, scales, biases = (arrays.take(pool[f"v.{part}"], index.slots) for part in PARTS)
        transpose, bits = False, value
        group = value_group(layer.value_width, scheme.value_group)
    return mx.quantized_matmul(
        p,
        packed,
        from_bits(scales),
        from_bits(biases),
        transpose=transpose,
        group_size=group,
        bits=bits,
    )


def page_scores(arrays: PoolArrays, layer: LayerSpec, index: FlatIndex, q: mx.array) -> mx.array:
    keys = from_bits(arrays.take(arrays.pages[layer.index]["tail.k"], index.slots)).astype(q.dtype)
    return q[index.rows] @ keys.swapaxes(-1, -2)


def page_outputs(arrays: PoolArrays, layer: LayerSpec, index: FlatIndex, p: mx.array) -> mx.array:
    pages = arrays.pages[layer.index]
    if layer.kind == "latent":
        return p @ from_bits(arrays.take(pages["tail.k"], index.slots))[..., : layer.value_width].astype(
            p.dtype
        )
    return p @ from_bits(arrays.take(pages["tail.v"], index.slots)).astype(p.dtype)


PARTS = ("packed", "scales", "biases")

# ---- prefill


def prefill(
    arrays: PoolArrays,
    layer: LayerSpec,
    table: AgentTable,
    group: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """A chunk of one row, queries [1, query heads, length, width], against its history and itself.

    One layer's history is dequantised at a time, so the extra memory is one layer's, and MLX's fused
    attention does the rest.
    """
    start, past_keys, past_values = history(arrays, layer, table, group, queries.dtype)
    if past_keys is not None:
        keys = mx.concatenate([past_keys, keys], axis=2)
        if past_values is not None:
            values = mx.concatenate([past_values, values], axis=2)
    if layer.kind == "latent":
        values = keys[..., : layer.value_width]
    length, total = queries.shape[2], keys.shape[2]
    mask: str | mx.array = "causal"
    if layer.window is not None and total > layer.window:
        at = np.arange(total)[None] + start
        query = np.arange(table.tokens, table.tokens + length)[:, None]
        mask = mx.array((at <= query) & (at > query - layer.window))
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def history(
    arrays: PoolArrays, layer: LayerSpec, table: AgentTable, group: int, dtype: Any
) -> tuple[int, mx.array | None, mx.array | None]:
    """The visible past of one row in one layer, dequantised.

    Returns the position it starts at, keys and values [1, heads, tokens, width] (values None for a
    latent layer, both None without a past).
    """
    if not table.tokens:
        return 0, None, None
    first = 0 if layer.window is None else max(0, table.tokens - layer.window + 1) // BLOCK
    slots = table.slots[group][first:]
    start = first * BLOCK
    keys, values = [], []
    if slots:
        index = mx.array(slots)
        k, v = dequantise_blocks(arrays, layer, index, dtype)
        keys.append(k[:, : table.sealed - start])
        if v is not None:
            values.append(v[:, : table.sealed - start])
    else:
        start = table.sealed
    if table.pages:
        pages = arrays.pages[layer.index]
        held = table.tokens - table.sealed
        index = mx.array(table.pages)
        for name, out in (("tail.k", keys), ("tail.v", values)):
            if name in pages:
                page = from_bits(arrays.take(pages[name], index)).astype(dtype)
                out.append(page.swapaxes(0, 1).reshape(layer.heads, -1, page.shape[-1])[:, :held])
    join = [mx.concatenate(part, axis=1)[None] if part else None for part in (keys, values)]
    return start, join[0], join[1]


def dequantise_blocks(
    arrays: PoolArrays, layer: LayerSpec, slots: mx.array, dtype: Any
) -> tuple[mx.array, mx.array | None]:
    """Blocks of one layer as [heads, blocks * 256, width] keys and values.

    Scales are widened first, so that a dequantised number is the same as in the packed products.
    """
    pool, scheme = arrays.blocks[layer.index], arrays.layer_scheme(layer)

    def unpack(name: str, bits: int, group: int) -> mx.array:
        packed, scales, biases = (arrays.take(pool[f"{name}.{part}"], slots) for part in PARTS)
        scales, biases = (from_bits(x).astype(dtype) for x in (scales, biases))
        return mx.dequantize(packed, scales, biases, group_size=group, bits=bits)

    def flat(x: mx.array) -> mx.array:
        return x.swapaxes(0, 1).reshape(layer.heads, -1, x.shape[-1])

    if scheme.key_bits is None:
        keys = flat(from_bits(arrays.take(pool["k.raw"], slots)).astype(dtype))
    else:
        keys = flat(unpack("k", scheme.key_bits, GROUP).swapaxes(-1, -2))
    if layer.kind == "latent":
        return keys, None
    bits, group = value_bits(layer, scheme), value_group(layer.value_width, scheme.value_group)
    if bits is None or group is None:
        return keys, flat(from_bits(arrays.take(pool["v.raw"], slots)).astype(dtype))
    return keys, flat(unpack("v", bits, group))
