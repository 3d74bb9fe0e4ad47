"""Every system call that changes the disk, one method each, and where things lie under the root.

Files are made complete under ``tmp/``, made durable, and renamed into place; nothing in ``blocks/`` or
``tails/`` is ever written to. ``Disk.step`` is called before each call that can fail or be interrupted:
fault tests override it to raise or to die there.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .container import write_from
from .results import Failed, Full, ReadOnly, StoreLocked

SUFFIX = ".safetensors"
PAGE = 4096

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def disk_size(nbytes: int) -> int:
    """Bytes a file of ``nbytes`` takes from the cap: whole pages, as file systems do."""
    return -(-nbytes // PAGE) * PAGE


def failure(error: OSError) -> Full | ReadOnly | Failed:
    """The typed outcome for an error of the operating system."""
    text = f"{error.strerror or error} ({error.filename})" if error.filename else str(error.strerror or error)
    if error.errno in _DISK_FULL:
        return Full(f"the disk is full: {text}")
    if error.errno in _READ_ONLY:
        return ReadOnly(f"the store cannot be written: {text}")
    return Failed(f"I/O error: {text}")


class Paths:
    """Names under the store's root. Everything is named by hashes; no user text reaches the disk's names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blocks = root / "blocks"
        self.tails = root / "tails"
        self.tmp = root / "tmp"
        self.quarantine = root / "quarantine"
        self.catalog = root / "catalog.sqlite"
        self.lock = root / "lock"

    def block(self, name: bytes) -> str:
        text = name.hex()
        return f"{self.blocks}/{text[:2]}/{text}{SUFFIX}"

    def tail(self, key: bytes, tokens: int, serial: int) -> str:
        # The serial makes each tail a file of its own: replacing one never overwrites it.
        text = key.hex()
        return f"{self.tails}/{text[:2]}/{text}-{tokens:010d}-{serial:016x}{SUFFIX}"


class Disk:
    """The real disk. Raises OSError and nothing else."""

    def __init__(self) -> None:
        self._serial = itertools.count()

    def step(self, what: str, path: str) -> None:
        """Called before each change, named ``what``. Does nothing; for fault tests."""

    def make_folder(self, path: str) -> None:
        """Make a folder, durably, if it is not there."""
        if os.path.isdir(path):
            return
        self.step("mkdir", path)
        os.makedirs(path, mode=0o700, exist_ok=True)
        self.sync_folder(os.path.dirname(path))

    def serial(self) -> int:
        """A number not given before by this object."""
        return next(self._serial)

    def temporary(self, folder: Path) -> str:
        """A name for a temporary file that no other has."""
        return f"{folder}/{os.getpid()}-{self.serial()}"

    def free(self, path: str) -> int:
        """Bytes of the disk of ``path`` that are left for this process."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def write(self, path: str, buffers: Sequence[Any]) -> None:
        """Make a new file of these buffers and bring it to the disk. Leaves nothing behind if it fails."""
        self.step("open", path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                self.step("write", path)
                self.write_out(fd, buffers)
                self.step("fsync", path)
                self.sync(fd)
            finally:
                os.close(fd)
        except OSError:
            self.discard(path)
            raise

    def write_out(self, fd: int, buffers: Sequence[Any]) -> None:
        write_from(fd, buffers)

    def rename(self, source: str, target: str) -> None:
        self.step("rename", target)
        os.replace(source, target)

    def sync_folder(self, path: str) -> None:
        self.step("fsync folder", path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def remove(self, path: str) -> None:
        """Remove a file; not being there is fine."""
        self.step("remove", path)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return

    def discard(self, path: str) -> None:
        """Remove a file if that can be done; no error. For clean-up after another failure."""
        try:
            os.unlink(path)
        except OSError:
            return


class RootLock:
    """One writing process per root: an flock that ends with the process, however it ends."""

    def __init__(self, path: Path, wait_seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """Take the lock. StoreLocked if another process still has it after ``wait_seconds``."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
                    os.close(self._fd)
                    raise StoreLocked(
                        f"{path.parent} is in use by process {owner}; stop it, or open the store read-only"
                    ) from None
                sleep(0.05)
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except OSError:
            pass  # Only the message above would have been better.

    def release(self) -> None:
        os.close(self._fd)
