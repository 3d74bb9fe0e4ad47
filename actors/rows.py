"""Single rows of the journal: how each is written, shared by the statements that write several.

Owns the order of columns.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from .records import Inbound, Mode, Outgoing, Timer

DB = sqlite3.Connection

INBOX = "seq, id, actor, type, body, mode, sender, deadline, chain, traceparent, tries"
"""The columns that :func:`inbound` takes."""

TICK_TYPE = "offbook.tick"
"""Type of the message that calls an ``@every`` method; its body is the method's name."""

BORN_TYPE = "offbook.born"
"""Type of the message that runs ``on_spawn``: the first turn of an actor."""


def inbound(row: Any) -> Inbound:
    seq, id_, actor, type_, body, mode, sender, deadline, chain, trace, tries = row
    return Inbound(
        id=id_,
        actor=actor,
        type=type_,
        body=body,
        mode=Mode(mode),
        sender=sender,
        deadline=deadline,
        chain=tuple(msgspec.json.decode(chain, type=list[str])),
        traceparent=trace,
        tries=tries,
        seq=seq,
        recovered=True,
    )


def insert_inbox(db: DB, message: Inbound, now: float) -> Inbound:
    """Store a message; it gets its place."""
    cursor = db.execute(
        "INSERT INTO inbox (id, actor, type, body, mode, sender, deadline, chain, traceparent, tries, at) "
        "VALUES (?,?,?,?,?,?,?,?,?,?,?)",
        (
            message.id,
            message.actor,
            message.type,
            message.body,
            int(message.mode),
            message.sender,
            message.deadline,
            msgspec.json.encode(message.chain).decode(),
            message.traceparent,
            message.tries,
            now,
        ),
    )
    message.seq = int(cursor.lastrowid or 0)
    message.counted = message.tries > 0
    return message


def insert_outbox(db: DB, row: Outgoing) -> Outgoing:
    cursor = db.execute(
        "INSERT INTO outbox (id, sender, target, type, body, topic, traceparent) VALUES (?,?,?,?,?,?,?)",
        (row.id, row.sender, row.target, row.type, row.body, int(row.topic), row.traceparent),
    )
    return Outgoing(
        row.id,
        row.sender,
        row.target,
        row.type,
        row.body,
        row.topic,
        row.traceparent,
        int(cursor.lastrowid or 0),
    )


def insert_dead(
    db: DB, id_: str, actor: str, type_: str, body: bytes, sender: str, reason: str, tries: int, now: float
) -> None:
    db.execute(
        "INSERT INTO dead (id, actor, type, body, sender, reason, tries, at) VALUES (?,?,?,?,?,?,?,?)",
        (id_, actor, type_, body, sender, reason, tries, now),
    )


def tick_timer(actor: str, name: str, period: float, now: float) -> Timer:
    return Timer(actor, f"@{name}", now + period, period, TICK_TYPE, msgspec.msgpack.encode(name))


def set_timer(db: DB, timer: Timer) -> None:
    db.execute(
        "INSERT OR REPLACE INTO timers VALUES (?,?,?,?,?,?)",
        (timer.actor, timer.name, timer.due, timer.period, timer.type, timer.body),
    )


def subscribe(db: DB, topic: str, actor: str) -> None:
    """From the next event that this host delivers."""
    db.execute(
        "INSERT OR IGNORE INTO subscriptions "
        "VALUES (?,?,COALESCE((SELECT seq FROM cursors WHERE topic=?),0))",
        (topic, actor, topic),
    )
