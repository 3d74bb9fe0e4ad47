"""``BatchQuantizedKVCache``: what a model sees of the pool during one forward.

A *view* over the rows (agents) of one step: nothing is padded, copied or merged when a row joins or
leaves. It follows mlx-lm's cache protocol (``offset``, ``make_mask``, ``update_and_fetch``); attention
itself is done by ``attention.py`` on the packed blocks. ``Step.commit`` puts the new tokens' KV into
pages and seals what left the tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .arrays import PoolArrays, to_bits
from .pool import BlockPool
from .scheme import BLOCK, GROUP
from .spec import LayerSpec, value_bits, value_group
from .state import StateView
from .table import ABSENT, AgentTable


class CausalMask(str):
    """The mask our caches hand to models: mlx-lm's "causal", with the window a model asked for."""

    window: int | None

    def __new__(cls, window: int | None) -> CausalMask:
        mask = super().__new__(cls, "causal")
        mask.window = window
        return mask


@dataclass(frozen=True)
class FlatIndex:
    """The blocks (or pages) of all rows as one flat list, for one layer group.

    Attributes:
        slots: [n] slot or page of each entry. rows: [n] whose it is.
        visible: [n, 1, 1, 256 or 64] which of its tokens the row's new token sees.
    """

    slots: mx.array
    rows: mx.array
    visible: mx.array

    @classmethod
    def build(cls, entries: Sequence[tuple[int, int, int, int]], width: int) -> FlatIndex | None:
        """From (slot, row, first visible, one past the last visible) of each entry."""
        if not entries:
            return None
        table = np.array(entries, np.int32)
        inside = np.arange(width)[None]
        visible = (inside >= table[:, 2:3]) & (inside < table[:, 3:4])
        return cls(mx.array(table[:, 0]), mx.array(table[:, 1]), mx.array(visible[:, None, None]))


