"""What goes in comes out: blocks, tails, sharing, rewinding, restarts."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Event
from typing import Any

import numpy as np
import pytest

from offbook.runtime.store import (
    Busy,
    Failed,
    Missing,
    ReadOnly,
    Removed,
    Stored,
    StoreLocked,
    StoreUsageError,
    Tail,
    TensorSpec,
)
from offbook.runtime.store.disk import Disk


def test_blocks_and_tail_come_back_bit_for_bit_after_a_restart(kit, open_store):
    store = open_store()
    kit.save(store, "villager/ann", 1000)
    assert kit.check(store, "villager/ann", 1000) == (3, True)
    store.close()
    again = open_store()
    assert kit.check(again, "villager/ann", 1000) == (3, True)
    assert again.stats().counters.get("adopted_blocks", 0) == 0


def test_equal_prefixes_are_stored_once(kit, open_store):
    store = open_store()
    ids = kit.ids("shared", 512)
    first = kit.put_blocks(store, ids, "a")
    second = kit.put_blocks(store, ids, "b")
    assert [r.existed for r in first] == [False, False]
    assert [r.existed for r in second] == [True, True]
    assert store.stats().blocks == 2


def test_salts_and_models_share_nothing(kit, open_store):
    store = open_store()
    kit.save(store, "ann", 600, salt="one")
    assert not any(store.has(name) for name in store.chain(kit.ids("ann", 600), "two"))
    assert store.load_tail("ann", "two").result() == Missing("no tail of 'ann'")
    store.close()
    other = open_store(fingerprint="e" * 64)
    assert kit.check(other, "ann", 600, salt="one") == (0, False)
    other.close()
    assert kit.check(open_store(), "ann", 600, salt="one") == (2, True)


def test_one_layer_group_can_be_read_alone(kit, open_store):
    store = open_store()
    kit.save(store, "ann", 256)
    name = store.chain(kit.ids("ann", 256))[0]
    want = kit.contents(name)
    middle: list[Any] = [None] * 3 + kit.empty()[3:6] + [None] * 3
    result = store.load_block(name, middle).result()
    assert result.ok
    assert result.nbytes < store.block_bytes / 2
    for i in range(3, 6):
        assert middle[i].tobytes() == want[i].tobytes()
    by_name = {"layers.2.v.raw": kit.layout[8].empty(), "layers.0.k.scales": kit.layout[1].empty()}
    assert store.load_block(name, by_name).result().ok
    assert by_name["layers.2.v.raw"].tobytes() == want[8].tobytes()
    assert by_name["layers.0.k.scales"].tobytes() == want[1].tobytes()


def test_loads_go_straight_into_slots_of_a_pool(kit, open_store):
    store = open_store()
    kit.save(store, "ann", 768)
    names = store.chain(kit.ids("ann", 768))
    pool = [np.zeros((5, *spec.shape), spec.empty().dtype) for spec in kit.layout]
    slots = [4, 0, 2]
    futures = store.load_blocks([(n, [p[s] for p in pool]) for n, s in zip(names, slots, strict=True)])
    assert all(f.result().ok for f in futures)
    for name, slot in zip(names, slots, strict=True):
        for array, want in zip(pool, kit.contents(name), strict=True):
            assert array[slot].tobytes() == want.tobytes()
    assert not any(p[1].any() or p[3].any() for p in pool)


def test_the_last_turns_can_be_rewound_to(kit, open_store):
    store = open_store(snapshots=3)
    for tokens in (100, 200, 300, 400):
        kit.save(store, "ann", tokens)
    assert [t.tokens for t in store.tails("ann")] == [200, 300, 400]
    assert store.load_tail("ann", at=300).result().tail.tokens == 300
    assert isinstance(store.load_tail("ann", at=100).result(), Missing)
    # Rewound to 300 and gone another way: the tail of the left branch goes.
    ids = np.concatenate([kit.ids("ann", 300), kit.ids("other way", 50)])
    assert store.put_tail("ann", kit.tail(store, ids)).result().ok
    assert [t.tokens for t in store.tails("ann")] == [200, 300, 350]
    assert store.best_tail("ann", kit.ids("ann", 400)).tokens == 300
    assert store.best_tail("ann", ids).tokens == 350
    assert store.best_tail("ann", kit.ids("bob", 400)) is None


def test_blocks_written_ahead_of_a_tail_stay_the_agents(kit, open_store):
    store = open_store(snapshots=1)
    ids = kit.ids("ann", 1024)
    kit.put_blocks(store, ids, "ann")
    assert store.put_tail("ann", kit.tail(store, ids[:700])).result().ok
    assert store.flush()
    assert store.stats().blocks == 4
    assert store.put_tail("ann", kit.tail(store, ids[:710])).result().ok
    assert store.flush()
    assert store.stats().blocks == 2  # The two after it were of a turn that never ended.


def test_rewinding_collects_the_blocks_of_the_branch_left(kit, open_store):
    store = open_store(snapshots=1)
    kit.save(store, "ann", 1024)
    assert store.stats().blocks == 4
    kit.save(store, "ann", 600)
    assert store.flush()
    assert store.stats().blocks == 2


def test_tails_hold_any_named_arrays(kit, open_store):
    store = open_store()
    arrays = {
        "scalar": np.float32(3.5).reshape(()),
        "none": np.empty((0, 4), np.float32),
        "bools": np.array([True, False]),
        "strided": np.arange(12, dtype=np.int64).reshape(3, 4).T,
    }
    tail = Tail(7, bytes(16), [], arrays, {"why": "läuft", "n": [1, 2]})
    assert store.put_tail("ann", tail).result().ok
    store.close()
    back = open_store().load_tail("ann").result().tail
    assert dict(back.note) == dict(tail.note)
    for name, array in arrays.items():
        assert np.array_equal(back.arrays[name], array)
        assert back.arrays[name].shape == array.shape


def test_a_copied_tail_may_change_at_once(kit, open_store):
    store = open_store()
    page = np.full(1000, 7, np.uint16)
    future = store.put_tail("ann", Tail(3, bytes(16), [], {"page": page}))
    page[:] = 9
    assert future.result().ok
    assert (store.load_tail("ann").result().tail.arrays["page"] == 7).all()


def test_a_tail_names_listed_blocks_that_are_not_stored(kit, open_store):
    store = open_store()
    ids = kit.ids("ann", 520)
    result = store.put_tail("ann", kit.tail(store, ids)).result()
    assert result.missing == tuple(store.chain(ids))
    kit.put_blocks(store, ids)
    assert store.put_tail("ann", kit.tail(store, ids)).result().missing == ()


@pytest.mark.parametrize(
    "agent", ["user@example.com", "../../etc/passwd", "a\0b", "\n", "ж" * 5000, "", "villager/a/b"]
)
def test_any_agent_id_is_safe_on_disk(kit, open_store, tmp_path, agent):
    store = open_store()
    kit.save(store, agent, 300)
    assert kit.check(store, agent, 300) == (1, True)
    assert [r.agent for r in store.agents()] == [agent]
    assert {p.name for p in tmp_path.iterdir()} == {"kv"}
    store.close()
    assert kit.check(open_store(), agent, 300) == (1, True)


def test_an_agent_id_that_is_no_text_is_refused(kit, open_store):
    store = open_store()
    with pytest.raises(StoreUsageError, match="proper text"):
        store.put_tail("\ud800", Tail(0, bytes(16), [], {}))


def test_forgetting_spares_what_others_own(kit, open_store):
    store = open_store()
    shared = kit.ids("persona", 512)
    for who in ("ann", "bob"):
        ids = np.concatenate([shared, kit.ids(who, 300)])
        kit.put_blocks(store, ids, who)
        store.put_tail(who, kit.tail(store, ids)).result()
    assert store.stats().blocks == 4
    removed = store.forget("ann").result()
    assert isinstance(removed, Removed)
    assert (removed.blocks, removed.tails) == (1, 1)
    assert isinstance(store.load_tail("ann").result(), Missing)
    assert all(store.has(name) for name in store.chain(shared))
    store.forget("bob").result()
    assert store.stats().blocks == 0
    assert [r.agent for r in store.agents()] == []


def test_forgetting_covers_all_models_and_salts(kit, open_store):
    store = open_store()
    kit.save(store, "ann", 300, salt="one")
    store.close()
    other = open_store(fingerprint="e" * 64)
    kit.save(other, "ann", 300, salt="two")
    assert other.forget("ann", salt="two").result().tails == 1
    assert other.forget("ann").result().tails == 1
    assert other.stats().blocks == 0


def test_blocks_without_owner_are_collected_on_request_and_at_start(kit, open_store):
    store = open_store()
    kit.put_blocks(store, kit.ids("nobody", 512))
    kit.save(store, "ann", 300)
    assert store.gc().result().blocks == 2
    kit.put_blocks(store, kit.ids("nobody", 512))
    store.close()
    assert open_store().stats().blocks == 1


def test_a_wrong_name_shape_or_destination_is_refused_before_any_work(kit, open_store):
    store = open_store()
    ids = kit.ids("ann", 256)
    name, root, good = store.chain(ids)[0], store.root_hash(), kit.empty()
    with pytest.raises(StoreUsageError, match="not what follows"):
        store.put_block(bytes(16), root, ids, good)
    with pytest.raises(StoreUsageError, match="255 ids"):
        store.put_block(name, root, ids[:255], good)
    with pytest.raises(StoreUsageError, match="8 arrays for the 9"):
        store.put_block(name, root, ids, good[:-1])
    with pytest.raises(StoreUsageError, match=r"layers\.0\.k\.packed.*2048 contiguous bytes"):
        store.put_block(name, root, ids, [np.zeros(3, np.uint32), *good[1:]])
    with pytest.raises(StoreUsageError, match=r"lacks 'layers\.0\.k\.packed'"):
        store.put_block(name, root, ids, {spec.name: spec.empty() for spec in kit.layout[1:]})
    with pytest.raises(StoreUsageError, match="not in the layout: nonsense"):
        store.load_block(name, {"nonsense": good[0]})
    good[0].flags.writeable = False
    with pytest.raises(StoreUsageError, match="cannot be written"):
        store.load_block(name, good)
    with pytest.raises(StoreUsageError, match="dtype complex128"):
        store.put_tail("ann", Tail(1, bytes(16), [], {"z": np.zeros(2, complex)}))
    with pytest.raises(StoreUsageError, match="two tensors are named"):
        open_store(root="/nowhere", layout=[kit.layout[0], kit.layout[0]])
    assert store.stats().blocks == 0


def test_one_process_writes_at_a_time_and_others_may_read(kit, open_store):
    store = open_store()
    kit.save(store, "ann", 300)
    with pytest.raises(StoreLocked, match="in use by process"):
        open_store()
    reader = open_store(read_only=True)
    assert kit.check(reader, "ann", 300) == (1, True)
    assert isinstance(reader.put_tail("x", Tail(0, bytes(16), [], {})).result(), ReadOnly)
    assert isinstance(reader.forget("ann").result(), ReadOnly)
    assert isinstance(reader.gc().result(), ReadOnly)
    reader.close()
    assert kit.check(store, "ann", 300) == (1, True)


def test_a_closed_store_answers_and_does_nothing(kit, open_store):
    store = open_store()
    kit.save(store, "ann", 300)
    store.close()
    store.close()
    name = store.chain(kit.ids("ann", 300))[0]
    assert store.load_block(name, kit.empty()).result() == Failed("the store is closed")
    assert store.put_tail("ann", Tail(0, bytes(16), [], {})).result() == Failed("the store is closed")
    assert store.forget("ann").result() == Failed("the store is closed")
    assert store.flush()


class HeldDisk(Disk):
    """Stands still at the first write until let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = Event(), Event()

    def step(self, what: str, path: str) -> None:
        if what == "write":
            self.reached.set()
            assert self.go.wait(10)


