"""The journal's tables and their versions.

Owns the SQL schema. ``PRAGMA user_version`` holds the version; an older journal is upgraded in one
transaction, a newer one is refused.
"""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

from offbook.bus.errors import StateNotLoadable

VERSION = 1

_MIGRATIONS: dict[int, str] = {
    1: """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
    CREATE TABLE actors (
        id TEXT PRIMARY KEY, kind TEXT NOT NULL, version INTEGER NOT NULL, state BLOB NOT NULL,
        turns INTEGER NOT NULL, created REAL NOT NULL, memory BLOB
    );
    CREATE INDEX actors_kind ON actors (kind, id);
    -- What was accepted and is not handled yet. The order of seq is the order of the mailbox.
    CREATE TABLE inbox (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, actor TEXT NOT NULL, type TEXT NOT NULL,
        body BLOB NOT NULL, mode INTEGER NOT NULL, sender TEXT NOT NULL, deadline REAL NOT NULL,
        chain TEXT NOT NULL, traceparent TEXT NOT NULL, tries INTEGER NOT NULL, at REAL NOT NULL
    );
    CREATE UNIQUE INDEX inbox_actor ON inbox (actor, id);
    -- Ids of handled messages, so that a repeated delivery has no second effect.
    CREATE TABLE done (
        actor TEXT NOT NULL, id TEXT NOT NULL, reply BLOB, at REAL NOT NULL, PRIMARY KEY (actor, id)
    ) WITHOUT ROWID;
    CREATE INDEX done_at ON done (at);
    CREATE TABLE outbox (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, sender TEXT NOT NULL, target TEXT NOT NULL,
        type TEXT NOT NULL, body BLOB NOT NULL, topic INTEGER NOT NULL, traceparent TEXT NOT NULL
    );
    CREATE TABLE timers (
        actor TEXT NOT NULL, name TEXT NOT NULL, due REAL NOT NULL, period REAL NOT NULL, type TEXT NOT NULL,
        body BLOB NOT NULL, PRIMARY KEY (actor, name)
    ) WITHOUT ROWID;
    CREATE INDEX timers_due ON timers (due);
    CREATE TABLE subscriptions (
        topic TEXT NOT NULL, actor TEXT NOT NULL, after INTEGER NOT NULL, PRIMARY KEY (topic, actor)
    ) WITHOUT ROWID;
    -- The last event of each topic that this host has put into mailboxes.
    CREATE TABLE cursors (topic TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;
    -- Finished language-model calls of turns that are not committed yet.
    CREATE TABLE calls (
        actor TEXT NOT NULL, message TEXT NOT NULL, number INTEGER NOT NULL, digest BLOB NOT NULL,
        result BLOB NOT NULL, PRIMARY KEY (actor, message, number)
    ) WITHOUT ROWID;
    CREATE TABLE transcript (
        actor TEXT NOT NULL, turn INTEGER NOT NULL, kept INTEGER NOT NULL, tokens BLOB NOT NULL,
        PRIMARY KEY (actor, turn)
    );
    CREATE TABLE dead (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, actor TEXT NOT NULL, type TEXT NOT NULL,
        body BLOB NOT NULL, sender TEXT NOT NULL, reason TEXT NOT NULL, tries INTEGER NOT NULL,
        at REAL NOT NULL
    );
    CREATE TABLE once (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
    CREATE TABLE topics (
        topic TEXT NOT NULL, seq INTEGER NOT NULL, id TEXT NOT NULL, type TEXT NOT NULL, sender TEXT NOT NULL,
        traceparent TEXT NOT NULL, body BLOB NOT NULL, at REAL NOT NULL, PRIMARY KEY (topic, seq)
    );
    CREATE TABLE topic_ids (
        topic TEXT NOT NULL, id TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (topic, id)
    ) WITHOUT ROWID;
    CREATE INDEX topic_ids_seq ON topic_ids (topic, seq);
    CREATE TABLE topic_heads (topic TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;
    """,
}


_NO_ROOM = 1 << 20
"""Bytes: with less left of a disk, its room is taken to be what an error is about."""


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Set the connection to the file at ``path`` up and bring its schema to this version.

    Raises:
        StateNotLoadable: the file was written by a newer offbook, or is not a journal; or the disk is full.
    """
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA busy_timeout=10000")
        db.execute("PRAGMA cache_size=-16384")
        (have,) = db.execute("PRAGMA user_version").fetchone()
        if have > VERSION:
            raise StateNotLoadable(
                f"the journal {path} has schema version {have}, this offbook knows {VERSION}; "
                "run the newer offbook",
                version=have,
                known=VERSION,
            )
        for version in range(have + 1, VERSION + 1):
            db.executescript(f"BEGIN; {_MIGRATIONS[version]} PRAGMA user_version={version}; COMMIT;")
    except sqlite3.DatabaseError as exc:
        free = shutil.disk_usage(path.parent).free
        hint = f"; the disk is full ({free >> 10} KiB left): free some space" if free < _NO_ROOM else ""
        raise StateNotLoadable(f"the journal {path} cannot be used: {exc}{hint}", path=str(path)) from exc
