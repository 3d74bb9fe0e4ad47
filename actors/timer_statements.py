"""The journal's statements about timers."""

from __future__ import annotations

import math
from random import Random

from .message import derive_id
from .records import Inbound, Mode
from .rows import DB, insert_inbox


def next_due(db: DB) -> float | None:
    """When the earliest timer is due."""
    (due,) = db.execute("SELECT MIN(due) FROM timers").fetchone()
    return None if due is None else float(due)


def fire(db: DB, now: float, seed: int, limit: int = 256) -> tuple[list[Inbound], float | None]:
    """Turn due timers into messages, each once, and say when the next one is due.

    A periodic timer moves to its next time after ``now``: missed periods are one message. It is skipped
    while its last message still waits.
    """
    rows = db.execute(
        "SELECT actor, name, due, period, type, body FROM timers WHERE due<=? "
        "ORDER BY due, actor, name LIMIT ?",
        (now, limit),
    ).fetchall()
    # Timers of one instant fire in an order that the seed fixes, not the alphabet.
    order = Random(seed)
    rows = [row for _, _, row in sorted((row[2], order.random(), row) for row in rows)]
    fired = []
    for actor, name, due, period, type_, body in rows:
        if period > 0:
            after = due + period * max(1, math.floor((now - due) / period) + 1)
            db.execute(
                "UPDATE timers SET due=? WHERE actor=? AND name=?",
                (after if after > now else now + period, actor, name),
            )
            waiting = db.execute(
                "SELECT 1 FROM inbox WHERE actor=? AND type=? AND body=? AND mode=?",
                (actor, type_, body, int(Mode.TIMER)),
            ).fetchone()
            if waiting:
                continue
        else:
            db.execute("DELETE FROM timers WHERE actor=? AND name=?", (actor, name))
        id_ = derive_id("timer", actor, name, repr(due))
        if db.execute("SELECT 1 FROM inbox WHERE actor=? AND id=?", (actor, id_)).fetchone():
            continue
        fired.append(
            insert_inbox(db, Inbound(id=id_, actor=actor, type=type_, body=body, mode=Mode.TIMER), now)
        )
    return fired, next_due(db)


def pull_timers(db: DB, now: float) -> int:
    """After the wall clock was set back: no periodic timer waits longer than its period. Returns how many."""
    return db.execute("UPDATE timers SET due=?+period WHERE period>0 AND due>?+period", (now, now)).rowcount
