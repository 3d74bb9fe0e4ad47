"""The journal's statements about topics: who hears them, and what this host has delivered."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

from .message import derive_id
from .records import Inbound, Mode
from .rows import DB, insert_dead, insert_inbox


def cursor(db: DB, topic: str) -> int | None:
    row = db.execute("SELECT seq FROM cursors WHERE topic=?", (topic,)).fetchone()
    return None if row is None else int(row[0])


def position(db: DB, topic: str) -> tuple[int | None, int]:
    """The last event that was delivered, and the last one there is; 0 unless the topic is kept here."""
    row = db.execute("SELECT seq FROM topic_heads WHERE topic=?", (topic,)).fetchone()
    return cursor(db, topic), 0 if row is None else int(row[0])


def set_cursor(db: DB, topic: str, seq: int) -> None:
    db.execute(
        "INSERT INTO cursors VALUES (?,?) ON CONFLICT (topic) DO UPDATE SET seq=MAX(seq, excluded.seq)",
        (topic, seq),
    )


def begin(db: DB, topic: str, seq: int) -> None:
    """The next event to be delivered is the one after ``seq``, whatever was delivered before."""
    db.execute("INSERT OR REPLACE INTO cursors VALUES (?,?)", (topic, seq))
    db.execute("UPDATE subscriptions SET after=? WHERE topic=? AND after>?", (seq, topic, seq))


def subscribed_topics(db: DB) -> list[str]:
    return [topic for (topic,) in db.execute("SELECT DISTINCT topic FROM subscriptions")]


def subscribers(db: DB, topic: str) -> list[str]:
    return [actor for (actor,) in db.execute("SELECT actor FROM subscriptions WHERE topic=?", (topic,))]


def deliver_event(
    db: DB, topic: str, seq: int, event: Inbound, deaf: Collection[str], now: float
) -> list[Inbound]:
    """Put one event into the mailboxes of its subscribers and move the cursor, in one piece.

    ``event`` is the pattern of the messages; ``deaf`` are kinds that do not take its type. Its sender does
    not hear it.
    """
    have = cursor(db, topic)
    if have is not None and seq <= have:
        return []
    set_cursor(db, topic, seq)
    delivered = []
    rows = db.execute(
        "SELECT actor FROM subscriptions WHERE topic=? AND after<? ORDER BY actor", (topic, seq)
    )
    for (actor,) in rows.fetchall():
        if actor == event.sender or actor.partition("/")[0] in deaf:
            continue
        message = Inbound(
            id=derive_id("event", topic, seq, actor),
            actor=actor,
            type=event.type,
            body=event.body,
            mode=Mode.TOPIC,
            sender=event.sender,
            traceparent=event.traceparent,
        )
        try:
            delivered.append(insert_inbox(db, message, now))
        except sqlite3.IntegrityError:  # an event of this number from an earlier log still waits
            message.id = derive_id(message.id, repr(now))
            delivered.append(insert_inbox(db, message, now))
    return delivered


def bury_event(db: DB, topic: str, seq: int, id_: str, event: Inbound, reason: str, now: float) -> None:
    """An event whose body does not decode: a dead letter, and the cursor goes on."""
    have = cursor(db, topic)
    if have is None or seq > have:
        set_cursor(db, topic, seq)
        insert_dead(db, id_, f"topic {topic}", event.type, event.body, event.sender, reason, 1, now)
