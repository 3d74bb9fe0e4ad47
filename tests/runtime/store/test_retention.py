"""The cap: what goes first, what is refused, and that it holds across restarts and models."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbook.runtime.store import BlockStore, Full, Tail
from offbook.runtime.store.disk import Disk, disk_size

PAGES = 4096


class Ticks:
    """Each look at the clock is a second later."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def on_disk(root: Path) -> int:
    """What the folder really takes, in whole pages, the lock file apart."""
    return sum(disk_size(p.stat().st_size) for p in root.rglob("*") if p.is_file() and p.name != "lock")


def agent_bytes(kit, open_store, tmp_path, tokens=600) -> int:
    """What saving one agent adds."""
    store = open_store(root=tmp_path / "measure")
    kit.save(store, "x", tokens)
    (record,) = store.agents()
    return sum(disk_size(store.block_bytes) for _ in range(record.blocks)) + disk_size(record.tails[0].nbytes)


@pytest.fixture
def room_for(kit, open_store, tmp_path):
    one = agent_bytes(kit, open_store, tmp_path)
    catalog = 600_000  # With its log, at most.
    return lambda agents: int(agents * one + catalog)


def fill(kit, store, prefix, n, tokens=600):
    """Save agents. Returns those still held, the longest unused first."""
    for i in range(n):
        assert kit.save(store, f"{prefix}{i}", tokens).ok
    return [record.agent for record in reversed(store.agents())]


def test_the_longest_unused_agent_goes_first_and_whole(kit, open_store, room_for):
    store = open_store(cap_bytes=room_for(4), clock=Ticks(), snapshots=1)
    held = fill(kit, store, "a", 30)
    assert len(held) >= 4
    assert held == [f"a{i}" for i in range(30 - len(held), 30)]
    assert store.load_tail(held[0]).result().ok  # Used just now: no longer the first to go.
    kit.save(store, "new", 600)
    left = {record.agent for record in store.agents()}
    assert held[0] in left
    assert held[1] not in left
    assert kit.check(store, held[1], 600) == (0, False)
    assert kit.check(store, held[0], 600) == (2, True)
    assert store.stats().blocks == 2 * len(left)
    assert store.stats().disk_bytes <= room_for(4)


def test_other_models_go_before_this_one(kit, open_store, room_for):
    old = open_store(fingerprint="e" * 64, cap_bytes=room_for(4), clock=Ticks(), snapshots=1)
    fill(kit, old, "old", 30)
    old.close()
    store = open_store(cap_bytes=room_for(4), snapshots=1)
    for i in range(4):
        assert kit.save(store, f"new{i}", 600).ok
        assert on_disk(store.root) <= room_for(4)
    assert all(kit.check(store, f"new{i}", 600) == (2, True) for i in range(4))
    models = [record.fingerprint for record in store.agents()]
    assert models.count(kit.fingerprint) == 4
    kept_old = [record.agent for record in store.agents() if record.fingerprint != kit.fingerprint]
    assert kept_old == [f"old{i}" for i in range(29, 29 - len(kept_old), -1)]


def test_a_smaller_cap_holds_from_the_start(kit, open_store, room_for):
    store = open_store(clock=Ticks(), snapshots=1)
    fill(kit, store, "a", 40)
    store.close()
    smaller = open_store(cap_bytes=room_for(3), clock=Ticks(), snapshots=1)
    assert on_disk(smaller.root) <= room_for(3)
    assert len(smaller.agents()) >= 3
    assert smaller.agents()[0].agent == "a39"


def test_shared_blocks_stay_while_one_owner_stays(kit, open_store, room_for):
    store = open_store(cap_bytes=room_for(6), clock=Ticks(), snapshots=1)
    persona = kit.ids("persona", 512)
    for i in range(40):
        ids = np.concatenate([persona, kit.ids(f"s{i}", 300)])
        assert all(r.ok for r in kit.put_blocks(store, ids, f"s{i}"))
        assert store.put_tail(f"s{i}", kit.tail(store, ids)).result().ok
    assert store.stats().counters["evicted_agents"] > 0
    assert all(store.has(name) for name in store.chain(persona))


def test_what_is_larger_than_the_cap_is_refused_alone(kit, open_store, room_for):
    store = open_store(cap_bytes=room_for(3), clock=Ticks())
    kit.save(store, "ann", 600)
    huge = Tail(1, bytes(16), [], {"x": np.zeros(room_for(4), np.uint8)})
    result = store.put_tail("bob", huge).result()
    assert isinstance(result, Full)
    assert "do not fit the cap" in result.reason
    assert kit.check(store, "ann", 600) == (2, True)
    assert store.stats().counters["refused"] == 1
    assert store.degraded is None
    assert kit.save(store, "bob", 600).ok


