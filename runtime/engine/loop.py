"""The step thread: the only thread that touches MLX.

Owns the model, the pool and the loop admit - decode - prefill - emit. Other threads talk to it through
``post``; it talks back through callbacks that must only hand things over.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from offbook.actors.lm import AgentStats, EngineStats, FinishReason, StateHandle, Where
from offbook.bus.errors import Cancelled, ContextTooLarge, DeadlineExceeded, EngineFailed, OffbookError

from ..kv.arrays import PoolArrays
from ..kv.memory import Key, KVMemory, Loading
from ..kv.pool import BlockPool
from ..kv.probe import derive, make_caches
from ..kv.scheme import KVScheme
from ..kv.spec import ModelCacheSpec
from ..kv.table import Ids
from ..models import linear
from ..observe.metrics import Metrics
from ..observe.trace import Trace
from ..store.hashing import chain_at
from ..supervisor import MIB, Supervisor, pool_sizes, workspace_bytes
from .batch import Batch
from .job import Job, Phase
from .sampling import top_logprobs
from .scheduler import Scheduler

log = logging.getLogger("offbook.engine")

T = TypeVar("T")

SAVE_AFTER_SECONDS = 3.0
"""A finished turn's tail is written when the engine is idle, or after this long."""

IDLE_WAIT_SECONDS = 0.5

TEAM_AGENTS, TEAM_CONTEXT = 32, 8192
"""A default budget is cut to what this many agents with contexts of this many tokens need."""

MAX_FAILURES = 5
"""Turns of the loop that fail one after the other before the engine gives up and is started anew."""


