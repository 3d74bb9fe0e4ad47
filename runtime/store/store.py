"""``BlockStore``: the facade over the KV files of one folder, used by the step thread and by others.

Look-ups answer from memory. Everything that touches the disk goes to the writer or the loaders and comes
back as a future of a typed result (see ``results``); no method but the constructor and ``close`` waits,
and none raises for a fault of the disk. Errors of the caller raise ``StoreUsageError`` at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from . import hashing, retention
from .audit import VerifyReport, verify
from .blocks import BlockFormat, Destinations
from .disk import Disk
from .hashing import TokenIds
from .index import AgentEntry
from .inventory import AgentRecord, StoreStats, agent_records, store_stats, tail_info
from .layout import Array, Tail, TailInfo, TensorSpec
from .loading import load_block, load_tail
from .prefetch import Load, Loader
from .reading import Reader
from .recover import recover
from .results import (
    Busy,
    Failed,
    LoadResult,
    PutResult,
    RemoveResult,
    StoreUsageError,
    TailResult,
)
from .saving import BlockPut, TailPut
from .state import State
from .tails import agent_key, check_tail
from .transfer import ExportResult, ImportResult, export_agent, import_agent
from .writer import Writer

log = logging.getLogger(__name__)


class BlockStore:
    """KV blocks and tails of one model's agents in one folder, checksummed, shared, capped."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        fingerprint: str,
        layout: Sequence[TensorSpec],
        cap_bytes: int | None = None,
        min_free: int = 0,
        snapshots: int = 4,
        write_threads: int = 2,
        load_threads: int = 2,
        pending_bytes: int = 256 << 20,
        retry_seconds: float = 30.0,
        lock_seconds: float = 20.0,
        read_only: bool = False,
        disk: Disk | None = None,
        reader: Reader | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or make the store.

        Args:
            root: the folder. Other models' files in it are kept within the cap, and never used.
            fingerprint: of model, tokenizer, template and KV scheme; part of every block's identity.
            layout: the tensors of a block in file order, each layer group's together.
            cap_bytes: bound on everything in the folder, or None.
            min_free: bytes of the disk to leave to others. With less free, the store gives up what was
                unused longest, and if that is not enough saves nothing (``Full``).
            snapshots: how many of an agent's latest tails to keep, for ``load_tail(at=...)``.
            pending_bytes: bound on data queued for writing; above it puts are ``Busy``.
            retry_seconds: how long a full or read-only disk is left alone before the next try.
            lock_seconds: how long to wait for another process to let go of the folder.
            read_only: change nothing and take no lock; puts are refused with ``ReadOnly``.
            disk, clock: replaced by tests.
            reader: reads block files at once; with it ``load_blocks`` takes ``Places``.

        Raises:
            StoreLocked: another process has the store open.
            StoreUsageError: a bad layout or limit.
        """
        if snapshots < 1 or pending_bytes < 1 or (cap_bytes is not None and cap_bytes < 0):
            raise StoreUsageError("snapshots and pending_bytes are at least 1, cap_bytes at least 0 or None")
        self.fingerprint = fingerprint
        self.layout = tuple(layout)
        self._format = BlockFormat(fingerprint, layout, reader)
        self._snapshots = snapshots
        self._closed = False
        self._in_flight: dict[bytes, BlockPut] = {}
        self._state = state = State(
            Path(root).absolute(),
            fingerprint=fingerprint,
            cap_bytes=cap_bytes,
            min_free=min_free,
            disk=disk or Disk(),
            clock=clock,
            retry_seconds=retry_seconds,
            read_only=read_only,
            lock_seconds=lock_seconds,
        )
        if not read_only:
            try:
                state.prepare_folders()
            except OSError as error:
                state.refuse(error)
        try:
            state.load_catalog()
            self._recover()
        except BaseException:
            state.close()
            raise
        self._writer = Writer(
            sync=self._sync, commit=self._settled, threads=write_threads, pending_bytes=pending_bytes
        )
        self._loader = Loader(load_threads)

    def _recover(self) -> None:
        state = self._state
        try:
            recover(state)
        except OSError as error:
            state.refuse(error)
        state.commit()

    # Names

    @property
    def root(self) -> Path:
        """The folder."""
        return self._state.paths.root

    @property
    def block_bytes(self) -> int:
        """Size of a block's file."""
        return self._format.file_bytes

    def root_hash(self, salt: str = "") -> bytes:
        """Where the chain of this model and tenant starts."""
        return hashing.root_hash(self.fingerprint, salt)

    def chain(self, ids: TokenIds, salt: str = "") -> list[bytes]:
        """The names of all full blocks of ``ids``."""
        return hashing.chain(ids, self.root_hash(salt))

    def chain_at(self, ids: TokenIds, salt: str = "") -> bytes:
        """The hash of all ``ids`` that a tail carries."""
        return hashing.chain_at(ids, self.root_hash(salt))

    # Blocks

    def has(self, name: bytes) -> bool:
        """Is this block on disk? A dict look-up, from any thread."""
        return name in self._state.index.blocks

    def __contains__(self, name: bytes) -> bool:
        return name in self._state.index.blocks

    def put_block(
        self,
        name: bytes,
        parent: bytes,
        ids: TokenIds,
        tensors: Mapping[str, Array] | Sequence[Array],
        *,
        agent: str | None = None,
        salt: str = "",
    ) -> Future[PutResult]:
        """Save a sealed block. Nothing is copied: ``tensors`` must not change until the future is done.

        Args:
            name, parent, ids: the block's hash, its parent's (or the root), and its 256 token ids.
            tensors: contiguous arrays by name, or in layout order.
            agent, salt: who owns it. A block without owner is kept until the next start or ``gc``.

        Returns: a future of ``Stored``, ``Full``, ``ReadOnly``, ``Busy`` or ``Failed``.
        Raises: StoreUsageError if the name does not follow from parent and ids, or a tensor does not fit.
        """
        raw = _checked(hashing.ids_bytes, ids)
        if _checked(hashing.block_hash, parent, raw) != name:
            raise StoreUsageError(f"block {name.hex()} is not what follows {parent.hex()} with these ids")
        arrays = self._format.arrange(tensors)
        state = self._state
        if self._closed:
            return _done(Failed("the store is closed"))
        put = BlockPut(state, self._format, name, parent, raw, arrays, agent, salt)
        with state.lock:
            running = self._in_flight.get(name)
            if running is not None and running.outcome is None:
                running.owners.update(put.owners)
                return running.future
            if name not in state.index.blocks:
                refused = state.degraded
                if refused is not None and not state.due():
                    return _done(refused)
            self._in_flight[name] = put
        if self._writer.offer(put):
            put.future.add_done_callback(lambda _: self._landed(put))
            return put.future
        self._landed(put)
        return _done(Failed("the store is closed") if self._closed else Busy("the write queue is full"))

    def _landed(self, put: BlockPut) -> None:
        with self._state.lock:
            if self._in_flight.get(put.name) is put:
                del self._in_flight[put.name]

    @property
    def takes_places(self) -> bool:
        """Whether destinations may be ``Places``."""
        return self._format.reader is not None

    def load_block(self, name: bytes, dests: Destinations, *, priority: int = 0) -> Future[LoadResult]:
        """Read a block into ``dests`` and verify it. See ``load_blocks``."""
        return self.load_blocks([(name, dests)], priority=priority)[0]

    def load_blocks(
        self, wanted: Iterable[tuple[bytes, Destinations]], *, priority: int = 0
    ) -> list[Future[LoadResult]]:
        """Read blocks straight into the caller's arrays and verify every byte before saying ``Loaded``.

        Args:
            wanted: names with destinations: writable contiguous arrays by name, or in layout order; None
                or an absent name skips a tensor, so one layer group alone can be read.
            priority: lower goes first; see ``promote``.

        Returns: futures of ``Loaded``, ``Missing``, ``Corrupt`` or ``Failed``, in order. ``cancel()`` works
        until the load begins, and then the destinations were not touched. On any result but ``Loaded`` they
        hold garbage. Raises: StoreUsageError if a destination does not fit.
        """
        loads = []
        for name, dests in wanted:
            ordered = self._format.destinations(dests)
            loads.append(Load(partial(load_block, self._state, self._format, name, ordered), priority))
        return self._loader.submit(loads)

    def promote(self, futures: Iterable[Future[Any]], priority: int) -> None:
        """Make loads that have not begun more urgent."""
        self._loader.promote(futures, priority)

    # Tails

    def put_tail(self, agent: str, tail: Tail, *, salt: str = "", copy: bool = True) -> Future[PutResult]:
        """Save an agent's newest tail; its oldest beyond ``snapshots`` go, and any longer than this one.

        Blocks the tail lists become the agent's. With ``copy`` the arrays may change as soon as this returns.

        Returns: a future as of ``put_block``; ``Stored.missing`` names listed blocks that are not stored.
        Raises: StoreUsageError if the record cannot be stored.
        """
        check_tail(tail)
        if self._closed:
            return _done(Failed("the store is closed"))
        refused = self._state.degraded
        if refused is not None and not self._state.due():
            return _done(refused)
        arrays = {
            name: array if not copy and array.flags.c_contiguous else np.array(array, order="C")
            for name, array in tail.arrays.items()
        }
        put = TailPut(
            self._state, self.fingerprint, agent, salt, replace(tail, arrays=arrays), self._snapshots
        )
        if self._writer.offer(put):
            return put.future
        return _done(Failed("the store is closed") if self._closed else Busy("the write queue is full"))

    def tails(self, agent: str, salt: str = "") -> list[TailInfo]:
        """The agent's stored tails under this model, the newest last."""
        with self._state.lock:
            entry = self._agent(agent, salt)
            return [tail_info(tail) for tail in entry.tails] if entry is not None else []

    def best_tail(self, agent: str, ids: TokenIds, salt: str = "") -> TailInfo | None:
        """The longest stored tail of the agent that these token ids begin with. From memory."""
        raw = _checked(hashing.ids_bytes, ids)
        root = self.root_hash(salt)
        for info in sorted(self.tails(agent, salt), key=lambda info: -info.tokens):
            if info.tokens * 4 <= len(raw) and hashing.chain_at(raw[: info.tokens * 4], root) == info.chain:
                return info
        return None

    def load_tail(
        self, agent: str, salt: str = "", *, at: int | None = None, priority: int = 0
    ) -> Future[TailResult]:
        """Read and verify the agent's tail at ``at`` tokens, or its newest.

        Compare ``tail.chain`` with ``chain_at`` of the transcript, or ask ``best_tail`` first.
        Returns: a future of ``TailLoaded``, ``Missing``, ``Corrupt`` or ``Failed``.
        """
        key = agent_key(self.fingerprint, salt, agent)
        load = Load(lambda _: load_tail(self._state, key, agent, at, self._format.reader), priority)
        return self._loader.submit([load])[0]

    # Owners

    def claim(self, agent: str, names: Iterable[bytes], salt: str = "") -> None:
        """Make the agent an owner of blocks it shares, before its next tail lists them."""
        key = agent_key(self.fingerprint, salt, agent)
        with self._state.lock:
            self._state.index.agent(key, agent, salt, self.fingerprint, self._state.clock())
            self._state.index.claim(key, names)

    def touch(self, agent: str, salt: str = "") -> None:
        """Mark the agent's memory as used now."""
        with self._state.lock:
            self._state.index.touch(agent_key(self.fingerprint, salt, agent), self._state.clock())

    def forget(self, agent: str, salt: str | None = None) -> Future[RemoveResult]:
        """Remove the agent's memory, of every model, under ``salt`` or (None) all salts.

        Blocks that others own stay. Done in order with the puts queued before it.
        """

        def act() -> RemoveResult:
            with self._state.lock:
                keys = [
                    key
                    for key, entry in self._state.index.agents.items()
                    if entry.agent == agent and salt in (None, entry.salt)
                ]
            result = retention.forget(self._state, keys)
            self._settled()
            return result

        return self._writer.call(act)

    def gc(self) -> Future[RemoveResult]:
        """Remove blocks without owner, and temporary files."""

        def act() -> RemoveResult:
            state = self._state
            refused = state.unwritable(freeing=True)
            if refused is not None:
                return refused
            try:
                removed = retention.collect(state, state.index.unowned())
                for path in state.paths.tmp.iterdir():
                    state.disk.discard(str(path))
            except OSError as error:
                return state.refuse(error)
            state.freed()
            self._settled()
            return removed

        return self._writer.call(act)

    def agents(self) -> list[AgentRecord]:
        """Every agent's memory in the folder, other models' included, the latest used first."""
        return agent_records(self._state)

    def _agent(self, agent: str, salt: str) -> AgentEntry | None:
        return self._state.index.agents.get(agent_key(self.fingerprint, salt, agent))

    # The whole

    @property
    def degraded(self) -> str | None:
        """Why the last save came to nothing (disk full, read-only, an error of the device), or None."""
        return self._state.reason

    def stats(self) -> StoreStats:
        """Counters and sizes, from memory."""
        return store_stats(self._state, self._writer, self._loader)

    def verify(self, *, quarantine: bool = False) -> VerifyReport:
        """Read every file in the folder, of all models, and report what is wrong. Takes its time; waits.

        With ``quarantine`` bad files go to quarantine as they would at a load, else nothing is changed.
        """
        return verify(self._state, quarantine=quarantine and self._state.may_write)

    def export_agent(
        self,
        agent: str,
        path: str | os.PathLike[str],
        ids: TokenIds,
        *,
        salt: str = "",
        fingerprint: str | None = None,
        record: bytes = b"",
    ) -> ExportResult:
        """Write an agent's transcript, blocks and tail to one checksummed file. Waits.

        Args:
            ids: the transcript; only blocks and a tail that belong to it are taken.
            fingerprint: of which model; None takes the one the agent used last.
            record: the caller's own bytes about the agent, given back by ``import_agent``.
        """
        raw = _checked(hashing.ids_bytes, ids)
        self.flush()
        return export_agent(self._state, os.fspath(path), agent, salt, raw, fingerprint, record)

    def import_agent(self, path: str | os.PathLike[str], *, agent: str | None = None) -> ImportResult:
        """Save what an exported file holds, under its own agent id or ``agent``. Waits.

        The result carries the transcript, which the caller enters in its journal.
        """
        if self._closed:
            return Failed("the store is closed")
        return import_agent(self._state, self._writer, os.fspath(path), agent, self._snapshots)

    @classmethod
    def for_tools(cls, root: str | os.PathLike[str], *, read_only: bool = True, **options: Any) -> Self:
        """Open a folder without knowing its models: to list, verify, collect, forget, export or import.

        Read-only it may be used beside a running engine.
        """
        layout = [TensorSpec("none", "U8", (1,))]  # Never written: a tool puts no blocks of its own.
        return cls(root, fingerprint="", layout=layout, read_only=read_only, **options)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything put before is on disk (or refused). False if the time ran out."""
        done = self._writer.call(self._settled)
        try:
            done.result(timeout)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Save what is queued, cancel loads that have not begun, let go of the folder. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._loader.close()
        self._writer.close()
        self._state.commit()
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sync(self, folders: Sequence[str]) -> dict[str, Any]:
        """Sync folders that got new files. Returns the outcomes of those that failed."""
        failed: dict[str, Any] = {}
        for folder in folders:
            try:
                self._state.disk.sync_folder(folder)
            except OSError as error:
                failed[folder] = self._state.refuse(error)
        return failed

    def _settled(self) -> None:
        """The end of a group: collect what lost its last owner, bring the catalog up to date."""
        retention.collect_lost(self._state)
        self._state.commit()


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _checked(function: Callable[..., bytes], *args: Any) -> bytes:
    try:
        return function(*args)
    except ValueError as error:
        raise StoreUsageError(str(error)) from None
