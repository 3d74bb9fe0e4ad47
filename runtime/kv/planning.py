"""Planning: how much of a request's ids has KV already, and from where it can be had.

Decides on token ids and the fingerprint alone (block names hold it): in the agent's own table, in another
table with the same prefix, in blocks in memory or on disk, in a saved tail. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..store.hashing import chain, chain_at
from ..store.layout import TailInfo
from .resident import Key, Resident
from .scheme import BLOCK
from .table import ABSENT, AgentTable, Ids, common_prefix


@dataclass(frozen=True)
class Plan:
    """How a request's ids can be brought into memory.

    Attributes:
        source: ``hot`` (the agent's own table), ``clone`` (another table with the same ids), ``warm``
            (blocks or a tail from disk or shared in memory), ``cold`` (nothing).
        tokens: tokens that will have KV without a prefill.
        tail: for ``warm``: agent whose saved tail is used, if one is.
        names: for ``warm``: names of the full blocks.
        over: ids that the tail holds beyond ``tokens``: an opening.
    """

    source: Literal["hot", "clone", "warm", "cold"]
    tokens: int
    tail: str | None = None
    names: tuple[bytes, ...] = ()
    origin: AgentTable | None = None
    over: Ids = field(default_factory=lambda: np.zeros(0, np.uint32), compare=False)


class Planner:
    """Makes plans for what is resident, and keeps in place what a plan counts on."""

    def __init__(self, kv: Resident) -> None:
        self._kv = kv

    def plan(self, key: Key, ids: Ids, origin: str = "", *, clone: bool = True) -> Plan:
        """The plan that leaves the fewest tokens to prefill. At least the last id is always left.

        Args:
            origin: an agent this one was forked from, whose saved tails stand for the same ids.
            clone: whether copying another agent's table is allowed.
        """
        limit = len(ids) - 1
        best = Plan("cold", 0)
        table = self._kv.tables.get(key)
        if table is not None and table.tokens:
            reusable = self._reusable(table, ids[:limit])
            if reusable:
                best = Plan("hot", reusable)
            if reusable == table.tokens:
                return best
        for other in self._kv.tables.values() if clone else ():
            if other is table or other.salt != key[1] or key in self._kv.loading:
                continue
            if (other.agent, other.salt) in self._kv.loading:
                continue
            for tokens in (other.tokens, other.tokens - other.opening, other.tokens - other.early):
                equal = best.tokens < tokens <= limit and np.array_equal(other.ids[:tokens], ids[:tokens])
                if equal and self._may_end(other, tokens):
                    best = Plan("clone", tokens, origin=other)
        names = chain(ids[:limit], self._kv.root(key[1]))
        reach = 0
        while reach < len(names) and self._available(names[reach]):
            reach += 1
        for agent in dict.fromkeys((key[0], origin)):
            if agent and self._kv.store is not None:
                # The longest first: the others are then told by their length alone.
                for info in sorted(self._kv.store.tails(agent, key[1]), key=lambda info: -info.tokens):
                    full = self._kv.scheme.sealed(info.tokens) // BLOCK
                    if full > reach or (agent, key[1], info.tokens) in self._kv.unreadable:
                        continue
                    if (fits := self._fits(info, ids, best.tokens, key[1])) is not None:
                        tokens, over = fits
                        best = Plan("warm", tokens, agent, tuple(names[:full]), over=over)
        # Only blocks that are sealed at this length anyway, so that the result does not depend on
        # what others happened to leave in memory.
        usable = 0 if self._kv.spec.state_layers else min(reach, self._kv.scheme.sealed(limit) // BLOCK)
        if usable * BLOCK > best.tokens:
            best = Plan("warm", usable * BLOCK, None, tuple(names[:usable]))
        return best

    def _fits(self, info: TailInfo, ids: Ids, least: int, salt: str) -> tuple[int, Ids] | None:
        """How many of ``ids`` a saved tail stands for and what it holds beyond them; None if not more than
        ``least``, or if it is another history's."""
        # At least the last id is read again: so a tail may hold that one, too, and the opening behind it.
        openings = [over for over in self._kv.openings if len(over)]
        for over in (ids[:0], *openings, *(np.concatenate([ids[-1:], over]) for over in openings)):
            tokens = info.tokens - len(over)
            if least < tokens < len(ids):
                whole = np.concatenate([ids[:tokens], over]) if len(over) else ids[:tokens]
                if chain_at(whole, self._kv.root(salt)) == info.chain:
                    return tokens, over
        return None

    def _available(self, name: bytes) -> bool:
        if self._kv.on_disk(name):
            return True
        return all(group.find(name) is not None for group in self._kv.pool.groups)

    def _reusable(self, table: AgentTable, ids: Ids) -> int:
        """How much of a table is left when its ids go on as ``ids``."""
        shared = common_prefix(table.ids[: table.tokens], ids)
        if shared == table.tokens:
            return shared
        if table.state:  # recurrent layers cannot go back
            return 0
        sealed = self._kv.scheme.sealed(shared)
        back = shared if sealed == table.sealed else min(sealed, table.sealed)
        return back if self._may_end(table, back) else 0

    def _may_end(self, table: AgentTable, tokens: int) -> bool:
        """Whether a table that is cut back to ``tokens`` has all blocks that the next one sees: what had left
        a window may be back in it."""
        return not any(
            ABSENT in slots[group.first_block(tokens) : -(-tokens // BLOCK)]
            for group, slots in zip(self._kv.spec.groups, table.slots, strict=True)
        )

    def hold(self, plan: Plan) -> list[tuple[int, int]]:
        """Keep what a plan will share with others where it is until it is carried out.

        Returns (layer group, slot) of the full blocks that are in memory now; ``unhold`` lets go of them.
        """
        held = []
        for index, group in enumerate(self._kv.spec.groups):
            allocator, first = self._kv.pool.groups[index], group.first_block(plan.tokens)
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
            self._kv.pool.groups[index].release(slot)
