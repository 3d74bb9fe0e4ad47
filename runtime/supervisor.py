"""``Supervisor``: one memory budget, and who must give way for whom.

The budget covers weights, the pool (blocks and hot tails), the workspace of a step and MLX's buffer
cache. Memory is reserved before it is used: a job reserves its context and ``max_tokens``; what running
jobs may still take is counted as taken. Over budget, idle agents are evicted, then jobs wait in a
bounded queue, then they are refused. Policy in plain Python; imports no MLX.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbook.bus.errors import ContextTooLarge

from .kv.pool import BlockPool
from .kv.scheme import BLOCK, GROUP, KVScheme
from .kv.spec import ModelCacheSpec
from .kv.table import AgentTable

if TYPE_CHECKING:
    from .engine.job import Job
    from .kv.memory import Key, KVMemory

MIB = 1 << 20

MIN_WORKSPACE = 96 * MIB
"""What a step's activations, logits and I/O buffers take at least (measured with SmolLM2-135M on the CPU)."""

TYPICAL_CONTEXT = 2048
"""Tokens of a typical agent: fixes how the pool divides between blocks and pages of hot tails."""

MAX_CHUNK = 256
"""Tokens of a prefill chunk at most."""

MAX_DECISIONS = 100
"""Decisions that are remembered."""

WAITING_SECONDS = 30.0
"""How long an announced message (``Prefetch``) protects an agent from eviction."""


@dataclass
class Idle:
    """What is known of an agent between its turns."""

    used: float = field(default_factory=time.monotonic)
    waiting_until: float = 0.0
    pinned: bool = False


@dataclass(frozen=True)
class PoolSizes:
    """How many slots each layer group and how many pages the pool gets, and their bytes."""

    group_slots: tuple[int, ...]
    pages: int
    nbytes: int


