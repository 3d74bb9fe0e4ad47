"""A disk without a cap: the store leaves others, the journal above all, the room they need."""

from __future__ import annotations

from pathlib import Path

from offbook.runtime.store import Full, Stored
from offbook.runtime.store.disk import Disk

RESERVE = 200_000


class SmallDisk(Disk):
    """A disk of some size, on which others have files, too."""

    def __init__(self, root: Path, size: int) -> None:
        super().__init__()
        self.root = root
        self.size = size
        self.others = 0
        self.lowest = size

    def sync(self, fd: int) -> None:
        pass

    def free(self, path: str) -> int:
        kv = sum(p.stat().st_size for p in self.root.rglob("*.safetensors"))
        return self.size - self.others - kv

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.lowest = min(self.lowest, self.free(target))


def test_the_longest_unused_goes_before_the_room_of_others(kit, open_store, tmp_path):
    disk = SmallDisk(tmp_path / "kv", RESERVE + 100_000)
    store = open_store(min_free=RESERVE, disk=disk, snapshots=1)
    for number in range(30):
        assert kit.save(store, f"a{number}", 600).ok
    held = [record.agent for record in store.agents()]
    assert "a29" in held
    assert "a0" not in held
    assert disk.lowest >= RESERVE
    assert store.degraded is None


def test_nothing_is_saved_and_nothing_dropped_where_others_fill_the_disk(kit, open_store, tmp_path):
    disk = SmallDisk(tmp_path / "kv", RESERVE + 100_000)
    store = open_store(min_free=RESERVE, disk=disk, snapshots=1, retry_seconds=0.0)
    assert kit.save(store, "first", 600).ok
    disk.others = disk.size
    refused = kit.put_blocks(store, kit.ids("second", 600), "second")
    assert all(isinstance(one, Full) for one in refused)
    assert "are kept for others" in (store.degraded or "")
    assert [record.agent for record in store.agents()] == ["first"]
    disk.others = 0
    assert isinstance(kit.put_blocks(store, kit.ids("second", 600), "second")[0], Stored)
    assert store.degraded is None


def test_a_store_that_took_the_room_of_others_gives_it_back_at_the_next_start(kit, open_store, tmp_path):
    disk = SmallDisk(tmp_path / "kv", 300_000)
    store = open_store(disk=disk)
    number = 0
    while disk.free("") > 50_000:
        kit.save(store, f"a{number}", 600)
        number += 1
    store.close()
    again = open_store(disk=disk, min_free=RESERVE)
    assert disk.free("") >= RESERVE
    assert again.degraded is None
