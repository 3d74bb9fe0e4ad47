"""What a host tells about itself over the bus, at the address ``host/NAME``.

Owns these message types; ``offbook ps`` and other tools use them.
"""

from __future__ import annotations

import msgspec

from .lm import StateHandle


class ActorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One actor.

    Attributes:
        state: ``passive`` (on disk only), ``idle``, ``running``, ``retrying`` or ``stopped``.
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
