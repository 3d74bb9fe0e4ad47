"""What is stored and how the store is doing, told from the index; reads no file's contents."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from .disk import disk_size
from .index import AgentEntry, Index, TailEntry
from .layout import TailInfo
from .prefetch import Loader
from .state import State
from .writer import Writer


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One agent's memory on disk. ``shared_bytes`` of ``nbytes`` are blocks that others own too."""

    agent: str
    salt: str
    fingerprint: str
    tails: tuple[TailInfo, ...]
    blocks: int
    nbytes: int
    shared_bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Sizes in bytes; ``counters`` since the store was opened, ``lifetime`` since the folder was made.

    Counters: ``blocks_written tails_written bytes_written blocks_loaded tails_loaded bytes_loaded``,
    ``corrupt missing`` (files found bad or gone), ``refused evicted_agents forgotten_agents
    collected_blocks``, ``write_errors read_errors catalog_errors catalog_rebuilt``, and of start-up
    ``adopted_blocks adopted_tails orphans_removed``.
    """

    blocks: int
    tails: int
    agents: int
    disk_bytes: int
    cap_bytes: int | None
    pending_bytes: int
    queued_writes: int
    queued_loads: int
    quarantined_files: int
    degraded: str | None
    counters: dict[str, int]
    lifetime: dict[str, int]


def store_stats(state: State, writer: Writer, loader: Loader) -> StoreStats:
    """A consistent picture of sizes and counters."""
    with state.lock:
        quarantined, uncounted = len(state.quarantined), 0
        if state.read_only:  # Whoever writes keeps the list of them; here the folder is all there is.
            sizes = _quarantine_sizes(state)
            quarantined, uncounted = len(sizes), sum(sizes)
        return StoreStats(
            blocks=len(state.index.blocks),
            tails=sum(len(agent.tails) for agent in state.index.agents.values()),
            agents=len(state.index.agents),
            disk_bytes=state.used_bytes + uncounted,
            cap_bytes=state.cap_bytes,
            pending_bytes=writer.pending_bytes,
            queued_writes=writer.depth,
            queued_loads=loader.depth,
            quarantined_files=quarantined,
            degraded=state.reason,
            counters=dict(state.counters),
            lifetime=dict(state.lifetime),
        )


def _quarantine_sizes(state: State) -> list[int]:
    sizes: list[int] = []
    with contextlib.suppress(OSError), os.scandir(state.paths.quarantine) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # The engine beside makes room.
                if entry.is_file(follow_symlinks=False):
                    sizes.append(disk_size(entry.stat().st_size))
    return sizes


def agent_records(state: State) -> list[AgentRecord]:
    """Every agent's memory, other models' included, the latest used first."""
    with state.lock:
        records = [_record(state.index, entry) for entry in state.index.agents.values()]
    return sorted(records, key=lambda record: -record.last_used)


def tail_info(tail: TailEntry) -> TailInfo:
    return TailInfo(tail.tokens, tail.chain, tail.nbytes)


def _record(index: Index, entry: AgentEntry) -> AgentRecord:
    stored = [(name, block) for name in entry.owned if (block := index.blocks.get(name)) is not None]
    tails = tuple(tail_info(tail) for tail in entry.tails)
    return AgentRecord(
        agent=entry.agent,
        salt=entry.salt,
        fingerprint=entry.model,
        tails=tails,
        blocks=len(stored),
        nbytes=sum(block.nbytes for _, block in stored) + sum(tail.nbytes for tail in tails),
        shared_bytes=sum(block.nbytes for name, block in stored if index.references[name] > 1),
        last_used=entry.last_used,
    )
