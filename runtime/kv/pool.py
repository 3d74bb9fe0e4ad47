"""``BlockPool``: who holds which slot. Plain Python, no arrays.

Owns slots of each layer group, pages of the hot tail, their reference counts, and the map from a
block's hash to the slot that holds it. A slot nobody refers to keeps its content, and can be found by
its hash, until the slot is taken for something else; so the free list, oldest first, is the eviction
order of shared blocks (the arrangement of vLLM's block pool).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from offbook.bus.errors import OffbookError


class PoolExhausted(OffbookError):
    """No slot is free. The supervisor reserves before it takes, so callers outside it never see this."""


class SlotAllocator:
    """Slots ``0..capacity-1`` of one kind, with reference counts."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._refs = [0] * capacity
        self._free: OrderedDict[int, None] = OrderedDict((slot, None) for slot in range(capacity))
        self._slot_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def refs(self, slot: int) -> int:
        return self._refs[slot]

    def take(self) -> int:
        """A slot for new content, referred to once. The oldest free slot goes first."""
        if not self._free:
            raise PoolExhausted(f"all {self.capacity} slots of {self.name!r} are in use")
        slot, _ = self._free.popitem(last=False)
        self._forget_hash(slot)
        self._refs[slot] = 1
        return slot

    def retain(self, slot: int) -> None:
        """One more holder of ``slot``, which may be a free one that still has its content."""
        if self._refs[slot] == 0:
            del self._free[slot]
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """One holder fewer. With the last one gone the slot is free, its content kept for look-ups."""
        if self._refs[slot] <= 0:
            raise AssertionError(f"slot {slot} of {self.name!r} released once too often")
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            self._free[slot] = None
            if slot not in self._hash_of:
                self._free.move_to_end(slot, last=False)

    def name_content(self, slot: int, digest: bytes) -> None:
        """Say what ``slot`` holds, so that others find it. The first holder of a hash keeps it."""
        if digest not in self._slot_of:
            self._forget_hash(slot)
            self._slot_of[digest] = slot
            self._hash_of[slot] = digest

    def unname(self, slot: int) -> None:
        """The content of ``slot`` is about to change: it can no longer be found."""
        self._forget_hash(slot)

    def find(self, digest: bytes) -> int | None:
        return self._slot_of.get(digest)

    def forget_content(self) -> None:
        """Drop all names: nothing that is free can be found any more."""
        self._slot_of.clear()
        self._hash_of.clear()

    def forget_free(self) -> None:
        """Drop the names of free slots: what nobody holds can no longer be found."""
        for slot in self._free:
            self._forget_hash(slot)

    def _forget_hash(self, slot: int) -> None:
        digest = self._hash_of.pop(slot, None)
        if digest is not None:
            del self._slot_of[digest]

    def check(self) -> None:
        """Invariants, for tests: a slot is free exactly when nobody refers to it."""
        for slot, refs in enumerate(self._refs):
            assert (refs == 0) == (slot in self._free), (self.name, slot, refs)
        for digest, slot in self._slot_of.items():
            assert self._hash_of[slot] == digest
        assert len(self._slot_of) == len(self._hash_of)


class BlockPool:
    """The block slots of every layer group, and the pages of the hot tails."""

    def __init__(self, group_slots: Sequence[tuple[str, int]], pages: int) -> None:
        self.groups = tuple(SlotAllocator(name, capacity) for name, capacity in group_slots)
        self.pages = SlotAllocator("pages", pages)

    def fits(self, blocks: Sequence[int], pages: int) -> bool:
        """Whether ``blocks[g]`` slots of each group and ``pages`` pages are free now."""
        return pages <= self.pages.free and all(
            need <= group.free for need, group in zip(blocks, self.groups, strict=True)
        )

    def could_fit(self, blocks: Sequence[int], pages: int) -> bool:
        """Whether they would be free if the pool were empty."""
        return pages <= self.pages.capacity and all(
            need <= group.capacity for need, group in zip(blocks, self.groups, strict=True)
        )

    def release(self, group: int, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot >= 0:
                self.groups[group].release(slot)

    def check(self) -> None:
        for allocator in (*self.groups, self.pages):
            allocator.check()
