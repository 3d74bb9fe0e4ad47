"""Bad files, bad catalogs, bad disks: at most a miss, never wrong data, never a dead thread."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from offbook.runtime.store import Corrupt, Failed, Full, Loaded, Missing, ReadOnly, Stored, Tail
from offbook.runtime.store.disk import Disk


def flip(path: Path, at: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def test_a_flipped_bit_anywhere_in_a_block_is_found(kit, open_store, block_files):
    rng = np.random.default_rng(1)
    store = open_store()
    kit.save(store, "ann", 256)
    name = store.chain(kit.ids("ann", 256))[0]
    (path,) = block_files()
    size = path.stat().st_size
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    places = [
        0,
        7,
        8,
        34,
        81,
        header - 1,
        header,
        size - 1,
        *rng.integers(0, header, 20),
        *rng.integers(0, size, 20),
    ]
    for at in map(int, places):
        flip(path, at, int(rng.integers(8)))
        result = store.load_block(name, kit.empty()).result()
        assert isinstance(result, Corrupt), at
        assert not store.has(name)
        assert not path.exists()
        assert kit.put_blocks(store, kit.ids("ann", 256), "ann")[0] == Stored(store.block_bytes)
    assert kit.check(store, "ann", 256) == (1, True)
    assert store.stats().counters["corrupt"] == len(places)
    assert store.stats().quarantined_files == 32


def test_a_flipped_bit_is_found_without_the_catalog_too(kit, open_store, block_files, tail_files, tmp_path):
    rng = np.random.default_rng(2)
    for trial in range(25):
        store = open_store()
        kit.save(store, "ann", 300)
        store.close()
        for path in (*block_files(), *tail_files()):
            flip(path, int(rng.integers(path.stat().st_size)), int(rng.integers(8)))
        for file in (tmp_path / "kv").glob("catalog*"):
            file.unlink()
        again = open_store()
        assert kit.check(again, "ann", 300) == (0, False), trial
        assert again.stats().counters["corrupt"] == 2
        again.close()
        shutil.rmtree(tmp_path / "kv")


@pytest.mark.parametrize("damage", ["truncate", "empty", "longer", "delete", "folder", "zeros"])
def test_other_damage_to_a_block_is_one_miss(kit, open_store, block_files, damage):
    store = open_store()
    kit.save(store, "ann", 600)
    kit.save(store, "bob", 600)
    first, second = store.chain(kit.ids("ann", 600))
    path = next(path for path in block_files() if path.stem == second.hex())
    size = path.stat().st_size
    if damage == "truncate":
        os.truncate(path, size - 1)
    elif damage == "empty":
        os.truncate(path, 0)
    elif damage == "longer":
        os.truncate(path, size + 1)
    elif damage == "zeros":
        path.write_bytes(bytes(size))
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    result = store.load_block(second, kit.empty()).result()
    assert isinstance(result, Missing if damage == "delete" else Corrupt)
    assert isinstance(store.load_block(second, kit.empty()).result(), Missing)
    assert store.load_block(first, kit.empty()).result().ok
    assert kit.check(store, "bob", 600) == (2, True)
    kit.save(store, "ann", 600)
    assert kit.check(store, "ann", 600) == (2, True)


def test_swapped_blocks_are_both_corrupt(kit, open_store, block_files):
    store = open_store()
    kit.save(store, "ann", 512)
    one, two = block_files()
    spare = one.with_name("spare")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    for name in store.chain(kit.ids("ann", 512)):
        assert isinstance(store.load_block(name, kit.empty()).result(), Corrupt)


def test_files_swapped_while_closed_are_found_with_and_without_the_catalog(
    kit, open_store, block_files, tmp_path
):
    for lose_catalog in (False, True):
        store = open_store()
        kit.save(store, "ann", 512)
        store.close()
        one, two = block_files()
        raw = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(raw)
        if lose_catalog:
            (tmp_path / "kv" / "catalog.sqlite").unlink()
        again = open_store()
        assert kit.check(again, "ann", 512)[0] == 0
        again.close()
        shutil.rmtree(tmp_path / "kv")


def test_another_agents_tail_in_its_place_is_corrupt(kit, open_store, tail_files):
    store = open_store()
    kit.save(store, "ann", 300)
    kit.save(store, "bob", 300)
    one, two = tail_files()
    one.write_bytes(two.read_bytes())
    results = {who: store.load_tail(who).result() for who in ("ann", "bob")}
    assert sorted(type(r).__name__ for r in results.values()) == ["Corrupt", "TailLoaded"]


def test_a_bad_tail_does_not_cost_the_blocks(kit, open_store, tail_files):
    store = open_store()
    kit.save(store, "ann", 600)
    flip(tail_files()[0], -1)
    assert isinstance(store.load_tail("ann").result(), Corrupt)
    assert store.flush()
    assert kit.check(store, "ann", 600) == (2, False)
    store.close()
    assert kit.check(open_store(), "ann", 600) == (2, False)


def test_blocks_of_an_unfinished_turn_outlive_a_lost_catalog(kit, open_store, tmp_path):
    store = open_store()
    kit.put_blocks(store, kit.ids("ann", 512), "ann")
    store.close()
    for file in (tmp_path / "kv").glob("catalog*"):
        file.unlink()
    again = open_store()
    assert kit.check(again, "ann", 512) == (2, False)
    again.close()
    assert open_store().stats().blocks == 0


def test_a_bad_newest_tail_leaves_the_one_before(kit, open_store, tail_files):
    store = open_store()
    kit.save(store, "ann", 300)
    kit.save(store, "ann", 350)
    flip(next(path for path in tail_files() if "-0000000350-" in path.name), -1)
    assert isinstance(store.load_tail("ann").result(), Corrupt)
    assert store.best_tail("ann", kit.ids("ann", 350)).tokens == 300
    assert store.load_tail("ann").result().tail.tokens == 300


def test_a_forged_model_in_a_block_is_not_believed(kit, open_store, block_files, tmp_path):
    """Two models' files mixed up by hand: names carry the model, so nothing fits."""
    other = open_store(fingerprint="e" * 64)
    kit.save(other, "ann", 256)
    other.close()
    (theirs,) = block_files()
    raw = theirs.read_bytes()
    store = open_store()
    name = store.chain(kit.ids("ann", 256))[0]
    ours = tmp_path / "kv" / "blocks" / name.hex()[:2] / f"{name.hex()}.safetensors"
    store.close()
    ours.parent.mkdir(exist_ok=True)
    ours.write_bytes(raw)
    again = open_store()
    assert not again.has(name)
    assert again.stats().counters["corrupt"] == 1