def test_an_agent_larger_than_the_cap_keeps_its_oldest_blocks(kit, open_store, room_for):
    store = open_store(cap_bytes=room_for(3))
    ids = kit.ids("ann", 256 * 400)
    results = kit.put_blocks(store, ids, "ann")
    good = [r.ok for r in results]
    assert good == sorted(good, reverse=True)
    assert 0 < sum(good) < 400
    assert on_disk(store.root) <= room_for(3)
    # A short-lived other agent may then take its place.
    assert kit.save(store, "bob", 300).ok


def test_a_cap_of_nothing_refuses_everything_and_serves(kit, open_store):
    store = open_store(cap_bytes=0)
    assert isinstance(kit.put_blocks(store, kit.ids("ann", 256), "ann")[0], Full)
    assert isinstance(kit.save(store, "ann", 10), Full)
    assert kit.check(store, "ann", 256) == (0, False)


def test_eviction_that_cannot_remove_files_refuses_the_new_one(kit, open_store, room_for):
    class Stuck(Disk):
        stuck = False

        def step(self, what: str, path: str) -> None:
            if self.stuck and what == "remove":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    disk = Stuck()
    store = open_store(cap_bytes=room_for(3), clock=Ticks(), disk=disk, retry_seconds=5, snapshots=1)
    held = fill(kit, store, "a", 50)
    disk.stuck = True
    names = [record.agent for record in store.agents()]
    results = [kit.save(store, f"b{i}", 600) for i in range(30)]
    assert not results[-1].ok
    assert set(held) <= {record.agent for record in store.agents()} | {held[0]}
    assert names
    assert on_disk(store.root) <= room_for(3)
    disk.stuck = False
    assert kit.save(store, "c", 600).ok


def test_the_quarantine_counts_and_goes_first(kit, open_store, block_files, room_for):
    store = open_store(cap_bytes=room_for(5), snapshots=1)
    for i in range(10):
        kit.save(store, "bad", 300 + i)
        for path in block_files():
            path.write_bytes(b"x" * 50_000)
        assert kit.check(store, "bad", 300 + i)[0] == 0
    assert store.stats().quarantined_files > 0
    assert on_disk(store.root) <= room_for(5) + 10 * 50_000
    fill(kit, store, "a", 60)
    assert store.stats().quarantined_files == 0
    assert on_disk(store.root) <= room_for(5)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_happens_counts_and_files_agree(kit, tmp_path_factory, data):
    """Random saves, rewinds, forgets, damage and restarts; after each the index equals the folder."""
    root = tmp_path_factory.mktemp("any") / "kv"
    cap = data.draw(st.sampled_from([None, 700_000, 1_000_000]))
    store = None
    lengths: dict[str, int] = {}
    try:
        for _ in range(data.draw(st.integers(3, 10))):
            if store is None:
                options = {"fingerprint": kit.fingerprint, "layout": kit.layout, "lock_seconds": 0}
                store = BlockStore(root, cap_bytes=cap, snapshots=2, **options)
            who = data.draw(st.sampled_from(["ann", "bob", "cem"]))
            match data.draw(st.sampled_from(["save"] * 3 + ["rewind", "forget", "damage", "restart", "gc"])):
                case "save":
                    lengths[who] = lengths.get(who, 0) + data.draw(st.sampled_from([10, 300, 1500]))
                    kit.save(store, who, lengths[who])
                case "rewind":
                    lengths[who] = lengths.get(who, 0) // 2
                    kit.save(store, who, lengths[who])
                case "forget":
                    assert store.forget(who).result().ok
                    lengths.pop(who, None)
                case "gc":
                    assert store.gc().result().ok
                case "damage":
                    files = sorted(root.glob("blocks/*/*"))
                    if files:
                        files[data.draw(st.integers(0, len(files) - 1))].write_bytes(b"")
                case "restart":
                    store.close()
                    store = None
            if store is not None:
                store.flush()
                for name, tokens in lengths.items():
                    kit.check(store, name, tokens)
                stats = store.stats()
                assert stats.blocks == len(list(root.glob("blocks/*/*")))
                assert stats.tails == len(list(root.glob("tails/*/*")))
                assert stats.disk_bytes == on_disk(root)
                assert cap is None or stats.disk_bytes <= cap
                assert list(root.glob("tmp/*")) == []
                index = store._state.index
                assert set(index.unowned()) == {n for n in index.blocks if not index.references[n]}
                assert index.references == sum((Counter(a.owned) for a in index.agents.values()), Counter())
    finally:
        if store is not None:
            store.close()
