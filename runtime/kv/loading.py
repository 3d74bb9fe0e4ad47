"""Loading: carrying out a plan, and what is under way until it is done.

Owns the way of blocks and tails from the store into slots and pages. Loads complete on I/O threads; what they
brought is finished on the step thread. The pool's slots are the destinations themselves on the CPU, and
staging buffers elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store.blocks import Destinations
from ..store.layout import OPENING, Tail
from ..store.reading import Places
from ..store.results import Failed
from .planning import Plan
from .resident import Key, Resident, Store
from .saving import leading_groups
from .scheme import BLOCK, GROUP
from .state import RecurrentState
from .table import ABSENT, AgentTable, Ids
from .unpacking import Unpacking

log = logging.getLogger("offbook.engine")

_COUNT_LOCK = threading.Lock()


@dataclass
class Loading:
    """Loads under way for one table.

    Attributes:
        priority: of its reads in the store; 0 once a turn waits for them.
        unpacked: the tail is in its place already.
        cancelled: nobody wants it any more. It ends when what is being read has been read.
    """

    key: Key
    table: AgentTable
    plan: Plan
    priority: int = 0
    cancelled: bool = False
    reads: list[Future[Any]] = field(default_factory=list)
    waiting: int = 0
    failed: str | None = None
    unreadable: list[Any] = field(default_factory=list)
    staged: list[tuple[int, int, list[NDArray[Any]]]] = field(default_factory=list)
    tail: Tail | None = None
    unpacked: bool = False
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.uint32))
    started: float = field(default_factory=time.monotonic)

    def serves(self, ids: Ids) -> bool:
        """Whether a turn that asks for ``ids`` can have what this load, begun ahead of it, brings."""
        known, tokens = self.ids, self.plan.tokens
        return not self.cancelled and tokens < len(ids) and np.array_equal(known[:tokens], ids[:tokens])


class Reads:
    """What is to be read from a store for one table.

    Attributes:
        what: as it is called when it cannot be read (``Resident.unreadable``), in the order of ``begin``.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._blocks: list[tuple[bytes, Destinations]] = []
        self._tail: tuple[str, str, int] | None = None

    def block(self, name: bytes, dests: Destinations) -> None:
        self._blocks.append((name, dests))

    def tail(self, agent: str, salt: str, tokens: int) -> None:
        self._tail = (agent, salt, tokens)

    @property
    def what(self) -> list[Any]:
        return [*([self._tail] if self._tail is not None else ()), *(name for name, _ in self._blocks)]

    def begin(self, priority: int) -> list[Future[Any]]:
        """Start reading: the tail first, which takes the interpreter longest; blocks are read beside it."""
        if self._store is None:
            return []
        begun: list[Future[Any]] = []
        try:
            if self._tail is not None:
                agent, salt, tokens = self._tail
                begun.append(self._store.load_tail(agent, salt, at=tokens, priority=priority))
            begun += self._store.load_blocks(self._blocks, priority=priority)
        except Exception as error:
            log.exception("a load could not be begun")
            failed: Future[Any] = Future()
            failed.set_result(Failed(repr(error)))
            begun += [failed] * (len(self.what) - len(begun))
        return begun


