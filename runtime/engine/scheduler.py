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
"""Prompts up to this many remaining tokens are read whole, several agents at a time."""

MAX_PREFILL_ROWS = 8

FOR_MEMORY = ("memory that running turns hold", "an earlier turn that needs memory")
"""What turns wait for that wait for memory."""

MIN_CHUNK = 32

CHUNK_WORK = {"cpu": 64e9, "gpu": 2048e9}
"""Weights times tokens of a chunk: about a quarter of a second's work (two x86-64 cores; an M-series GPU).
Rows that decode never wait longer for their next token than one chunk takes, or as many tokens of short
prompts."""

LARGEST_CHUNK = {"cpu": 128, "gpu": MAX_CHUNK}

DECODE_SHARE = 1.35
"""Seconds that rows decode for each second of a long prompt's chunk: they keep over half their rate."""

MAX_PASSED = 4
"""Lots of short prompts that are read before a long one that waits, whatever the rows are owed."""

LOAD_WAIT_SECONDS = 0.012
"""A load takes some milliseconds and a decode step tens: so long the step waits for a load that is about to
end, so that a short turn does not wait for the step instead."""


def chunk_tokens(weights: float, device: str) -> int:
    """Tokens of a long prompt that are read at once, from how many weights a token is multiplied with.

    It depends on the model and the device alone and not on what was measured: where a prompt is cut decides
    which of its tokens are at 4 bits when later ones attend to them, so a cut that followed the neighbours
    would change what an agent says.
    """
    fits = int(CHUNK_WORK[device] / max(1.0, weights)) // MIN_CHUNK * MIN_CHUNK
    return max(MIN_CHUNK, min(LARGEST_CHUNK[device], fits))


