"""Dead letters: messages that were given up, looked at, sent again or dropped.

Owns what may be done with them, as work on a journal, so that it is the same beside a running host and on
the journal of one that is down. A letter that is sent again is a new message from its old sender: whatever it
did before its turn failed was rolled back, and a receiver that has seen the old id does not mistake it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from .control import DeadInfo, DeadPage, DeadResult, DropDead, ListDead, ResendDead
from .message import derive_id
from .records import DeadLetter, Inbound, Mode, Outgoing
from .rows import BORN_TYPE, DB, TICK_TYPE, insert_inbox, insert_outbox
from .statements import exists

TOPIC = "topic "
"""Begins the receiver of a letter that was a publication; no address does, for a kind has no space."""

_COLUMNS = "seq, id, actor, type, body, sender, reason, tries, at"
_ABSENT = "there is no such dead letter"
_SHOWN = 500
"""Characters of a body that are shown."""


@dataclass
class Resent:
    """What became of letters that were to be sent again: rows for the outbox and for mailboxes."""

    result: DeadResult
    outgoing: list[Outgoing] = field(default_factory=list)
    inbound: list[Inbound] = field(default_factory=list)


def count(db: DB) -> int:
    return int(db.execute("SELECT COUNT(*) FROM dead").fetchone()[0])


def newest(db: DB, limit: int) -> list[DeadLetter]:
    """The most recent letters, newest first."""
    rows = db.execute(f"SELECT {_COLUMNS} FROM dead ORDER BY seq DESC LIMIT ?", (limit,))
    return [DeadLetter(*row) for row in rows]


def page(db: DB, request: ListDead) -> DeadPage:
    """Letters in order of their numbers."""
    start = request.to
    rows = db.execute(
        f"SELECT {_COLUMNS} FROM dead WHERE seq>? AND substr(actor, 1, ?)=? ORDER BY seq LIMIT ?",
        (request.after, len(start), start, request.limit + 1),
    ).fetchall()
    letters = [_info(DeadLetter(*row)) for row in rows[: request.limit]]
    return DeadPage(letters=tuple(letters), total=count(db), more=len(rows) > request.limit)


def resend(db: DB, numbers: Sequence[int], now: float) -> Resent:
    """Take letters out and send them again."""
    done: list[int] = []
    refused: dict[int, str] = {}
    sent = Resent(DeadResult())
    for number in dict.fromkeys(numbers):
        letter = _take(db, number)
        if letter is None:
            refused[number] = _ABSENT
        elif why := _refused(db, letter):
            refused[number] = why
        else:
            done.append(number)
            _send(db, letter, sent, now)
            _remove(db, number)
    sent.result = DeadResult(done=tuple(done), refused=refused)
    return sent


def drop(db: DB, numbers: Sequence[int]) -> DeadResult:
    """Delete letters."""
    removed = {number: _remove(db, number) for number in dict.fromkeys(numbers)}
    return DeadResult(
        done=tuple(number for number, was in removed.items() if was),
        refused={number: _ABSENT for number, was in removed.items() if not was},
    )


def chosen(db: DB, request: ResendDead | DropDead) -> list[int]:
    """The numbers of the letters that a request means."""
    if request.to is None:
        return list(request.numbers)
    start = request.to
    rows = db.execute("SELECT seq FROM dead WHERE substr(actor, 1, ?)=? ORDER BY seq", (len(start), start))
    return [*request.numbers, *(number for (number,) in rows)]


def _take(db: DB, number: int) -> DeadLetter | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM dead WHERE seq=?", (number,)).fetchone()
    return None if row is None else DeadLetter(*row)


def _remove(db: DB, number: int) -> bool:
    return db.execute("DELETE FROM dead WHERE seq=?", (number,)).rowcount == 1


def _refused(db: DB, letter: DeadLetter) -> str:
    """Why a letter cannot be sent again; empty if it can."""
    if letter.actor.startswith(TOPIC):
        topic = letter.actor.removeprefix(TOPIC)
        known = db.execute("SELECT seq FROM topic_ids WHERE topic=? AND id=?", (topic, letter.id)).fetchone()
        if known is not None:
            return f"it was published, as event {known[0]}, and could not be read here"
    elif letter.type in (BORN_TYPE, TICK_TYPE) and not exists(db, letter.actor):
        return f"there is no {letter.actor} any more"
    return ""


def _send(db: DB, letter: DeadLetter, sent: Resent, now: float) -> None:
    id_ = derive_id("resent", letter.id, letter.actor, letter.seq)
    if letter.type in (BORN_TYPE, TICK_TYPE):  # from the actor's own life: nobody could send it one
        mode = Mode.BIRTH if letter.type == BORN_TYPE else Mode.TIMER
        message = Inbound(id=id_, actor=letter.actor, type=letter.type, body=letter.body, mode=mode)
        sent.inbound.append(insert_inbox(db, message, now))
        return
    topic = letter.actor.startswith(TOPIC)
    row = Outgoing(
        id=letter.id if topic else id_,  # a publication never has a second effect
        sender=letter.sender,
        target=letter.actor.removeprefix(TOPIC) if topic else letter.actor,
        type=letter.type,
        body=letter.body,
        topic=topic,
    )
    sent.outgoing.append(insert_outbox(db, row))


def _info(letter: DeadLetter) -> DeadInfo:
    return DeadInfo(
        number=letter.seq,
        to=letter.actor,
        type=letter.type,
        sender=letter.sender,
        reason=letter.reason,
        tries=letter.tries,
        at=letter.at,
        size=len(letter.body),
        body=_shown(letter.body),
    )


def _shown(body: bytes) -> str:
    """A body as JSON, as far as it has such a form, shortened."""
    try:
        text = msgspec.json.encode(msgspec.msgpack.decode(body)).decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError):
        text = repr(body[:_SHOWN])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
