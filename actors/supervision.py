"""Supervision: what happens to an actor and its message after a failed turn.

Owns the policy and the record of failures. A failed turn is rolled back and the actor restarts from its last
commit. The message is tried again after a growing delay; after ``max_tries`` it goes to the dead letters
and the actor goes on. An actor that restarts more than ``intensity`` times within ``period`` seconds is
stopped, as Erlang's supervisors do, and the host reports it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from offbook.bus.errors import (
    ActorFailed,
    ConnectionLost,
    ContextTooLarge,
    CycleError,
    DeadlineExceeded,
    EngineBusy,
    EngineFailed,
    InvalidAddress,
    InvalidRequest,
    MailboxFull,
    ModelError,
    NoSuchActor,
    OffbookError,
    StateNotLoadable,
    StateNotStorable,
    UnknownModel,
    to_wire,
)

from .reasons import reason_of

_NOT_READY = (ConnectionLost, DeadlineExceeded, EngineFailed, MailboxFull, NoSuchActor)
"""Errors that the state of other parts causes, and time may mend."""

_OTHERS = 20
"""How much longer to wait for others than for oneself: a process starts within some seconds."""


@dataclass(frozen=True)
class Supervision:
    """How an actor class is supervised; set it as ``supervision = Supervision(...)`` on the class.

    Attributes:
        max_tries: how often a message is tried before it goes to the dead letters.
        backoff: seconds before the second try; doubles with each further one.
        backoff_max: the longest delay between tries, in seconds.
        intensity: restarts allowed within ``period``; one more stops the actor.
        period: the window of ``intensity``, in seconds.

    Raises:
        InvalidRequest: a value that cannot be used.
    """

    max_tries: int = 5
    backoff: float = 0.05
    backoff_max: float = 5.0
    intensity: int = 30
    period: float = 60.0

    def __post_init__(self) -> None:
        # A value that only fails when it is used would do so in the midst of a failure.
        for name, least in (("max_tries", 1), ("intensity", 0)):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidRequest(
                    f"Supervision: {name} must be a whole number from {least}, got {value!r}", field=name
                )
        for name in ("backoff", "backoff_max", "period"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not value >= 0:  # nor is NaN
                raise InvalidRequest(
                    f"Supervision: {name} must be seconds, zero or more, got {value!r}", field=name
                )

    def delay(self, tries: int, error: BaseException) -> float:
        """Seconds to wait after the ``tries``-th failed try; longer if somebody else was not ready."""
        first = self.backoff * (_OTHERS if isinstance(error, _NOT_READY) else 1)
        doublings = min(tries - 1, 100)  # far beyond any delay; thousands would be no float any more
        return float(min(first * 2.0**doublings, self.backoff_max))


class Verdict(Enum):
    """What the supervisor decides about a failed message."""

    RETRY = "retry"
    DEAD_LETTER = "dead letter"
    REPORT = "report to the asker"


@dataclass(frozen=True)
class Failure:
    """One failed turn, or an actor that was stopped. ``host.failures`` has the most recent ones."""

    actor: str
    message_id: str
    type: str
    error: str
    tries: int
    verdict: str
    at: float = field(default_factory=time.time)


class RestartWindow:
    """Counts the restarts of one actor within the policy's period."""

    def __init__(self, policy: Supervision) -> None:
        self._policy = policy
        self._times: deque[float] = deque()

    def restart(self) -> bool:
        """Count a restart; False if it is one too many."""
        now = time.monotonic()
        self._times.append(now)
        while self._times and self._times[0] < now - self._policy.period:
            self._times.popleft()
        return len(self._times) <= self._policy.intensity


def decide(policy: Supervision, *, is_ask: bool, tries: int) -> Verdict:
    """An asker is told at once and may ask again; anything else is retried, then becomes a dead letter."""
    if is_ask:
        return Verdict.REPORT
    return Verdict.RETRY if tries < policy.max_tries else Verdict.DEAD_LETTER


ASKERS_OWN: tuple[type[OffbookError], ...] = (
    ContextTooLarge,
    CycleError,
    DeadlineExceeded,
    EngineBusy,
    InvalidRequest,
)
"""What an asker may bring about with a question: told to it, and no failure of the actor."""

_PASSED_ON: tuple[type[OffbookError], ...] = (
    *ASKERS_OWN,
    InvalidAddress,
    ModelError,
    StateNotLoadable,
    StateNotStorable,
    UnknownModel,
)
"""Errors about the request itself: the asker gets them as they are, not as ``ActorFailed``."""


def for_asker(actor: str, exc: BaseException) -> OffbookError:
    """The error that an asker gets for an exception that left a handler."""
    if isinstance(exc, _PASSED_ON):
        exc.details.setdefault("actor", actor)
        return exc
    return ActorFailed(f"{actor} failed: {reason_of(exc)}", actor=actor, cause=to_wire(exc))