class Scheduler:
    """Queues and phases of all jobs.

    Args:
        chunk: tokens of a long prompt that are read at once (``chunk_tokens``).
    """

    def __init__(self, supervisor: Supervisor, memory: KVMemory, chunk: int = LARGEST_CHUNK["cpu"]) -> None:
        self.chunk = chunk
        self.supervisor, self.memory = supervisor, memory
        self.queue: list[Job] = []
        self.running: list[Job] = []
        self.changed = False
        """Whether something has changed that queued jobs may have waited for."""
        self.prefill_rate = 0.0
        """Tokens a second of recent chunks."""
        self._alone = 0.0
        """Seconds of recent decode steps with nothing beside them."""
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
        self.look_again()

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
        """Something has changed that queued jobs may have waited for: try them at the next admission.

        Until then each keeps the reason it has waited for.
        """
        self.changed = True

    def hold_back(self, reason: str) -> None:
        """Nobody is admitted now."""
        self.changed = False
        for job in self.queue:
            job.waits_for = reason

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
        blocked = self.changed = False
        for job in sorted(self.queue, key=lambda job: job.order):
            if len(self.running) >= MAX_ROWS:
                job.waits_for = f"one of {MAX_ROWS} turns to end: no more run at one time"
                continue
            if self.active(job.key) or any(
                other.key == job.key and other.arrived < job.arrived for other in self.queue
            ):
                job.waits_for = "an earlier turn of this agent"
                continue
            ahead = self.memory.loading.get(job.key)
            if ahead is not None and not ahead.serves(job.ids):
                self.memory.promote(job.key)
                job.waits_for = "its memory is loading"
                continue
            if any(self.memory.being_saved((agent, job.key[1])) for agent in (job.key[0], job.origin)):
                job.waits_for = "its memory is being saved"
                continue
            if blocked:
                job.waits_for = FOR_MEMORY[1]
                continue
            plan = ahead.plan if ahead is not None else self.memory.plan(job.key, job.ids, job.origin)
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
                job.waits_for = FOR_MEMORY[0]
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
        if job.key in self.memory.loading and table is not None:
            need = table.missing(job.limit)  # a load ahead of the turn has taken its slots
        elif plan.source == "hot" and table is not None:
            # What a truncation gives back is not counted: the estimate errs to the safe side.
            need = table.missing(job.limit)
            copies = table.copies(plan.tokens, self.supervisor.pool)
            if any(copies):
                need = [a + b for a, b in zip(need[0], copies, strict=True)], need[1]
                evicted = self.supervisor.make_room(self.memory, self.running, need, keep, whom=job.key[0])
                if evicted is None:
                    why = "cut back into a block that others hold, and no room for a copy: it begins anew"
                    self.supervisor.evict(self.memory, job.key, why)
                return evicted
        else:
            if table is not None:
                # What was worth saving is on disk.
                why = "its next turn has a history of which little or nothing was in memory"
                self.supervisor.evict(self.memory, job.key, why)
            blocks, pages = self.supervisor.need(job.key, job.limit)
            shared = Counter(group for group, _ in held)
            need = [max(0, block - shared[group]) for group, block in enumerate(blocks)], pages
            if plan.origin is not None:
                keep.add((plan.origin.agent, plan.origin.salt))
        return self.supervisor.make_room(self.memory, self.running, need, keep, whom=job.key[0])

    @property
    def short_of_memory(self) -> bool:
        """Whether a turn waits for memory, or may: it has not been tried yet."""
        return any(job.waits_for in ("", *FOR_MEMORY) for job in self.queue)

    def prefetch(self, key: Key, plan: Plan, tokens: int) -> Loading | None:
        """Start loading an agent ahead of its turn. None if there is no room, or others wait for it."""
        if self.short_of_memory:
            return None
        need, whom = self.supervisor.need(key, tokens), f"{key[0]}, whose message waits"
        room = self.supervisor.make_room(self.memory, self.running, need, {key}, gentle=True, whom=whom)
        if room is None:
            return None
        started = self.memory.start(key, plan, priority=1)
        return started if isinstance(started, Loading) else None

    # ---- the next steps

    def decoding(self) -> list[Job]:
        return [job for job in self.running if job.phase is Phase.DECODE]

    def prefill(self, *, workspace: int, score_bytes: int, room: int | None = None) -> list[tuple[Job, int]]:
        """The jobs of the next chunk and how many tokens of each; empty if the decoding rows have the turn.

        Short prompts go first, whole and several at a time, since they cost rows little and are soon
        answered. A long one's chunks are paced: rows decode for longer than a chunk took before the next
        one, so that they keep at least half their rate; but it is not passed without end.

        Args:
            workspace: bytes a step may use for temporaries.
            score_bytes: bytes of attention temporaries per (new token, context token) pair.
            room: tokens of short prompts that are read in one lot, if there is such a limit.
        """
        waiting = sorted((j for j in self.running if j.phase is Phase.PREFILL), key=lambda job: job.order)
        rows_decode = any(job.phase is Phase.DECODE for job in self.running)
        short = [job for job in waiting if job.unread <= SHORT_PREFILL]
        long = next((job for job in waiting if job not in short), None)
        owed = rows_decode and self._debt > 0 and self._passed < MAX_PASSED
        may_be_long = long is not None and not owed
        if short and not (may_be_long and self._short_last):
            self._short_last = True
            self._passed += long is not None
            return self._together(short, self.chunk if room is None else room, workspace, score_bytes)
        self._short_last = False
        if long is None or not may_be_long:
            return []
        self._passed = 0
        return [(long, self.piece(long, workspace=workspace, score_bytes=score_bytes))]

    def piece(self, job: Job, *, workspace: int, score_bytes: int) -> int:
        """How many of a job's tokens are read next: to the next multiple of the chunk, or a short rest whole.

        A function of the job's own length and place, so that its memory has the same bits whoever is near.
        """
        left = len(job.remaining)
        if job.unread <= SHORT_PREFILL:
            return left
        fits = max(MIN_CHUNK, int(workspace / max(1, score_bytes * len(job.ids))))
        return min(left, self.chunk - (len(job.ids) - left) % self.chunk, fits)

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

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Rows are owed the time of a chunk."""
        if tokens >= MIN_CHUNK and seconds > 0:
            self.prefill_rate += (0.3 if self.prefill_rate else 1.0) * (tokens / seconds - self.prefill_rate)
        if self.decoding():
            self._debt += DECODE_SHARE * seconds

    def observe_decode(self, seconds: float) -> None:
        """Rows had this much time."""
        self._alone += (0.3 if self._alone else 1.0) * (seconds - self._alone)
        self._debt = max(0.0, self._debt - seconds)

    def observe_both(self, seconds: float) -> None:
        """Rows had a step, and what was read beside it took the rest of the time."""
        alone = min(seconds, self._alone or seconds)
        self._debt = max(0.0, self._debt + DECODE_SHARE * (seconds - alone) - alone)

    def expecting(self) -> bool:
        """Whether a load is under way whose turn could begin at once: worth a moment's wait."""
        return any(
            job.phase is Phase.LOADING
            and len(job.ids) - job.reused <= SHORT_PREFILL
            and time.monotonic() - job.admitted < LOAD_WAIT_SECONDS
            for job in self.running
        )