def workspace_bytes(spec: ModelCacheSpec, weights_bytes: int) -> int:
    """What to leave for one step's temporaries."""
    widest = max((layer.heads * layer.key_width for layer in spec.attention_layers), default=64)
    return max(MIN_WORKSPACE, weights_bytes // 16, MAX_CHUNK * widest * 4 * 24)


def agent_share(
    spec: ModelCacheSpec, scheme: KVScheme, context: int, *, at_rest: bool = False
) -> tuple[list[int], int]:
    """Blocks of each group and pages of one agent of ``context`` tokens.

    Args:
        at_rest: what it holds between turns at just this length; otherwise the most that it takes at any
            length up to this one while it speaks.
    """
    if at_rest:
        sealed = scheme.sealed(context)
        return [group.blocks(context, sealed) for group in spec.groups], -(-(context - sealed) // GROUP)
    blocks = []
    for group in spec.groups:
        most = -(-context // BLOCK)
        blocks.append(most if group.window is None else min(most, -(-group.window // BLOCK) + 1))
    return blocks, scheme.pages


def pool_sizes(
    spec: ModelCacheSpec,
    scheme: KVScheme,
    nbytes: int,
    *,
    context: int = TYPICAL_CONTEXT,
    at_rest: bool = False,
) -> PoolSizes:
    """Divide ``nbytes`` so that blocks and pages run out together for agents of ``context`` tokens.

    Args:
        at_rest: see ``agent_share``.
    """
    page_bytes = max(1, spec.page_bytes)
    per_agent, pages_each = agent_share(spec, scheme, context, at_rest=at_rest)
    agent_bytes = pages_each * page_bytes + sum(
        count * group.block_bytes(scheme) for count, group in zip(per_agent, spec.groups, strict=True)
    )
    agents = max(0, nbytes) / max(1, agent_bytes)
    slots = tuple(int(agents * count) for count in per_agent)
    pages = int(agents * pages_each)
    used = pages * page_bytes + sum(
        count * group.block_bytes(scheme) for count, group in zip(slots, spec.groups, strict=True)
    )
    return PoolSizes(slots, pages, used)


class Supervisor:
    """Admission and eviction over one ``KVMemory``."""

    def __init__(self, spec: ModelCacheSpec, scheme: KVScheme, pool: BlockPool) -> None:
        self.spec, self.scheme, self.pool = spec, scheme, pool
        self.idle: dict[Key, Idle] = {}
        self.decisions: list[str] = []

    def need(self, key: Key, tokens: int) -> tuple[list[int], int]:
        """Slots per group and pages an agent of ``tokens`` tokens takes from nothing."""
        return AgentTable(key[0], key[1], self.spec.groups, self.scheme).missing(tokens)

    def refuse_impossible(self, key: Key, tokens: int) -> None:
        """Raise ``ContextTooLarge`` for a turn that could not fit even an empty pool."""
        blocks, pages = self.need(key, tokens)
        if not self.pool.could_fit(blocks, pages):
            most = self.longest()
            raise ContextTooLarge(
                f"{key[0]}: {tokens} tokens (context and max_tokens) can never fit the memory budget, "
                f"which holds one agent of at most {most} tokens; raise memory= or shorten the history",
                limit=most,
                needed=tokens,
            )

    def longest(self) -> int:
        """Tokens of the longest single agent the pool could hold."""
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            blocks, pages = self.need(("", ""), middle)
            if self.pool.could_fit(blocks, pages):
                low = middle
            else:
                high = middle - 1
        return low

    def promised(self, jobs: Iterable[Job]) -> tuple[list[int], int]:
        """What running jobs may still take, as they were promised."""
        blocks, pages = [0] * len(self.spec.groups), 0
        for job in jobs:
            if job.table is not None:
                more, more_pages = job.table.missing(job.limit)
                # One slot beyond: writing into a block that others read copies it first.
                blocks = [a + b + 1 for a, b in zip(blocks, more, strict=True)]
                pages += more_pages
        return blocks, pages

    def make_room(
        self,
        memory: KVMemory,
        running: Sequence[Job],
        need: tuple[Sequence[int], int],
        keep: Collection[Key],
        *,
        gentle: bool = False,
        whom: str = "",
    ) -> int | None:
        """Evict idle agents until ``need`` fits beside what running jobs were promised.

        Args:
            keep: agents that must stay. gentle: also spare agents whose message waits (for prefetch).
            whom: for whom room is made, to explain it.

        Returns:
            How many were evicted, or None if it cannot fit now (nothing is evicted in vain).
        """
        promised, promised_pages = self.promised(running)
        blocks = [a + b for a, b in zip(need[0], promised, strict=True)]
        pages = need[1] + promised_pages
        if self.pool.fits(blocks, pages):
            return 0
        busy = {job.key for job in running} | set(keep) | set(memory.loading)
        victims = [key for key in memory.tables if key not in busy]
        if running or gentle:
            # Only when nothing else could ever end a wait do pinned agents give way.
            victims = [key for key in victims if not self._idle(key).pinned]
        now = time.monotonic()
        if gentle:
            victims = [key for key in victims if self._idle(key).waiting_until <= now]
        victims.sort(key=lambda key: self._value(memory, key, now))
        chosen = self._enough(memory, victims, blocks, pages)
        if chosen is None:
            return None
        takes = f"{'+'.join(map(str, need[0])) or 0} blocks, {need[1]} pages"
        for key in chosen:
            self.evict(memory, key, f"room for {whom or 'others'} ({takes})")
        return len(chosen)

    def evict(self, memory: KVMemory, key: Key, why: str) -> None:
        """Evict an agent, and say why."""
        idle = self._idle(key)
        pinned = ", pinned" if idle.pinned else ""
        age = time.monotonic() - idle.used
        self.decisions.append(f"evicted {key[0]}: {why}; it was idle for {age:.1f} s{pinned}")
        del self.decisions[:-MAX_DECISIONS]
        memory.evict(key)

    def _enough(
        self, memory: KVMemory, victims: Sequence[Key], blocks: Sequence[int], pages: int
    ) -> list[Key] | None:
        """The first victims whose leaving makes room, or None if all of them do not."""
        free = [group.free for group in self.pool.groups]
        free_pages = self.pool.pages.free
        chosen: list[Key] = []
        left: dict[tuple[int, int], int] = {}
        for key in victims:
            if free_pages >= pages and all(f >= b for f, b in zip(free, blocks, strict=True)):
                break
            table = memory.tables[key]
            chosen.append(key)
            free_pages += len(table.pages)
            for index, slots in enumerate(table.slots):
                for slot in slots:
                    if slot >= 0:  # A shared slot is free only when its last holder leaves.
                        holders = left.get((index, slot), self.pool.groups[index].refs(slot)) - 1
                        left[index, slot] = holders
                        free[index] += holders == 0
        if free_pages >= pages and all(f >= b for f, b in zip(free, blocks, strict=True)):
            return chosen
        return None

    def _value(self, memory: KVMemory, key: Key, now: float) -> tuple[bool, bool, float]:
        """What keeping an agent is worth: the least valuable goes first.

        Pinned agents and waiting messages come first; then idle time against the cost of coming back,
        which is a disk read for saved memory and a prefill for memory that cannot be saved.
        """
        idle, table = self._idle(key), memory.tables[key]
        tokens = max(1, table.tokens)
        reload_seconds = tokens * (2e-6 if memory.store is not None else 2e-3) + 0.01
        return idle.pinned, idle.waiting_until > now, reload_seconds / max(1e-3, now - idle.used)

    def _idle(self, key: Key) -> Idle:
        return self.idle.setdefault(key, Idle())

    def touch(self, key: Key, *, pinned: bool = False) -> None:
        """The agent has just spoken."""
        idle = self._idle(key)
        idle.used, idle.waiting_until, idle.pinned = time.monotonic(), 0.0, pinned

    def expect(self, key: Key) -> None:
        """A message waits for this agent."""
        self._idle(key).waiting_until = time.monotonic() + WAITING_SECONDS

    def forget(self, key: Key) -> None:
        self.idle.pop(key, None)