class EngineLoop:
    """Model, memory and jobs of one engine.

    Args:
        load: loads the model, on the step thread.
        open_store: opens the block store for a fingerprint and spec, or returns None.
        scheme: how KV is kept, or what says so of the loaded model and its cache spec (``scheme_for``).
        budget_bytes: everything this process may use for MLX memory.
        generous: the budget is a default, so a pool for more agents than a team has is not allocated.
        host: whether the pool is written through NumPy views (CPU).
        native: makes the native kernel's front for a pool, or None where it does not fit.
        trace: file for a Perfetto/Chrome trace.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        open_store: Callable[[str, ModelCacheSpec, KVScheme], Any],
        *,
        scheme: KVScheme | Callable[[Any, ModelCacheSpec], KVScheme],
        budget_bytes: int,
        host: bool,
        generous: bool = False,
        native: Callable[[PoolArrays], Any] | None = None,
        trace: Path | None = None,
    ) -> None:
        self._load, self._open_store = load, open_store
        self._scheme, self.budget_bytes, self.host = scheme, budget_bytes, host
        self._native, self._generous = native, generous
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._done: Future[None] = Future()
        self._unsaved: dict[Key, float] = {}
        self._resizes: list[tuple[int, Future[None]]] = []
        self.ready: Future[None] = Future()
        self.step_started = 0.0
        self._failures = 0
        self.metrics = Metrics()
        self.trace = Trace(trace) if trace is not None else None
        self.peak_bytes = 0

    # ---- for other threads

    def start(self) -> None:
        threading.Thread(target=self._run, name="offbook-step", daemon=True).start()

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the step thread, between steps."""
        self._inbox.put(action)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` on the step thread and give its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future

    def stop(self) -> Future[None]:
        """End after saving everything. The future is done once all is on disk."""
        self._stopping.set()
        self.post(lambda: None)
        return self._done

    # ---- the thread

    def _run(self) -> None:
        try:
            self._set_up()
        except BaseException as error:
            log.exception("the engine could not start")
            self.ready.set_exception(error)
            self._done.set_result(None)
            return
        self.ready.set_result(None)
        try:
            while not self._stopping.is_set():
                self._turn_safely()
        except BaseException:
            log.exception("the engine's loop ended")
        finally:
            self._tear_down()

    def _turn_safely(self) -> None:
        """A turn of the loop; what goes wrong in it beyond any one job ends the jobs, not the engine."""
        try:
            self._turn()
            self._failures = 0
        except Exception as error:
            log.exception("a turn of the engine's loop failed")
            self.metrics.count("failed_turns")
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            for job in [*self.scheduler.running, *self.scheduler.queue]:
                self._fail(job, error)

    @property
    def died(self) -> bool:
        """Whether the step thread has ended without having been asked to."""
        return self._done.done() and not self._stopping.is_set()

    def _set_up(self) -> None:
        self.loaded = self._load()
        self.model = self.loaded.model
        mx.eval(self.model.parameters())
        if self.host and self._native is not None:
            linear.install(self.model)
        self.spec = derive(self.model)
        self.scheme = self._scheme(self.loaded, self.spec) if callable(self._scheme) else self._scheme
        self.fingerprint: str = self.loaded.fingerprint_for(self.scheme.describe() + self.spec.describe())
        self.weights_bytes = int(self.loaded.weights_bytes)
        # A lazy forward: only its shape is asked for.
        self.vocabulary = int(self.model(mx.array([[1]]), cache=list(make_caches(self.model))).shape[-1])
        self.store = self._open_store(self.fingerprint, self.spec, self.scheme)
        if self._generous:
            enough = self.spec.agent_bytes(min(self.loaded.context_limit, TEAM_CONTEXT), self.scheme)
            fixed = self.weights_bytes + workspace_bytes(self.spec, self.weights_bytes)
            self.budget_bytes = min(self.budget_bytes, fixed + TEAM_AGENTS * enough)
        self._build_pool()

    def _build_pool(self) -> None:
        """Allocate the pool at the size the budget leaves. Raises ContextTooLarge if that is nothing."""
        self.workspace = workspace_bytes(self.spec, self.weights_bytes)
        left = self.budget_bytes - self.weights_bytes - self.workspace
        sizes = pool_sizes(self.spec, self.scheme, left)
        if sizes.pages < self.scheme.pages or min(sizes.group_slots, default=1) < 1:
            least = self.weights_bytes + self.workspace + 2 * self.spec.agent_bytes(1024, self.scheme)
            raise ContextTooLarge(
                f"a memory budget of {self.budget_bytes / MIB:.0f} MiB leaves {left / MIB:.0f} MiB for KV "
                f"beside {self.weights_bytes / MIB:.0f} MiB of weights and {self.workspace / MIB:.0f} MiB "
                f"of workspace; give at least {least / MIB:.0f} MiB"
            )
        mx.set_cache_limit(self.workspace // 4)
        mx.clear_cache()
        groups = [(group.name, n) for group, n in zip(self.spec.groups, sizes.group_slots, strict=True)]
        self.pool = BlockPool(groups, sizes.pages)
        self.arrays = PoolArrays(self.spec, self.scheme, sizes.group_slots, sizes.pages, host=self.host)
        native = self._native(self.arrays) if self._native is not None else None
        self.batch = Batch(self.model, self.arrays, self.pool, native=native)
        self.memory = KVMemory(
            self.spec, self.scheme, self.fingerprint, self.arrays, self.pool, self.store, self._loaded
        )
        self.memory.metrics = self.metrics
        self.memory.saved = self._saved
        self.supervisor = Supervisor(self.spec, self.scheme, self.pool)
        self.scheduler = Scheduler(self.supervisor, self.memory)
        self.pool_bytes = sizes.nbytes
        log.info("pool of %.0f MiB: %s, %d pages", sizes.nbytes / MIB, groups, sizes.pages)

    def resize(self, budget_bytes: int) -> Future[None]:
        """Change the budget. New turns wait until running ones end; then the pool is rebuilt.

        The future raises ``ContextTooLarge`` (and the old budget stays) if nothing would be left for KV.
        """
        done: Future[None] = Future()
        self.post(lambda: self._resizes.append((budget_bytes, done)))
        return done

    def _resize_now(self) -> None:
        """With nothing running: save everything, give the pool back, build it at the new size."""
        budget, done = self._resizes.pop(0)
        before, self.budget_bytes = self.budget_bytes, budget
        for key in list(self.memory.tables):
            self.memory.evict(key)
        if self.store is not None:
            self.store.flush()  # the next turns look for what was evicted
        queued, idle = self.scheduler.queue, self.supervisor.idle
        # The old arrays must be gone before the new ones are allocated: the budget holds in between.
        del self.arrays, self.batch, self.memory, self.scheduler, self.supervisor, self.pool
        gc.collect()
        mx.clear_cache()
        try:
            self._build_pool()
        except ContextTooLarge as error:
            self.budget_bytes = before
            self._build_pool()
            done.set_exception(error)
        else:
            mx.reset_peak_memory()
            self.peak_bytes = 0
            done.set_result(None)
        self.scheduler.queue, self.supervisor.idle = [], idle
        for job in queued:
            self.submit(job)

    def _turn(self) -> None:
        """One turn of the loop."""
        self._drain(block=self.scheduler.idle or self._only_loading())
        if self._stopping.is_set():
            return
        self.step_started = time.monotonic()
        self._expire()
        if self._resizes and not self.scheduler.running and not self.memory.loading:
            self._resize_now()
        for job, plan in self.scheduler.admit() if not self._resizes else ():
            self._guard([job], partial(self._begin, job, plan))
        rows = self.scheduler.decoding()
        if rows:
            self._guard(rows, lambda: self._decode(rows))
        chunk = self.scheduler.prefill(workspace=self.workspace // 2, score_bytes=self._score_bytes)
        if chunk:
            self._guard([job for job, _ in chunk], lambda: self._prefill(chunk))
        self.peak_bytes = max(self.peak_bytes, mx.get_active_memory() + mx.get_cache_memory())
        self.step_started = 0.0
        self._save_some()

    @property
    def _score_bytes(self) -> int:
        if self.batch.native is not None:
            return 1  # the kernel keeps no scores
        # Scores, masked scores and probabilities in float32, for the heads of one layer.
        return 12 * max((layer.heads for layer in self.spec.attention_layers), default=1) * 4

    def _only_loading(self) -> bool:
        return all(job.phase is Phase.LOADING for job in self.scheduler.running) and not any(
            not job.waits_for for job in self.scheduler.queue
        )

    def _drain(self, *, block: bool) -> None:
        try:
            if block:
                self._perform(self._inbox.get(timeout=IDLE_WAIT_SECONDS))
            while True:
                self._perform(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _perform(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("an action on the step thread failed")
            self.metrics.count("failed_actions")

    def _guard(self, jobs: Sequence[Job], work: Callable[[], None]) -> None:
        """Do a step. If it fails, find the job that fails alone; the others go on."""
        try:
            work()
        except Exception as error:
            log.exception("a step failed for %s", [job.key for job in jobs])
            self.metrics.count("failed_steps")
            alive = [job for job in jobs if job.phase in (Phase.DECODE, Phase.PREFILL)]
            if len(alive) > 1:
                for job in alive:
                    self._guard([job], partial(self._again, job))
                return
            for job in jobs:
                self._fail(job, error)

    def _again(self, job: Job) -> None:
        """One job's part of a step that failed for several."""
        assert job.table is not None
        if job.phase is Phase.DECODE:
            # The step may have got as far as counting the token whose KV it wrote.
            job.table.tokens = min(job.table.tokens, len(job.ids) + len(job.generated) - 1)
            self._decode([job])
        else:
            self._prefill([(job, len(job.remaining))])

    def _fail(self, job: Job, error: Exception) -> None:
        """End a job that went wrong. Its table may be half written; it is rebuilt from tokens."""
        key = job.key
        if isinstance(error, OffbookError):
            self._end(job, error)
        else:
            self._end(job, EngineFailed(f"the engine failed in this turn of {key[0]}: {error!r}"))
        if key in self.memory.tables and key not in self.memory.loading:
            self.memory.drop(key)

    def _alone(self, job: Job, work: Callable[[], None]) -> None:
        """Do what concerns one job only; if it fails, that job fails."""
        try:
            work()
        except Exception as error:
            log.exception("a turn of %s failed", job.key)
            self._fail(job, error)

    # ---- steps

    def _begin(self, job: Job, plan: Any) -> None:
        job.admitted = time.monotonic()
        job.source = {"hot": "hot", "clone": "hot", "warm": "warm", "cold": "cold"}[plan.source]  # type: ignore[assignment]
        if plan.source == "hot" and (table := self.memory.tables.get(job.key)) is not None and table.restored:
            # It was on disk when its message came; the prefetch was done before the turn asked.
            job.source, table.restored = "warm", False
        job.reused = plan.tokens
        started = self.memory.start(job.key, plan)
        if isinstance(started, Loading):
            job.phase, job.table = Phase.LOADING, started.table
        else:
            self._ready(job, started)

    def _ready(self, job: Job, table: Any) -> None:
        job.table, job.phase = table, Phase.PREFILL
        job.loaded = time.monotonic()
        table.ids = np.concatenate([table.ids[: table.tokens], job.ids[table.tokens :]])

    def _loaded(self, loading: Loading) -> None:
        self.post(lambda: self._finish_load(loading))

    def _finish_load(self, loading: Loading) -> None:
        now = time.monotonic()
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
                self._fail(job, error)
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

    def _prefill(self, chunk: Sequence[tuple[Job, int]]) -> None:
        jobs = [job for job, _ in chunk]
        tables = [job.table for job in jobs if job.table is not None]
        pieces = [job.remaining[:count] for job, count in chunk]
        last = all(len(job.remaining) == count for job, count in chunk)
        started = time.monotonic()
        logits = self.batch.prefill(tables, pieces, logits=last and any(j.max_tokens for j in jobs))
        ended, count = time.monotonic(), sum(map(len, pieces))
        self.scheduler.observe_prefill(count, ended - started)
        self.metrics.observe("prefill_chunk_ms", (ended - started) * 1e3)
        if self.trace is not None:
            self.trace.step(f"prefill {count}", started, ended, agents=[job.key[0] for job in jobs])
        for (job, count), table in zip(chunk, tables, strict=True):
            job.prefilled += count
            self._alone(job, partial(self.memory.after_step, table))
        if not last:
            return
        for job in jobs:
            if job.phase is Phase.DONE:
                continue
            job.phase = Phase.DECODE
            if logits is None or not job.max_tokens:
                self._alone(job, partial(self._finish, job, "stop"))
        if logits is not None:
            self._draw(jobs, logits)

    def _decode(self, rows: Sequence[Job]) -> None:
        tables = [job.table for job in rows if job.table is not None]
        tokens = [job.generated[-1] for job in rows]
        for table, token in zip(tables, tokens, strict=True):
            table.ids = np.append(table.ids[: table.tokens], np.uint32(token))
        started = time.monotonic()
        logits = self.batch.decode(tables, tokens)
        ended = time.monotonic()
        self.metrics.observe("decode_step_ms", (ended - started) * 1e3)
        self.metrics.count("decode_steps")
        self.metrics.count("decode_rows", len(rows))
        if self.trace is not None:
            self.trace.step(f"decode {len(rows)}", started, ended, agents=[job.key[0] for job in rows])
        for job, table in zip(rows, tables, strict=True):
            self._alone(job, partial(self.memory.after_step, table))
        self._draw(rows, logits)

    def _draw(self, rows: Sequence[Job], logits: mx.array) -> None:
        """Draw the next token of every row that still decodes, and say what is certain."""
        best = None
        if any(job.sampler.greedy and job.constraint is None for job in rows):
            best = np.array(mx.argmax(logits, axis=-1))
        for row, job in enumerate(rows):
            if job.phase is Phase.DECODE:
                likeliest = int(best[row]) if best is not None else 0
                self._alone(job, partial(self._draw_row, job, logits[row], likeliest))

    def _draw_row(self, job: Job, logits: mx.array, likeliest: int) -> None:
        """One row's next token from logits [vocabulary]."""
        if job.logprobs:
            pairs = top_logprobs(logits, job.logprobs)
            decode = self.loaded.tokenizer.decode
            job.distributions.append({decode([i]): p for i, p in pairs})
        if job.constraint is not None:
            masked = job.constraint.masked(logits)
            token = job.sampler.draw(masked, [*job.ids.tolist(), *job.generated])
            job.constraint.accept(token)
        elif job.sampler.greedy:
            token = likeliest
        else:
            history = [*job.ids[-job.sampler.params.repetition_context :].tolist(), *job.generated]
            token = job.sampler.draw(logits, history)
        self._drew(job, token)

    def _drew(self, job: Job, token: int) -> None:
        if not job.generated:
            job.first_token = time.monotonic()
        job.generated.append(token)
        self.metrics.count("generated_tokens")
        assert job.text is not None
        if token in self.loaded.eos_token_ids and not job.ignore_end:
            self._finish(job, "stop")
            return
        piece = job.text.push(token)
        done = job.constraint is not None and job.constraint.finished
        reason: FinishReason | None = "stop" if job.text.stopped or done else None
        if reason is None and len(job.generated) >= job.max_tokens:
            reason = "length"
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
        self._unsaved[job.key] = time.monotonic()
        count = "turns" if job.text is not None else "observed"
        self.metrics.count(count)
        for name, by in (("reused_tokens", job.reused), ("prefilled_tokens", job.prefilled)):
            self.metrics.count(name, by)
        if not job.reused:
            self.metrics.count("cold_prefills")
        ids = np.concatenate([job.ids, np.array(job.generated, np.uint32)])
        handle = StateHandle(
            agent=job.key[0],
            fingerprint=self.fingerprint,
            tokens=len(ids),
            chain=chain_at(ids, self.memory.root(job.key[1])).hex(),
            where="hot",
        )
        self.scheduler.finish(job)
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

    def _end(self, job: Job, error: OffbookError) -> None:
        """End a job with an error, at whatever phase it is."""
        if job.phase is Phase.DONE:
            return
        if job.phase is Phase.LOADING:
            self.memory.cancel(job.key)
        self.scheduler.finish(job)
        self.metrics.count("ended_early")
        job.emit(job, error)

    # ---- requests, on the step thread

    def submit(self, job: Job) -> None:
        try:
            self.scheduler.submit(job)
        except OffbookError as error:
            job.phase = Phase.DONE
            job.emit(job, error)
        except Exception as error:
            self._fail(job, error)
            raise

    def cancel(self, job: Job) -> None:
        self._end(job, Cancelled(f"the turn of {job.key[0]} was cancelled"))

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [*self.scheduler.queue, *self.scheduler.running]:
            if job.deadline <= now:
                waited = f" while waiting for {job.waits_for}" if job.waits_for else ""
                self._end(job, DeadlineExceeded(f"the deadline of {job.key[0]} passed{waited}"))

    def _saved(self) -> None:
        """From an I/O thread: an agent's memory is on disk; a turn may wait for that."""
        self.post(lambda: self.scheduler.look_again())

    def prefetch(self, key: Key, ids: Ids, origin: str = "") -> None:
        """A message waits for this agent: load it, if it is on disk and there is room."""
        self.supervisor.expect(key)
        if key in self.memory.loading or self.scheduler.active(key):
            return
        # One id more stands for the message to come.
        ahead = np.append(ids, np.uint32(0))
        plan = self.memory.plan(key, ahead, origin)
        loading = self.scheduler.prefetch(key, plan, len(ids) + 256)
        if loading is not None:
            loading.ids = ids
            self.metrics.count("prefetches")

    def locate(self, key: Key, ids: Ids) -> StateHandle:
        plan = self.memory.plan(key, np.append(ids, np.uint32(0)))
        where: Where = "cold"
        if plan.tokens * 2 >= len(ids) and len(ids):
            where = "hot" if plan.source in ("hot", "clone") else "warm"
        return StateHandle(
            agent=key[0],
            fingerprint=self.fingerprint,
            tokens=len(ids),
            chain=chain_at(ids, self.memory.root(key[1])).hex(),
            where=where,
        )

    def forget_agent(self, agent: str) -> Future[Any] | None:
        """Drop an agent's KV everywhere, under every salt. Gone once the future is done, if there is one.

        Raises:
            EngineFailed: it is speaking now.
        """
        keys = [key for key in self.memory.tables if key[0] == agent]
        for key in keys:
            if self.scheduler.active(key):
                raise EngineFailed(f"{agent} is speaking; forget it after its turn")
        for key in keys:
            self.memory.cancel(key)
            if key not in self.memory.loading:
                self.memory.drop(key)
            self.supervisor.forget(key)
            self._unsaved.pop(key, None)
        for group in self.pool.groups:
            group.forget_free()  # also of agents that were evicted before
        return self.store.forget(agent) if self.store is not None else None

    def stats(self) -> EngineStats:
        page_bytes = self.spec.page_bytes
        agents = []
        for (agent, _), table in self.memory.tables.items():
            loading = (table.agent, table.salt) in self.memory.loading
            agents.append(
                AgentStats(
                    agent=agent,
                    where="warm" if loading else "hot",
                    tokens=table.tokens,
                    resident_bytes=table.nbytes(page_bytes),
                    disk_bytes=0,
                    busy=self.scheduler.active((agent, table.salt)),
                )
            )
        used = self.pool.pages.used * page_bytes + sum(
            allocator.used * group.block_bytes(self.scheme)
            for allocator, group in zip(self.pool.groups, self.spec.groups, strict=True)
        )
        disk = self.store.stats() if self.store is not None else None
        return EngineStats(
            model=self.loaded.ref,
            fingerprint=self.fingerprint,
            device=str(mx.default_device()),
            pid=os.getpid(),
            budget_bytes=self.budget_bytes,
            used_bytes=mx.get_active_memory() + mx.get_cache_memory(),
            peak_bytes=max(self.peak_bytes, mx.get_peak_memory()),
            weights_bytes=self.weights_bytes,
            pool_bytes=self.pool_bytes,
            pool_used_bytes=used,
            disk_bytes=disk.disk_bytes if disk is not None else 0,
            context_limit=self.loaded.context_limit,
            agents=tuple(agents),
            decisions=tuple(self.supervisor.decisions[-20:]),
            waiting={job.key[0]: job.waits_for for job in self.scheduler.queue if job.waits_for},
            degraded=self.store.degraded or "" if self.store is not None else "nothing is kept on disk",
            counters={
                **self.metrics.flat(),
                "queued": len(self.scheduler.queue),
                "running": len(self.scheduler.running),
                "prefill_tokens_per_s": self.scheduler.prefill_rate,
                **{f"store.{name}": n for name, n in (disk.counters.items() if disk is not None else ())},
            },
        )

    # ---- keeping

    def _save_some(self) -> None:
        """Write finished turns' tails when nothing else is to do, or when they have waited."""
        now = time.monotonic()
        for key, since in list(self._unsaved.items()):
            if not (self.scheduler.idle or now - since > SAVE_AFTER_SECONDS):
                continue
            if self.scheduler.active(key):
                continue
            table = self.memory.tables.get(key)
            if table is not None and key not in self.memory.loading:
                self.memory.save(table)
            del self._unsaved[key]
            if not self._inbox.empty():
                return

    def _tear_down(self) -> None:
        """End every job, save every agent, close the store."""
        try:
            for job in [*self.scheduler.running, *self.scheduler.queue]:
                self._end(job, EngineFailed("the engine is shutting down; the turn will be run again"))
            for key, table in list(self.memory.tables.items()):
                if key not in self.memory.loading:
                    self.memory.save(table)
            if self.store is not None:
                self.store.flush()
                self.store.close()
        except BaseException:
            log.exception("the engine did not end cleanly")
        finally:
            if self.trace is not None:
                self.trace.close()
            self._done.set_result(None)
