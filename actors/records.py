"""Rows of the journal as Python values: what goes in and what comes out.

Owns these plain types and nothing else, so that the journal, the turns and the host agree on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Mode(IntEnum):
    """How a message reached the mailbox. Stored: keep the numbers."""

    TELL = 0
    ASK = 1
    TOPIC = 2
    TIMER = 3
    BIRTH = 4


@dataclass(slots=True)
class Inbound:
    """A message in a mailbox.

    Attributes:
        seq: its place in the journal's inbox; -1 before it is stored.
        id: the message id, unique for its receiver.
        deadline: Unix seconds after which nobody waits for an answer; 0 for none.
        chain: the actors that wait for this message's answer, outermost first.
        tries: how many tries have begun, as stored.
        recovered: an earlier run of the process accepted it.
        counted: ``tries`` covers a try that has not begun yet: it may begin without another write.
    """

    id: str
    actor: str
    type: str
    body: bytes
    mode: Mode
    sender: str = ""
    deadline: float = 0.0
    chain: tuple[str, ...] = ()
    traceparent: str = ""
    tries: int = 0
    seq: int = -1
    counted: bool = False
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class Birth:
    """What creates an actor that does not exist yet."""

    kind: str
    version: int
    state: bytes
    topics: tuple[str, ...] = ()
    ticks: tuple[tuple[str, float], ...] = ()
    first_turn: bool = False
    memory: bytes | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """What became of a message that asked to be stored.

    Attributes:
        status: ``new``; ``pending``: it is in the inbox already; ``done``: its turn is committed, ``reply``
            has the answer; ``absent``: there is no such actor.
        messages: the stored messages in order: the actor's first turn, if this created it, then this one.
        created: this created the actor.
    """

    status: str
    reply: bytes | None = None
    messages: tuple[Inbound, ...] = ()
    created: bool = False


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that leaves after its turn is committed. ``topic`` tells a publication from a tell."""

    id: str
    sender: str
    target: str
    type: str
    body: bytes
    topic: bool = False
    traceparent: str = ""
    seq: int = -1


@dataclass(frozen=True, slots=True)
class Timer:
    """A message to oneself in the future. ``due`` is in seconds of the host's clock."""

    actor: str
    name: str
    due: float
    period: float
    type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Growth:
    """How a transcript changed: ``kept`` tokens of the old one, then ``tokens`` (little-endian uint32)."""

    kept: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Fork:
    """A new actor with a copy of a state and a transcript."""

    actor: str
    birth: Birth
    transcript: bytes


@dataclass(slots=True)
class TurnRecord:
    """Everything that one turn commits, or nothing of it."""

    actor: str
    kind: str
    message: Inbound
    turn: int
    version: int
    state: bytes | None
    memory: bytes | None = None
    growth: Growth | None = None
    reply: bytes | None = None
    outbox: list[Outgoing] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    subscribed: list[str] = field(default_factory=list)
    unsubscribed: list[str] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An actor as it was last committed. ``segments`` are the transcript's growths, oldest first."""

    id: str
    kind: str
    version: int
    state: bytes
    turns: int
    memory: bytes | None
    segments: tuple[Growth, ...]
    ticks: frozenset[str]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was given up, or could not be delivered."""

    seq: int
    id: str
    actor: str
    type: str
    body: bytes
    sender: str
    reason: str
    tries: int
    at: float
