"""What an engine is made of, and how that is put together and, for another memory budget, put together anew.

Owns the order in which model, store, pool, memory, scheduler and the rest are made, and what is left for the
pool. Everything here runs on the step thread; what is done with the parts is the loop's business.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from offbook.bus.errors import ContextTooLarge, InvalidRequest

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
from ..supervisor import MIB, Supervisor, pool_sizes, workspace_bytes
from .batch import Batch
from .dialogue import Dialogue
from .hints import Hints
from .job import Job
from .openings import Openings
from .scheduler import Scheduler, chunk_tokens
from .steps import Steps

log = logging.getLogger("offbook.engine")

TEAM_AGENTS, TEAM_CONTEXT = 32, 8192
"""A default budget is cut to what this many agents with contexts of this many tokens need."""


class Assembly:
    """The parts of one engine.

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
        super().__init__()
        self._load, self._open_store = load, open_store
        self._scheme, self.budget_bytes, self.host = scheme, budget_bytes, host
        self._native, self._generous, self._read_ahead = native, generous, read_ahead
        self._unsaved: dict[Key, float] = {}
        self._resizes: list[tuple[int, Future[None]]] = []
        self.metrics = Metrics()
        self.trace = Trace(trace) if trace is not None else None
        self.peak_bytes = self._packed_bytes = 0

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
        """What every next message begins with, behind turns that were cut off and that ended.

        Wanted also where it is not read ahead: tails that another engine saved may end with it.
        """
        none = np.zeros(0, np.uint32)
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
            behind=self._openings if self._read_ahead else (),
            turn_ends=frozenset(self.loaded.eos_token_ids),
            chunk=self._chunk,
            limit=self.loaded.context_limit,
            trace=self.trace,
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

    def _rebuild(self, budget_bytes: int) -> tuple[list[Job], ContextTooLarge | None]:
        """With nothing running: save everything, give the pool back, build it at the new size.

        Returns:
            The jobs that wait, to be submitted again; and why the size is the old one, if the new one leaves
            nothing for the pool.
        """
        for key in list(self.memory.tables):
            self.supervisor.evict(self.memory, key, f"the memory budget becomes {budget_bytes / MIB:.0f} MiB")
        if self.store is not None:
            self.store.flush()  # the next turns look for what was evicted
        queued, hints = self.scheduler.queue, self.hints.kept
        idle, decisions = self.supervisor.idle, self.supervisor.decisions
        # The old arrays must be gone before the new ones are allocated: the budget holds in between.
        del self.arrays, self.batch, self.memory, self.scheduler, self.supervisor, self.pool, self.steps
        del self.hints, self.openings
        gc.collect()
        mx.clear_cache()
        # Not before: the old pool was within the old budget.
        before, self.budget_bytes = self.budget_bytes, budget_bytes
        refused: ContextTooLarge | None = None
        try:
            self._build_pool()
        except ContextTooLarge as error:
            refused, self.budget_bytes = error, before
            self._build_pool()
        else:
            mx.reset_peak_memory()
            self.peak_bytes = 0
        self.supervisor.idle, self.supervisor.decisions = idle, decisions
        self.hints.kept = hints
        self.scheduler.look_again()
        return queued, refused

    def _loaded(self, loading: Loading) -> None:
        """From an I/O thread: all loads of an agent are done."""
        raise NotImplementedError

    def _saved(self) -> None:
        """From an I/O thread: an agent's memory is on disk."""
        raise NotImplementedError
