"""``Scheduler``: which job does what next. Plain Python, no arrays.

One turn of the engine's loop is: admit, one decode step for all running rows, at most one prefill
chunk, the two as one forward where the model's is the kernel's. This file decides who is admitted, who is
prefilled and how much; the loop does it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from offbook.bus.errors import EngineBusy

from ..kv.memory import Key, KVMemory, Loading, Plan
from ..supervisor import MAX_CHUNK, Supervisor
from .job import Job, Phase

MAX_QUEUE = 512
"""Jobs waiting for admission before new ones are refused with ``EngineBusy``."""

MAX_ROWS = 32
"""Jobs between admission and end at one time."""

SHORT_PREFILL = 96
"""Prompts up to this many remaining tokens are prefilled several agents at a time."""

MAX_PREFILL_ROWS = 8

GAP_SECONDS = 0.25
"""While rows decode, a prefill chunk is sized to take about this long: the bound on their gap."""

MIN_CHUNK = 32

DECODE_SHARE = 1.35
"""Seconds that rows decode for each second of a long prompt's chunk: they keep over half their rate."""

MIN_BESIDE = 8
"""Tokens of a long prompt that are read beside a decode step at least."""

MAX_PASSED = 4
"""Lots of short prompts that are read before a long one that waits, whatever the rows are owed."""

LOAD_WAIT_SECONDS = 0.012
"""A load takes some milliseconds and a decode step tens: so long the step waits for a load that is about to
end, so that a short turn does not wait for the step instead."""


