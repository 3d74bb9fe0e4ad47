"""``Job``: one request on its way through the engine, and the events it sends back."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offbook.actors.lm import FinishReason, Generated, Observed, StateHandle, Usage, Where
from offbook.bus.errors import OffbookError

from ..kv.memory import Key
from ..kv.table import AgentTable, Ids
from .sampling import Sampler
from .text import TextStream

AGING_SECONDS = 10.0
"""A job that has waited this long counts as one level of priority higher, and so on: nobody starves."""


class Phase(enum.Enum):
    """Where a job is. Its agent's table is bound to it from ``LOADING`` on."""

    QUEUED = "queued"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False)
class Job:
    """One ``Generate`` (or, with ``max_tokens`` 0, one ``Observe``).

    Attributes:
        key: agent and salt. origin: agent it was forked from, if any.
        ids: transcript and prompt, all ids that must have KV before the first token is drawn.
        appended_from: where in ``ids`` the part begins that the caller does not have yet.
        kept: how many ids of the caller's transcript stay in front of that part.
        pinned: whether its agent stays in memory afterwards.
        deadline: ``time.monotonic()`` at which the caller gives up; infinity if it does not say.
        emit: called on the step thread with each piece of text, and once with the reply or an error.
        constraint: decides which tokens are allowed (typed replies), or None.
    """

    key: Key
    ids: Ids
    appended_from: int
    kept: int
    max_tokens: int
    sampler: Sampler
    text: TextStream | None
    emit: Callable[[Job, str | Generated | Observed | OffbookError], None]
    origin: str = ""
    pinned: bool = False
    priority: int = 0
    deadline: float = float("inf")
    truncated: int = 0
    logprobs: int = 0
    constraint: Any = None
    ignore_end: bool = False
    """Go on to ``max_tokens`` over end-of-turn tokens (benchmarks)."""

    phase: Phase = Phase.QUEUED
    table: AgentTable | None = None
    cancelled: bool = False
    generated: list[int] = field(default_factory=list)
    distributions: list[dict[str, float]] = field(default_factory=list)
    source: Where = "cold"
    reused: int = 0
    prefilled: int = 0
    early: int = 0
    """Of its ids without KV at the end of the turn before, how many have been read since (``Openings``)."""
    evictions: int = 0
    waits_for: str = ""
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    loaded: float = 0.0
    first_token: float = 0.0

    @property
    def limit(self) -> int:
        """Tokens this job's table may grow to: what it reserves."""
        return len(self.ids) + self.max_tokens

    @property
    def order(self) -> tuple[int, float, float]:
        """Who goes first: by priority and how long it has waited, then what is due sooner, then who came."""
        aged = self.priority + int((time.monotonic() - self.arrived) / AGING_SECONDS)
        return (-aged, self.deadline, self.arrived)

    @property
    def remaining(self) -> Ids:
        """Ids without KV yet."""
        assert self.table is not None
        return self.ids[self.table.tokens :]

    @property
    def unread(self) -> int:
        """How many ids are without KV, those that were read early included: it decides how the prompt is cut,
        which must not depend on what the engine had time for."""
        return len(self.remaining) + (0 if self.prefilled else self.early)

    def usage(self, now: float) -> Usage:
        first = self.first_token or now
        admitted, loaded = self.admitted or now, self.loaded or now
        return Usage(
            source=self.source,
            reused_tokens=self.reused,
            prefilled_tokens=self.prefilled,
            generated_tokens=len(self.generated),
            context_tokens=len(self.ids) + len(self.generated),
            queue_ms=(admitted - self.arrived) * 1e3,
            load_ms=(loaded - admitted) * 1e3,
            prefill_ms=(first - loaded) * 1e3,
            decode_ms=(now - first) * 1e3,
            ttft_ms=(first - self.arrived) * 1e3,
            evictions=self.evictions,
            truncated_tokens=self.truncated,
        )

    def reply(self, reason: FinishReason, handle: StateHandle) -> Generated | Observed:
        """The reply of a job that has run to its end."""
        if self.text is None:
            return Observed(tokens=len(self.ids) - self.appended_from, handle=handle)
        new = np.concatenate([self.ids[self.appended_from :], np.array(self.generated, np.uint32)])
        return Generated(
            text=self.text.text,
            appended=new.astype("<u4").tobytes(),
            kept=self.kept,
            finish_reason=reason,
            usage=self.usage(time.monotonic()),
            handle=handle,
            logprobs=tuple(self.distributions),
        )
