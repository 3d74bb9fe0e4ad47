"""``AgentTable``: the block table of one agent, and what its slots hold.

Owns the bookkeeping of one agent's KV in memory: the token ids it stands for, the slots of its blocks
per layer group, and the pages of its hot tail. The rule that a position alone decides where a token's
KV is (sealed group of a block, or page of the tail) lives in ``KVScheme.sealed``; this class applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pool import BlockPool
from .scheme import BLOCK, GROUP, KVScheme
from .spec import LayerGroup

Ids = NDArray[np.uint32]

ABSENT = -1
"""In a block table: this block left the window and holds no slot."""


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


@dataclass
class AgentTable:
    """Where one agent's KV is in the pool.

    Attributes:
        tokens: how many tokens have KV here (``ids[:tokens]``; ids may be ahead of it in a step).
        sealed: how many of them are in sealed groups; the rest is in ``pages``.
        slots: per layer group, the slot of each block from position 0, or ``ABSENT``.
        pages: page ids; the first page starts at position ``sealed``.
        chain: names of the leading blocks that are full, named and handed to the store.
        saved: tokens the last saved tail stands for (-1: none).
        state: what recurrent layers keep, by layer index (hybrid models).
        early: how many tokens at the end were read between turns: the last one that was generated, and behind
            it what every next message begins with (an opening).
        restored: it was read from disk ahead of a turn that has not begun.
        failed: why a step's KV could not be put here. What is here is then half written, and to be dropped.
    """

    agent: str
    salt: str
    groups: tuple[LayerGroup, ...]
    scheme: KVScheme
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.uint32))
    tokens: int = 0
    sealed: int = 0
    slots: list[list[int]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    saved: int = -1
    state: dict[int, Any] = field(default_factory=dict)
    early: int = 0
    restored: bool = False
    failed: Exception | None = None

    def __post_init__(self) -> None:
        if not self.slots:
            self.slots = [[] for _ in self.groups]

    @property
    def opening(self) -> int:
        """How many ids at the end are no part of a turn yet."""
        return max(0, self.early - 1)

    def missing(self, tokens: int) -> tuple[list[int], int]:
        """Blocks per group and pages that growing to ``tokens`` tokens takes beyond what is held.

        Window groups are counted with what the growing holds at its widest.
        """
        sealed = self.scheme.sealed(tokens)
        blocks = []
        for group, slots in zip(self.groups, self.slots, strict=True):
            held = sum(slot != ABSENT for slot in slots)
            want = -(-sealed // BLOCK)
            if group.window is not None:
                want = min(want, -(-group.window // BLOCK) + 3)
            blocks.append(max(0, want - held))
        # While a step runs, the tail holds up to one page more than at rest.
        return blocks, max(0, min(-(-tokens // GROUP), self.scheme.pages) - len(self.pages))

    def copies(self, tokens: int, pool: BlockPool) -> list[int]:
        """Blocks per group to be copied before a table cut back to ``tokens`` can grow: shared ones."""
        if tokens >= self.sealed or tokens % BLOCK == 0:
            return [0] * len(self.groups)
        held = [slots[tokens // BLOCK] for slots in self.slots]
        return [
            int(slot != ABSENT and group.refs(slot) > 1)
            for slot, group in zip(held, pool.groups, strict=True)
        ]

    def page_of(self, position: int) -> tuple[int, int]:
        """Page id and offset of a position in the hot tail."""
        index, offset = divmod(position - self.sealed, GROUP)
        return self.pages[index], offset

    def block_slot(self, group: int, position: int) -> int:
        return self.slots[group][position // BLOCK]

    def leave_window(self, pool: BlockPool) -> int:
        """Give back the blocks that no future token can see. Returns how many."""
        returned = 0
        for index, (group, slots) in enumerate(zip(self.groups, self.slots, strict=True)):
            # A block that is not named yet has not been saved; it stays until it is.
            for block in range(min(group.first_block(self.tokens), len(self.chain)) - 1, -1, -1):
                if slots[block] == ABSENT:
                    break
                pool.groups[index].release(slots[block])
                slots[block] = ABSENT
                returned += 1
        return returned

    def truncate(self, tokens: int, pool: BlockPool) -> None:
        """Keep the first ``tokens`` tokens: within the tail, or a multiple of 64 with an empty tail."""
        if tokens < self.tokens:
            self.state = {}  # it stands for all tokens and cannot go back
        if tokens < self.sealed:
            assert tokens % GROUP == 0, tokens
            for page in self.pages:
                pool.pages.release(page)
            self.pages, self.sealed = [], tokens
        keep = -(-(tokens - self.sealed) // GROUP)
        for page in self.pages[keep:]:
            pool.pages.release(page)
        self.pages = self.pages[:keep]
        blocks = -(-self.sealed // BLOCK)
        for index, slots in enumerate(self.slots):
            pool.release(index, slots[blocks:])
            del slots[blocks:]
        del self.chain[self.sealed // BLOCK :]
        self.early = max(0, self.early - (self.tokens - tokens))
        self.tokens, self.ids = tokens, self.ids[:tokens]
        self.saved = -1

    def release(self, pool: BlockPool) -> None:
        """Give everything back; the table is then empty."""
        for index, slots in enumerate(self.slots):
            pool.release(index, slots)
        for page in self.pages:
            pool.pages.release(page)
        self.slots = [[] for _ in self.groups]
        self.pages, self.chain, self.state = [], [], {}
        self.tokens = self.sealed = self.early = 0
        self.saved = -1
        self.ids = np.zeros(0, np.uint32)

    def held(self) -> tuple[list[int], int]:
        """Slots per group and pages held now."""
        return [sum(s != ABSENT for s in slots) for slots in self.slots], len(self.pages)

    def nbytes(self, page_bytes: int) -> int:
        """Bytes of the pool this table refers to (shared blocks count for each holder)."""
        blocks, pages = self.held()
        return pages * page_bytes + sum(
            count * group.block_bytes(self.scheme) for count, group in zip(blocks, self.groups, strict=True)
        )


def as_ids(ids: Sequence[int] | bytes | Ids) -> Ids:
    """Token ids as a uint32 array; ``bytes`` are little-endian 32-bit integers."""
    if isinstance(ids, bytes):
        return np.frombuffer(ids, "<u4").astype(np.uint32, copy=False)
    return np.asarray(ids, np.uint32)
