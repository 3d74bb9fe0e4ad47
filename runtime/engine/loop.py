"""The step thread: the only thread that touches MLX.

Owns the model, the pool and the loop admit - decode - prefill - emit. Other threads talk to it through
``post``; it talks back through callbacks that must only hand things over.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from offbook.actors.lm import EngineStats, StateHandle, Where
from offbook.bus.errors import (
    Cancelled,
    ContextTooLarge,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    OffbookError,
)

from ..kv.arrays import PoolArrays
from ..kv.memory import Key, KVMemory, Loading
from ..kv.pool import BlockPool
from ..kv.probe import derive, make_caches
from ..kv.scheme import KVScheme
from ..kv.spec import ModelCacheSpec
from ..kv.table import Ids
from ..models import decoder, linear, packed
from ..observe.metrics import Metrics
from ..observe.trace import Trace
from ..store.hashing import chain_at
from ..supervisor import MIB, Supervisor, pool_sizes, workspace_bytes
from .batch import Batch
from .dialogue import Dialogue
from .hints import Hints
from .job import Job, Phase
from .openings import Openings
from .reports import engine_stats
from .scheduler import Scheduler, chunk_tokens
from .steps import Steps

log = logging.getLogger("offbook.engine")

T = TypeVar("T")

SAVE_AFTER_SECONDS = 3.0
"""A finished turn's tail is written when the engine is idle, or after this long."""

IDLE_WAIT_SECONDS = 0.5

