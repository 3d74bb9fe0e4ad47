"""``SlotAllocator``, ``BlockPool`` and ``AgentTable``: who holds what, without a tensor in sight."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from offbook.bus.errors import InvalidRequest
from offbook.runtime.kv.pool import BlockPool, PoolExhausted, SlotAllocator
from offbook.runtime.kv.scheme import BLOCK, GROUP, KVScheme
from offbook.runtime.kv.spec import LayerGroup, LayerSpec
from offbook.runtime.kv.table import ABSENT, AgentTable, as_ids, common_prefix


class Allocation(RuleBasedStateMachine):
    """Any order of taking, sharing, naming and releasing against a dictionary of holders."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator("test", 5)
        self.holders: dict[int, int] = {}
        self.names: dict[bytes, int] = {}

    @rule(target=held)
    def take(self) -> Any:
        if len(self.holders) == 5:
            with pytest.raises(PoolExhausted):
                self.allocator.take()
            return None
        slot = self.allocator.take()
        assert slot not in self.holders, "a slot somebody holds was given away"
        self.holders[slot] = 1
        self.names = {name: of for name, of in self.names.items() if of != slot}
        return slot

    @rule(target=held, slot=held)
    def share(self, slot: int | None) -> Any:
        if slot in self.holders:
            self.allocator.retain(slot)
            self.holders[slot] += 1
            return slot
        return None

    @rule(slot=consumes(held))
    def release(self, slot: int | None) -> None:
        if slot in self.holders:
            self.allocator.release(slot)
            self.holders[slot] -= 1
            if not self.holders[slot]:
                del self.holders[slot]

    @rule(slot=held, name=st.sampled_from([b"a", b"b", b"c"]))
    def name(self, slot: int | None, name: bytes) -> None:
        if slot in self.holders:
            self.allocator.name_content(slot, name)
            if name not in self.names:
                self.names = {n: of for n, of in self.names.items() if of != slot} | {name: slot}

    @rule(target=held, name=st.sampled_from([b"a", b"b", b"c"]))
    def find(self, name: bytes) -> Any:
        slot = self.allocator.find(name)
        assert slot == self.names.get(name)
        if slot is not None:
            self.allocator.retain(slot)
            self.holders[slot] = self.holders.get(slot, 0) + 1
        return slot

    @invariant()
    def a_slot_is_free_exactly_when_nobody_holds_it(self) -> None:
        self.allocator.check()
        assert self.allocator.used == len(self.holders)
        assert all(self.allocator.refs(slot) == count for slot, count in self.holders.items())


Allocation.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAllocation = Allocation.TestCase


def test_free_slots_without_content_are_taken_before_named_ones() -> None:
    allocator = SlotAllocator("test", 3)
    slots = [allocator.take() for _ in range(3)]
    allocator.name_content(slots[0], b"worth keeping")
    for slot in slots:
        allocator.release(slot)
    taken = {allocator.take(), allocator.take()}
    assert taken == {slots[1], slots[2]}
    assert allocator.find(b"worth keeping") == slots[0]


def test_named_free_slots_go_oldest_first() -> None:
    allocator = SlotAllocator("test", 3)
    slots = [allocator.take() for _ in range(3)]
    for slot in slots:
        allocator.name_content(slot, bytes([slot]))
    for slot in (slots[1], slots[0], slots[2]):
        allocator.release(slot)
    assert [allocator.take() for _ in range(3)] == [slots[1], slots[0], slots[2]]


def test_releasing_once_too_often_is_found_out() -> None:
    allocator = SlotAllocator("test", 1)
    slot = allocator.take()
    allocator.release(slot)
    with pytest.raises(AssertionError, match="once too often"):
        allocator.release(slot)


def test_what_fits_now_and_what_could_ever_fit_are_told_apart() -> None:
    pool = BlockPool([("full", 2), ("window", 1)], 3)
    assert pool.fits([2, 1], 3)
    pool.groups[0].take()
    assert not pool.fits([2, 1], 3)
    assert pool.could_fit([2, 1], 3)
    assert not pool.could_fit([3, 1], 3)
    assert not pool.could_fit([2, 1], 4)


# ---- the scheme: position alone decides


@given(st.integers(0, 5000), st.sampled_from([64, 128, 256]))
def test_all_but_the_tail_is_sealed_in_whole_groups(tokens: int, tail: int) -> None:
    scheme = KVScheme(tail=tail)
    sealed = scheme.sealed(tokens)
    assert sealed % GROUP == 0
    assert 0 <= tokens - sealed < tail + GROUP
    assert sealed == 0 or tokens - sealed >= tail
    assert tokens - sealed <= scheme.pages * GROUP
    assert scheme.sealed(tokens + 1) >= sealed


@pytest.mark.parametrize("tail", [0, 32, 100, -64])
def test_a_tail_that_is_not_whole_groups_is_refused(tail: int) -> None:
    with pytest.raises(InvalidRequest, match=str(tail)):
        KVScheme(tail=tail)


