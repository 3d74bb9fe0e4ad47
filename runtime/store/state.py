"""What the parts of the store share: index, lock, counters, paths, and whether the disk can be written.

Invariants kept here: a file is in the index only while it is in place; ``used_bytes`` plus what is
reserved never passes the cap; a disk that refused a write is left alone until its time to retry.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from threading import RLock

from .catalog import Catalog, CatalogDamaged
from .disk import Disk, Paths, RootLock, disk_size, failure
from .index import BlockEntry, Index, TailEntry
from .reading import Reusable
from .results import Failed, Full, ReadOnly, StoreLocked
from .tails import KnownTails

log = logging.getLogger(__name__)

CATALOG_MARGIN = 384 << 10
"""Charged for the catalog beside its main file: its log and what one commit adds. A fixed amount, so that
room does not come and go with the log."""
QUARANTINE_FILES = 32
QUARANTINE_BYTES = 64 << 20


class State:
    """Shared by the facade, the saving jobs, retention and recovery; ``lock`` guards all changes."""

    def __init__(
        self,
        root: Path,
        *,
        fingerprint: str,
        cap_bytes: int | None,
        min_free: int = 0,
        disk: Disk,
        clock: Callable[[], float],
        retry_seconds: float,
        read_only: bool,
        lock_seconds: float,
    ) -> None:
        self.paths = Paths(root)
        self.fingerprint = fingerprint
        self.cap_bytes = cap_bytes
        self.min_free = min_free
        self.disk = disk
        self.clock = clock
        self.retry_seconds = retry_seconds
        self.read_only = read_only
        self.lock_seconds = lock_seconds
        self.lock = RLock()
        self.index = Index()
        self.known_tails = KnownTails()
        self.tail_memory = Reusable()
        self.counters: Counter[str] = Counter()
        self.lifetime: Counter[str] = Counter()
        self.reserved_bytes = 0
        self.catalog: Catalog | None = None
        self.catalog_bytes = 0
        self.catalog_charge = CATALOG_MARGIN
        self.quarantined: deque[tuple[str, int]] = deque()
        self.quarantine_bytes = 0
        self.degraded: Full | ReadOnly | None = None
        self.trouble: Failed | None = None
        self._retry_at = 0.0
        self._root_lock: RootLock | None = None

    # Counting

    def count(self, name: str, n: int = 1) -> None:
        with self.lock:
            self.counters[name] += n
            self.lifetime[name] += n

    @property
    def used_bytes(self) -> int:
        """What the store takes on disk now, in whole pages."""
        return self.index.file_bytes + self.quarantine_bytes + self.catalog_bytes

    def next_serial(self) -> int:
        """A number for a new tail, above all before, also across restarts."""
        with self.lock:
            self.index.last_serial = max(self.index.last_serial + 1, int(self.clock() * 1e6))
            return self.index.last_serial

    # Whether the disk can be written

    def prepare_folders(self) -> None:
        """Make the folders and take the lock. OSError if the folder cannot be written; StoreLocked."""
        for folder in (
            self.paths.root,
            self.paths.blocks,
            self.paths.tails,
            self.paths.tmp,
            self.paths.quarantine,
        ):
            self.disk.make_folder(str(folder))
        if self._root_lock is None:
            self._root_lock = RootLock(self.paths.lock, self.lock_seconds)

    @property
    def may_write(self) -> bool:
        """Is the folder this process's to change?"""
        return not self.read_only and self._root_lock is not None

    def load_catalog(self) -> None:
        """Fill the index from the catalog, if there is a good one; a damaged one is set aside."""
        if self.read_only and not self.paths.catalog.exists():
            return
        try:
            self.catalog = Catalog(self.paths.catalog, read_only=not self.may_write)
            self.lifetime = self.catalog.load(self.index)
        except CatalogDamaged as error:
            log.warning("the catalog of %s is rebuilt from its files: %s", self.paths.root, error)
            self.index = Index()
            self.count("catalog_rebuilt")
            if self.catalog is not None:
                self.catalog.close()
                self.catalog = None
            if self.may_write:
                self._new_catalog(damaged=True)
        except sqlite3.Error as error:
            log.warning("the catalog of %s cannot be opened: %s", self.paths.root, error)
            self.count("catalog_errors")
        self._measure_catalog()

    def unwritable(self, *, freeing: bool = False) -> Full | ReadOnly | Failed | None:
        """Why nothing can be written now, or None. Retries once the time has come.

        ``freeing``: for what only removes files, which a full disk does not keep from being done.
        """
        if self.read_only:
            return ReadOnly("the store was opened read-only")
        if self.degraded is not None and not self.due() and not (freeing and isinstance(self.degraded, Full)):
            return self.degraded
        if self._root_lock is None:
            try:
                self.prepare_folders()
            except StoreLocked as error:
                return self.refuse(BlockingIOError(errno.EROFS, str(error)))
            except OSError as error:
                return self.refuse(error)
            if self.catalog is not None:  # It was opened for reading alone.
                self.catalog.close()
                self.catalog = None
        if self.catalog is None:
            self._new_catalog(damaged=False)
        return None

    def due(self) -> bool:
        """Is it time to try a disk again that refused a write?"""
        return self.clock() >= self._retry_at

    def refuse(self, error: OSError) -> Full | ReadOnly | Failed:
        """Note that the disk refused a write. A full or read-only disk is left alone for a while."""
        result = failure(error)
        self.count("write_errors")
        if isinstance(result, Full | ReadOnly):
            if self.degraded is None:
                log.warning("the store at %s stops saving: %s", self.paths.root, result.reason)
            self.degraded = result
            self._retry_at = self.clock() + self.retry_seconds
        else:
            if self.trouble is None:
                log.warning("the store at %s could not save: %s", self.paths.root, result.reason)
            self.trouble = result
        return result

    @property
    def reason(self) -> str | None:
        """Why the last save came to nothing, for people; None if it did not."""
        refused = self.degraded or self.trouble
        return refused.reason if refused is not None else None

    def freed(self) -> None:
        """Note that room was made: a disk that was full may be tried again at once."""
        if isinstance(self.degraded, Full):
            self._retry_at = self.clock()

    def wrote(self) -> None:
        """Note that a write succeeded."""
        if self.degraded is not None:
            log.warning("the store at %s saves again", self.paths.root)
            self.degraded = None
        self.trouble = None

    # Catalog

    def commit(self) -> None:
        """Bring the catalog up to date. Failures are noted and made up for by the next commit."""
        if self.catalog is None or not self.may_write:
            return
        try:
            self.catalog.commit(self.index, self.lifetime, self.lock)
        except sqlite3.OperationalError as error:
            self.count("catalog_errors")
            log.warning("the catalog could not be written, the files are safe: %s", error)
        except sqlite3.Error as error:
            self.count("catalog_errors")
            log.warning("the catalog is damaged and made anew: %s", error)
            self._new_catalog(damaged=True)
        self._measure_catalog()

    def _new_catalog(self, *, damaged: bool) -> None:
        """Fill the catalog from the index, in a new file if the old one is damaged."""
        if self.catalog is not None:
            self.catalog.close()
            self.catalog = None
        for attempt in range(2):
            if damaged or attempt:
                self.quarantine(str(self.paths.catalog), "catalog")
                for suffix in ("-wal", "-shm"):
                    self.disk.discard(f"{self.paths.catalog}{suffix}")
            try:
                catalog = Catalog(self.paths.catalog)
                with self.lock:
                    self.index.changed_blocks.update(self.index.blocks)
                    self.index.changed_agents.update(self.index.agents)
                catalog.clear()
                catalog.commit(self.index, self.lifetime, self.lock)
                self.catalog = catalog
                return
            except (CatalogDamaged, sqlite3.Error, OSError) as error:
                log.warning("no catalog can be made now, the index is kept in memory: %s", error)
                if isinstance(error, sqlite3.OperationalError | OSError):
                    return

    def _measure_catalog(self) -> None:
        total = main = 0
        for suffix in ("", "-wal", "-shm"):
            try:
                size = disk_size(os.stat(f"{self.paths.catalog}{suffix}").st_size)
            except OSError:
                continue
            total += size
            main += size if not suffix else 0
        self.catalog_bytes = total
        self.catalog_charge = main + CATALOG_MARGIN

    # Bad files

    def quarantine(self, path: str, label: str) -> None:
        """Move a bad file aside, within bounds; where that fails, remove it or leave it unlisted."""
        with self.lock:
            try:
                size = disk_size(os.stat(path).st_size)
                target = f"{self.paths.quarantine}/{int(self.clock() * 1e6)}-{self.disk.serial()}-{label}"
                if self.read_only or size > QUARANTINE_BYTES:
                    raise PermissionError
                self.disk.rename(path, target)
            except FileNotFoundError:
                return
            except OSError:
                if not self.read_only:
                    self.disk.discard(path)
                return
            self.quarantined.append((target, size))
            self.quarantine_bytes += size
            while len(self.quarantined) > QUARANTINE_FILES or self.quarantine_bytes > QUARANTINE_BYTES:
                self.drop_oldest_quarantined()

    def drop_oldest_quarantined(self) -> None:
        path, size = self.quarantined.popleft()
        self.disk.discard(path)
        self.quarantine_bytes -= size

    def bad_block(self, name: bytes, entry: BlockEntry, what: str) -> None:
        """A block turned out missing or corrupt: out of the index, the file aside, counted as ``what``."""
        with self.lock:
            if self.index.blocks.get(name) is not entry:
                return  # Evicted or replaced meanwhile: the new file is not the one that was read.
            self.index.drop_block(name)
            self.count(what)
            if what == "corrupt":
                self.quarantine(self.paths.block(name), f"{name.hex()}.block")

    def bad_tail(self, key: bytes, entry: TailEntry, what: str) -> None:
        """The same for a tail."""
        with self.lock:
            agent = self.index.agents.get(key)
            if agent is None or entry not in agent.tails:
                return
            self.index.drop_tail(key, entry, keep_blocks=True)
            self.count(what)
            if what == "corrupt":
                self.quarantine(
                    self.paths.tail(key, entry.tokens, entry.serial), f"{key.hex()}-{entry.tokens}.tail"
                )

    def close(self) -> None:
        if self.catalog is not None:
            self.catalog.close()
            self.catalog = None
        if self._root_lock is not None:
            self._root_lock.release()
            self._root_lock = None