def test_a_full_queue_says_busy_and_takes_nothing(kit, open_store):
    disk = HeldDisk()
    store = open_store(disk=disk, pending_bytes=1)
    ids = kit.ids("ann", 512)
    names = store.chain(ids)
    args = [
        (names[0], store.root_hash(), kit.ids("ann", 512)[:256]),
        (names[1], names[0], kit.ids("ann", 512)[256:]),
    ]
    first = store.put_block(*args[0], kit.contents(names[0]))  # Alone it is taken, whatever its size.
    assert disk.reached.wait(10)
    assert store.put_block(*args[0], kit.contents(names[0])) is first
    assert isinstance(store.put_block(*args[1], kit.contents(names[1])).result(), Busy)
    assert store.stats().pending_bytes == store.block_bytes
    assert not store.has(names[0])
    disk.go.set()
    assert isinstance(first.result(), Stored)
    assert store.put_block(*args[1], kit.contents(names[1])).result().ok


def test_saving_a_turn_costs_its_tokens_not_its_history(kit, open_store):
    store = open_store()
    written = {}
    for start in (256, 4096):
        who = f"agent {start}"
        kit.save(store, who, start)
        before = store.stats().counters["bytes_written"]
        kit.save(store, who, start + 50)
        written[start] = store.stats().counters["bytes_written"] - before
    assert abs(written[4096] - written[256]) < store.block_bytes


def test_flush_waits_for_everything_before_it(kit, open_store):
    store = open_store()
    ids = kit.ids("ann", 2048)
    futures: list[Future[Any]] = [
        store.put_tail("ann", kit.tail(store, ids[:n])) for n in range(0, 2048, 100)
    ]
    assert store.flush()
    assert all(f.done() for f in futures)


def test_an_odd_layout_of_many_tensors_survives_the_limit_on_vectors(kit, open_store):
    layout = [TensorSpec(f"t{i}", "U8", (i % 5 + 1,)) for i in range(2500)]
    store = open_store(layout=layout)
    ids = kit.ids("ann", 256)
    assert kit.put_blocks(store, ids, "ann")[0].ok
    dests = [spec.empty() for spec in layout]
    assert store.load_block(store.chain(ids)[0], dests).result().ok
    assert [d.tobytes() for d in dests] == [a.tobytes() for a in kit.contents(store.chain(ids)[0], layout)]


def test_nothing_on_disk_is_for_other_users_eyes(kit, open_store, tmp_path):
    store = open_store()
    kit.save(store, "ann", 300)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "kv").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
