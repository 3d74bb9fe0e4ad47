"""An actor on its way to another journal: everything the journal keeps of it, as one record.

Owns that record. Messages that wait in the mailbox stay where they are: who sent them sent them there.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import msgspec

from offbook.bus.address import parse_address
from offbook.bus.errors import InvalidRequest, NoSuchActor, StateNotLoadable

from . import schema, statements
from .memory import fold, unpack
from .records import Growth, Timer
from .rows import DB, set_timer, subscribe

FORMAT = 1


class PackedActor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An actor as it was last committed. Stored in exported files: new fields need defaults.

    Attributes:
        growths: the transcript's growths as (turn, kept, tokens), so that ``rewind`` works as before.
        timers: (name, due, period, type, body); ``due`` in seconds of its host's clock.
    """

    id: str
    kind: str
    version: int
    state: bytes
    turns: int
    memory: bytes | None = None
    growths: tuple[tuple[int, int, bytes], ...] = ()
    topics: tuple[str, ...] = ()
    timers: tuple[tuple[str, float, float, str, bytes], ...] = ()
    format: int = FORMAT

    @property
    def transcript(self) -> bytes:
        """The token ids so far, little-endian uint32."""
        return fold(Growth(kept, tokens) for _, kept, tokens in self.growths)

    @property
    def salt(self) -> str:
        """The tenant's salt, as the memory has it."""
        return unpack(self.memory).salt

    @property
    def origin(self) -> str:
        """The agent this one was forked from, if it has not spoken since."""
        return unpack(self.memory).origin


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PackedActor)


def read(journal: Path, actor: str) -> PackedActor:
    """Pack an actor out of a journal, which may be in use: what is committed now.

    Raises:
        NoSuchActor: it is not in there. StateNotLoadable: the file is no journal of this version.
    """
    parse_address(actor)
    if not journal.is_file():
        raise NoSuchActor(f"there is no {actor}: {journal} does not exist", actor=actor)
    try:
        db = sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            db.execute("BEGIN")  # one state of things for all that is read
            (have,) = db.execute("PRAGMA user_version").fetchone()
            if have != schema.VERSION:
                raise StateNotLoadable(
                    f"{journal} has schema version {have}, not {schema.VERSION}; start its team once "
                    "with this offbook, or use the newer one",
                    version=have,
                    known=schema.VERSION,
                )
            packed = pack(db, actor)
        finally:
            db.close()
    except sqlite3.DatabaseError as exc:
        raise StateNotLoadable(f"{journal} cannot be read: {exc}") from exc
    if packed is None:
        raise NoSuchActor(f"there is no {actor} in {journal}", actor=actor)
    return packed


def pack(db: DB, actor: str) -> PackedActor | None:
    """Everything about an actor, or None."""
    snapshot = statements.load(db, actor)
    if snapshot is None:
        return None
    growths = db.execute("SELECT turn, kept, tokens FROM transcript WHERE actor=? ORDER BY turn", (actor,))
    topics = db.execute("SELECT topic FROM subscriptions WHERE actor=? ORDER BY topic", (actor,))
    timers = db.execute(
        "SELECT name, due, period, type, body FROM timers WHERE actor=? ORDER BY name", (actor,)
    )
    return PackedActor(
        id=actor,
        kind=snapshot.kind,
        version=snapshot.version,
        state=snapshot.state,
        turns=snapshot.turns,
        memory=snapshot.memory,
        growths=tuple(growths),
        topics=tuple(topic for (topic,) in topics),
        timers=tuple(timers),
    )


def encode(packed: PackedActor) -> bytes:
    return _encode(packed)


def decode(raw: bytes) -> PackedActor:
    """The inverse of ``encode``.

    Raises:
        StateNotLoadable: it is damaged, or of another version.
    """
    try:
        packed = _decoder.decode(raw)
        if packed.format != FORMAT:
            raise StateNotLoadable(f"a packed actor of format {packed.format}; this version reads {FORMAT}")
        if parse_address(packed.id).kind != packed.kind:
            raise StateNotLoadable(f"{packed.id} is not of kind {packed.kind}")
        unpack(packed.memory)
    except msgspec.DecodeError as exc:
        raise StateNotLoadable(f"the packed actor cannot be read: {exc}") from exc
    return packed


def renamed(packed: PackedActor, actor: str) -> PackedActor:
    """The same actor under another key.

    Raises:
        InvalidAddress, InvalidRequest: it is no address of the actor's kind.
    """
    if parse_address(actor).kind != packed.kind:
        raise InvalidRequest(f"{packed.id} can become another {packed.kind}/..., not {actor}")
    memory = packed.memory
    if memory is not None:  # what the engine said last, it said of the other name
        memory = _encode(msgspec.structs.replace(unpack(memory), handle=None))
    return msgspec.structs.replace(packed, id=actor, memory=memory)


def enter(db: DB, packed: PackedActor, now: float | None = None) -> None:
    """Make the actor exist in this journal, within the journal's transaction.

    Raises:
        InvalidRequest: there is one of this address already.
    """
    refuse_existing(db, packed.id)
    db.execute(
        "INSERT INTO actors (id, kind, version, state, turns, created, memory) VALUES (?,?,?,?,?,?,?)",
        (
            packed.id,
            packed.kind,
            packed.version,
            packed.state,
            packed.turns,
            time.time() if now is None else now,
            packed.memory,
        ),
    )
    db.executemany(
        "INSERT INTO transcript VALUES (?,?,?,?)", [(packed.id, *growth) for growth in packed.growths]
    )
    for topic in packed.topics:
        subscribe(db, topic, packed.id)
    for name, due, period, type_, body in packed.timers:
        set_timer(db, Timer(packed.id, name, due, period, type_, body))


def refuse_existing(db: DB, actor: str) -> None:
    """Raise ``InvalidRequest`` if there is such an actor."""
    if statements.exists(db, actor):
        raise InvalidRequest(f"{actor} exists already; import it under another name", actor=actor)
