"""``KVMemory``: which agents' KV is in memory, how it comes back, and how it is kept.

Decides on token ids and the fingerprint alone: what of a request's ids has KV already (in the
agent's own table, in another table with the same prefix, in blocks in memory or on disk, in a saved
tail), and brings that into a table. Everything here runs on the step thread; loads complete on I/O
threads and are finished here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..observe.metrics import Metrics
from ..store.hashing import block_hash, chain, chain_at, root_hash
from ..store.layout import Tail, TailInfo
from ..store.results import Failed
from .arrays import PoolArrays
from .pool import BlockPool
from .scheme import BLOCK, GROUP, KVScheme
from .spec import ModelCacheSpec
from .state import RecurrentState
from .table import ABSENT, AgentTable, Ids, common_prefix

Key = tuple[str, str]
"""Agent id and salt."""


_COUNT_LOCK = threading.Lock()


class Store(Protocol):
    """What the memory needs of the block store (``runtime.store``)."""

    def has(self, name: bytes) -> bool: ...
    def put_block(
        self,
        name: bytes,
        parent: bytes,
        ids: Any,
        tensors: Sequence[NDArray[Any]],
        *,
        agent: str | None = None,
        salt: str = "",
    ) -> Future[Any]: ...
    def load_block(
        self, name: bytes, dests: Sequence[NDArray[Any] | None], *, priority: int = 0
    ) -> Future[Any]: ...
    def put_tail(self, agent: str, tail: Tail, *, salt: str = "", copy: bool = True) -> Future[Any]: ...
    def load_tail(
        self, agent: str, salt: str = "", *, at: int | None = None, priority: int = 0
    ) -> Future[Any]: ...
    def tails(self, agent: str, salt: str = "") -> Sequence[TailInfo]: ...
    def touch(self, agent: str, salt: str = "") -> None: ...


@dataclass(frozen=True)
class Plan:
    """How a request's ids can be brought into memory.

    Attributes:
        source: ``hot`` (the agent's own table), ``clone`` (another table with the same ids), ``warm``
            (blocks or a tail from disk or shared in memory), ``cold`` (nothing).
        tokens: tokens that will have KV without a prefill.
        tail: for ``warm``: agent whose saved tail is used, if one is.
        names: for ``warm``: names of the full blocks.
    """

    source: Literal["hot", "clone", "warm", "cold"]
    tokens: int
    tail: str | None = None
    names: tuple[bytes, ...] = ()
    origin: AgentTable | None = None


@dataclass
class Loading:
    """Loads under way for one table."""

    key: Key
    table: AgentTable
    plan: Plan
    waiting: int = 0
    failed: str | None = None
    unreadable: list[Any] = field(default_factory=list)
    staged: list[tuple[int, int, list[NDArray[Any]]]] = field(default_factory=list)
    tail: Tail | None = None
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.uint32))
    started: float = field(default_factory=time.monotonic)


class KVMemory:
    """The tables of all agents whose KV is in memory.

    Args:
        store: the block store, or None to keep nothing on disk.
        loaded: called on an I/O thread when the last load of a ``Loading`` is done.

    Attributes:
        saved: called on an I/O thread when an agent's tail has been written.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        scheme: KVScheme,
        fingerprint: str,
        arrays: PoolArrays,
        pool: BlockPool,
        store: Store | None,
        loaded: Callable[[Loading], None],
    ) -> None:
        self.spec, self.scheme, self.fingerprint = spec, scheme, fingerprint
        self.arrays, self.pool, self.store = arrays, pool, store
        self.tables: dict[Key, AgentTable] = {}
        self.loading: dict[Key, Loading] = {}
        self.metrics = Metrics()
        self._loaded = loaded
        self.saved: Callable[[], None] = lambda: None
        self._saving: dict[Key, Future[Any]] = {}
        self._roots: dict[str, bytes] = {}
        # Blocks (names) and tails (agent, salt, tokens) that the store lists but could not give. Plans
        # avoid them, so a plan that failed is not made again.
        self._unreadable: set[Any] = set()
        self._putting: set[bytes] = set()
        self._group_sizes = [len(group.tensors(scheme)) for group in spec.groups]

    def count(self, name: str, by: float = 1) -> None:
        self.metrics.count(name, by)

    def root(self, salt: str) -> bytes:
        if salt not in self._roots:
            self._roots[salt] = root_hash(self.fingerprint, salt)
        return self._roots[salt]

    # ---- finding what there is

    def plan(self, key: Key, ids: Ids, origin: str = "", *, clone: bool = True) -> Plan:
        """The plan that leaves the fewest tokens to prefill. At least the last id is always left.

        Args:
            origin: an agent this one was forked from, whose saved tails stand for the same ids.
            clone: whether copying another agent's table is allowed.
        """
        limit = len(ids) - 1
        best = Plan("cold", 0)
        table = self.tables.get(key)
        if table is not None and table.tokens:
            reusable = self._reusable(table, ids[:limit])
            if reusable:
                best = Plan("hot", reusable)
            if reusable == table.tokens:
                return best
        for other in self.tables.values() if clone else ():
            if other is not table and other.salt == key[1] and best.tokens < other.tokens <= limit:
                whole = self._whole(other, ids)
                if whole and key not in self.loading and (other.agent, other.salt) not in self.loading:
                    best = Plan("clone", other.tokens, origin=other)
        names = chain(ids[:limit], self.root(key[1]))
        reach = 0
        while reach < len(names) and self._available(names[reach]):
            reach += 1
        for agent in dict.fromkeys((key[0], origin)):
            if agent and self.store is not None:
                for info in self.store.tails(agent, key[1]):
                    full = self.scheme.sealed(info.tokens) // BLOCK
                    longer = best.tokens < info.tokens <= limit and full <= reach
                    if (agent, key[1], info.tokens) in self._unreadable:
                        continue
                    if longer and chain_at(ids[: info.tokens], self.root(key[1])) == info.chain:
                        best = Plan("warm", info.tokens, agent, tuple(names[:full]))
        # Only blocks that are sealed at this length anyway, so that the result does not depend on
        # what others happened to leave in memory.
        usable = 0 if self.spec.state_layers else min(reach, self.scheme.sealed(limit) // BLOCK)
        if usable * BLOCK > best.tokens:
            best = Plan("warm", usable * BLOCK, None, tuple(names[:usable]))
        return best

    def _whole(self, other: AgentTable, ids: Ids) -> bool:
        return bool(np.array_equal(other.ids[: other.tokens], ids[: other.tokens]))

    def _available(self, name: bytes) -> bool:
        if self._on_disk(name):
            return True
        return all(group.find(name) is not None for group in self.pool.groups)

    def _reusable(self, table: AgentTable, ids: Ids) -> int:
        """How much of a table is left when its ids go on as ``ids``."""
        shared = common_prefix(table.ids[: table.tokens], ids)
        if shared == table.tokens:
            return shared
        if table.state:  # recurrent layers cannot go back
            return 0
        if self.scheme.sealed(shared) == table.sealed:
            return shared
        back = min(self.scheme.sealed(shared), table.sealed)
        for group, slots in zip(self.spec.groups, table.slots, strict=True):
            if ABSENT in slots[group.first_block(back) : -(-back // BLOCK)]:
                return 0
        return back

    # ---- bringing it in

    def start(self, key: Key, plan: Plan, *, priority: int = 0) -> AgentTable | Loading:
        """Carry out a plan. The caller has made sure that the pool has room.

        Returns the table, or a ``Loading`` to be given to ``finish`` once its loads are done.
        """
        table = self.tables.get(key)
        if plan.source == "hot" and table is not None:
            if plan.tokens < table.tokens:
                table.truncate(plan.tokens, self.pool)
            return table
        if table is not None:
            self.drop(key)
        table = AgentTable(key[0], key[1], self.spec.groups, self.scheme)
        self.tables[key] = table
        if plan.source == "clone" and plan.origin is not None:
            self._clone(plan.origin, table)
        if plan.source != "warm":
            return table
        loading = Loading(key, table, plan)
        self.loading[key] = loading
        try:
            jobs = self._destinations(loading, priority)
        except BaseException:
            self.discard(loading)
            raise
        loading.waiting = len(jobs) + 1
        for what, job in jobs:
            try:
                future = job()
            except Exception as error:
                future = Future()
                future.set_result(Failed(repr(error)))
            future.add_done_callback(partial(self._one_loaded, loading, what))
        self._one_loaded(loading, None, None)
        return loading

    def discard(self, loading: Loading) -> None:
        """Give up a load of which nothing is under way."""
        self.loading.pop(loading.key, None)
        if self.tables.get(loading.key) is loading.table:
            self.drop(loading.key)

    def hold(self, plan: Plan) -> list[tuple[int, int]]:
        """Keep what a plan will share with others where it is until it is carried out.

        Returns (layer group, slot) of the full blocks that are in memory now; ``unhold`` lets go of them.
        """
        held = []
        for index, group in enumerate(self.spec.groups):
            allocator, first = self.pool.groups[index], group.first_block(plan.tokens)
            if plan.origin is not None:
                found: list[int | None] = list(plan.origin.slots[index][: len(plan.origin.chain)])
            else:
                found = [allocator.find(name) for name in plan.names]
            for slot in found[first:]:
                if slot is not None and slot != ABSENT:
                    allocator.retain(slot)
                    held.append((index, slot))
        return held

    def unhold(self, held: Sequence[tuple[int, int]]) -> None:
        for index, slot in held:
            self.pool.groups[index].release(slot)

    def _clone(self, origin: AgentTable, table: AgentTable) -> None:
        """A fork: full blocks are shared, the part-filled one and the pages are copied."""
        full = len(origin.chain)
        for index, slots in enumerate(origin.slots):
            allocator = self.pool.groups[index]
            for block, slot in enumerate(slots):
                if slot == ABSENT:
                    table.slots[index].append(ABSENT)
                elif block < full:
                    allocator.retain(slot)
                    table.slots[index].append(slot)
                else:
                    mine = allocator.take()
                    self.arrays.copy_block(index, slot, mine)
                    table.slots[index].append(mine)
        for page in origin.pages:
            mine = self.pool.pages.take()
            self.arrays.copy_page(page, mine)
            table.pages.append(mine)
        table.ids, table.tokens, table.sealed = origin.ids[: origin.tokens], origin.tokens, origin.sealed
        table.chain, table.state = list(origin.chain), dict(origin.state)

    def _destinations(self, loading: Loading, priority: int) -> list[tuple[Any, Callable[[], Future[Any]]]]:
        """Take the slots and pages of a plan. Returns the loads to start: what, and the call."""
        table, plan = loading.table, loading.plan
        sealed = self.scheme.sealed(plan.tokens) if plan.tail else plan.tokens
        jobs: list[tuple[Any, Callable[[], Future[Any]]]] = []
        store = self.store
        for block, name in enumerate(plan.names):
            dests: list[NDArray[Any] | None] = []
            wanted = False
            for index, group in enumerate(self.spec.groups):
                allocator = self.pool.groups[index]
                size = self._group_sizes[index]
                if block < group.first_block(plan.tokens):
                    table.slots[index].append(ABSENT)
                    dests += [None] * size
                    continue
                slot = allocator.find(name)
                if slot is not None:
                    allocator.retain(slot)
                    dests += [None] * size
                else:
                    slot = allocator.take()
                    wanted = True
                    if self.arrays.host:
                        dests += self.arrays.block_buffers(index, slot)
                    else:
                        staging = self.arrays.empty_block(index)
                        loading.staged.append((index, slot, staging))
                        dests += staging
                table.slots[index].append(slot)
            if wanted and store is not None:
                jobs.append((name, partial(store.load_block, name, dests, priority=priority)))
        if plan.tail and store is not None:
            agent, salt = plan.tail, loading.key[1]
            load = partial(store.load_tail, agent, salt, at=plan.tokens, priority=priority)
            jobs.append(((agent, salt, plan.tokens), load))
            if sealed % BLOCK:
                for index in range(len(self.spec.groups)):
                    table.slots[index].append(self.pool.groups[index].take())
            for _ in range(-(-(plan.tokens - sealed) // GROUP)):
                table.pages.append(self.pool.pages.take())
        table.tokens, table.sealed = plan.tokens, sealed
        table.chain = list(plan.names)
        return jobs

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
        with _COUNT_LOCK:
            loading.waiting -= 1
            done = loading.waiting == 0
        if done:
            self._loaded(loading)

    def finish(self, loading: Loading, ids: Ids) -> AgentTable | None:
        """Complete a load on the step thread. None if it failed: plan again, less will be found."""
        self.loading.pop(loading.key, None)
        table, plan = loading.table, loading.plan
        if loading.failed is None and plan.tail and loading.tail is not None:
            loading.failed = self._restore_tail(table, loading.tail)
            if loading.failed is not None:
                loading.unreadable.append((plan.tail, table.salt, plan.tokens))
        if loading.failed is not None:
            self._unreadable.update(loading.unreadable)
            self.count("load_failures")
            self.drop(loading.key)
            return None
        for index, slot, tensors in loading.staged:
            self.arrays.put_block(index, slot, tensors)
        for block, name in enumerate(plan.names):
            for index, slots in enumerate(table.slots):
                if slots[block] != ABSENT:
                    slots[block] = self._one_copy(index, slots[block], name)
        self.arrays.evaluate()
        table.ids = ids[: plan.tokens].copy()
        table.saved = plan.tokens if plan.tail == table.agent else -1
        self.count("restores")
        self.count("restored_tokens", plan.tokens)
        return table

    # ---- keeping it

    def after_step(self, table: AgentTable) -> None:
        """Name and save the blocks that became full, then give back those behind the window."""
        while (len(table.chain) + 1) * BLOCK <= table.sealed:
            block = len(table.chain)
            parent = table.chain[-1] if table.chain else self.root(table.salt)
            ids = table.ids[block * BLOCK : (block + 1) * BLOCK]
            name = block_hash(parent, ids)
            table.chain.append(name)
            mine = False
            for index, slots in enumerate(table.slots):
                kept = self._one_copy(index, slots[block], name)
                mine, slots[block] = mine or kept == slots[block], kept
            if mine and not self._adopt(table, block):
                self._put(table, block)
        table.leave_window(self.pool)

    def _adopt(self, table: AgentTable, block: int) -> bool:
        """If a new block is on disk already, take the disk's bits: a later restore will give those.

        Rare (an agent whose tail was lost prefills into a block that was saved), so it waits.
        """
        name = table.chain[block]
        if self.store is None or not self._on_disk(name):
            return False
        staged = [self.arrays.empty_block(index) for index in range(len(table.slots))]
        result = self.store.load_block(name, [tensor for group in staged for tensor in group]).result()
        if not result.ok:
            return False
        for index, slots in enumerate(table.slots):
            self.arrays.put_block(index, slots[block], staged[index])
        self.count("blocks_adopted")
        return True

    def _on_disk(self, name: bytes) -> bool:
        return self.store is not None and self.store.has(name) and name not in self._unreadable

    def _put(self, table: AgentTable, block: int) -> None:
        """Save a full block, unless it is on disk or on its way, or has left a window unsaved."""
        name = table.chain[block]
        held = [slots[block] for slots in table.slots]
        if self.store is None or self._on_disk(name) or name in self._putting or ABSENT in held:
            return
        buffers = [b for index, slot in enumerate(held) for b in self.arrays.block_buffers(index, slot)]
        parent = table.chain[block - 1] if block else self.root(table.salt)
        ids = table.ids[block * BLOCK : (block + 1) * BLOCK]
        self._putting.add(name)
        self._unreadable.discard(name)
        self.count("blocks_written")
        future = self.store.put_block(
            name, parent, ids, [b.copy() for b in buffers], agent=table.agent, salt=table.salt
        )
        future.add_done_callback(lambda _: self._putting.discard(name))

    def _one_copy(self, group: int, slot: int, name: bytes) -> int:
        """Name a full block's content; if another slot has it already, take that one instead.

        Equal ids, so one copy is enough, and the first one's bits are everyone's.
        """
        allocator = self.pool.groups[group]
        known = allocator.find(name)
        if known is None:
            allocator.name_content(slot, name)
        elif known != slot:
            allocator.retain(known)
            allocator.release(slot)
            return known
        return slot

    def save(self, table: AgentTable) -> Future[Any] | None:
        """Save the part-filled block and the pages, as a snapshot of now. None if nothing is new."""
        if self.store is None or table.saved == table.tokens or not table.tokens:
            return None
        if table.sealed != self.scheme.sealed(table.tokens):
            return None  # cut back, and stopped before it had grown again: its blocks are enough
        arrays: dict[str, NDArray[Any]] = {}
        groups = table.sealed % BLOCK // GROUP
        if groups:
            for index, group in enumerate(self.spec.groups):
                buffers = self.arrays.block_buffers(index, table.slots[index][-1])
                for layout, tensor in zip(group.tensors(self.scheme), buffers, strict=True):
                    arrays[layout.name] = _leading_groups(layout.name, tensor, groups).copy()
        for layer in self.spec.attention_layers:
            for name, array in self.arrays.pages[layer.index].items():
                if table.pages:
                    source = self.arrays.view(array) if self.arrays.host else np.array(array)
                    arrays[f"layers.{layer.index}.{name}"] = source[table.pages]
        for index, state in table.state.items():
            arrays |= {f"layers.{index}.state.{part}": value for part, value in state.export().items()}
        table.saved = table.tokens
        for block in range(len(table.chain)):
            self._put(table, block)  # what the disk refused, or has let go since
        tail = Tail(
            tokens=table.tokens,
            chain=chain_at(table.ids[: table.tokens], self.root(table.salt)),
            blocks=tuple(table.chain),
            arrays=arrays,
            note={},
        )
        self.count("tails_written")
        self._unreadable.discard((table.agent, table.salt, table.tokens))
        key = (table.agent, table.salt)
        future = self._saving[key] = self.store.put_tail(table.agent, tail, salt=table.salt, copy=False)
        future.add_done_callback(partial(_note_unsaved, table, table.tokens))
        future.add_done_callback(partial(self._one_saved, key))
        return future

    def _one_saved(self, key: Key, future: Future[Any]) -> None:
        if self._saving.get(key) is future:
            del self._saving[key]
        self.saved()

    def being_saved(self, key: Key) -> bool:
        """Whether what was given back of this agent will be found on disk in a moment."""
        return key not in self.tables and key in self._saving

    def _restore_tail(self, table: AgentTable, tail: Tail) -> str | None:
        """Put a saved tail into the table's slots and pages. A reason if it does not fit."""
        groups = table.sealed % BLOCK // GROUP
        try:
            if groups:
                for index, group in enumerate(self.spec.groups):
                    slot = table.slots[index][-1]
                    buffers = self.arrays.block_buffers(index, slot)
                    for layout, buffer in zip(group.tensors(self.scheme), buffers, strict=True):
                        _leading_groups(layout.name, buffer, groups)[...] = tail.arrays[layout.name]
                    if not self.arrays.host:
                        self.arrays.put_block(index, slot, buffers)
            if table.pages:
                saved = [
                    tail.arrays[f"layers.{layer.index}.{name}"]
                    for layer in self.spec.attention_layers
                    for name in self.arrays.pages[layer.index]
                ]
                for at, page in enumerate(table.pages):
                    self.arrays.put_page(page, [tensor[at] for tensor in saved])
            for layer in self.spec.state_layers:
                prefix = f"layers.{layer.index}.state."
                parts = {n.removeprefix(prefix): a for n, a in tail.arrays.items() if n.startswith(prefix)}
                table.state[layer.index] = RecurrentState.restore(parts)
        except (KeyError, ValueError, IndexError) as error:
            return f"the saved tail does not fit this model: {error!r}"
        return None

    # ---- giving it back

    def drop(self, key: Key) -> None:
        """Give back an agent's slots and pages at once, without saving.

        Not while a load writes into them: cancel the load and wait for its ``finish``.
        """
        assert key not in self.loading, key
        table = self.tables.pop(key, None)
        if table is not None:
            table.release(self.pool)

    def cancel(self, key: Key) -> None:
        """Let a load come to nothing. Its slots are given back by ``finish``, when nothing writes them."""
        if key in self.loading:
            self.loading[key].failed = "cancelled"

    def evict(self, key: Key) -> None:
        """Save what is not saved and give the memory back. What was held can be used at once."""
        table = self.tables.get(key)
        if table is not None:
            self.save(table)
            self.drop(key)
            self.count("evictions")


def _note_unsaved(table: AgentTable, tokens: int, future: Future[Any]) -> None:
    """A tail the disk refused is saved again at the next occasion."""
    if not future.result().ok and table.saved == tokens:
        table.saved = -1


def _leading_groups(name: str, tensor: NDArray[Any], groups: int) -> NDArray[Any]:
    """The part of a block's tensor that the first ``groups`` sealed groups fill (a view)."""
    if name.endswith(("k.packed", "k.scales", "k.biases")):
        return tensor[..., : tensor.shape[-1] // (BLOCK // GROUP) * groups]
    return tensor[:, : groups * GROUP]
