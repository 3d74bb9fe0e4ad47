"""The engine's loop: admit - decode - prefill - emit, turn after turn on the step thread.

Owns when things are done. What the engine is made of is ``assembly.py``'s, who is next the scheduler's, how a
job goes on ``steps.py``'s.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from offbook.actors.lm import EngineStats, StateHandle, Where
from offbook.bus.errors import Cancelled, DeadlineExceeded, EngineFailed, OffbookError

from ..kv.memory import Key, Loading
from ..kv.table import Ids
from ..store.hashing import chain_at
from .assembly import Assembly
from .job import Job, Phase
from .reports import engine_stats
from .thread import StepThread

log = logging.getLogger("offbook.engine")

SAVE_AFTER_SECONDS = 3.0
"""A finished turn's tail is written when the engine is idle, or after this long."""

IDLE_WAIT_SECONDS = 0.5

LOAD_POLL_SECONDS = 0.002

MAX_FAILURES = 5
"""Turns of the loop that fail one after the other before the engine gives up and is started anew."""


class EngineLoop(Assembly, StepThread):
    """Model, memory and jobs of one engine: see ``Assembly`` for its arguments."""

    _failures = 0

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

    def resize(self, budget_bytes: int) -> Future[None]:
        """Change the budget. New turns wait until running ones end; then the pool is rebuilt.

        The future raises ``ContextTooLarge`` (and the old budget stays) if nothing would be left for KV.
        """
        done: Future[None] = Future()
        self.post(lambda: self._resizes.append((budget_bytes, done)))
        return done

    def _resize_now(self) -> None:
        """With nothing running: the next change of the budget."""
        budget, done = self._resizes.pop(0)
        queued, refused = self._rebuild(budget)
        if refused is not None:
            done.set_exception(refused)
        else:
            done.set_result(None)
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
            self.steps.guard(jobs, lambda: self.steps.both(rows, chunk), chunk)
            return
        # Prefill first: a turn whose memory is there speaks before the rows' next step, and joins it.
        if chunk:
            self.steps.guard([job for job, _ in chunk], lambda: self.steps.prefill(chunk), chunk)
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
        # Forks own what they share with it once they are saved themselves.
        for key in [key for key in self._unsaved if key[0] != agent]:
            self._save_now(key)
        for key in [key for key in self._unsaved if key[0] == agent]:
            del self._unsaved[key]
        for key in keys:
            self.openings.forget(key)
            self.memory.cancel(key)
            if key not in self.memory.loading:
                self.memory.drop(key)
            self.supervisor.forget(key)
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
            self._save_now(key)
            if not self._inbox.empty():
                return

    def _save_now(self, key: Key) -> None:
        """Write a finished turn's tail, unless its agent speaks again: then that turn's end will."""
        if self.scheduler.active(key):
            return
        table = self.memory.tables.get(key)
        if table is not None and key not in self.memory.loading:
            self.memory.save(table)
        del self._unsaved[key]

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
