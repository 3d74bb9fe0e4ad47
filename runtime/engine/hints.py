"""``Hints``: messages that wait for agents, whose memory is loaded ahead of their turns.

Owns the hints that could not be followed at once, because somebody waits for memory or there is no room that
nobody needs. They are tried again when that may have changed; few are kept, and none for long.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ..kv.memory import Key, KVMemory
from ..kv.table import Ids
from ..supervisor import WAITING_SECONDS
from .scheduler import Scheduler

MAX_HINTS = 32
"""Hints kept to be tried again. Of more the oldest are forgotten; their turns load for themselves."""


@dataclass(frozen=True)
class Hint:
    """A message that waits for an agent with the transcript ``ids``. ``until`` is ``time.monotonic()``."""

    ids: Ids
    origin: str
    until: float


class Hints:
    """Follows hints, now or later. On the step thread.

    Attributes:
        kept: hints to be tried again, the oldest first.
    """

    def __init__(self, memory: KVMemory, scheduler: Scheduler) -> None:
        self._memory, self._scheduler = memory, scheduler
        self.kept: dict[Key, Hint] = {}

    def follow(self, key: Key, ids: Ids, origin: str) -> None:
        """Load the agent's memory if it is on disk: now if that disturbs nobody, else when it does not."""
        self.kept.pop(key, None)
        hint = Hint(ids, origin, time.monotonic() + WAITING_SECONDS)
        if not self._settled(key, hint):
            self.kept[key] = hint
            if len(self.kept) > MAX_HINTS:
                del self.kept[next(iter(self.kept))]

    def again(self) -> None:
        """Something has changed: try what was kept, the oldest first."""
        now = time.monotonic()
        for key, hint in list(self.kept.items()):
            if hint.until <= now or self._settled(key, hint):
                del self.kept[key]

    def forget(self, agent: str) -> None:
        for key in [key for key in self.kept if key[0] == agent]:
            del self.kept[key]

    def _settled(self, key: Key, hint: Hint) -> bool:
        """Begin a load if one helps and may begin. False if it is worth trying again."""
        if key in self._memory.loading or self._scheduler.active(key):
            return True
        if self._memory.being_saved(key) or self._scheduler.short_of_memory:
            return False
        # One id more stands for the message to come.
        plan = self._memory.plan(key, np.append(hint.ids, np.uint32(0)), hint.origin)
        if plan.source != "warm":
            return True
        loading = self._scheduler.prefetch(key, plan, len(hint.ids) + 256)
        if loading is None:
            return False
        loading.ids = hint.ids
        self._memory.count("prefetches")
        return True