class Step:
    """One forward over some rows.

    Args:
        tables: the rows' tables. Room for the new tokens is taken from ``pool`` here.
        counts: new tokens of each row; the forward's length is their maximum, shorter rows are padded
            on the right and the padding is dropped.
        decoding: each row's one new token continues what the row says. (A prompt's last token may be one as
            well; it is read as the tokens of a longer piece are, whose bits differ from a decode's.)
        native: the compiled CPU kernel's front, or None for MLX operations.
    """

    def __init__(
        self,
        arrays: PoolArrays,
        pool: BlockPool,
        tables: Sequence[AgentTable],
        counts: Sequence[int],
        *,
        decoding: bool,
        native: Any = None,
    ) -> None:
        self.arrays, self.pool, self.native = arrays, pool, native
        self.spec, self.scheme = arrays.spec, arrays.scheme
        self.tables, self.counts = list(tables), list(counts)
        self.length = max(counts)
        self.past = [table.tokens for table in self.tables]
        self.decoding = decoding
        self.native_tables: dict[int, Any] = {}
        self.indices: dict[int, tuple[FlatIndex | None, FlatIndex | None]] = {}
        for table in self.tables if self.decoding else ():
            if (table.tokens - table.sealed) == len(table.pages) * GROUP:
                table.pages.append(pool.pages.take())
        if len(set(self.past)) == 1:
            self.offset: int | mx.array = self.past[0]
        else:
            self.offset = mx.array(self.past, mx.int32)
        self.group_of = {
            layer.index: index for index, group in enumerate(self.spec.groups) for layer in group.layers
        }
        self.caches = [self._cache(layer) for layer in self.spec.layers]

    def _cache(self, layer: LayerSpec) -> Any:
        if layer.kind == "state":
            return StateView(self, layer)
        return BatchQuantizedKVCache(self, layer)

    def flat(self, layer: LayerSpec) -> tuple[FlatIndex | None, FlatIndex | None]:
        """Blocks and pages of all rows that this layer's group sees in a decode step."""
        group = self.group_of[layer.index]
        if group not in self.indices:
            window = self.spec.groups[group].window
            blocks: list[tuple[int, int, int, int]] = []
            pages: list[tuple[int, int, int, int]] = []
            for row, table in enumerate(self.tables):
                # In a decode step the new token's own KV is attended to apart, so `tokens` is past.
                start = 0 if window is None else max(0, table.tokens - window + 1)
                for block, slot in enumerate(table.slots[group]):
                    base = block * BLOCK
                    if slot != ABSENT and base + BLOCK > start:
                        blocks.append((slot, row, start - base, min(BLOCK, table.sealed - base)))
                for index, page in enumerate(table.pages):
                    base = table.sealed + index * GROUP
                    if base + GROUP > start and table.tokens > base:
                        pages.append((page, row, start - base, min(GROUP, table.tokens - base)))
            self.indices[group] = FlatIndex.build(blocks, BLOCK), FlatIndex.build(pages, GROUP)
        return self.indices[group]

    def commit(self) -> None:
        """Put the new tokens' KV into the pool and seal what left the tails.

        Call once, after the forward's outputs were evaluated. In a decode step the native kernel has
        written the tokens already. A row whose KV cannot be put there is that row's failure alone, for the
        step cannot be taken again: others have moved on. It is noted in the table (``failed``).
        """
        pending = [c for c in self.caches if isinstance(c, BatchQuantizedKVCache) and c.pending is not None]
        if self.decoding:
            self._write_decoded(pending)
        for row, table in enumerate(self.tables):
            try:
                if self.decoding:
                    self._grow(table)
                else:
                    self._commit_prefill(row, pending)
            except Exception as error:
                table.failed = error
        self.arrays.evaluate()
        for cache in self.caches:
            if not isinstance(cache, BatchQuantizedKVCache):
                cache.commit()
        # The views and the step refer to each other; arrays should not wait for the cycle collector.
        for cache in pending:
            cache.pending = None
        self.caches.clear()

    def _write_decoded(self, pending: Sequence[BatchQuantizedKVCache]) -> None:
        """Put the new token of every row into its page."""
        places = [table.page_of(table.tokens) for table in self.tables]
        pages = np.array([page for page, _ in places])
        offsets = np.array([offset for _, offset in places])
        mx.eval([bits for cache in pending for bits in cache.pending or ()])
        for cache in pending:
            arrays = self.arrays.pages[cache.layer.index]
            for name, bits in zip(("tail.k", "tail.v"), cache.pending or (), strict=False):
                # [rows, heads, 1, width] -> [rows, heads, width], the order advanced indexing gives.
                if self.arrays.host:
                    view = self.arrays.view(arrays[name])
                    view[pages, :, offsets, :] = np.array(bits, copy=False)[:, :, 0]
                else:
                    for row, (page, offset) in enumerate(places):
                        arrays[name][page, :, offset, :] = bits[row, :, 0]

    def _grow(self, table: AgentTable) -> None:
        """The new token's KV is in its page: count it, and seal what left the tail."""
        table.tokens += 1
        while table.sealed < self.scheme.sealed(table.tokens):
            self._seal_page(table)

    def _seal_page(self, table: AgentTable) -> None:
        """Quantise the oldest page into the block it belongs to."""
        page = table.pages[0]
        self._open_block(table, table.sealed)
        if self.native is not None:
            self.native.seal(table, page)
        else:
            self._write_groups(table, table.sealed, 1, self._quantised_page(page))
        table.pages.pop(0)
        self.pool.pages.release(page)
        table.sealed += GROUP

    def _quantised_page(self, page: int) -> dict[int, dict[str, mx.array]]:
        groups = {}
        for layer in self.spec.attention_layers:
            arrays = self.arrays.pages[layer.index]
            tail = [arrays[name][page][:, None] for name in ("tail.k", "tail.v") if name in arrays]
            groups[layer.index] = self._quantise(layer, tail)
        return groups

    def _open_block(self, table: AgentTable, position: int) -> None:
        """Take a slot for the block of ``position`` where the table has none yet.

        A block that others may read (a fork holds the same part-filled one) is copied first.
        """
        block = position // BLOCK
        for index, slots in enumerate(table.slots):
            allocator = self.pool.groups[index]
            if len(slots) == block:
                slots.append(allocator.take())
            elif slots[block] != ABSENT and allocator.refs(slots[block]) > 1:
                mine = allocator.take()
                self.arrays.copy_block(index, slots[block], mine)
                allocator.release(slots[block])
                slots[block] = mine
            elif slots[block] != ABSENT:
                allocator.unname(slots[block])

    def _quantise(self, layer: LayerSpec, tail: Sequence[mx.array]) -> dict[str, mx.array]:
        """Seal groups of one layer. ``tail``: keys (and values) as bits, [heads, groups, 64, width].

        Returns the pool's tensors for them, with the groups' axis second: [heads, groups, ...].
        """
        scheme = self.arrays.layer_scheme(layer)
        out: dict[str, mx.array] = {}
        keys = tail[0].view(mx.bfloat16)
        if scheme.key_bits is None:
            out["k.raw"] = tail[0]
        else:
            packed, scales, biases = mx.quantize(
                keys.swapaxes(-1, -2), group_size=GROUP, bits=scheme.key_bits
            )
            out |= {"k.packed": packed, "k.scales": to_bits(scales), "k.biases": to_bits(biases)}
        if len(tail) > 1:
            bits = value_bits(layer, scheme)
            if bits is None:
                out["v.raw"] = tail[1]
            else:
                group = value_group(layer.value_width, scheme.value_group)
                values = tail[1].view(mx.bfloat16)
                packed, scales, biases = mx.quantize(values, group_size=group, bits=bits)
                out |= {"v.packed": packed, "v.scales": to_bits(scales), "v.biases": to_bits(biases)}
        return out

    def _write_groups(
        self, table: AgentTable, position: int, count: int, groups: dict[int, dict[str, mx.array]]
    ) -> None:
        """Write ``count`` sealed groups, the first at ``position``, into the table's blocks."""
        mx.eval([tensor for tensors in groups.values() for tensor in tensors.values()])
        for index, tensors in groups.items():
            group = self.group_of[index]
            for name, evaluated in tensors.items():
                target, tensor = self.arrays.blocks[index][name], self.arrays.sliceable(evaluated)
                for g in range(count):
                    at = position + g * GROUP
                    slot = table.block_slot(group, at)
                    if slot == ABSENT:
                        continue
                    quarter = at % BLOCK // GROUP
                    along_time = target.shape[-1] // (BLOCK // GROUP)  # width of a group along time
                    span = slice(quarter * along_time, (quarter + 1) * along_time)
                    if name in ("k.packed", "k.scales", "k.biases"):
                        self.arrays.write(target, (slot, slice(None), slice(None), span), tensor[:, g])
                    else:
                        rows = slice(quarter * GROUP, (quarter + 1) * GROUP)
                        self.arrays.write(target, (slot, slice(None), rows), tensor[:, g])

    def _append(self, table: AgentTable, sources: Any, count: int, after: int) -> None:
        """Put ``count`` new tokens into pages, and seal what is before ``after``."""
        start, stop = table.tokens, table.tokens + count
        while table.tokens < stop:
            # The oldest page goes before a new one is taken: the tail is never longer than at rest.
            while table.sealed < after and table.tokens - table.sealed >= GROUP:
                self._seal_page(table)
            held = table.tokens - table.sealed
            if held == len(table.pages) * GROUP:
                table.pages.append(self.pool.pages.take())
            page, offset = table.page_of(table.tokens)
            some = min(stop - table.tokens, GROUP - offset)
            self.native.appending.append(sources, table.tokens - start, some, page, offset)
            table.tokens += some
        while table.sealed < after:
            self._seal_page(table)

    def _commit_prefill(self, row: int, pending: Sequence[BatchQuantizedKVCache]) -> None:
        table, count = self.tables[row], self.counts[row]
        total = table.tokens + count
        # A table that was cut back to a sealed group has more sealed than its length asks for.
        after = max(table.sealed, self.scheme.sealed(total))
        if self.native is not None:
            bits = [x[row] for cache in pending for x in cache.pending or ()]
            if bits and isinstance(bits[0], np.ndarray):  # the forward was the kernel's
                self._append(table, self.native.appending.sources(bits), count, after)
                return
            while table.sealed < after <= table.tokens:  # all of it is in pages, as in a decode step
                self._seal_page(table)
        before = table.sealed
        sealing = (after - before) // GROUP
        groups: dict[int, dict[str, mx.array]] = {}
        rest: dict[int, list[Any]] = {}
        # What is sealed now begins with the pages' content; otherwise only the new tokens matter.
        held = table.tokens - before if sealing else 0
        rest_from = after if sealing else table.tokens
        for cache in pending:
            index = cache.layer.index
            arrays = self.arrays.pages[index]
            tail = []
            for name, bits in zip(("tail.k", "tail.v"), cache.pending or (), strict=False):
                new = bits[row][:, :count]
                if held:
                    old = self.arrays.take(arrays[name], mx.array(table.pages))
                    old = old.swapaxes(0, 1).reshape(new.shape[0], -1, new.shape[-1])[:, :held]
                    new = mx.concatenate([old, new], axis=1)
                tail.append(new)
            if sealing:
                groups[index] = self._quantise(
                    cache.layer,
                    [t[:, : sealing * GROUP].reshape(t.shape[0], sealing, GROUP, t.shape[-1]) for t in tail],
                )
            rest[index] = [t[:, sealing * GROUP :] for t in tail]
        mx.eval(groups, list(rest.values()))
        if sealing:
            for position in range(before, after, GROUP):
                self._open_block(table, position)
            self._write_groups(table, before, sealing, groups)
        # Pages that stay keep their content: a page's positions do not change. New ones are written.
        for page in table.pages[:sealing]:
            self.pool.pages.release(page)
        table.pages = table.pages[sealing:]
        first_new = max(table.tokens, after)
        while len(table.pages) * GROUP < total - after:
            table.pages.append(self.pool.pages.take())
        table.sealed, table.tokens = after, total
        for index, tails in rest.items():
            for name, evaluated in zip(("tail.k", "tail.v"), tails, strict=False):
                target, tensor = self.arrays.pages[index][name], self.arrays.sliceable(evaluated)
                position = first_new
                while position < total:
                    page, offset = table.page_of(position)
                    end = min(total, position + GROUP - offset)
                    self.arrays.write(
                        target,
                        (page, slice(None), slice(offset, offset + end - position)),
                        tensor[:, position - rest_from : end - rest_from],
                    )
                    position = end
        self.arrays.evaluate()