@pytest.mark.parametrize("damage", ["lost", "garbage", "truncated", "rows", "version", "flips", "folder"])
def test_a_lost_or_damaged_catalog_is_rebuilt_from_the_files(kit, open_store, tmp_path, damage):
    store = open_store()
    for who in ("ann", "bob"):
        kit.save(store, who, 600)
        kit.save(store, who, 650)
    store.close()
    path = tmp_path / "kv" / "catalog.sqlite"
    if damage == "lost":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"nonsense" * 1000)
    elif damage == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "flips":
        raw = np.frombuffer(path.read_bytes(), np.uint8).copy()
        raw[4096::7] ^= 0x10
        path.write_bytes(raw.tobytes())
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        db = sqlite3.connect(path)
        db.execute("UPDATE blocks SET seal = x'00'" if damage == "rows" else "PRAGMA user_version = 99")
        db.commit()
        db.close()
    again = open_store()
    assert kit.check(again, "ann", 650) == (2, True)
    assert [t.tokens for t in again.tails("bob")] == [600, 650]
    assert again.stats().blocks == 4
    again.close()
    assert kit.check(open_store(), "bob", 650) == (2, True)


def test_wrong_seals_in_the_catalog_are_misses_not_wrong_data(kit, open_store, tmp_path):
    store = open_store()
    kit.save(store, "ann", 600)
    store.close()
    db = sqlite3.connect(tmp_path / "kv" / "catalog.sqlite")
    db.execute("UPDATE blocks SET seal = randomblob(16)")
    db.commit()
    db.close()
    assert kit.check(open_store(), "ann", 600) == (0, True)


def test_the_catalog_damaged_under_a_running_store_is_made_anew(kit, open_store, tmp_path):
    store = open_store()
    kit.save(store, "ann", 300)
    with open(tmp_path / "kv" / "catalog.sqlite", "r+b") as file:
        file.write(os.urandom(1 << 16))
    for file in (tmp_path / "kv").glob("catalog.sqlite-*"):
        file.write_bytes(os.urandom(1 << 16))
    for turn in range(4):
        kit.save(store, "bob", 300 + turn)
    assert kit.check(store, "ann", 300) == (1, True)
    store.close()
    again = open_store()
    assert kit.check(again, "ann", 300) == (1, True)
    assert kit.check(again, "bob", 303) == (1, True)


