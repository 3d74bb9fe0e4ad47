"""Saving: what a step has made is named, kept in one copy, and written to disk.

Owns the way of full blocks and of tails to the store. A block is named when it is full and written once; an
agent's tail (the part-filled block and the pages) is a snapshot, written when somebody asks for it.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store.hashing import block_hash, chain_at
from ..store.layout import OPENING, Tail
from .resident import Key, Resident
from .scheme import BLOCK, GROUP
from .table import ABSENT, AgentTable


class Saver:
    """Keeps what tables hold."""

    def __init__(self, kv: Resident) -> None:
        self._kv = kv
        self._saving: dict[Key, Future[Any]] = {}
        self._putting: set[bytes] = set()

    def after_step(self, table: AgentTable) -> None:
        """Name and save the blocks that became full, then give back those behind the window.

        Raises what went wrong if the step could not put its KV there.
        """
        if table.failed is not None:
            raise table.failed
        while (len(table.chain) + 1) * BLOCK <= table.sealed:
            block = len(table.chain)
            parent = table.chain[-1] if table.chain else self._kv.root(table.salt)
            ids = table.ids[block * BLOCK : (block + 1) * BLOCK]
            name = block_hash(parent, ids)
            table.chain.append(name)
            mine = False
            for index, slots in enumerate(table.slots):
                kept = self._kv.one_copy(index, slots[block], name)
                mine, slots[block] = mine or kept == slots[block], kept
            if mine and not self._adopt(table, block):
                self._put(table, block)
        table.leave_window(self._kv.pool)

    def _adopt(self, table: AgentTable, block: int) -> bool:
        """If a new block is on disk already, take the disk's bits: a later restore will give those.

        Rare (an agent whose tail was lost prefills into a block that was saved), so it waits.
        """
        name = table.chain[block]
        if self._kv.store is None or not self._kv.on_disk(name):
            return False
        staged = [self._kv.arrays.empty_block(index) for index in range(len(table.slots))]
        result = self._kv.store.load_block(name, [tensor for group in staged for tensor in group]).result()
        if not result.ok:
            return False
        for index, slots in enumerate(table.slots):
            self._kv.arrays.put_block(index, slots[block], staged[index])
        self._kv.count("blocks_adopted")
        return True

    def _put(self, table: AgentTable, block: int) -> None:
        """Save a full block, unless it is on disk or on its way, or has left a window unsaved."""
        name = table.chain[block]
        held = [slots[block] for slots in table.slots]
        if self._kv.store is None or self._kv.on_disk(name) or name in self._putting or ABSENT in held:
            return
        buffers = [b for index, slot in enumerate(held) for b in self._kv.arrays.block_buffers(index, slot)]
        parent = table.chain[block - 1] if block else self._kv.root(table.salt)
        ids = table.ids[block * BLOCK : (block + 1) * BLOCK]
        self._putting.add(name)
        self._kv.unreadable.discard(name)
        self._kv.count("blocks_written")
        future = self._kv.store.put_block(
            name, parent, ids, [b.copy() for b in buffers], agent=table.agent, salt=table.salt
        )
        future.add_done_callback(lambda _: self._putting.discard(name))

    def save(self, table: AgentTable) -> Future[Any] | None:
        """Save the part-filled block and the pages, as a snapshot of now. None if nothing is new."""
        if self._kv.store is None or table.saved == table.tokens or not table.tokens:
            return None
        if table.opening and table.saved == table.tokens - table.early:
            return None  # an opening is not worth another file: it takes longer to write than to read again
        if table.sealed != self._kv.scheme.sealed(table.tokens):
            return None  # cut back, and stopped before it had grown again: its blocks are enough
        arrays: dict[str, NDArray[Any]] = {}
        groups = table.sealed % BLOCK // GROUP
        if groups:
            for index, group in enumerate(self._kv.spec.groups):
                buffers = self._kv.arrays.block_buffers(index, table.slots[index][-1])
                for layout, tensor in zip(group.tensors(self._kv.scheme), buffers, strict=True):
                    arrays[layout.name] = leading_groups(layout.name, tensor, groups).copy()
        for layer in self._kv.spec.attention_layers:
            for name, array in self._kv.arrays.pages[layer.index].items():
                if table.pages:
                    source = self._kv.arrays.view(array) if self._kv.arrays.host else np.array(array)
                    arrays[f"layers.{layer.index}.{name}"] = source[table.pages]
        for index, state in table.state.items():
            arrays |= {f"layers.{index}.state.{part}": value for part, value in state.export().items()}
        table.saved = table.tokens
        for block in range(len(table.chain)):
            self._put(table, block)  # what the disk refused, or has let go since
        tail = Tail(
            tokens=table.tokens,
            chain=chain_at(table.ids[: table.tokens], self._kv.root(table.salt)),
            blocks=tuple(table.chain),
            arrays=arrays,
            note={OPENING: table.ids[-table.opening :].tolist()} if table.opening else {},
        )
        self._kv.count("tails_written")
        self._kv.unreadable.discard((table.agent, table.salt, table.tokens))
        key = (table.agent, table.salt)
        future = self._saving[key] = self._kv.store.put_tail(table.agent, tail, salt=table.salt, copy=False)
        future.add_done_callback(partial(_note_unsaved, table, table.tokens))
        future.add_done_callback(partial(self._one_saved, key))
        return future

    def _one_saved(self, key: Key, future: Future[Any]) -> None:
        if self._saving.get(key) is future:
            del self._saving[key]
        self._kv.saved()

    def being_saved(self, key: Key) -> bool:
        """Whether what was given back of this agent will be found on disk in a moment."""
        return key not in self._kv.tables and key in self._saving


def _note_unsaved(table: AgentTable, tokens: int, future: Future[Any]) -> None:
    """A tail the disk refused is saved again at the next occasion."""
    if not future.result().ok and table.saved == tokens:
        table.saved = -1


def leading_groups(name: str, tensor: NDArray[Any], groups: int) -> NDArray[Any]:
    """The part of a block's tensor that the first ``groups`` sealed groups fill (a view)."""
    if name.endswith(("k.packed", "k.scales", "k.biases")):
        return tensor[..., : tensor.shape[-1] // (BLOCK // GROUP) * groups]
    return tensor[:, : groups * GROUP]