class Loader:
    """Brings into tables what plans found. ``loaded`` is called on an I/O thread with the last load's end."""

    def __init__(self, kv: Resident, loaded: Callable[[Loading], None]) -> None:
        self._kv = kv
        self._loaded = loaded
        self._unpacking = Unpacking(kv.spec, kv.scheme, kv.arrays)
        self._group_sizes = [len(group.tensors(kv.scheme)) for group in kv.spec.groups]

    def start(self, key: Key, plan: Plan, *, priority: int = 0) -> AgentTable | Loading:
        """Carry out a plan. The caller has made sure that the pool has room.

        Returns the table, or a ``Loading`` to be given to ``finish`` once its loads are done.
        """
        table = self._kv.tables.get(key)
        if plan.source == "hot" and table is not None:
            if plan.tokens < table.tokens:
                table.truncate(plan.tokens, self._kv.pool)
            return table
        if table is not None:
            self._kv.drop(key)
        table = AgentTable(key[0], key[1], self._kv.spec.groups, self._kv.scheme)
        self._kv.tables[key] = table
        if plan.source == "clone" and plan.origin is not None:
            self._clone(plan.origin, table)
            if plan.tokens < table.tokens:  # it goes on otherwise than an opening that was read ahead
                table.truncate(plan.tokens, self._kv.pool)
        if plan.source != "warm":
            return table
        loading = Loading(key, table, plan, priority)
        self._kv.loading[key] = loading
        try:
            reads = self._destinations(loading)
        except BaseException:
            self.discard(loading)
            raise
        loading.waiting = len(reads.what) + 1
        loading.reads = reads.begin(priority)
        for what, future in zip(reads.what, loading.reads, strict=True):
            future.add_done_callback(partial(self._one_loaded, loading, what))
        self._one_loaded(loading, None, None)
        return loading

    def discard(self, loading: Loading) -> None:
        """Give up a load of which nothing is under way."""
        self._kv.loading.pop(loading.key, None)
        if self._kv.tables.get(loading.key) is loading.table:
            self._kv.drop(loading.key)

    def _clone(self, origin: AgentTable, table: AgentTable) -> None:
        """A fork: full blocks are shared, the part-filled one and the pages are copied."""
        full = len(origin.chain)
        for index, slots in enumerate(origin.slots):
            allocator = self._kv.pool.groups[index]
            for block, slot in enumerate(slots):
                if slot == ABSENT:
                    table.slots[index].append(ABSENT)
                elif block < full:
                    allocator.retain(slot)
                    table.slots[index].append(slot)
                else:
                    mine = allocator.take()
                    self._kv.arrays.copy_block(index, slot, mine)
                    table.slots[index].append(mine)
        for page in origin.pages:
            mine = self._kv.pool.pages.take()
            self._kv.arrays.copy_page(page, mine)
            table.pages.append(mine)
        table.ids, table.tokens, table.sealed = origin.ids[: origin.tokens], origin.tokens, origin.sealed
        table.chain, table.state, table.early = list(origin.chain), dict(origin.state), origin.early

    def _destinations(self, loading: Loading) -> Reads:
        """Take the slots and pages of a plan. Returns what is to be read into them."""
        table, plan = loading.table, loading.plan
        tokens = plan.tokens + len(plan.over)
        sealed = self._kv.scheme.sealed(tokens) if plan.tail else tokens
        store, arrays = self._kv.store, self._kv.arrays
        reads = Reads(store)
        as_places = store is not None and store.takes_places and arrays.host
        for block, name in enumerate(plan.names):
            dests: list[NDArray[Any] | None] = []
            places: list[NDArray[np.int64]] = []
            wanted = False
            for index, group in enumerate(self._kv.spec.groups):
                allocator = self._kv.pool.groups[index]
                size = self._group_sizes[index]
                slot = ABSENT if block < group.first_block(plan.tokens) else allocator.find(name)
                if slot is not None:
                    if slot != ABSENT:
                        allocator.retain(slot)
                    if as_places:
                        places.append(np.zeros(size, np.int64))
                    else:
                        dests += [None] * size
                else:
                    slot = allocator.take()
                    wanted = True
                    if as_places:
                        places.append(arrays.block_addresses(index, slot))
                    elif arrays.host:
                        dests += arrays.block_buffers(index, slot)
                    else:
                        staging = arrays.empty_block(index)
                        loading.staged.append((index, slot, staging))
                        dests += staging
                table.slots[index].append(slot)
            if wanted:
                reads.block(name, Places(np.concatenate(places), arrays) if as_places else dests)
        if plan.tail and store is not None:
            agent, salt = plan.tail, loading.key[1]
            reads.tail(agent, salt, tokens)
            if sealed % BLOCK:
                for index in range(len(self._kv.spec.groups)):
                    table.slots[index].append(self._kv.pool.groups[index].take())
            for _ in range(-(-(tokens - sealed) // GROUP)):
                table.pages.append(self._kv.pool.pages.take())
        table.tokens, table.sealed = tokens, sealed
        table.chain = list(plan.names)
        return reads

    def _one_loaded(self, loading: Loading, what: Any, future: Future[Any] | None) -> None:
        # On I/O threads; += on an int attribute under the GIL is not atomic, hence the lock.
        if future is not None:
            result = future.result() if not future.cancelled() else None
            if result is None or not result.ok:
                loading.failed = "cancelled" if result is None else str(result.reason)
                if result is not None:
                    loading.unreadable.append(what)
            elif hasattr(result, "tail"):
                loading.tail = result.tail
                try:  # here, where it is in the caches yet
                    loading.unpacked = self._unpacking.restore(loading.table, result.tail.arrays)
                except Exception as error:
                    log.exception("a saved tail could not be put into its place")
                    loading.failed = repr(error)
        with _COUNT_LOCK:
            loading.waiting -= 1
            done = loading.waiting == 0
        if done:
            self._loaded(loading)

    def finish(self, loading: Loading, ids: Ids) -> AgentTable | None:
        """Complete a load on the step thread. None if it failed: plan again, less will be found."""
        self._kv.loading.pop(loading.key, None)
        table, plan = loading.table, loading.plan
        if loading.failed is None and plan.tail and loading.tail is not None and not loading.unpacked:
            loading.failed = self._restore_tail(table, loading.tail)
            if loading.failed is not None:
                loading.unreadable.append((plan.tail, table.salt, table.tokens))
        if loading.failed is not None:
            self._kv.unreadable.update(loading.unreadable)
            self._kv.count("cancelled_loads" if loading.cancelled else "load_failures")
            self._kv.drop(loading.key)
            return None
        for index, slot, tensors in loading.staged:
            self._kv.arrays.put_block(index, slot, tensors)
        for block, name in enumerate(plan.names):
            for index, slots in enumerate(table.slots):
                if slots[block] != ABSENT:
                    slots[block] = self._kv.one_copy(index, slots[block], name)
        self._kv.arrays.evaluate()
        table.ids = np.concatenate([ids[: plan.tokens], plan.over])
        table.saved = table.tokens if plan.tail == table.agent else -1
        if loading.tail is not None:
            opening = len(loading.tail.note.get(OPENING, ()))
            table.early = opening + 1 if opening else 0
        if len(plan.over) and len(ids) > plan.tokens and not self._goes_on(table, ids):
            table.truncate(plan.tokens, self._kv.pool)
        self._kv.count("restores")
        self._kv.count("restored_tokens", plan.tokens)
        return table

    @staticmethod
    def _goes_on(table: AgentTable, ids: Ids) -> bool:
        """Whether ids begin with all that a table holds, and go on."""
        return table.tokens < len(ids) and np.array_equal(table.ids, ids[: table.tokens])

    def cancel(self, key: Key) -> None:
        """Let a load come to nothing: what is not being read yet never will be.

        Its slots are given back by ``finish``, when nothing writes them.
        """
        loading = self._kv.loading.get(key)
        if loading is not None and not loading.cancelled:
            loading.failed, loading.cancelled = "cancelled", True
            for read in loading.reads:
                read.cancel()

    def promote(self, key: Key) -> None:
        """A turn waits for a load that was begun ahead of it: read it before what nobody waits for."""
        loading = self._kv.loading.get(key)
        if loading is not None and loading.priority > 0 and self._kv.store is not None:
            loading.priority = 0
            self._kv.store.promote(loading.reads, 0)

    def _restore_tail(self, table: AgentTable, tail: Tail) -> str | None:
        """Put a saved tail into the table's slots and pages. A reason if it does not fit."""
        groups = table.sealed % BLOCK // GROUP
        try:
            if groups:
                for index, group in enumerate(self._kv.spec.groups):
                    slot = table.slots[index][-1]
                    buffers = self._kv.arrays.block_buffers(index, slot)
                    for layout, buffer in zip(group.tensors(self._kv.scheme), buffers, strict=True):
                        leading_groups(layout.name, buffer, groups)[...] = tail.arrays[layout.name]
                    if not self._kv.arrays.host:
                        self._kv.arrays.put_block(index, slot, buffers)
            if table.pages:
                saved = [
                    tail.arrays[f"layers.{layer.index}.{name}"]
                    for layer in self._kv.spec.attention_layers
                    for name in self._kv.arrays.pages[layer.index]
                ]
                for at, page in enumerate(table.pages):
                    self._kv.arrays.put_page(page, [tensor[at] for tensor in saved])
            for layer in self._kv.spec.state_layers:
                prefix = f"layers.{layer.index}.state."
                parts = {n.removeprefix(prefix): a for n, a in tail.arrays.items() if n.startswith(prefix)}
                table.state[layer.index] = RecurrentState.restore(parts)
        except (KeyError, ValueError, IndexError) as error:
            return f"the saved tail does not fit this model: {error!r}"
        return None