class Scheduler:
    """Queues and phases of all jobs."""

    def __init__(self, supervisor: Supervisor, memory: KVMemory) -> None:
        self.supervisor, self.memory = supervisor, memory
        self.queue: list[Job] = []
        self.running: list[Job] = []
        self.prefill_rate = 200.0
        """Tokens a second of recent chunks; a cautious start, corrected by every chunk."""
        self.beside_rate = 300.0
        """Tokens a second of what was read beside decode steps, the steps' own time not counted."""
        self._alone: dict[int, float] = {}
        """Seconds of recent decode steps of so many rows with nothing beside them."""
        self._debt = 0.0
        self._short_last = False
        self._passed = 0

    # ---- coming in and going out

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ContextTooLarge: it could never fit. EngineBusy: the queue is full.
        """
        self.supervisor.refuse_impossible(job.key, job.limit)
        if len(self.queue) >= MAX_QUEUE:
            raise EngineBusy(f"{len(self.queue)} turns wait already; try again later")
        self.queue.append(job)

    def finish(self, job: Job) -> None:
        """The job is over; its agent stays in memory, idle."""
        job.phase = Phase.DONE
        job.table = None
        if job in self.running:
            self.running.remove(job)
            self.supervisor.touch(job.key, pinned=job.pinned)
        elif job in self.queue:
            self.queue.remove(job)
        self.look_again()

    def look_again(self) -> None:
        """Something has changed that queued jobs may have waited for."""
        for job in self.queue:
            job.waits_for = ""

    def active(self, key: Key) -> bool:
        return any(job.key == key for job in self.running)

    @property
    def idle(self) -> bool:
        return not self.queue and not self.running

    # ---- admission

    def admit(self) -> Iterator[tuple[Job, Plan]]:
        """Jobs to start now, in order. The caller starts each before asking for the next.

        An agent's jobs are served one after the other, as they came. A job that does not fit waits, and so
        does all behind it that would take memory, so that a large one does not starve.
        """
        blocked = False
        for job in sorted(self.queue, key=lambda job: job.order):
            if len(self.running) >= MAX_ROWS:
                break
            if self.active(job.key) or any(
                other.key == job.key and other.arrived < job.arrived for other in self.queue
            ):
                job.waits_for = "an earlier turn of this agent"
                continue
            if job.key in self.memory.loading:
                job.waits_for = "its memory is loading"
                continue
            if any(self.memory.being_saved((agent, job.key[1])) for agent in (job.key[0], job.origin)):
                job.waits_for = "its memory is being saved"
                continue
            if blocked:
                job.waits_for = "an earlier turn that needs memory"
                continue
            plan = self.memory.plan(job.key, job.ids, job.origin)
            held = self.memory.hold(plan)
            evicted = self._room(job, plan, held)
            if evicted is None and plan.origin is not None:
                # Origin and fork do not fit beside each other: the fork is made from what is on disk.
                self.memory.unhold(held)
                plan = self.memory.plan(job.key, job.ids, job.origin, clone=False)
                held = self.memory.hold(plan)
                evicted = self._room(job, plan, held)
                if evicted and self.memory.being_saved((job.origin, job.key[1])):
                    self.memory.unhold(held)
                    job.evictions += evicted
                    job.waits_for = "its memory is being saved"
                    continue
            if evicted is None:
                self.memory.unhold(held)
                job.waits_for = "memory that running turns hold"
                blocked = True
                continue
            job.evictions += evicted
            job.waits_for = ""
            self.queue.remove(job)
            self.running.append(job)
            try:
                yield job, plan
            finally:
                self.memory.unhold(held)

    def _room(self, job: Job, plan: Plan, held: Sequence[tuple[int, int]]) -> int | None:
        """Make room for a job. Blocks it will share (``held``) are there already."""
        table = self.memory.tables.get(job.key)
        keep = {job.key}
        if plan.source == "hot" and table is not None:
            # What a truncation gives back is not counted: the estimate errs to the safe side.
            need = table.missing(job.limit)
            copies = table.copies(plan.tokens, self.supervisor.pool)
            if any(copies):
                need = [a + b for a, b in zip(need[0], copies, strict=True)], need[1]
                evicted = self.supervisor.make_room(self.memory, self.running, need, keep)
                if evicted is None:
                    # Cut back into a block that others hold, and no room for a copy: begin anew.
                    self.memory.evict(job.key)
                return evicted
        else:
            if table is not None:
                # Its content is of no use to this request; what was worth saving is on disk.
                self.memory.evict(job.key)
            blocks, pages = self.supervisor.need(job.key, job.limit)
            shared = Counter(group for group, _ in held)
            need = [max(0, block - shared[group]) for group, block in enumerate(blocks)], pages
            if plan.origin is not None:
                keep.add((plan.origin.agent, plan.origin.salt))
        return self.supervisor.make_room(self.memory, self.running, need, keep)

    def prefetch(self, key: Key, plan: Plan, tokens: int) -> Loading | None:
        """Start loading an agent ahead of its turn, if that disturbs nobody who is about to speak."""
        if plan.source != "warm" or key in self.memory.loading or self.active(key):
            return None
        need = self.supervisor.need(key, tokens)
        if (
            self.queue
            or self.supervisor.make_room(self.memory, self.running, need, {key}, gentle=True) is None
        ):
            return None
        started = self.memory.start(key, plan, priority=1)
        return started if isinstance(started, Loading) else None

    # ---- the next steps

    def decoding(self) -> list[Job]:
        return [job for job in self.running if job.phase is Phase.DECODE]

    def prefill(self, *, workspace: int, score_bytes: int, beside: int = 0) -> list[tuple[Job, int]]:
        """The jobs of the next chunk and how many tokens of each; empty if the decoding rows have the turn.

        Short prompts go first, several at a time, since they cost rows little and are soon answered; but
        never twice in a row past a long one. A long one's chunks are paced: rows decode for longer than a
        chunk took before the next one, so that they keep at least half their rate.

        Args:
            workspace: bytes a step may use for temporaries.
            score_bytes: bytes of attention temporaries per (new token, context token) pair.
            beside: tokens that may be read in the same forward as the rows' next ones; 0 if none may.
        """
        waiting = sorted((j for j in self.running if j.phase is Phase.PREFILL), key=lambda job: job.order)
        rows = len(self.decoding())
        limit = beside or self._chunk_limit(rows > 0)
        short = [job for job in waiting if len(job.remaining) <= min(SHORT_PREFILL, limit)]
        long = next((job for job in waiting if job not in short), None)
        may_be_long = long is not None and (not rows or self._debt <= 0 or self._passed >= MAX_PASSED)
        if beside and rows not in self._alone:
            may_be_long = False  # until it is known how long these rows take by themselves
        if short and not (may_be_long and self._short_last):
            self._short_last = True
            self._passed += long is not None
            return self._together(short, limit, workspace, score_bytes)
        self._short_last = False
        if long is None or not may_be_long:
            return []
        self._passed = 0
        if beside:
            share = self._alone[rows] / DECODE_SHARE
            return [(long, min(len(long.remaining), limit, max(MIN_BESIDE, int(share * self.beside_rate))))]
        fits = max(MIN_CHUNK, int(workspace / max(1, score_bytes * len(long.ids))))
        return [(long, min(len(long.remaining), limit, fits))]

    def _together(
        self, short: list[Job], limit: int, workspace: int, score_bytes: int
    ) -> list[tuple[Job, int]]:
        """As many short prompts as one forward may have (rows are padded to the longest)."""
        batch: list[tuple[Job, int]] = []
        for job in short[:MAX_PREFILL_ROWS]:
            longest = max([len(job.remaining), *(count for _, count in batch)])
            context = max([len(job.ids), *(len(other.ids) for other, _ in batch)])
            rows = len(batch) + 1
            if batch and (rows * longest > limit or rows * longest * context * score_bytes > workspace):
                break
            batch.append((job, len(job.remaining)))
        return batch

    def _chunk_limit(self, rows_decode: bool) -> int:
        if not rows_decode:
            return MAX_CHUNK
        wanted = int(self.prefill_rate * GAP_SECONDS)
        return max(MIN_CHUNK, min(MAX_CHUNK, wanted // MIN_CHUNK * MIN_CHUNK))

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Learn how fast chunks are, so that the next one fits the gap; rows are owed their time."""
        if tokens >= MIN_CHUNK // 2 and seconds > 0:
            self.prefill_rate += 0.3 * (tokens / seconds - self.prefill_rate)
        if self.decoding():
            self._debt += DECODE_SHARE * seconds

    def observe_decode(self, rows: int, seconds: float) -> None:
        """Rows had this much time."""
        self._alone[rows] = seconds + 0.7 * (self._alone.get(rows, seconds) - seconds)
        self._debt = max(0.0, self._debt - seconds)

    def observe_both(self, rows: int, tokens: int, seconds: float) -> None:
        """Rows had a step, and what was read beside it took the rest of the time."""
        alone = min(seconds, self._alone.get(rows, seconds))
        rest = seconds - alone
        if rest > 0:
            self.beside_rate += 0.2 * (min(tokens / rest, 1e4) - self.beside_rate)
        self._debt = max(0.0, self._debt + DECODE_SHARE * rest - alone)

    def expecting(self) -> bool:
        """Whether a load is under way whose turn could begin at once: worth a moment's wait."""
        return any(
            job.phase is Phase.LOADING
            and len(job.ids) - job.reused <= SHORT_PREFILL
            and time.monotonic() - job.admitted < LOAD_WAIT_SECONDS
            for job in self.running
        )