def test_stray_files_are_set_aside_and_temporary_ones_removed(kit, open_store, tmp_path):
    store = open_store()
    kit.save(store, "ann", 300)
    store.close()
    root = tmp_path / "kv"
    (root / "tmp" / "123-4").write_bytes(b"half a block")
    folder = next((root / "blocks").iterdir())
    (folder / "notes.txt").write_text("hello")
    (folder / f"{'0' * 32}.safetensors").write_text("hello")
    again = open_store()
    assert list((root / "tmp").iterdir()) == []
    assert again.stats().counters["orphans_removed"] == 1
    assert again.stats().quarantined_files == 2
    assert kit.check(again, "ann", 300) == (1, True)


@pytest.mark.parametrize("min_free", [0, 1 << 20])
def test_the_folder_removed_under_a_running_store_is_made_again(kit, open_store, tmp_path, min_free):
    store = open_store(min_free=min_free)
    kit.save(store, "ann", 300)
    shutil.rmtree(tmp_path / "kv")
    assert kit.check(store, "ann", 300) == (0, False)
    assert kit.save(store, "ann", 300).ok
    assert kit.check(store, "ann", 300) == (1, True)


def test_a_device_that_fails_is_said_to_until_it_works_again(kit, open_store):
    disk = FaultyDisk(errno.EIO, where="write")
    store = open_store(disk=disk)
    disk.armed = True
    assert isinstance(kit.save(store, "ann", 300), Failed)
    assert "Input/output error" in store.degraded
    assert store.stats().degraded == store.degraded
    disk.armed = False
    assert kit.save(store, "ann", 300).ok
    assert store.degraded is None


class FaultyDisk(Disk):
    """Raises an error at the n-th step of those that ``where`` names; or at all of them."""

    def __init__(self, error: int, *, at: int | None = None, where: str | None = None) -> None:
        super().__init__()
        self.error, self.at, self.where = error, at, where
        self.armed = False
        self.seen: list[str] = []

    def step(self, what: str, path: str) -> None:
        if not self.armed or (self.where is not None and what != self.where):
            return
        self.seen.append(what)
        if self.at is None or len(self.seen) == self.at:
            raise OSError(self.error, os.strerror(self.error), path)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


SAVE_STEPS = 14
"""Steps of saving one block and one tail into new folders, counted by the first test below."""


def save_once(kit, store, who="bob", tokens=300):
    ids = kit.ids(who, tokens)
    names = store.chain(ids)
    block = store.put_block(
        names[0], store.root_hash(), ids[:256], kit.contents(names[0]), agent=who
    ).result()
    return block, store.put_tail(who, kit.tail(store, ids)).result()


def test_the_steps_of_a_save_come_in_the_safe_order(kit, open_store):
    disk = FaultyDisk(0, at=0)
    store = open_store(disk=disk)
    disk.armed = True
    save_once(kit, store)
    one = ["open", "write", "fsync", "mkdir", "fsync folder", "rename", "fsync folder"]
    assert disk.seen == one * 2
    assert len(disk.seen) == SAVE_STEPS


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("at", range(1, SAVE_STEPS + 1))
def test_a_disk_that_fails_at_any_step_leaves_the_store_serving(kit, open_store, error, at):
    disk, clock = FaultyDisk(error, at=at), Clock()
    store = open_store(disk=disk, clock=clock, retry_seconds=10)
    kit.save(store, "ann", 600)
    disk.armed = True
    block, tail = save_once(kit, store)
    kind = {errno.ENOSPC: Full, errno.EDQUOT: Full, errno.EIO: Failed}.get(error, ReadOnly)
    failed = block if at <= SAVE_STEPS // 2 else tail
    assert isinstance(failed, kind)
    assert store.has(store.chain(kit.ids("bob", 256))[0]) == block.ok
    # A disk that is full or read-only is left alone for a while; reads go on.
    if error != errno.EIO:
        assert store.degraded == failed.reason
        assert isinstance(save_once(kit, store, "cem")[0], kind)
        assert len(disk.seen) == at
    assert kit.check(store, "ann", 600) == (2, True)
    clock.now += 60
    assert all(r.ok for r in save_once(kit, store))
    assert store.degraded is None
    assert kit.check(store, "bob", 300) == (1, True)
    assert list(Path(store.root, "tmp").iterdir()) == []
    store.close()
    again = open_store()
    assert kit.check(again, "ann", 600) == (2, True)
    assert kit.check(again, "bob", 300) == (1, True)
    assert set(again.stats().counters) == {"blocks_loaded", "tails_loaded", "bytes_loaded"}


