"""What a host tells about itself over the bus, at the address ``host/NAME``.

Owns these message types; ``offbook ps`` and other tools use them.
"""

from __future__ import annotations

import msgspec

from .lm import StateHandle


class ActorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One actor.

    Attributes:
        state: ``passive`` (on disk only), ``idle``, ``running``, ``retrying``, ``held`` or ``stopped``.
        mailbox: messages that wait, the one being handled included.
        turns: committed turns.
        tokens: length of the transcript; 0 for actors without a memory.
        observed: messages that the next call will read.
        memory: what the engine said last about the memory.
        error: why it was stopped.
    """

    id: str
    state: str
    mailbox: int
    turns: int
    tokens: int = 0
    observed: int = 0
    memory: StateHandle | None = None
    error: str = ""


class ListActors(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for actors in order of their ids. Reply: ``ActorPage``.

    Attributes:
        after: start after this id.
        prefix: only ids that start so, e.g. ``villager/``.
        limit: at most this many, up to 10,000.
    """

    after: str = ""
    prefix: str = ""
    limit: int = 1000


class ActorPage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Some actors. ``total`` counts all of the host; ``more`` says whether there are further ones."""

    host: str
    actors: tuple[ActorInfo, ...]
    total: int
    more: bool


class HostStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the host's counters. Reply: ``HostInfo``."""


class FailureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One failed turn; see ``Failure``."""

    actor: str
    message_id: str
    type: str
    error: str
    tries: int
    verdict: str
    at: float


class HostInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A host's counters since it started.

    Attributes:
        kinds: what it serves.
        now: its clock, seconds since 1970.
        active: actors in memory.
        busy: things in progress; 0 when idle.
        failed: failed turns; ``failures`` has the most recent ones.
    """

    host: str
    pid: int
    kinds: tuple[str, ...]
    now: float
    actors: int
    active: int
    busy: int
    turns: int
    failed: int
    dead_letters: int
    failures: tuple[FailureInfo, ...] = ()


class DeadInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter: a message that was given up.

    Attributes:
        number: names it; later ones have higher numbers.
        to: its receiver's address, or ``topic NAME`` for a publication.
        reason: the error of its last try.
        at: when it was given up, seconds since 1970.
        size: bytes of its body.
        body: as JSON, shortened.
    """

    number: int
    to: str
    type: str
    sender: str
    reason: str
    tries: int
    at: float
    size: int
    body: str


class ListDead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for dead letters in order of their numbers. Reply: ``DeadPage``.

    Attributes:
        after: start after this number.
        to: only those whose receiver's address starts so, e.g. ``villager/``.
        limit: at most this many, up to 1,000.
    """

    after: int = 0
    to: str = ""
    limit: int = 100


class DeadPage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Some dead letters. ``total`` counts all; ``more`` says whether further ones match."""

    letters: tuple[DeadInfo, ...]
    total: int
    more: bool


class ResendDead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send dead letters again, each as a new message from its old sender. Reply: ``DeadResult``.

    Attributes:
        numbers: which.
        to: or all whose receiver's address starts so; the empty text means every one. None: ``numbers`` only.
    """

    numbers: tuple[int, ...] = ()
    to: str | None = None


class DropDead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Delete dead letters, chosen as by ``ResendDead``. Reply: ``DeadResult``."""

    numbers: tuple[int, ...] = ()
    to: str | None = None


class DeadResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was done: the numbers of those it was done with, and the others with the reason."""

    done: tuple[int, ...] = ()
    refused: dict[int, str] = {}
