"""Rows that share blocks are attended to together, each with the bits that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_pool import BLOCK, GROUP, SHAPES, Array, Pool, Shape, attention, close

from offbook.runtime.kv import native
from offbook.runtime.kv.native import StepTables

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

SLOTS, PAGES = 40, 64
MORE_SHAPES = [
    *SHAPES,
    Shape(key_bits=8, value_bits=4, rep=7),
    Shape(key_bits=16, value_bits=4, rep=5),
    Shape(dk=128, dv=128, group=128, rep=12),
    Shape(dk=192, dv=128, heads=1, rep=13),
    Shape(dk=72, dv=40, key_bits=16, value_bits=16, rep=14),
]


@dataclass
class Family:
    """Rows of a step, each with a page or more of its own."""

    blocks: list[list[int]] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def add(self, blocks: list[int], sealed: int, tail: int = 1, start: int = 0) -> None:
        gone = min(start, sealed) // BLOCK
        self.blocks.append([-1] * gone + blocks[gone:])
        self.sealed.append(sealed)
        self.lengths.append(sealed + tail)
        self.starts.append(start)

    def pages(self, row: int) -> list[int]:
        return [3 * row + page for page in range(3)]

    def tables(self, only: slice = slice(None)) -> StepTables:
        pages = [self.pages(row) for row in range(len(self.blocks))]
        return StepTables(
            self.blocks[only], pages[only], self.sealed[only], self.lengths[only], self.starts[only]
        )

    def check(self, shape: Shape, sinks: Array | None = None, pool: Pool | None = None) -> Array:
        """All together, and each alone: the same bits, and those of plain attention within rounding."""
        s, pool = shape, pool or Pool(shape, SLOTS, PAGES)
        rng, rows = np.random.default_rng(1), len(self.blocks)
        q = rng.standard_normal((rows, s.heads * s.rep, s.dk), np.float32)
        k = rng.standard_normal((rows, s.heads, s.dk), np.float32)
        v = None if s.latent else rng.standard_normal((rows, s.heads, s.dv), np.float32)
        together = pool.layer.decode(self.tables(), q, k, v, sinks=sinks)
        for row, start in enumerate(self.starts):
            one = slice(row, row + 1)
            mine = None if v is None else v[one]
            alone = pool.layer.decode(self.tables(one), q[one], k[one], mine, sinks=sinks)
            np.testing.assert_array_equal(alone[0], together[row], err_msg=f"row {row} of {rows}")
            keys, values = pool.history(
                self.blocks[row], self.pages(row), self.sealed[row], self.lengths[row]
            )
            want = attention(
                q[row][:, None],
                keys[:, start:],
                values[:, start:],
                s.dk**-0.5,
                softcap=s.softcap,
                sinks=sinks,
            )
            close(together[row], want[0])
        return together


def a_family() -> Family:
    """Different tails, lengths and windows over one prefix."""
    rows = Family()
    rows.add([7, 3, 9, 5], 4 * BLOCK, 129)
    rows.add([7, 3, 9, 6], 3 * BLOCK + 64, 2)
    rows.add([7, 3, 9, 5], 3 * BLOCK + 128, 64)  # a fork cut back: part of a block that another has whole
    rows.add([7, 3], 2 * BLOCK, 65)
    rows.add([11, 12, 13], 3 * BLOCK, 1)  # a stranger
    rows.add([7, 3, 9, 5], 4 * BLOCK, 1, start=300)  # a window that begins within the prefix
    rows.add([7, 3, 9, 5], 4 * BLOCK, 10, start=2 * BLOCK + 70)
    rows.add([7], 64, 30)
    rows.add([], 0, 5)
    rows.add([7, 3, 9], 3 * BLOCK, 30, start=3 * BLOCK + 9)  # sees its tail alone
    return rows


def test_runs_are_the_blocks_that_the_same_rows_read() -> None:
    assert sorted(a_family().tables().runs()) == [
        (0, 1, (0, 1, 2, 3, 7)),
        (0, 3, (4,)),
        (1, 2, (0, 1, 2, 3, 5)),
        (2, 3, (0, 1, 2, 5, 6)),
        (3, 4, (0, 2, 5, 6)),
        (3, 4, (1,)),
    ]


@pytest.mark.parametrize("shape", MORE_SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_with_those_it_shares_a_prefix_with(
    shape: Shape, every_set: str
) -> None:
    a_family().check(shape)


@pytest.mark.parametrize("shape", MORE_SHAPES, ids=str)
def test_a_shared_block_gives_the_bits_that_copies_of_it_give(shape: Shape) -> None:
    shared, copies, pool = a_family(), a_family(), Pool(shape, 2 * SLOTS, PAGES)
    free = SLOTS
    for blocks in copies.blocks:
        for at, slot in enumerate(blocks):
            if slot >= 0:
                for name, tensor in pool.tensors.items():
                    if not name.startswith("tail."):
                        tensor[free] = tensor[slot]
                blocks[at], free = free, free + 1
    assert {len(rows) for _, _, rows in copies.tables().runs()} == {1}
    np.testing.assert_array_equal(shared.check(shape, pool=pool), copies.check(shape, pool=pool))


@pytest.mark.parametrize("count", [2, 3, 8, 16])
@pytest.mark.parametrize("rep", [1, 3, 9])
def test_any_number_of_rows_may_share(count: int, rep: int) -> None:
    """More query rows than one product takes, too."""
    rows = Family()
    for row in range(count):
        rows.add([4, 2, 8, 10 + row], 3 * BLOCK + 64 * (row % 5), 1 + 40 * (row % 4))
    rows.check(Shape(rep=rep))


def test_sinks_take_their_share_of_each_row() -> None:
    a_family().check(Shape(), sinks=np.linspace(-2, 6, 6, dtype=np.float32))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_bits(threads: int) -> None:
    want = a_family().check(Shape())
    try:
        native.set_threads(threads)
        for _ in range(5):
            np.testing.assert_array_equal(a_family().check(Shape()), want)
    finally:
        native.set_threads(native.default_threads())


def test_what_is_not_sealed_for_any_sharer_may_hold_anything() -> None:
    pool, rows, nan = Pool(Shape(), SLOTS, PAGES), Family(), 0x7FC0
    rows.add([7, 3], BLOCK + 128, 9)
    rows.add([7, 3], BLOCK + 64, 9)
    pool.tensors["k.scales"][3, ..., 2:] = nan
    pool.tensors["v.scales"][3, :, 128:] = nan
    rows.check(Shape(), pool=pool)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(MORE_SHAPES), st.integers(2, 16))
def test_any_tree_of_forks(data: st.DataObject, shape: Shape, count: int) -> None:
    free, rows = iter(range(SLOTS)), Family()
    tables = [[next(free) for _ in range(data.draw(st.integers(0, 3)))]]
    while len(tables) < count:
        parent = data.draw(st.sampled_from(tables))
        kept = parent[: data.draw(st.integers(0, len(parent)))]
        tables.append(
            kept + [slot for slot, _ in zip(free, range(data.draw(st.integers(0, 1))), strict=False)]
        )
    for table in tables:
        back = data.draw(st.integers(0, 3)) if table else 0
        sealed, tail = len(table) * BLOCK - back * GROUP, data.draw(st.integers(1, 190))
        rows.add(table, sealed, tail, data.draw(st.just(0) | st.integers(0, sealed + tail - 1)))
    rows.check(shape)
    seen = [
        (row, block)
        for first, last, members in rows.tables().runs()
        for row in members
        for block in range(first, last)
    ]
    assert sorted(seen) == [
        (row, block)
        for row in range(count)
        for block in range(rows.starts[row] // BLOCK, -(-rows.sealed[row] // BLOCK))
    ]
    for first, last, members in rows.tables().runs():
        for block in range(first, last):
            slot = rows.blocks[members[0]][block]
            sharers = [
                row
                for row in range(count)
                if rows.starts[row] // BLOCK <= block < -(-rows.sealed[row] // BLOCK)
                and rows.blocks[row][block] == slot
            ]
            assert list(members) == sharers


@pytest.mark.parametrize("architecture", ["llama", "gemma-96", "latent"])
def test_agents_with_equal_beginnings_are_one_product(
    architecture: str, rig: Callable[..., Any], ids: Any
) -> None:
    """From agents' own tables: forks, and an agent that read the same text by itself."""
    one, text = rig(architecture, native=True), ids(900)
    agents = ["first", "itself", "fork", "longer"]
    one.say("first", text)
    one.say("itself", np.concatenate([text[:800], ids(70, 1)]))
    one.say("fork", np.concatenate([text, ids(5, 2)]), origin="first")
    one.say("longer", np.concatenate([text, ids(300, 3)]), origin="first")
    tables, front = [one.table(agent) for agent in agents], one.batch.native
    for group, layers in enumerate(one.spec.groups):
        window = layers.window
        starts = [0 if window is None else max(0, table.tokens + 1 - window) for table in tables]
        step = [
            [table.slots[group] for table in tables],
            [[*table.pages, PAGES] for table in tables],  # a page for the new token, where it needs one
            [table.sealed for table in tables],
            [table.tokens + 1 for table in tables],
            starts,
        ]
        room = all(table.tokens % GROUP for table in tables)
        assert room, "choose other lengths: each row's last page has room for a token"
        together = StepTables(*step)
        if window is None:
            assert (0, 2, (0, 1, 2, 3)) in together.runs()
        layer = layers.layers[0]
        handle, rng = front.handle(layer, 4), np.random.default_rng(5)
        q = rng.standard_normal((4, 4, layer.key_width), np.float32)
        k = rng.standard_normal((4, layer.heads, layer.key_width), np.float32)
        v = (
            None
            if layer.kind == "latent"
            else rng.standard_normal((4, layer.heads, layer.value_width), np.float32)
        )
        out = handle.decode(together, q, k, v)
        for row in range(4):
            alone = StepTables(*([part[row]] for part in step))
            at = slice(row, row + 1)
            np.testing.assert_array_equal(
                handle.decode(alone, q[at], k[at], None if v is None else v[at])[0], out[row]
            )
