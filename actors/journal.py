"""The journal: one SQLite file, one thread, and many writers' work in each transaction.

Owns durability. Work is a function of the connection (see ``statements.py``). The journal's thread takes
all work that waits, runs each piece under its own savepoint, and commits once (*group commit*): a hundred
actors that finish turns at the same time share one fsync, and a piece that fails is undone alone. Work is
done in the order of submission, and results come back in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from offbook.bus.errors import InvalidRequest, OffbookError

from . import schema

log = logging.getLogger("offbook.actors.journal")

R = TypeVar("R")

Fault = Callable[[str], None]
"""Called in the journal's thread at each boundary, for crash tests: ``begin``, ``work:LABEL`` after each
piece, ``commit`` and ``committed``."""

KEEP_FREE = 32 << 20
"""Bytes of the disk that are kept free for turns that have begun."""

_GROUP_LIMIT = 1024
"""Pieces of work in one transaction: bounds the first one's latency, and amortises an fsync well enough."""


RETRY_AFTER = 1.0
"""Seconds until work that the journal refused is tried again: somebody has to free some space first."""


class JournalFailed(OffbookError):
    """The journal could not write (disk full, I/O error); what was asked did not happen."""


class JournalInUse(OffbookError):
    """Another process has this journal open."""


class _Work:
    __slots__ = ("admits", "error", "future", "label", "result", "run")

    def __init__(self, label: str, run: Callable[[sqlite3.Connection], Any], admits: bool) -> None:
        self.label = label
        self.run = run
        self.admits = admits
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.result: Any = None
        self.error: BaseException | None = None


class Journal:
    """An open journal. Make one with :meth:`open`, end it with :meth:`close`.

    Args:
        path: the SQLite file; its folder is created.
        fault: a crash test's hook, see :data:`Fault`.
        min_free: bytes that must stay free on the disk; below, no new messages are admitted, so that
            turns which have begun can still commit.
    """

    def __init__(self, path: Path, *, fault: Fault | None = None, min_free: int = KEEP_FREE) -> None:
        self.path = path
        self._fault = fault
        self._min_free = min_free
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock_fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._db: sqlite3.Connection | None = None
        self._free_checked = 0.0
        self._full = ""
        self.commits = 0
        self.works = 0

    @classmethod
    async def open(
        cls, path: str | os.PathLike[str], *, fault: Fault | None = None, min_free: int = KEEP_FREE
    ) -> Journal:
        """Open or create a journal.

        Raises:
            JournalInUse: another process has it open.
            StateNotLoadable: a newer offbook wrote it, or it is not a journal.
        """
        journal = cls(Path(path), fault=fault, min_free=min_free)
        await anyio.to_thread.run_sync(journal._open)
        journal._loop = asyncio.get_running_loop()
        journal._thread = threading.Thread(target=journal._run, name="offbook-journal", daemon=True)
        journal._thread.start()
        return journal

    async def close(self) -> None:
        """Finish the work submitted so far and close the file."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._queue.put(None)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.join)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def submit(
        self, label: str, work: Callable[[sqlite3.Connection], R], *, admits: bool = False
    ) -> asyncio.Future[R]:
        """Queue work; the future resolves after the commit that holds it.

        Args:
            label: names the work for fault tests.
            work: a function of the connection; its return value is the result. Runs in the journal's
                thread and must not block on anything but SQLite.
            admits: the work takes on something new and is refused when the disk is nearly full.

        Raises (from the future):
            JournalFailed: it was not written.
        """
        if self._thread is None:
            raise InvalidRequest(f"the journal {self.path} is closed")
        item = _Work(label, work, admits)
        self._queue.put(item)
        return item.future

    async def do(self, label: str, work: Callable[[sqlite3.Connection], R], *, admits: bool = False) -> R:
        """:meth:`submit` and wait."""
        return await self.submit(label, work, admits=admits)

    def post(self, label: str, work: Callable[[sqlite3.Connection], Any]) -> None:
        """:meth:`submit` without waiting, for work whose loss does no harm; a failure is logged."""
        self.submit(label, work).add_done_callback(_log_failure)

    # -- the journal's thread -------------------------------------------------------------------------

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock_fd)
            raise JournalInUse(f"{self.path} is open in another process; stop that one first") from exc
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            schema.prepare(self._db, self.path)
        except BaseException:
            if self._db is not None:
                self._db.close()
            os.close(self._lock_fd)
            raise

    def _run(self) -> None:
        assert self._db is not None
        while True:
            item = self._queue.get()
            group: list[_Work] = []
            while item is not None:
                group.append(item)
                if len(group) >= _GROUP_LIMIT:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if group:
                self._commit(self._db, group)
                self._resolve(group)
            if item is None:
                self._db.close()
                return

    def _commit(self, db: sqlite3.Connection, group: list[_Work]) -> None:
        """Run one group in one transaction."""
        fault = self._fault or _no_fault
        try:
            self._check_space(any(work.admits for work in group))
            fault("begin")
            db.execute("BEGIN IMMEDIATE")
            for work in group:
                if work.admits and self._full:
                    work.error = JournalFailed(self._full)
                    continue
                db.execute("SAVEPOINT work")
                try:
                    work.result = work.run(db)
                except BaseException as exc:
                    work.error = exc
                    if not db.in_transaction:  # SQLite rolled everything back: disk full, I/O error
                        raise
                    db.execute("ROLLBACK TO work")
                db.execute("RELEASE work")
                fault(f"work:{work.label}")
            fault("commit")
            db.execute("COMMIT")
            fault("committed")
            self.commits += 1
            self.works += len(group)
        except BaseException as exc:
            if db.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # the next BEGIN reports
                    db.execute("ROLLBACK")
            failed = JournalFailed(
                f"the journal {self.path} could not be written: {exc}; nothing was changed"
            )
            failed.__cause__ = exc
            for work in group:
                work.error = failed

    def _check_space(self, wanted: bool) -> None:
        """Look at the free disk space at most once a second."""
        now = time.monotonic()
        if not wanted or now - self._free_checked < 1.0:
            return
        self._free_checked = now
        free = shutil.disk_usage(self.path.parent).free
        self._full = (
            f"the disk of {self.path} has {free >> 20} MiB left, less than the {self._min_free >> 20} MiB "
            f"kept for turns that have begun; free some space"
            if free < self._min_free
            else ""
        )

    def _resolve(self, group: list[_Work]) -> None:
        loop = self._loop
        assert loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits
            loop.call_soon_threadsafe(_deliver, group)


def _deliver(group: list[_Work]) -> None:
    for work in group:
        if work.future.done():
            continue  # whoever waited was cancelled
        if work.error is not None:
            work.future.set_exception(work.error)
        else:
            work.future.set_result(work.result)


def _log_failure(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is not None:
        log.warning("%s", future.exception())


def _no_fault(_point: str) -> None:
    pass