LOAD_POLL_SECONDS = 0.002

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
        read_ahead: whether an idle engine reads what every next message begins with (``Openings``).
        trace: file for a Perfetto/Chrome trace; one that is there already is kept under a numbered name.
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
        read_ahead: bool = True,
        trace: Path | None = None,
    ) -> None:
        self._load, self._open_store = load, open_store
        self._scheme, self.budget_bytes, self.host = scheme, budget_bytes, host
        self._native, self._generous, self._read_ahead = native, generous, read_ahead
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
        self.peak_bytes = self._packed_bytes = 0

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
            log.exception("a turn of the engine's loop failed with %s", self._at_work())
            self.metrics.count("failed_turns")
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            for job in [*self.scheduler.running, *self.scheduler.queue]:
                self.steps.fail(job, error)

    def _at_work(self) -> str:
        """Who is at what, for the log."""
        jobs = [*self.scheduler.running, *self.scheduler.queue]
        return ", ".join(f"{job.key[0]} ({job.phase.value})" for job in jobs[:20]) or "no turn at work"

    @property
    def died(self) -> bool:
        """Whether the step thread has ended without having been asked to."""
        return self._done.done() and not self._stopping.is_set()

    @property
    def used_bytes(self) -> int:
        """What MLX holds, its cache of freed buffers included, and the weights that it does not know of."""
        return int(mx.get_active_memory() + mx.get_cache_memory()) + self._packed_bytes

    @property
    def most_bytes(self) -> int:
        """The most of it since the budget was set: between steps, and in them as far as MLX tells."""
        return max(self.peak_bytes, int(mx.get_peak_memory()) + self._packed_bytes)

    def _set_up(self) -> None:
        self.loaded = self._load()
        self.model = self.loaded.model
        mx.eval(self.model.parameters())
        if self.host and self._native is not None:
            linear.install(self.model, release=True)
        self._packed_bytes = packed.packed_bytes(self.model)
        self.spec = derive(self.model)
        native = self.host and self._native is not None
        self.decoder = decoder.find(self.model, self.spec) if native else None
        self._chunk = chunk_tokens(packed.weight_count(self.model), "cpu" if self.host else "gpu")
        self.scheme = self._scheme(self.loaded, self.spec) if callable(self._scheme) else self._scheme
        self.fingerprint: str = self.loaded.fingerprint_for(self.scheme.describe() + self.spec.describe())
        self.weights_bytes = packed.weights_bytes(self.model)
        # A lazy forward: only its shape is asked for.
        self.vocabulary = int(self.model(mx.array([[1]]), cache=list(make_caches(self.model))).shape[-1])
        self._openings = self._find_openings()
        self.store = self._open_store(self.fingerprint, self.spec, self.scheme)
        if self._generous:
            enough = self.spec.agent_bytes(min(self.loaded.context_limit, TEAM_CONTEXT), self.scheme)
            fixed = self.weights_bytes + workspace_bytes(self.spec, self.weights_bytes)
            self.budget_bytes = min(self.budget_bytes, fixed + TEAM_AGENTS * enough)
        self._build_pool()

    def _find_openings(self) -> tuple[Ids, Ids]:
        """What is read ahead behind turns that were cut off, and that ended: nothing where it is not done."""
        none = np.zeros(0, np.uint32)
        if not self._read_ahead or self.decoder is None:
            return none, none
        try:
            return Dialogue(self.loaded.tokenizer, sorted(self.loaded.eos_token_ids)).openings()
        except InvalidRequest:
            log.exception("the chat template has no place for a second message")
            return none, none

    def _build_pool(self) -> None:
        """Allocate the pool at the size the budget leaves. Raises ContextTooLarge if that is nothing."""
        self.workspace = workspace_bytes(self.spec, self.weights_bytes)
        left = self.budget_bytes - self.weights_bytes - self.workspace
        sizes = pool_sizes(self.spec, self.scheme, left)
        if sizes.pages < self.scheme.pages or min(sizes.group_slots, default=1) < 1:
            least = self.weights_bytes + self.workspace + 2 * self.spec.agent_bytes(1024, self.scheme)
            budget, kv, weights, work = (
                f"{size / MIB:.0f} MiB"
                for size in (self.budget_bytes, max(0, left), self.weights_bytes, self.workspace)
            )
            # Rounded up, and never what was just refused.
            enough = f"{max(-(-least // MIB), round(self.budget_bytes / MIB) + 1)} MiB"
            raise ContextTooLarge(
                f"a memory budget of {budget} leaves {kv} for agents' memory beside {weights} of weights "
                f"and {work} of workspace; give at least {enough}"
            )
        mx.set_cache_limit(self.workspace // 4)
        mx.clear_cache()
        groups = [(group.name, n) for group, n in zip(self.spec.groups, sizes.group_slots, strict=True)]
        self.pool = BlockPool(groups, sizes.pages)
        self.arrays = PoolArrays(self.spec, self.scheme, sizes.group_slots, sizes.pages, host=self.host)
        native = self._native(self.arrays) if self._native is not None else None
        self.batch = Batch(self.model, self.arrays, self.pool, native=native, decoder=self.decoder)
        self.memory = KVMemory(
            self.spec, self.scheme, self.fingerprint, self.arrays, self.pool, self.store, self._loaded
        )
        self.memory.metrics = self.metrics
        self.memory.saved = self._saved
        self.supervisor = Supervisor(self.spec, self.scheme, self.pool)
        self.longest = self.supervisor.longest()
        self.scheduler = Scheduler(self.supervisor, self.memory, self._chunk)
        self.hints = Hints(self.memory, self.scheduler)
        self.memory.openings = self._openings
        self.openings = Openings(
            self.batch,
            self.memory,
            behind=self._openings,
            turn_ends=frozenset(self.loaded.eos_token_ids),
            chunk=self._chunk,
            limit=self.loaded.context_limit,
        )
        self.steps = Steps(
            self.loaded,
            self.batch,
            self.memory,
            self.scheduler,
            openings=self.openings,
            metrics=self.metrics,
            trace=self.trace,
            unsaved=self._unsaved,
        )
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
        for key in list(self.memory.tables):
            self.supervisor.evict(self.memory, key, f"the memory budget becomes {budget / MIB:.0f} MiB")
        if self.store is not None:
            self.store.flush()  # the next turns look for what was evicted
        queued, hints = self.scheduler.queue, self.hints.kept
        idle, decisions = self.supervisor.idle, self.supervisor.decisions
        # The old arrays must be gone before the new ones are allocated: the budget holds in between.
        del self.arrays, self.batch, self.memory, self.scheduler, self.supervisor, self.pool, self.steps
        del self.hints, self.openings
        gc.collect()
        mx.clear_cache()
        before, self.budget_bytes = (
            self.budget_bytes,
            budget,
        )  # not before: the old pool was within the old one
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
        self.supervisor.idle, self.supervisor.decisions = idle, decisions
        self.hints.kept = hints
        self.scheduler.look_again()
        for job in queued:
            self.submit(job)

    def _turn(self) -> None:
        """One turn of the loop."""
        self._drain(block=self._nothing_to_do())
        if self._stopping.is_set():
            return
        self.step_started = time.monotonic()
        self._expire()
        if self._may_resize():
            self._resize_now()
        if self._resizes:
            self.scheduler.hold_back("a change of the memory budget")
        else:
            changed = self.scheduler.changed
            for job, plan in self.scheduler.admit():
                self.steps.guard([job], partial(self.steps.begin, job, plan))
            if changed:
                self.hints.again()
        self._await_loads()
        self._step()
        if self.scheduler.idle:
            self.openings.read(unless=lambda: not self._inbox.empty())
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.step_started = 0.0
        self._save_some()

    def _step(self) -> None:
        """Prefill and decode: in one forward where that is possible."""
        rows = self.scheduler.decoding()
        room = self.batch.room(len(rows))
        chunk = self.scheduler.prefill(
            workspace=self.workspace // 2, score_bytes=self._score_bytes, room=room
        )
        if chunk and rows and room is not None and sum(count for _, count in chunk) <= room:
            jobs = [*rows, *(job for job, _ in chunk)]
            self.steps.guard(jobs, lambda: self.steps.both(rows, chunk))
            return
        # Prefill first: a turn whose memory is there speaks before the rows' next step, and joins it.
        if chunk:
            self.steps.guard([job for job, _ in chunk], lambda: self.steps.prefill(chunk))
        rows = self.scheduler.decoding()
        if rows:
            self.steps.guard(rows, lambda: self.steps.decode(rows))

    def _await_loads(self) -> None:
        """Before a decode step, wait a moment for a load that is about to end."""
        while self.scheduler.decoding() and self.scheduler.expecting():
            try:
                self._perform(self._inbox.get(timeout=LOAD_POLL_SECONDS))
            except queue.Empty:
                continue

    @property
    def _score_bytes(self) -> int:
        if self.batch.native is not None:
            return 1  # the kernel keeps no scores
        # Scores, masked scores and probabilities in float32, for the heads of one layer.
        return 12 * max((layer.heads for layer in self.spec.attention_layers), default=1) * 4

    def _may_resize(self) -> bool:
        return bool(self._resizes) and not self.scheduler.running and not self.memory.loading

    def _nothing_to_do(self) -> bool:
        """Whether all wait for something that will be posted: a load, a save, a request."""
        waiting = all(job.phase is Phase.LOADING for job in self.scheduler.running)
        return waiting and not self.scheduler.changed and not self._may_resize()

    def _drain(self, *, block: bool) -> None:
        try:
            if block:
                due = self.openings.seconds() if self.scheduler.idle else IDLE_WAIT_SECONDS
                self._perform(self._inbox.get(timeout=min(IDLE_WAIT_SECONDS, due)))
            while True:
                self._perform(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _perform(self, action: Callable[[], None]) -> None:
        began, self.step_started = self.step_started, self.step_started or time.monotonic()
        try:
            action()
        except Exception:
            log.exception("an action on the step thread failed with %s", self._at_work())
            self.metrics.count("failed_actions")
        finally:
            self.step_started = began

    def _loaded(self, loading: Loading) -> None:
        """From an I/O thread: all loads of an agent are done."""
        self.post(lambda: self.steps.finish_load(loading))

    # ---- requests, on the step thread

    def submit(self, job: Job) -> None:
        try:
            self.scheduler.submit(job)
        except OffbookError as error:
            job.phase = Phase.DONE
            job.emit(job, error)
        except Exception as error:
            self.steps.fail(job, error)
            raise

    def cancel(self, job: Job) -> None:
        self.steps.end(job, Cancelled(f"the turn of {job.key[0]} was cancelled"))

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [*self.scheduler.queue, *self.scheduler.running]:
            if job.deadline <= now:
                waited = f" while waiting for {job.waits_for}" if job.waits_for else ""
                self.steps.end(job, DeadlineExceeded(f"the deadline of {job.key[0]} passed{waited}"))

    def _saved(self) -> None:
        """From an I/O thread: an agent's memory is on disk; a turn may wait for that."""
        self.post(lambda: self.scheduler.look_again())

    def prefetch(self, key: Key, ids: Ids, origin: str = "") -> None:
        """A message waits for this agent: load it, if it is on disk and there is room."""
        self.supervisor.expect(key)
        self.hints.follow(key, ids, origin)

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
        self.hints.forget(agent)
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
        return engine_stats(self)

    # ---- keeping

    def _save_some(self) -> None:
        """Write finished turns' tails when nothing else is to do, or when they have waited."""
        now = time.monotonic()
        for key, since in list(self._unsaved.items()):
            if not (self.scheduler.idle or now - since > SAVE_AFTER_SECONDS):
                continue
            if self.scheduler.active(key) or now - SAVE_AFTER_SECONDS < self.openings.waiting(key) <= now:
                continue  # its opening will be read in a moment, and saved with the rest
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
                self.steps.end(job, EngineFailed("the engine is shutting down; the turn will be run again"))
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
