"""The index's copy on disk: one SQLite file in WAL mode, written in one transaction per group of saves.

The catalog remembers each file's seal (which covers the tensor checksums in the file's header, which
cover its data), owners, tails, last use and counters. It is a convenience, not the truth: every file
proves itself, so a catalog that is lost, damaged or of another version is set aside and rebuilt from
the files, and a failed commit is made up for by the next one.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from threading import RLock
from typing import Any

from .index import AgentEntry, BlockEntry, Index, TailEntry
from .tails import split_names

VERSION = 1

_LOG_BYTES = 128 << 10
"""The write-ahead log is folded in and cut above this size: it counts against the store's cap."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE blocks (
    name BLOB PRIMARY KEY, model TEXT NOT NULL, nbytes INTEGER NOT NULL, seal BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE agents (
    key BLOB PRIMARY KEY, agent TEXT NOT NULL, salt TEXT NOT NULL, model TEXT NOT NULL,
    last_used REAL NOT NULL, fresh BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE tails (
    key BLOB NOT NULL, tokens INTEGER NOT NULL, chain BLOB NOT NULL, serial INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, seal BLOB NOT NULL, blocks BLOB NOT NULL, PRIMARY KEY (key, tokens)
) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
COMMIT;
"""


class CatalogDamaged(Exception):
    """The catalog cannot be used as it is; the message says why."""


class Catalog:
    """An open catalog. Used by one thread at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open or make the catalog.

        Raises: CatalogDamaged if what is there is no usable catalog, sqlite3.OperationalError if it
        cannot be opened now (disk full, locked, not to be written).
        """
        self.path = path
        self._db: sqlite3.Connection | None = None
        try:
            self._db = _connect(path, read_only)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            tables = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            if tables == 0 and version == 0 and not read_only:
                self._db.executescript(_SCHEMA)
            elif version != VERSION:
                raise CatalogDamaged(f"version {version} instead of {VERSION}")
            verdict = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise CatalogDamaged(str(verdict))
        except (CatalogDamaged, sqlite3.OperationalError):
            self.close()
            raise
        except sqlite3.DatabaseError as error:
            self.close()
            raise CatalogDamaged(str(error)) from None

    def load(self, index: Index) -> Counter[str]:
        """Put everything remembered into an empty index. Returns the lifetime counters."""
        db = self._open()
        try:
            for name, model, nbytes, seal in db.execute("SELECT name, model, nbytes, seal FROM blocks"):
                _require(len(name) == 16 and len(seal) == 16 and nbytes > 0)
                index.add_block(name, BlockEntry(sys.intern(model), nbytes, seal))
            for key, agent, salt, model, last_used, fresh in db.execute(
                "SELECT key, agent, salt, model, last_used, fresh FROM agents"
            ):
                _require(len(key) == 16 and len(fresh) % 16 == 0)
                index.agents[key] = AgentEntry(agent, salt, sys.intern(model), float(last_used))
                index.claim(key, split_names(fresh))
            for key, *row in db.execute(
                "SELECT key, tokens, chain, serial, nbytes, seal, blocks FROM tails ORDER BY serial"
            ):
                tail = TailEntry(*row)
                _require(key in index.agents and len(tail.chain) == 16 and len(tail.seal) == 16)
                _require(len(tail.blocks) % 16 == 0 and tail.nbytes > 0)
                fresh = set(index.agents[key].fresh)
                index.add_tail(key, tail, keep=sys.maxsize)
                index.claim(key, fresh)
            counters = Counter(
                {str(name): int(value) for name, value in db.execute("SELECT name, value FROM counters")}
            )
        except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError) as error:
            raise CatalogDamaged(str(error)) from None
        index.changed_blocks.clear()
        index.changed_agents.clear()
        index.lost.clear()
        return counters

    def commit(self, index: Index, counters: Counter[str], lock: RLock) -> None:
        """Write down what changed. sqlite3.Error leaves the changes for the next try."""
        db = self._open()
        with lock:
            names, keys = list(index.changed_blocks), list(index.changed_agents)
            blocks = [
                (name, entry.model, entry.nbytes, entry.seal)
                for name in names
                if (entry := index.blocks.get(name)) is not None
            ]
            agents: list[tuple[Any, ...]] = []
            tails: list[tuple[Any, ...]] = []
            for key in keys:
                agent = index.agents.get(key)
                if agent is None:
                    continue
                fresh = b"".join(sorted(agent.fresh))
                agents.append((key, agent.agent, agent.salt, agent.model, agent.last_used, fresh))
                tails += [(key, t.tokens, t.chain, t.serial, t.nbytes, t.seal, t.blocks) for t in agent.tails]
            index.changed_blocks.clear()
            index.changed_agents.clear()
            numbers = list(counters.items())
        try:
            with db:
                db.executemany("DELETE FROM blocks WHERE name = ?", [(name,) for name in names])
                db.executemany("DELETE FROM agents WHERE key = ?", [(key,) for key in keys])
                db.executemany("DELETE FROM tails WHERE key = ?", [(key,) for key in keys])
                db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", blocks)
                db.executemany("INSERT INTO agents VALUES (?, ?, ?, ?, ?, ?)", agents)
                db.executemany("INSERT INTO tails VALUES (?, ?, ?, ?, ?, ?, ?)", tails)
                db.executemany("INSERT OR REPLACE INTO counters VALUES (?, ?)", numbers)
        except BaseException:
            with lock:
                index.changed_blocks.update(names)
                index.changed_agents.update(keys)
            raise
        if self._log_bytes() > _LOG_BYTES:
            # With a reader in the way this does nothing now, and the next commit tries again.
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def _log_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0

    def clear(self) -> None:
        """Forget everything, to be filled anew from an index."""
        with self._open() as db:
            for table in ("blocks", "agents", "tails", "counters"):
                db.execute(f"DELETE FROM {table}")

    def close(self) -> None:
        if self._db is not None:
            try:
                self._db.close()
            finally:
                self._db = None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.ProgrammingError("the catalog is closed")
        return self._db


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    if not read_only:
        try:
            # It names agents and salts: for the owner's eyes, whatever the folder's mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from None
        db = sqlite3.connect(path, check_same_thread=False, timeout=10.0)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            # FULL would sync at each commit; a row lost with the power is found again from its file.
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA wal_autocheckpoint = 0")  # See commit.
        except sqlite3.Error:
            db.close()
            raise
        return db
    base = path.absolute().as_uri()
    db = sqlite3.connect(f"{base}?mode=ro", uri=True, check_same_thread=False, timeout=10.0)
    try:
        db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError:
        # WAL needs to make a shared-memory file, which a read-only folder does not allow.
        db.close()
        db = sqlite3.connect(f"{base}?immutable=1", uri=True, check_same_thread=False)
    return db


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("a row makes no sense")
