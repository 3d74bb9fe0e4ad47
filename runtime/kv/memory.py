"""``KVMemory``: which agents' KV is in memory, how it comes back, and how it is kept.

What the engine uses; its parts do the work: ``planning.py`` finds what of a request's ids has KV already,
``loading.py`` brings it into a table, ``saving.py`` names and keeps what a step has made; ``resident.py`` is
what they share. Everything here runs on the step thread; loads complete on I/O threads and are finished here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from .arrays import PoolArrays
from .loading import Loader, Loading
from .planning import Plan, Planner
from .pool import BlockPool
from .resident import Key, Resident, Store
from .saving import Saver
from .scheme import KVScheme
from .spec import ModelCacheSpec
from .table import AgentTable, Ids

__all__ = ["KVMemory", "Key", "Loading", "Plan", "Store"]


class KVMemory(Resident):
    """The tables of all agents whose KV is in memory.

    Args:
        store: the block store, or None to keep nothing on disk.
        loaded: called on an I/O thread when the last load of a ``Loading`` is done.
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
        super().__init__(spec, scheme, fingerprint, arrays, pool, store)
        self.planner = Planner(self)
        self.loader = Loader(self, loaded)
        self.saver = Saver(self)

    # ---- finding what there is

    def plan(self, key: Key, ids: Ids, origin: str = "", *, clone: bool = True) -> Plan:
        """The plan that leaves the fewest tokens to prefill; see :meth:`Planner.plan`."""
        return self.planner.plan(key, ids, origin, clone=clone)

    def hold(self, plan: Plan) -> list[tuple[int, int]]:
        """Keep what a plan will share with others where it is; see :meth:`Planner.hold`."""
        return self.planner.hold(plan)

    def unhold(self, held: Sequence[tuple[int, int]]) -> None:
        """Let go of what ``hold`` returned."""
        self.planner.unhold(held)

    # ---- bringing it in

    def start(self, key: Key, plan: Plan, *, priority: int = 0) -> AgentTable | Loading:
        """Carry out a plan: the table, or a ``Loading`` for ``finish``; see :meth:`Loader.start`."""
        return self.loader.start(key, plan, priority=priority)

    def finish(self, loading: Loading, ids: Ids) -> AgentTable | None:
        """Complete a load on the step thread. None if it failed: plan again, less will be found."""
        return self.loader.finish(loading, ids)

    def cancel(self, key: Key) -> None:
        """Let a load come to nothing. Its slots are given back by ``finish``, when nothing writes them."""
        self.loader.cancel(key)

    def promote(self, key: Key) -> None:
        """A turn waits for a load that was begun ahead of it; see :meth:`Loader.promote`."""
        self.loader.promote(key)

    def discard(self, loading: Loading) -> None:
        """Give up a load of which nothing is under way."""
        self.loader.discard(loading)

    # ---- keeping it

    def after_step(self, table: AgentTable) -> None:
        """Name and save the blocks that became full, then give back those behind the window."""
        self.saver.after_step(table)

    def save(self, table: AgentTable) -> Future[Any] | None:
        """Save the part-filled block and the pages, as a snapshot of now. None if nothing is new."""
        return self.saver.save(table)

    def being_saved(self, key: Key) -> bool:
        """Whether what was given back of this agent will be found on disk in a moment."""
        return self.saver.being_saved(key)

    # ---- giving it back

    def evict(self, key: Key) -> None:
        """Save what is not saved and give the memory back. What was held can be used at once."""
        table = self.tables.get(key)
        if table is not None:
            self.save(table)
            self.drop(key)
            self.count("evictions")
