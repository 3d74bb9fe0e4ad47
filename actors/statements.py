"""The journal's statements: one function for each thing that is read or written in one piece.

Owns the SQL apart from the schema. Each function takes a connection inside the journal's transaction and
leaves committing to the journal, so a function is atomic however many rows it writes.
"""

from __future__ import annotations

from collections.abc import Iterable

from .message import derive_id
from .records import (
    Accepted,
    Birth,
    Growth,
    Inbound,
    Mode,
    Outgoing,
    Snapshot,
    TurnRecord,
)
from .rows import (
    BORN_TYPE,
    DB,
    INBOX,
    inbound,
    insert_dead,
    insert_inbox,
    insert_outbox,
    set_timer,
    subscribe,
    tick_timer,
)


class TurnLost(Exception):
    """The message of this turn is not in the inbox any more: it was cancelled, or handled already."""


# -- actors ---------------------------------------------------------------------------------------------


def exists(db: DB, actor: str) -> bool:
    return db.execute("SELECT 1 FROM actors WHERE id=?", (actor,)).fetchone() is not None


def create(db: DB, actor: str, birth: Birth, now: float) -> list[Inbound]:
    """Insert an actor with its subscriptions, timers and, if it has one, the message of its first turn."""
    db.execute(
        "INSERT INTO actors (id, kind, version, state, turns, created, memory) VALUES (?,?,?,?,0,?,?)",
        (actor, birth.kind, birth.version, birth.state, now, birth.memory),
    )
    for topic in birth.topics:
        subscribe(db, topic, actor)
    for name, period in birth.ticks:
        set_timer(db, tick_timer(actor, name, period, now))
    if not birth.first_turn:
        return []
    born = Inbound(id=derive_id("born", actor), actor=actor, type=BORN_TYPE, body=b"\xc0", mode=Mode.BIRTH)
    return [insert_inbox(db, born, now)]


def spawn(db: DB, actor: str, birth: Birth, now: float) -> list[Inbound] | None:
    """Create an actor; None if it exists already."""
    return None if exists(db, actor) else create(db, actor, birth, now)


def load(db: DB, actor: str) -> Snapshot | None:
    row = db.execute("SELECT kind, version, state, turns, memory FROM actors WHERE id=?", (actor,)).fetchone()
    if row is None:
        return None
    kind, version, state, turns, memory = row
    segments = db.execute("SELECT kept, tokens FROM transcript WHERE actor=? ORDER BY turn", (actor,))
    ticks = db.execute("SELECT name FROM timers WHERE actor=? AND period>0", (actor,))
    return Snapshot(
        actor,
        kind,
        version,
        state,
        turns,
        memory,
        tuple(Growth(kept, tokens) for kept, tokens in segments),
        frozenset(name for (name,) in ticks),
    )


def segments_until(db: DB, actor: str, turn: int) -> tuple[Growth, ...]:
    """The transcript's growths of turns up to and including ``turn``."""
    rows = db.execute(
        "SELECT kept, tokens FROM transcript WHERE actor=? AND turn<=? ORDER BY turn", (actor, turn)
    )
    return tuple(Growth(kept, tokens) for kept, tokens in rows)


def list_actors(db: DB, after: str, limit: int, prefix: str) -> list[tuple[str, int, bytes | None, int]]:
    """``(id, turns, memory, mailbox)`` of actors in order of their ids, a page at a time."""
    return db.execute(
        "SELECT id, turns, memory, (SELECT COUNT(*) FROM inbox WHERE inbox.actor=actors.id) FROM actors "
        "WHERE id>? AND substr(id, 1, ?)=? ORDER BY id LIMIT ?",
        (after, len(prefix), prefix, limit),
    ).fetchall()


def knows_kind(db: DB, kind: str) -> bool:
    """Whether there are actors of a kind here, or another process was seen to serve it."""
    here = db.execute("SELECT 1 FROM actors WHERE kind=? LIMIT 1", (kind,)).fetchone()
    return here is not None or get_meta(db, f"kind {kind}") is not None


