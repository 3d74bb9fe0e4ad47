"""A disk that is really full, really read-only: a small tmpfs, where the tests may mount one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from offbook.actors.journal import Journal
from offbook.runtime.store import Full, ReadOnly
from offbook.runtime.store.disk import Disk

MOUNT = shutil.which("mount")


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB. Skips where it cannot be had."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [str(MOUNT), "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if MOUNT is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_saving_only_until_there_is_room(kit, open_store, small_disk):
    clock = Clock()
    options = {"root": small_disk / "kv", "clock": clock, "disk": Disk(), "retry_seconds": 30}
    store = open_store(**options)
    agents = []
    while (result := kit.save(store, f"a{len(agents)}", 1500)).ok:
        agents.append(f"a{len(agents)}")
    assert isinstance(result, Full)
    assert store.degraded is not None
    assert "disk is full" in store.degraded
    assert len(agents) > 5
    assert all(kit.check(store, who, 1500) == (5, True) for who in agents)
    for who in agents[:4]:  # Making room is possible on a full disk, and ends the wait.
        assert store.forget(who).result().ok
    assert kit.save(store, "new", 300).ok
    assert store.degraded is None
    store.close()
    again = open_store(**options)
    assert again.verify().ok
    assert kit.check(again, "new", 300) == (1, True)
    assert all(kit.check(again, who, 1500) == (5, True) for who in agents[4:])
    assert all(kit.check(again, who, 1500) == (0, False) for who in agents[:4])


def test_a_read_only_disk_serves_and_later_saves_again(kit, open_store, small_disk):
    clock = Clock()
    options = {"root": small_disk / "kv", "clock": clock, "disk": Disk(), "retry_seconds": 30}
    store = open_store(**options)
    kit.save(store, "ann", 600)
    store.close()
    subprocess.run([str(MOUNT), "-o", "remount,ro", str(small_disk)], check=True)
    store = open_store(**options)
    assert store.degraded is not None
    assert "Read-only" in store.degraded
    assert kit.check(store, "ann", 600) == (2, True)
    assert isinstance(kit.save(store, "bob", 300), ReadOnly)
    subprocess.run([str(MOUNT), "-o", "remount,rw", str(small_disk)], check=True)
    clock.now += 60
    assert kit.save(store, "bob", 300).ok
    store.close()
    again = open_store(**options)
    assert kit.check(again, "ann", 600) == (2, True)
    assert kit.check(again, "bob", 300) == (1, True)


async def test_a_journal_on_the_same_disk_still_takes_messages(kit, open_store, small_disk):
    reserve = 800_000
    journal = await Journal.open(small_disk / "journal", min_free=reserve // 2)
    store = open_store(root=small_disk / "kv", disk=Disk(), min_free=reserve)
    for number in range(30):  # more than the disk holds
        assert kit.save(store, f"a{number}", 1500).ok
    assert len(store.agents()) < 30
    assert kit.check(store, "a29", 1500) == (5, True)
    await journal.do("put", lambda db: db.execute("INSERT INTO once VALUES ('a', NULL)"), admits=True)
    await journal.close()