def test_bits_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="5"):
        KVScheme.uniform(5)  # type: ignore[arg-type]  # what a caller without types may do


def test_schemes_that_differ_are_described_differently() -> None:
    schemes = [KVScheme(), KVScheme(tail=64), KVScheme.uniform(8), KVScheme.uniform(None)]
    assert len({scheme.describe() for scheme in schemes}) == len(schemes)


# ---- the table

GROUPS = (
    LayerGroup("full", None, (LayerSpec(0, "full", 1, 64, 64),)),
    LayerGroup("window300", 300, (LayerSpec(1, "window", 1, 64, 64, 300),)),
)


def grow(table: AgentTable, pool: BlockPool, tokens: int) -> None:
    """What steps do to the bookkeeping."""
    scheme = table.scheme
    while table.tokens < tokens:
        if table.tokens - table.sealed == len(table.pages) * GROUP:
            table.pages.append(pool.pages.take())
        table.tokens += 1
        while table.sealed < scheme.sealed(table.tokens):
            for index, slots in enumerate(table.slots):
                if len(slots) == table.sealed // BLOCK:
                    slots.append(pool.groups[index].take())
            pool.pages.release(table.pages.pop(0))
            table.sealed += GROUP
    while (len(table.chain) + 1) * BLOCK <= table.sealed:
        table.chain.append(bytes([len(table.chain)]))
    table.leave_window(pool)


def made(tokens: int) -> tuple[AgentTable, BlockPool]:
    pool = BlockPool([(group.name, 40) for group in GROUPS], 8)
    table = AgentTable("a", "", GROUPS, KVScheme())
    grow(table, pool, tokens)
    return table, pool


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
def test_growing_never_takes_more_than_was_said_to_be_missing(lengths: list[int]) -> None:
    pool = BlockPool([(group.name, 40) for group in GROUPS], 8)
    table = AgentTable("a", "", GROUPS, KVScheme())
    for length in sorted(lengths):
        blocks, pages = table.missing(length)
        before, pages_before = table.held()
        grow(table, pool, length)
        after, pages_after = table.held()
        assert pages_after - pages_before <= pages
        assert all(b - a <= more for a, b, more in zip(before, after, blocks, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000))
def test_a_table_holds_what_its_spec_says_and_gives_it_all_back(tokens: int) -> None:
    table, pool = made(tokens)
    sealed = table.scheme.sealed(tokens)
    for group, slots in zip(GROUPS, table.slots, strict=True):
        first = min(group.first_block(tokens), len(table.chain))
        assert [slot == ABSENT for slot in slots] == [block < first for block in range(-(-sealed // BLOCK))]
    assert len(table.pages) == -(-(tokens - sealed) // GROUP)
    table.release(pool)
    pool.check()
    assert pool.pages.used == 0
    assert all(group.used == 0 for group in pool.groups)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 2000), st.data())
def test_truncating_keeps_just_the_slots_of_what_is_left(tokens: int, data: Any) -> None:
    table, pool = made(tokens)
    keep = data.draw(
        st.integers(table.sealed, tokens) | st.integers(0, table.sealed // GROUP).map(lambda n: n * GROUP)
    )
    table.truncate(keep, pool)
    assert table.tokens == keep
    assert table.sealed <= keep <= table.sealed + len(table.pages) * GROUP
    assert len(table.pages) == -(-(keep - table.sealed) // GROUP)
    assert all(len(slots) == -(-table.sealed // BLOCK) for slots in table.slots)
    assert len(table.chain) == table.sealed // BLOCK
    assert table.saved == -1
    pool.check()
    table.release(pool)
    assert pool.pages.used == 0
    assert all(group.used == 0 for group in pool.groups)


def test_truncating_forgets_what_recurrent_layers_kept() -> None:
    """A recurrent state stands for all tokens so far; it cannot go back."""
    table, pool = made(300)
    table.state = {2: "a state of 300 tokens"}
    table.truncate(0, pool)
    assert table.state == {}


def test_a_window_gives_a_block_back_once_no_future_token_can_see_it() -> None:
    table, pool = made(554)
    assert table.slots[1][0] != ABSENT  # the next token, at position 554, sees from 255 on
    grow(table, pool, 555)
    assert table.slots[1][0] == ABSENT
    assert table.slots[0][0] != ABSENT


def test_a_block_that_is_not_named_yet_stays_though_it_left_the_window() -> None:
    table, pool = made(500)
    table.chain.clear()
    table.tokens = 2000
    assert table.leave_window(pool) == 0


def test_token_ids_are_read_from_bytes_and_sequences_alike() -> None:
    assert as_ids([1, 2**32 - 1]).tolist() == as_ids(b"\1\0\0\0\xff\xff\xff\xff").tolist()


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_common_prefix_is_the_longest_one(a: list[int], b: list[int]) -> None:
    shared = common_prefix(as_ids(a), as_ids(b))
    assert a[:shared] == b[:shared]
    assert shared in (len(a), len(b)) or a[shared] != b[shared]