def note_kind(db: DB, kind: str) -> None:
    """Another process serves this kind."""
    put_meta(db, f"kind {kind}", b"")


def count_actors(db: DB) -> int:
    return int(db.execute("SELECT COUNT(*) FROM actors").fetchone()[0])


# -- inbox ----------------------------------------------------------------------------------------------


def accept(db: DB, message: Inbound, birth: Birth | None, now: float) -> Accepted:
    """Store a message for its actor, once. Creates the actor if ``birth`` is given and it does not exist."""
    done = db.execute("SELECT reply FROM done WHERE actor=? AND id=?", (message.actor, message.id)).fetchone()
    if done is not None:
        return Accepted("done", done[0])
    if db.execute("SELECT 1 FROM inbox WHERE actor=? AND id=?", (message.actor, message.id)).fetchone():
        return Accepted("pending")
    stored: list[Inbound] = []
    created = not exists(db, message.actor)
    if created:
        if birth is None:
            return Accepted("absent")
        stored = create(db, message.actor, birth, now)
        if stored:
            message.tries = 0  # it does not begin at once: the first turn does
    return Accepted("new", messages=(*stored, insert_inbox(db, message, now)), created=created)


def begin_try(db: DB, message: Inbound, tries: int) -> None:
    """Count a try before it begins, so that a try which kills the process is counted too."""
    db.execute("UPDATE inbox SET tries=? WHERE seq=?", (tries, message.seq))


def drop(db: DB, message: Inbound) -> None:
    """Forget a message that nobody waits for any more."""
    db.execute("DELETE FROM inbox WHERE seq=?", (message.seq,))
    _end_calls(db, message)


def bury(db: DB, message: Inbound, reason: str, now: float) -> None:
    """Move a message to the dead letters."""
    drop(db, message)
    if message.mode is Mode.TELL:
        _mark_done(db, message, None, now)
    insert_dead(
        db, message.id, message.actor, message.type, message.body, message.sender, reason, message.tries, now
    )


def mailboxes(db: DB, kind: str) -> list[Inbound]:
    """What waits for the actors of a kind; costs as much as there are messages in the inbox."""
    where = "WHERE substr(actor, 1, ?)=? ORDER BY seq"
    rows = db.execute(f"SELECT {INBOX} FROM inbox {where}", (len(kind) + 1, f"{kind}/"))
    return [inbound(row) for row in rows]


def mailbox(db: DB, actor: str) -> list[Inbound]:
    rows = db.execute(f"SELECT {INBOX} FROM inbox WHERE actor=? ORDER BY seq", (actor,))
    return [inbound(row) for row in rows]


def _mark_done(db: DB, message: Inbound, reply: bytes | None, now: float) -> None:
    db.execute("INSERT OR IGNORE INTO done VALUES (?,?,?,?)", (message.actor, message.id, reply, now))


def prune_done(db: DB, before: float) -> int:
    """Forget handled ids older than ``before``; returns how many.

    Those in the outbox stay: their sender here has not noted that they arrived, and repeats them.
    """
    return db.execute("DELETE FROM done WHERE at<? AND id NOT IN (SELECT id FROM outbox)", (before,)).rowcount


# -- turns ----------------------------------------------------------------------------------------------


