"""``Steps``: what the step thread does for jobs, one phase after the other.

Owns the way of a job from admission to its reply: starting or awaiting its memory, prefill chunks, decode
steps, drawing tokens, ending. A job that fails, fails alone. Which job does what next is the scheduler's
business, when is the loop's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from offbook.actors.lm import FinishReason, StateHandle
from offbook.bus.errors import EngineFailed, OffbookError

from ..kv.memory import Key, KVMemory, Loading
from ..kv.table import AgentTable, Ids
from ..observe.metrics import Metrics
from ..observe.trace import Trace
from ..store.hashing import chain_at
from .batch import Batch
from .job import Job, Phase
from .openings import Openings
from .sampling import Logits, top_logprobs
from .scheduler import Scheduler

log = logging.getLogger("offbook.engine")

Chunk = Sequence[tuple[Job, int]]
"""Jobs, and how many of their tokens are read next."""


class Steps:
    """Runs jobs over one pool.

    Args:
        loaded: the model with its tokenizer.
        openings: told of every turn that ends.
        unsaved: gets every agent whose turn ended, with the time: its tail is to be saved.
    """

    def __init__(
        self,
        loaded: Any,
        batch: Batch,
        memory: KVMemory,
        scheduler: Scheduler,
        *,
        openings: Openings,
        metrics: Metrics,
        trace: Trace | None,
        unsaved: dict[Key, float],
    ) -> None:
        self._loaded, self.batch = loaded, batch
        self.memory, self.scheduler, self.openings = memory, scheduler, openings
        self.metrics, self.trace, self.unsaved = metrics, trace, unsaved

    def guard(self, jobs: Sequence[Job], work: Callable[[], None], chunk: Chunk = ()) -> None:
        """Do a step. If it fails, find the job that fails alone; the others go on.

        Args:
            chunk: what is read in it.
        """
        try:
            work()
        except Exception as error:
            log.exception("a step failed for %s", [job.key for job in jobs])
            self.metrics.count("failed_steps")
            alive = [job for job in jobs if job.phase in (Phase.DECODE, Phase.PREFILL)]
            if len(alive) > 1:
                for job in alive:
                    part = [one for one in chunk if one[0] is job]
                    self.guard([job], partial(self._again, job, part))
                return
            for job in jobs:
                self.fail(job, error)

    def _again(self, job: Job, chunk: Chunk) -> None:
        """One job's part of a step that failed for several: the same tokens, so that it has the same bits."""
        assert job.table is not None
        if job.phase is Phase.DECODE:
            # The step may have got as far as counting the token whose KV it wrote.
            job.table.tokens = min(job.table.tokens, len(job.ids) + len(job.generated) - 1)
            self.decode([job])
        else:
            self.prefill(chunk)

    def fail(self, job: Job, error: Exception) -> None:
        """End a job that went wrong. Its table may be half written; it is rebuilt from tokens."""
        key = job.key
        if isinstance(error, OffbookError):
            self.end(job, error)
        else:
            self.end(job, EngineFailed(f"the engine failed in this turn of {key[0]}: {error!r}"))
        if key in self.memory.tables and key not in self.memory.loading:
            self.memory.drop(key)

    def _alone(self, job: Job, work: Callable[[], None]) -> None:
        """Do what concerns one job only; if it fails, that job fails."""
        try:
            work()
        except Exception as error:
            log.exception("a turn of %s failed", job.key)
            self.fail(job, error)

    # ---- steps

    def begin(self, job: Job, plan: Any) -> None:
        job.admitted = time.monotonic()
        job.source = {"hot": "hot", "clone": "hot", "warm": "warm", "cold": "cold"}[plan.source]  # type: ignore[assignment]
        if plan.source == "hot" and (table := self.memory.tables.get(job.key)) is not None and table.restored:
            # It was on disk when its message came; the prefetch was done before the turn asked.
            job.source, table.restored = "warm", False
        job.reused = plan.tokens
        if (ahead := self.memory.loading.get(job.key)) is not None:
            # Its memory is on the way from disk since its message came; now somebody waits for it.
            job.source, job.reused = "warm", ahead.plan.tokens
            self.memory.promote(job.key)
            started: AgentTable | Loading = ahead
        else:
            started = self.memory.start(job.key, plan)
        if isinstance(started, Loading):
            job.phase, job.table = Phase.LOADING, started.table
        else:
            self._ready(job, started)

    def _ready(self, job: Job, table: Any) -> None:
        job.table, job.phase = table, Phase.PREFILL
        job.loaded = time.monotonic()
        job.reused = table.tokens
        job.early, table.early = table.early, 0
        table.ids = np.concatenate([table.ids[: table.tokens], job.ids[table.tokens :]])

    def finish_load(self, loading: Loading) -> None:
        now = time.monotonic()
        if not loading.cancelled:
            self.metrics.observe("load_ms", (now - loading.started) * 1e3)
            if self.trace is not None:
                self.trace.load(loading.key[0], loading.started, now, tokens=loading.plan.tokens)
        job = next((j for j in self.scheduler.running if j.table is loading.table), None)
        ids = job.ids if job is not None else loading.ids
        try:
            table = self.memory.finish(loading, ids)
        except Exception as error:
            self.memory.discard(loading)
            if job is not None:
                self.fail(job, error)
            raise
        finally:
            self.scheduler.look_again()
        if job is None:
            if table is not None:
                table.restored = True
            return
        if table is None:
            # Something was missing or corrupt: back to the queue, less will be found this time.
            job.phase, job.table = Phase.QUEUED, None
            self.scheduler.running.remove(job)
            self.scheduler.queue.append(job)
        else:
            self._ready(job, table)

    def prefill(self, chunk: Chunk) -> None:
        """Read some of the tokens that jobs have yet to read."""
        tables, pieces, last = self._reading(chunk)
        wanted = last and any(job.max_tokens for job, _ in chunk)
        started = time.monotonic()
        logits = self.batch.prefill(tables, pieces, logits=wanted)
        ended, count = time.monotonic(), sum(map(len, pieces))
        self.scheduler.observe_prefill(count, ended - started)
        self.metrics.observe("prefill_chunk_ms", (ended - started) * 1e3)
        self._have_read(chunk, last, logits)
        self._trace(f"prefill {count}", started, [job for job, _ in chunk])

    def decode(self, rows: Sequence[Job]) -> None:
        """The next token of every row."""
        tables, tokens = self._speaking(rows)
        started = time.monotonic()
        logits = self.batch.decode(tables, tokens)
        ended = time.monotonic()
        self.scheduler.observe_decode(ended - started)
        self.metrics.observe("decode_step_ms", (ended - started) * 1e3)
        self._have_spoken(rows, logits)
        self._trace(f"decode {len(rows)}", started, rows)

    def both(self, rows: Sequence[Job], chunk: Chunk) -> None:
        """``decode`` and ``prefill`` in one forward."""
        tables, tokens = self._speaking(rows)
        joining, pieces, last = self._reading(chunk)
        wanted = last and any(job.max_tokens for job, _ in chunk)
        started = time.monotonic()
        spoken, read = self.batch.both(tables, tokens, joining, pieces, logits=wanted)
        ended, count = time.monotonic(), sum(map(len, pieces))
        self.scheduler.observe_both(ended - started)
        self.metrics.observe("decode_step_ms", (ended - started) * 1e3)
        self._have_spoken(rows, spoken)
        self._have_read(chunk, last, read)
        self._trace(f"decode {len(rows)} + prefill {count}", started, [*rows, *(job for job, _ in chunk)])

    def _reading(self, chunk: Chunk) -> tuple[list[AgentTable], list[Ids], bool]:
        """Tables, new tokens, and whether these are the last before the jobs' first own tokens."""
        tables = [job.table for job, _ in chunk if job.table is not None]
        pieces = [job.remaining[:count] for job, count in chunk]
        return tables, pieces, all(len(job.remaining) == count for job, count in chunk)

    def _have_read(self, chunk: Chunk, last: bool, logits: mx.array | None) -> None:
        for job, count in chunk:
            job.prefilled += count
            if job.table is not None:
                self._alone(job, partial(self.memory.after_step, job.table))
        if not last:
            return
        jobs = [job for job, _ in chunk]
        for job in jobs:
            if job.phase is Phase.DONE:
                continue
            job.phase = Phase.DECODE
            if logits is None or not job.max_tokens:
                self._alone(job, partial(self._finish, job, "stop"))
        if logits is not None:
            self.draw(jobs, logits)

    def _speaking(self, rows: Sequence[Job]) -> tuple[list[AgentTable], list[int]]:
        """Tables and last tokens; the tables take these in."""
        tables = [job.table for job in rows if job.table is not None]
        tokens = [job.generated[-1] for job in rows]
        for table, token in zip(tables, tokens, strict=True):
            table.ids = np.append(table.ids[: table.tokens], np.uint32(token))
        return tables, tokens

    def _have_spoken(self, rows: Sequence[Job], logits: mx.array) -> None:
        self.metrics.count("decode_steps")
        self.metrics.count("decode_rows", len(rows))
        for job in rows:
            if job.table is not None:
                self._alone(job, partial(self.memory.after_step, job.table))
        self.draw(rows, logits)

    def _trace(self, what: str, started: float, jobs: Sequence[Job]) -> None:
        """A step that has just ended, its draws included."""
        if self.trace is not None:
            self.trace.step(what, started, time.monotonic(), agents=[job.key[0] for job in jobs])

    def draw(self, rows: Sequence[Job], logits: mx.array) -> None:
        """Draw the next token of every row that still decodes, and say what is certain."""
        values = np.array(logits.astype(mx.float32), copy=False)
        # The index of a NaN, where there is one: then nothing can be drawn from the row.
        best = values.argmax(axis=-1)
        for row, job in enumerate(rows):
            if job.phase is Phase.DECODE and np.isnan(values[row, best[row]]):
                self.fail(job, ArithmeticError("the model's logits are not numbers"))
            elif job.phase is Phase.DECODE:
                self._alone(job, partial(self._draw_row, job, values[row], int(best[row])))

    def _draw_row(self, job: Job, logits: Logits, likeliest: int) -> None:
        """One row's next token from logits [vocabulary]."""
        if job.logprobs:
            pairs = top_logprobs(logits, job.logprobs)
            decode = self._loaded.tokenizer.decode
            tops: dict[str, float] = {}
            for i, p in pairs:
                tops.setdefault(decode([i]), p)  # parts of characters look the same: the likeliest one's
            job.distributions.append(tops)
        if job.constraint is None and job.sampler.greedy:
            token = likeliest
        else:
            history = [*job.ids[-job.sampler.params.repetition_context :].tolist(), *job.generated]
            if job.constraint is None:
                token = job.sampler.draw(logits, history)
            else:
                left = job.max_tokens - len(job.generated)
                token = job.constraint.draw(job.sampler, logits, history, left)
        self._drew(job, token)

    def _drew(self, job: Job, token: int) -> None:
        if not job.generated:
            job.first_token = time.monotonic()
        job.generated.append(token)
        self.metrics.count("generated_tokens")
        assert job.text is not None
        if token in self._loaded.eos_token_ids and not job.ignore_end:
            self._finish(job, "stop")
            return
        piece = job.text.push(token)
        done = job.constraint is not None and job.constraint.finished
        reason: FinishReason | None = "stop" if job.text.stopped or done else None
        if reason is None and len(job.generated) >= job.max_tokens:
            # A number may be longer, and is one all the same.
            reason = "stop" if job.constraint is not None and job.constraint.complete else "length"
        if piece and reason is None:
            job.emit(job, piece)
        elif reason is not None:
            self._finish(job, reason, piece)

    def _finish(self, job: Job, reason: FinishReason, piece: str = "") -> None:
        if job.text is not None:
            piece += job.text.finish()
        if piece:
            job.emit(job, piece)
        table = job.table
        assert table is not None
        self.unsaved[job.key] = time.monotonic()
        count = "turns" if job.text is not None else "observed"
        self.metrics.count(count)
        for name, by in (("reused_tokens", job.reused), ("prefilled_tokens", job.prefilled)):
            self.metrics.count(name, by)
        if not job.reused:
            self.metrics.count("cold_prefills")
        ids = np.concatenate([job.ids, np.array(job.generated, np.uint32)])
        handle = StateHandle(
            agent=job.key[0],
            fingerprint=self.memory.fingerprint,
            tokens=len(ids),
            chain=chain_at(ids, self.memory.root(job.key[1])).hex(),
            where="hot",
        )
        self.scheduler.finish(job)
        self.openings.expect(job)
        self._observe_turn(job)
        job.emit(job, job.reply(reason, handle))

    def _observe_turn(self, job: Job) -> None:
        """Histograms by where the memory came from, and the turn's phases in the trace."""
        now = time.monotonic()
        first = job.first_token or now
        if job.text is not None:
            self.metrics.observe(f"ttft_{job.source}_ms", (first - job.arrived) * 1e3)
            self.metrics.observe("queue_ms", (job.admitted - job.arrived) * 1e3)
        if self.trace is not None:
            phases = ("queued", "load", "prefill", "decode")
            times = (job.arrived, job.admitted, job.loaded, first, now)
            for name, start, end in zip(phases, times, times[1:], strict=False):
                self.trace.agent(job.key[0], name, start, end, source=job.source, reused=job.reused)

    def end(self, job: Job, error: OffbookError) -> None:
        """End a job with an error, at whatever phase it is."""
        if job.phase is Phase.DONE:
            return
        if job.phase is Phase.LOADING:
            self.memory.cancel(job.key)
        self.scheduler.finish(job)
        self.metrics.count("ended_early")
        job.emit(job, error)