class BatchQuantizedKVCache:
    """One attention layer's cache during one step, as mlx-lm models use it.

    Attributes:
        offset: tokens before this step; an int, or an array [rows] when the rows differ.
        pending: bits (bfloat16 as uint16) of the step's keys and values, for each row [heads, length,
            width], in MLX's or NumPy's arrays; None when the native kernel has written them.
    """

    def __init__(self, step: Step, layer: LayerSpec) -> None:
        self.step, self.layer = step, layer
        self.offset = step.offset
        self.pending: tuple[Any, ...] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take the step's keys and values, [rows, heads, length, width]; give back what will be kept.

        That is the same values rounded to bfloat16, so that a token attends to its own KV as later
        tokens will.
        """
        if self.step.decoding and self.step.native is not None:
            return keys, values  # the kernel rounds and writes them
        kept = [keys.astype(mx.bfloat16)]
        if self.layer.kind != "latent":
            kept.append(values.astype(mx.bfloat16))
        self.pending = tuple(x.view(mx.uint16) for x in kept)
        fetched = [x.astype(keys.dtype) for x in kept]
        return fetched[0], fetched[1] if len(fetched) > 1 else values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if N == 1 and not return_array:
            return None
        return CausalMask(window_size)

    def size(self) -> int:
        return max(self.step.past)

    def empty(self) -> bool:
        return not any(self.step.past)

    def is_trimmable(self) -> bool:
        return False
