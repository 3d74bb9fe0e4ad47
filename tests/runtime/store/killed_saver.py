"""Saves agents over and over, being killed with SIGKILL each time; then proves what is left.

Run as a program: ``killed_saver.py ROOT FIRST LAST``. For each seed a forked child opens the store, saves
turns back to back and is killed: at a chosen step of a save, in the middle of a write, around the
catalog's commit, or from outside after a random time. Each save the store acknowledged is noted in a
log. A second child then opens the store and checks that everything acknowledged is there and right, and
that nothing is corrupt. The folder is kept from seed to seed: later ones start from what crashes left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from conftest import FINGERPRINT, LAYOUT, Kit, QuickDisk  # found beside this file

from offbook.runtime.store import BlockStore
from offbook.runtime.store.catalog import Catalog

KIT = Kit()
AGENTS = ("ann", "bob", "cem")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # The signal comes at once; no instruction of ours follows.


class DeadlyDisk(QuickDisk):
    """Kills the process at its ``at``-th step; at a write, after a part of it."""

    def __init__(self, at: int | None, rng: random.Random) -> None:
        super().__init__()
        self.left = at
        self.rng = rng

    def step(self, what: str, path: str) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left == 0 and what != "write":
            die()

    def write_out(self, fd: int, buffers: Sequence[Any]) -> None:
        if self.left == 0:
            whole = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)
            os.write(fd, whole[: self.rng.randrange(len(whole) + 1)])
            die()
        super().write_out(fd, buffers)


def open_store(root: Path, disk: QuickDisk) -> BlockStore:
    options = {"fingerprint": FINGERPRINT, "layout": LAYOUT, "snapshots": 2, "cap_bytes": 2 << 20}
    return BlockStore(root, disk=disk, lock_seconds=5, **options)


def save_until_killed(root: Path, log: Path, seed: int) -> None:
    rng = random.Random(seed)
    mode = rng.choice(["step", "step", "step", "commit", "time"])
    disk = DeadlyDisk(rng.randrange(1, 60) if mode == "step" else None, rng)
    if mode == "commit":
        left = rng.randrange(1, 8)
        before = rng.random() < 0.5
        commit = Catalog.commit

        def deadly(self: Catalog, *args: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0 and before:
                die()
            commit(self, *args)
            if left == 0:
                die()

        Catalog.commit = deadly  # type: ignore[method-assign]  # this process is about to end
    with log.open("a", buffering=1) as notes:
        store = BlockStore(
            root,
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            snapshots=2,
            disk=disk,
            lock_seconds=5,
            cap_bytes=2 << 20,
        )
        lengths = read_log(log)
        while True:
            who = rng.choice(AGENTS)
            tokens = lengths.get(who, 0) + rng.choice([20, 60, 300, 700])
            if tokens > 5000:
                lengths[who] = 0
                notes.write(f"{who} 0\n")
                assert store.forget(who).result().ok
                continue
            # Two saves back to back, the second not waiting for the first.
            ids = KIT.ids(who, tokens + 30)
            KIT.put_blocks(store, ids, who)
            futures = [(n, store.put_tail(who, KIT.tail(store, ids[:n]))) for n in (tokens, tokens + 30)]
            for n, future in futures:
                assert future.result().ok
                lengths[who] = n
                notes.write(f"{who} {n}\n")


def read_log(log: Path) -> dict[str, int]:
    """The last acknowledged length of each agent."""
    lengths: dict[str, int] = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        who, tokens = line.split()
        lengths[who] = int(tokens)
    return lengths


def check(root: Path, log: Path) -> None:
    with open_store(root, QuickDisk()) as store:
        assert list((root / "tmp").iterdir()) == [], "temporary files are left"
        assert store.verify().ok, store.verify().faults
        for who, tokens in read_log(log).items():
            if tokens == 0:
                continue
            blocks, _ = KIT.check(store, who, tokens)
            assert blocks == tokens // 256, f"{who}: {blocks} blocks of {tokens} tokens"
            held = [t.tokens for t in store.tails(who)]
            assert tokens in held or any(n > tokens for n in held), (
                f"{who}: {tokens} acknowledged, tails {held}"
            )
            for n in held:
                assert KIT.check(store, who, n)[1], f"{who}: the tail at {n} is not what was saved"
        counters = store.stats().counters
        assert "corrupt" not in counters, counters
        assert "catalog_rebuilt" not in counters, counters
        assert store.stats().quarantined_files == 0


def forked(work: Any, *args: Any) -> int:
    """Run in a forked child. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def wait(pid: int, seconds: float) -> int:
    """Wait for a child's own end; kill it when the time is up. Returns its status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def main(root: Path, first: int, last: int) -> None:
    log = root.with_name("acknowledged")
    for seed in range(first, last):
        pid = forked(save_until_killed, root, log, seed)
        status = wait(pid, random.Random(~seed).uniform(0.0, 0.4))
        if not os.WIFSIGNALED(status):
            sys.exit(f"seed {seed}: saving failed")
        _, status = os.waitpid(forked(check, root, log), 0)
        if status != 0:
            sys.exit(f"seed {seed}: the store is not whole (folder {root})")
    total = sum(1 for line in log.read_text().splitlines() if not line.endswith(" 0"))
    print(f"{last - first} kills, {total} saves acknowledged")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
