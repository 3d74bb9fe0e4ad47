"""``Openings``: what every next message begins with is read before there is one.

A chat template closes the last turn and opens the next one before a word of the message: five or six of some
fifteen tokens of "Go on." with SmolLM2's. When an agent has spoken and the engine has nothing to do, they are
read, so that the next turn has as much less to read. Nobody waits for that: it is given up between two
layers when something comes in, and tried again later. A message that begins otherwise cuts the ids back off.

Only where a turn has the same bits with and without: the model's forward is the kernel's at any length, and
nothing is sealed and no chunk ends within the opening.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..kv.memory import Key, KVMemory
from ..kv.scheme import GROUP
from ..kv.table import Ids
from ..models.decoder import Interrupted
from ..observe.trace import Trace
from .batch import Batch
from .job import Job

log = logging.getLogger("offbook.engine")

PAUSE_SECONDS = 0.02
"""After a turn's end: so long it is likely that somebody asks for another at once."""


MAX_DUE = 64
"""Agents whose openings wait to be read. An engine that is never idle forgets the oldest."""


@dataclass
class Due:
    """An agent whose opening may be read.

    Attributes:
        tokens: of its memory when its turn ended.
        new: the ids to be read: the last one generated, and the opening.
        at: from when on. since: when it was asked for.
    """

    tokens: int
    new: Ids
    at: float
    since: float


class Openings:
    """Reads openings. On the step thread.

    Args:
        behind: the ids, behind a turn that was cut off and behind one that ended (``Dialogue.openings``).
        chunk: tokens of a long prompt that are read at once.
        limit: tokens the model reads.
        trace: gets a step for each that is read.
    """

    def __init__(
        self,
        batch: Batch,
        memory: KVMemory,
        *,
        behind: Sequence[Ids],
        turn_ends: frozenset[int],
        chunk: int,
        limit: int,
        trace: Trace | None = None,
    ) -> None:
        self._batch, self._memory = batch, memory
        self._behind, self._turn_ends = behind, turn_ends
        self._chunk, self._limit, self._trace = chunk, limit, trace
        self._due: dict[Key, Due] = {}

    @property
    def possible(self) -> bool:
        """Whether this model's openings are read at all."""
        decoder = self._batch.decoder
        return decoder is not None and decoder.limit >= self._chunk and any(map(len, self._behind))

    def expect(self, job: Job) -> None:
        """A turn has ended: its agent's next one can be prepared."""
        self._due.pop(job.key, None)
        if not job.generated or not self.possible:
            return
        opening = self._behind[job.generated[-1] in self._turn_ends]
        if len(opening):
            now = time.monotonic()
            new = np.concatenate([np.array(job.generated[-1:], np.uint32), opening])
            tokens = len(job.ids) + len(job.generated) - 1
            self._due[job.key] = Due(tokens, new, now + PAUSE_SECONDS, now)
            if len(self._due) > MAX_DUE:
                del self._due[next(iter(self._due))]

    def forget(self, key: Key) -> None:
        """The agent's memory is gone."""
        self._due.pop(key, None)

    def waiting(self, key: Key) -> float:
        """Since when an agent waits for its opening to be read; infinity if it does not."""
        due = self._due.get(key)
        return float("inf") if due is None else due.since

    def seconds(self) -> float:
        """Until the next one may be read; infinity if there is none."""
        return max(0.0, min((due.at for due in self._due.values()), default=float("inf")) - time.monotonic())

    def read(self, unless: Callable[[], bool]) -> None:
        """Read the next one, if its time has come.

        Args:
            unless: whether something has come in: then it is given up.
        """
        key = min(self._due, key=lambda key: self._due[key].at, default=None)
        if key is None or self._due[key].at > time.monotonic():
            return
        due = self._due.pop(key)
        if not self._readable(key, due):
            return
        table, started = self._memory.tables[key], time.monotonic()
        try:
            self._batch.prefill([table], [due.new], logits=False, unless=unless)
            if table.failed is not None:
                raise table.failed
        except Interrupted:
            due.at = time.monotonic() + PAUSE_SECONDS
            self._due[key] = due
            return
        except Exception:
            # Nobody asked for it: the turn to come will read these ids itself, and say if that fails.
            log.exception("the opening of %s could not be read", key[0])
            self._memory.count("failed_openings")
            self._memory.drop(key)  # it may be half written
            return
        table.ids, table.early = np.concatenate([table.ids[: due.tokens], due.new]), len(due.new)
        self._memory.count("openings")
        if self._trace is not None:
            self._trace.step(f"opening {len(due.new)}", started, time.monotonic(), agents=[key[0]])

    def _readable(self, key: Key, due: Due) -> bool:
        """Whether an agent's memory is as its turn left it, and reading on changes but its length."""
        table = self._memory.tables.get(key)
        if table is None or key in self._memory.loading or table.early:
            return False
        start, stop, scheme = due.tokens, due.tokens + len(due.new), self._memory.scheme
        sealed = scheme.sealed(start)
        pages = -(-(stop - sealed) // GROUP) - len(table.pages)
        return (
            table.tokens == start
            and stop < self._limit
            and table.sealed == sealed == scheme.sealed(stop)
            and start // self._chunk == stop // self._chunk
            and pages <= self._memory.pool.pages.free
        )