def test_a_write_that_ends_short_is_continued(kit, open_store, monkeypatch):
    real_write, real_read = os.writev, os.readv
    monkeypatch.setattr(os, "writev", lambda fd, bufs: os.write(fd, memoryview(bufs[0]).cast("B")[:1000]))
    store = open_store()
    kit.save(store, "ann", 300)
    monkeypatch.setattr(os, "writev", real_write)
    assert kit.check(store, "ann", 300) == (1, True)
    monkeypatch.setattr(os, "readv", lambda fd, bufs: real_read(fd, [memoryview(bufs[0]).cast("B")[:777]]))
    assert kit.check(store, "ann", 300) == (1, True)


def test_a_read_only_folder_serves_what_it_holds_and_says_so(kit, open_store):
    store = open_store()
    kit.save(store, "ann", 600)
    store.close()
    disk, clock = FaultyDisk(errno.EROFS), Clock()
    disk.armed = True
    frozen = open_store(disk=disk, clock=clock, retry_seconds=10)
    (Path(frozen.root) / "tmp").rmdir()  # So that there is something to make at start.
    frozen.close()
    frozen = open_store(disk=disk, clock=clock, retry_seconds=10)
    assert frozen.degraded is not None
    assert "cannot be written" in frozen.degraded
    assert kit.check(frozen, "ann", 600) == (2, True)
    assert isinstance(save_once(kit, frozen)[0], ReadOnly)
    assert isinstance(frozen.forget("ann").result(), ReadOnly)
    assert isinstance(frozen.gc().result(), ReadOnly)
    disk.armed = False
    clock.now += 60
    assert all(r.ok for r in save_once(kit, frozen))
    assert frozen.degraded is None
    frozen.close()
    again = open_store()
    assert kit.check(again, "bob", 300) == (1, True)
    assert kit.check(again, "ann", 600) == (2, True)


def test_a_full_disk_at_the_catalog_keeps_the_files(kit, open_store, monkeypatch):
    from offbook.runtime.store.catalog import Catalog

    store = open_store()

    def no_room(self, *args):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Catalog, "commit", no_room)
    assert kit.save(store, "ann", 300).ok
    assert store.stats().counters["catalog_errors"] >= 1
    assert kit.check(store, "ann", 300) == (1, True)
    store.close()
    monkeypatch.undo()
    again = open_store()
    assert kit.check(again, "ann", 300) == (1, True)
    assert again.stats().counters["adopted_blocks"] == 1


def test_errors_of_the_moment_do_not_cost_the_block(kit, open_store, monkeypatch):
    store = open_store()
    kit.save(store, "ann", 300)
    name = store.chain(kit.ids("ann", 300))[0]
    real = os.open

    def no_descriptors(path, *args, **kwargs):
        if name.hex() in str(path):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_descriptors)
    assert isinstance(store.load_block(name, kit.empty()).result(), Failed)
    monkeypatch.undo()
    assert isinstance(store.load_block(name, kit.empty()).result(), Loaded)


def test_programming_errors_in_a_job_do_not_kill_the_threads(kit, open_store, monkeypatch):
    from offbook.runtime.store.blocks import BlockFormat

    store = open_store()
    kit.save(store, "ann", 300)
    name = store.chain(kit.ids("ann", 300))[0]

    def broken(self, *args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(BlockFormat, "encode", broken)
    monkeypatch.setattr(BlockFormat, "read", broken)
    assert save_once(kit, store)[0] == Failed("RuntimeError('a bug')")
    for _ in range(5):
        assert store.load_block(name, kit.empty()).result() == Failed("RuntimeError('a bug')")
    monkeypatch.undo()
    assert all(r.ok for r in save_once(kit, store))
    assert kit.check(store, "ann", 300) == (1, True)


def test_verify_reads_everything_and_reports(kit, open_store, block_files, tail_files):
    store = open_store()
    kit.save(store, "ann", 600)
    kit.save(store, "bob", 600)
    report = store.verify()
    assert (report.ok, report.blocks, report.tails) == (True, 4, 2)
    flip(block_files()[0], -1)
    block_files()[1].unlink()
    flip(tail_files()[0], 100)
    report = store.verify()
    assert (report.blocks, report.tails, len(report.faults)) == (2, 1, 3)
    assert {fault.reason for fault in report.faults} == {
        "checksum of layers.2.v.raw differs",
        "the file is gone",
        "the header does not match its seal",
    }
    assert store.stats().blocks == 4
    store.verify(quarantine=True)
    assert (store.stats().blocks, store.stats().tails) == (2, 1)
    assert store.verify().ok


def test_a_tail_of_no_arrays_is_a_tail(open_store):
    store = open_store()
    assert store.put_tail("ann", Tail(0, bytes(16), [], {})).result().ok
    assert store.load_tail("ann").result().tail.arrays == {}