def commit(
    db: DB, record: TurnRecord, upcoming: Inbound | None, clock_now: float, now: float
) -> tuple[list[Outgoing], list[Inbound]]:
    """Everything a turn did. Returns the outgoing messages with their places, and forks' first turns.

    ``upcoming`` is the next message in the mailbox: its next try is counted in the same piece.
    """
    message = record.message
    if db.execute("DELETE FROM inbox WHERE seq=?", (message.seq,)).rowcount != 1:
        raise TurnLost(message.id)
    if message.mode in (Mode.TELL, Mode.ASK):
        _mark_done(db, message, record.reply, now)
    _end_calls(db, message)
    if upcoming is not None:
        begin_try(db, upcoming, upcoming.tries + 1)
    if record.state is not None:
        db.execute(
            "UPDATE actors SET state=?, version=? WHERE id=?", (record.state, record.version, record.actor)
        )
    db.execute(
        "UPDATE actors SET turns=?, memory=COALESCE(?, memory) WHERE id=?",
        (record.turn, record.memory, record.actor),
    )
    if record.growth is not None:
        db.execute(
            "INSERT INTO transcript VALUES (?,?,?,?)",
            (record.actor, record.turn, record.growth.kept, record.growth.tokens),
        )
    for name in record.cancelled:
        db.execute("DELETE FROM timers WHERE actor=? AND name=?", (record.actor, name))
    for timer in record.timers:
        set_timer(db, timer)
    for topic in record.unsubscribed:
        db.execute("DELETE FROM subscriptions WHERE topic=? AND actor=?", (topic, record.actor))
    for topic in record.subscribed:
        subscribe(db, topic, record.actor)
    born: list[Inbound] = []
    for fork in record.forks:
        born += create(db, fork.actor, fork.birth, clock_now)
        if fork.transcript:
            db.execute("INSERT INTO transcript VALUES (?,0,0,?)", (fork.actor, fork.transcript))
    return [insert_outbox(db, row) for row in record.outbox], born


def put_call(db: DB, message: Inbound, number: int, digest: bytes, result: bytes) -> None:
    """Keep a finished language-model call of a turn that is not committed."""
    db.execute(
        "INSERT OR REPLACE INTO calls VALUES (?,?,?,?,?)", (message.actor, message.id, number, digest, result)
    )


def get_calls(db: DB, message: Inbound) -> dict[int, tuple[bytes, bytes]]:
    """The finished calls of earlier tries: call number -> (digest of the request, result)."""
    rows = db.execute(
        "SELECT number, digest, result FROM calls WHERE actor=? AND message=?", (message.actor, message.id)
    )
    return {number: (digest, result) for number, digest, result in rows}


def _end_calls(db: DB, message: Inbound) -> None:
    db.execute("DELETE FROM calls WHERE actor=? AND message=?", (message.actor, message.id))


# -- outbox ---------------------------------------------------------------------------------------------


def load_outbox(db: DB) -> list[Outgoing]:
    rows = db.execute(
        "SELECT id, sender, target, type, body, topic, traceparent, seq FROM outbox ORDER BY seq"
    )
    return [Outgoing(i, s, t, ty, b, bool(topic), tr, seq) for i, s, t, ty, b, topic, tr, seq in rows]


def sent(db: DB, seqs: Iterable[int]) -> None:
    """The receivers have stored these."""
    db.executemany("DELETE FROM outbox WHERE seq=?", [(seq,) for seq in seqs])


def bury_outgoing(db: DB, row: Outgoing, reason: str, tries: int, now: float) -> None:
    """A message that no receiver takes."""
    db.execute("DELETE FROM outbox WHERE seq=?", (row.seq,))
    target = f"topic {row.target}" if row.topic else row.target
    insert_dead(db, row.id, target, row.type, row.body, row.sender, reason, tries, now)


# -- odds -----------------------------------------------------------------------------------------------


def get_once(db: DB, key: str) -> tuple[bytes | None] | None:
    row: tuple[bytes | None] | None = db.execute("SELECT value FROM once WHERE key=?", (key,)).fetchone()
    return row


def put_once(db: DB, key: str, value: bytes | None) -> None:
    db.execute("INSERT OR IGNORE INTO once VALUES (?,?)", (key, value))


def get_meta(db: DB, key: str) -> bytes | None:
    row = db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
    return None if row is None else bytes(row[0])


def put_meta(db: DB, key: str, value: bytes) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, value))
