"""Blocks read at once by the native kernel: what comes back, and what a bad file leads to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from offbook.runtime.kv import native, native_read
from offbook.runtime.store import Corrupt, Loaded, Missing, StoreUsageError, TensorSpec
from offbook.runtime.store.reading import HASHED_HERE, Places, Reusable

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

SIZES = (
    1,
    16,
    240,
    241,
    256,
    320,
    1023,
    1024,
    1025,
    1088,
    1089,
    2048,
    2049,
    4099,
    100_001,
    200_003,
    77,
    300_000,
    512,
)


@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
def test_checksums_are_xxh3_with_every_instruction_set(tmp_path: Path, instructions: str) -> None:
    try:
        native.instruction_set(instructions)
    except ValueError:
        pytest.skip(f"no {instructions} here")
    try:
        reader, path = native_read.reader(), tmp_path / "file"
        assert reader is not None
        pieces = [os.urandom(size) for size in SIZES]
        path.write_bytes(b"".join(pieces))
        into = [np.zeros(size, np.uint8) for size in SIZES]
        addresses = np.array([array.ctypes.data for array in into], np.int64)
        sums = np.zeros(16 * len(SIZES), np.uint8)
        read = reader(str(path), sum(SIZES), addresses, np.array(SIZES, np.int64), sums)
        assert read == (sum(SIZES), sum(SIZES))
        for i, piece in enumerate(pieces):
            assert into[i].tobytes() == piece
            if len(piece) > HASHED_HERE:
                assert sums[16 * i : 16 * i + 16].tobytes() == xxhash.xxh3_128_digest(piece), len(piece)
    finally:
        native.instruction_set()


def bits(array: Any) -> Any:
    return array.view(np.uint8)


def one_block(kit: Any, open_store: Any, **options: Any) -> tuple[Any, bytes]:
    store = open_store(**options)
    ids = kit.ids("ann", 256)
    assert kit.put_blocks(store, ids, "ann")[0].ok
    return store, store.chain(ids)[0]


def test_some_tensors_alone_are_read(kit: Any, open_store: Any) -> None:
    store, name = one_block(kit, open_store)
    contents = kit.contents(name)
    for wanted in ([0], [8], [1, 2, 7], [0, 4, 8], list(range(9))):
        dests = kit.empty()
        before = [dest.copy() for dest in dests]
        addresses = [dest.ctypes.data if i in wanted else 0 for i, dest in enumerate(dests)]
        result = store.load_block(name, Places(np.array(addresses, np.int64), dests)).result()
        assert isinstance(result, Loaded)
        for i, dest in enumerate(dests):
            np.testing.assert_array_equal(bits(dest), bits(contents[i] if i in wanted else before[i]))


def test_a_layout_of_more_pieces_than_one_system_call_takes(kit: Any, open_store: Any) -> None:
    layout = [TensorSpec(f"t{i}", "U8", (250 + i,)) for i in range(1200)]
    store, name = one_block(kit, open_store, layout=layout)
    dests = [spec.empty() for spec in layout]
    places = Places(np.array([dest.ctypes.data for dest in dests], np.int64), dests)
    assert store.load_block(name, places).result().ok
    for dest, content in zip(dests, kit.contents(name, layout), strict=True):
        np.testing.assert_array_equal(dest, content)


def test_any_changed_byte_is_noticed(
    kit: Any, open_store: Any, block_files: Callable[[], list[Path]]
) -> None:
    store, name = one_block(kit, open_store)
    (path,) = block_files()
    good = path.read_bytes()
    for at in [*range(0, len(good), 97), len(good) - 1]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        result, _ = kit.load(store, name, at_once=True)
        assert isinstance(result, Corrupt), at
        assert not path.exists()  # in quarantine
        store.close()
        path.write_bytes(good)
        store = open_store()
    assert kit.load(store, name, at_once=True)[0].ok


@pytest.mark.parametrize("change", [-1, -5000, 1])
def test_a_file_of_another_size_is_corrupt(
    kit: Any, open_store: Any, block_files: Callable[[], list[Path]], change: int
) -> None:
    store, name = one_block(kit, open_store)
    (path,) = block_files()
    good = path.read_bytes()
    path.write_bytes(good[:change] if change < 0 else good + b"x")
    result, _ = kit.load(store, name, at_once=True)
    assert isinstance(result, Corrupt)
    assert f"{len(good) + change} bytes instead of {len(good)}" in result.reason


def test_a_file_that_is_gone_is_missing(
    kit: Any, open_store: Any, block_files: Callable[[], list[Path]]
) -> None:
    store, name = one_block(kit, open_store)
    block_files()[0].unlink()
    assert isinstance(kit.load(store, name, at_once=True)[0], Missing)


def test_places_are_for_stores_with_a_reader(kit: Any, open_store: Any) -> None:
    store, name = one_block(kit, open_store)
    with pytest.raises(StoreUsageError, match="places"):
        store.load_block(name, Places(np.zeros(3, np.int64), None))
    plain, name = one_block(kit, open_store, root=store.root.parent / "other", reader=None)
    assert not plain.takes_places
    with pytest.raises(StoreUsageError, match="places"):
        kit.load(plain, name, at_once=True)


def test_memory_is_used_again_when_no_view_of_it_is_left() -> None:
    memory = Reusable()
    first = memory.take(1000)
    where = first.ctypes.data
    view = first[100:200].view(np.uint32)
    del first
    second = memory.take(1000)  # a view of the first is still there
    assert second.ctypes.data != where
    third = memory.take(2000)  # and this has nothing to do with either
    third[:], second[:], view[:] = 3, 2, 1
    assert (third == 3).all()
    assert (second == 2).all()
    assert (view == 1).all()
    del view, second, third
    places = {memory.take(5000).ctypes.data for _ in range(5)}
    assert len(places) == 1
    large = memory.take(3 * Reusable.ROUND)
    assert len(large) == 3 * Reusable.ROUND
    assert memory.take(0).nbytes == 0
