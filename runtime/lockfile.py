"""Locks between processes: one runtime of a name on a machine, one engine on a store.

Owns the lock files. A lock is a ``flock`` on an open file, so the kernel lets go of it when its last
holder is gone, however it went: nothing is ever stale. The file's text is the holder's pid, for messages.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType


class LockFile:
    """A lock that is held from ``acquire`` (or ``with``) until ``release``, or until the process is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, *, tries: int = 1) -> bool:
        """Take the lock and write our pid into it; False if another process holds it.

        Does not wait, but for 10 ms between tries: ``held`` holds a lock for an instant.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for left in reversed(range(tries)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    os.close(fd)
                    return False
                time.sleep(0.01)
        self._fd = fd
        self.note_holder(os.getpid())
        return True

    def held(self) -> bool:
        """Whether some process holds the lock now."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def release(self) -> None:
        """Let go. A child that was given ``fileno`` still holds the lock, until it ends."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def fileno(self) -> int:
        """The open file, to be passed to a child that is to hold the lock for its own life."""
        assert self._fd is not None, "the lock is not held"
        return self._fd

    def note_holder(self, pid: int) -> None:
        """Say in the file who holds the lock."""
        os.ftruncate(self.fileno, 0)
        os.pwrite(self.fileno, f"{pid}\n".encode(), 0)

    def holder(self) -> int | None:
        """The pid that the file names; whoever reads it should know that the lock is held."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def __enter__(self) -> LockFile:
        if not self.acquire():
            raise BlockingIOError(f"{self.path} is held by process {self.holder()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
