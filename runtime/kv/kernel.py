"""The native CPU kernel as the attention of a step: between MLX arrays and ``native.py``.

Owns one ``LayerHandle`` per layer and one ``StepTables`` per step and layer group. MLX's arrays and
the kernel share memory; a layer's queries are evaluated before the kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from . import native
from .appending import Appending
from .arrays import PoolArrays
from .cache import BatchQuantizedKVCache, Step
from .scheme import BLOCK, GROUP
from .spec import LayerSpec
from .table import AgentTable

MULTIPLE = 8
"""Head widths the kernel takes are multiples of this."""


def supported(arrays: PoolArrays) -> bool:
    """Whether the compiled kernel is there and fits every layer of this pool."""
    return (
        arrays.host
        and native.available()
        and all(
            layer.key_width % MULTIPLE == 0 and layer.value_width % MULTIPLE == 0
            for layer in arrays.spec.attention_layers
        )
    )


class NativeAttention:
    """Attention on the pool in place, for one pool."""

    def __init__(self, arrays: PoolArrays) -> None:
        self.arrays = arrays
        self.appending = Appending(arrays)
        self._handles: dict[tuple[int, int], native.LayerHandle] = {}
        self._any: dict[int, native.LayerHandle] = {}

    def handle(self, layer: LayerSpec, query_heads: int) -> native.LayerHandle:
        known = self._handles.get((layer.index, query_heads))
        if known is None:
            tensors = {
                name: self.arrays.view(array)
                for of in (self.arrays.blocks, self.arrays.pages)
                for name, array in of[layer.index].items()
            }
            known = self._any[layer.index] = self._handles[layer.index, query_heads] = native.LayerHandle(
                query_heads=query_heads,
                heads=layer.heads,
                key_width=layer.key_width,
                value_width=layer.value_width,
                tensors=tensors,
                latent=layer.kind == "latent",
            )
        return known

    def _tables(self, step: Step, layer: LayerSpec, new: int) -> native.StepTables:
        """The rows of this step for a layer's group, ``new`` tokens longer than before it."""
        group = step.group_of[layer.index]
        known = step.native_tables.get(group)
        if known is None:
            lengths = [past + new for past in step.past]
            window = step.spec.groups[group].window
            known = step.native_tables[group] = native.StepTables(
                [table.slots[group] for table in step.tables],
                [table.pages for table in step.tables],
                [table.sealed for table in step.tables],
                lengths,
                # What the first new token sees; a block before that may have been given back.
                None if window is None else [max(0, past + 1 - window) for past in step.past],
            )
        return known

    def decode(
        self,
        cache: BatchQuantizedKVCache,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """One new token a row, queries [rows, query heads, 1, width]; writes its KV into the tail."""
        layer, step = cache.layer, cache.step
        latent = layer.kind == "latent"
        mx.eval(queries, keys) if latent else mx.eval(queries, keys, values)
        out = self.handle(layer, queries.shape[1]).decode(
            self._tables(step, layer, 1),
            np.array(queries, copy=False)[:, :, 0],
            np.array(keys, copy=False)[:, :, 0],
            None if latent else np.array(values, copy=False)[:, :, 0],
            scale=scale,
            sinks=None if sinks is None else np.array(sinks.astype(mx.float32)),
        )
        return mx.array(out[:, :, None])

    def prefill(
        self,
        cache: BatchQuantizedKVCache,
        row: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Some new tokens of one row, queries [query heads, length, width]; writes nothing."""
        layer, step = cache.layer, cache.step
        latent = layer.kind == "latent"
        mx.eval(queries, keys) if latent else mx.eval(queries, keys, values)
        out = self.handle(layer, queries.shape[0]).prefill(
            self._tables(step, layer, 0),
            row,
            np.array(queries, copy=False).swapaxes(0, 1),
            np.array(keys, copy=False).swapaxes(0, 1),
            None if latent else np.array(values, copy=False).swapaxes(0, 1),
            window=layer.window,
            scale=scale,
            sinks=None if sinks is None else np.array(sinks.astype(mx.float32)),
        )
        return mx.array(out.swapaxes(0, 1))

    def attend(
        self,
        cache: BatchQuantizedKVCache,
        spans: Sequence[slice],
        scale: float,
        queries: native.F32,
        keys: native.F32,
        values: native.F32,
        out: native.F32,
        *,
        last_of: int | None = None,
    ) -> None:
        """A layer of a step whose arrays are in the host's memory, all rows' tokens one after the other.

        Args:
            spans: each row's tokens. A decode step's have one each, and their KV is written; otherwise it
                is left with the cache until the step is committed.
            queries, out: float32 [tokens, query heads, width]. keys, values: [tokens, heads, width].
            last_of: of so many rows, the last token alone attends, and of the others none: ``out`` is [rows,
                query heads, width] then.
        """
        layer, step = cache.layer, cache.step
        handle = self.handle(layer, queries.shape[1])
        if step.decoding:
            handle.decode(self._tables(step, layer, 1), queries, keys, values, out, scale=scale)
            return
        tables = self._tables(step, layer, 0)
        for row, span in enumerate(spans if last_of is None else spans[:last_of]):
            asked, to = (
                (span, span) if last_of is None else (slice(span.stop - 1, span.stop), slice(row, row + 1))
            )
            mine = queries[asked], keys[span], values[span], out[to]
            handle.prefill(tables, row, *mine, window=layer.window, scale=scale)
        # Rounded already, so the upper half of each float is its bfloat16.
        kept = (x.view(np.uint16)[..., 1::2].copy() for x in (keys, values))
        cache.pending = tuple([bits[span].swapaxes(0, 1) for span in spans] for bits in kept)

    def seal(self, table: AgentTable, page: int) -> None:
        """Quantise a page of every layer into its place in the table's block."""
        handles, slots = [], []
        for index, group in enumerate(table.groups):
            slot = table.block_slot(index, table.sealed)
            if slot >= 0:
                handles += [self._any[layer.index] for layer in group.layers]
                slots += [slot] * len(group.layers)
        quarter = table.sealed % BLOCK // GROUP
        native.seal(handles, [page] * len(slots), slots, [quarter] * len(slots))
