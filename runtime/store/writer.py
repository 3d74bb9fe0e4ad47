"""The background writer: a bounded queue, one thread that commits groups, a pool that does their I/O.

All changes to the disk happen in the committing thread or on its behalf, in the order they were asked
for. What is queued together is committed together: the files are made and synced in parallel, then renamed
in order, then each folder is synced once, then one catalog transaction covers them all, and only then do
the futures say ``Stored``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from .results import Failed

log = logging.getLogger(__name__)


def new_future() -> Future[Any]:
    """A future that cannot be cancelled: what was accepted for writing is written."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class Put(Protocol):
    """A file to be written, in stages. ``admit`` and ``settle`` run in the committing thread, in order."""

    queued_bytes: int
    """What it counts for in the queue; does not change."""
    future: Future[Any]
    outcome: Any
    """None while all is well, else the result that ends this put; later stages are skipped."""

    def admit(self) -> None:
        """Reserve room on disk, evicting if need be."""

    def prepare(self) -> None:
        """Make the temporary file, durable. Runs in the pool; the slow part."""

    def publish(self) -> str | None:
        """Rename into place. Returns the folder to sync."""

    def settle(self) -> None:
        """Enter it in the index, or clean up; sets the outcome."""


class Writer:
    """Owns the queue and the threads. ``sync`` is given folders, ``commit`` ends a group."""

    def __init__(
        self,
        *,
        sync: Callable[[list[str]], dict[str, Any]],
        commit: Callable[[], None],
        threads: int,
        pending_bytes: int,
        group_bytes: int = 32 << 20,
    ) -> None:
        """``pending_bytes`` bounds what is queued; ``group_bytes`` what one commit covers."""
        self._sync = sync
        self._commit = commit
        self._limit = pending_bytes
        self._group = group_bytes
        self._queue: deque[Put | tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.pending_bytes = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="offbook-store-write")
        self._thread = threading.Thread(target=self._run, name="offbook-store-commit", daemon=True)
        self._thread.start()

    def offer(self, put: Put) -> bool:
        """Queue a put. False if there is no room now, or the writer is closed. Never waits."""
        with self._wake:
            if self._closing or (self.pending_bytes and self.pending_bytes + put.queued_bytes > self._limit):
                return False
            self.pending_bytes += put.queued_bytes
            self._queue.append(put)
            self._wake.notify()
            return True

    def call(self, action: Callable[[], Any]) -> Future[Any]:
        """Run an action in the committing thread, after everything queued before it."""
        future = new_future()
        with self._wake:
            if self._closing:
                future.set_result(Failed("the store is closed"))
                return future
            self._queue.append((action, future))
            self._wake.notify()
        return future

    @property
    def depth(self) -> int:
        """Puts and actions queued, not counting those in work."""
        return len(self._queue)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._pool.shutdown()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    return
                work = self._take()
            if isinstance(work, list):
                self._commit_group(work)
            else:
                self._act(*work)

    def _take(self) -> list[Put] | tuple[Callable[[], Any], Future[Any]]:
        """The next action, or the next group of puts."""
        first = self._queue[0]
        if isinstance(first, tuple):
            self._queue.popleft()
            return first
        group: list[Put] = []
        size = 0
        while self._queue and not isinstance(put := self._queue[0], tuple):
            if group and size + put.queued_bytes > self._group:
                break
            group.append(put)
            size += put.queued_bytes
            self._queue.popleft()
        return group

    def _act(self, action: Callable[[], Any], future: Future[Any]) -> None:
        try:
            result = action()
        except Exception as error:
            log.exception("store action failed")
            result = Failed(repr(error))
        future.set_result(result)

    def _commit_group(self, group: list[Put]) -> None:
        for put in group:
            _stage(put, put.admit)
        try:
            prepared = list(self._pool.map(lambda put: _stage(put, put.prepare), group))
        except RuntimeError:
            # The interpreter is ending and takes no new work for its pools; what was queued is still saved.
            prepared = [_stage(put, put.prepare) for put in group]
        del prepared
        folders: dict[str, list[Put]] = {}
        for put in group:
            folder = _stage(put, put.publish)
            if folder is not None:
                folders.setdefault(folder, []).append(put)
        try:
            for folder, outcome in self._sync(list(folders)).items():
                for put in folders[folder]:
                    put.outcome = put.outcome or outcome
        except Exception as error:
            log.exception("syncing folders failed")
            for put in group:
                put.outcome = put.outcome or Failed(repr(error))
        for put in group:
            try:
                put.settle()
            except Exception as error:
                log.exception("store bookkeeping failed")
                put.outcome = Failed(repr(error))
        try:
            self._commit()
        except Exception:
            log.exception("store commit failed")
        with self._wake:
            self.pending_bytes -= sum(put.queued_bytes for put in group)
        for put in group:
            put.future.set_result(put.outcome)


def _stage(put: Put, stage: Callable[[], Any]) -> Any:
    """Run one stage of a put, unless it has already come to an end."""
    if put.outcome is not None:
        return None
    try:
        return stage()
    except Exception as error:
        log.exception("writing to the store failed")
        put.outcome = Failed(repr(error))
        return None
