"""What an engine says of itself: budget, memory, agents, counters and decisions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import mlx.core as mx
import msgspec

from offbook.actors.lm import AgentStats, EngineStats

from ..kv.scheme import BLOCK

if TYPE_CHECKING:
    from ..store import AgentRecord
    from .loop import EngineLoop


def engine_stats(loop: EngineLoop) -> EngineStats:
    """Everything an engine says of itself. On the step thread."""
    page_bytes = loop.spec.page_bytes
    agents = []
    for (agent, _), table in loop.memory.tables.items():
        loading = (table.agent, table.salt) in loop.memory.loading
        agents.append(
            AgentStats(
                agent=agent,
                where="warm" if loading else "hot",
                tokens=table.tokens,
                resident_bytes=table.nbytes(page_bytes),
                disk_bytes=0,
                busy=loop.scheduler.active((agent, table.salt)),
            )
        )
    used = loop.pool.pages.used * page_bytes + sum(
        allocator.used * group.block_bytes(loop.scheme)
        for allocator, group in zip(loop.pool.groups, loop.spec.groups, strict=True)
    )
    disk = loop.store.stats() if loop.store is not None else None
    return EngineStats(
        model=loop.loaded.ref,
        fingerprint=loop.fingerprint,
        device=str(mx.default_device()),
        pid=os.getpid(),
        budget_bytes=loop.budget_bytes,
        used_bytes=loop.used_bytes,
        peak_bytes=loop.most_bytes,
        weights_bytes=loop.weights_bytes,
        pool_bytes=loop.pool_bytes,
        pool_used_bytes=used,
        disk_bytes=disk.disk_bytes if disk is not None else 0,
        context_limit=loop.loaded.context_limit,
        agents=tuple(agents),
        decisions=tuple(loop.supervisor.decisions[-20:]),
        waiting={job.key[0]: job.waits_for for job in loop.scheduler.queue if job.waits_for},
        degraded=loop.store.degraded or "" if loop.store is not None else "nothing is kept on disk",
        counters={
            **loop.metrics.flat(),
            "queued": len(loop.scheduler.queue),
            "running": len(loop.scheduler.running),
            "prefill_tokens_per_s": loop.scheduler.prefill_rate,
            **{f"store.{name}": n for name, n in (disk.counters.items() if disk is not None else ())},
        },
    )


MOST_ON_DISK = 1000
"""Agents on disk that are listed, the latest used first: a report stays small with ten thousand of them."""


def with_disk(stats: EngineStats, loop: EngineLoop) -> EngineStats:
    """Add what the disk holds: bytes of the agents in memory, and the agents that are only there.

    Off the step thread, which need not wait for it: the store answers from its index, under its own lock.
    """
    if loop.store is None:
        return stats
    records: dict[str, AgentRecord] = {}
    for record in loop.store.agents()[:MOST_ON_DISK]:
        if record.fingerprint == loop.fingerprint:
            records.setdefault(record.agent, record)
    agents = []
    for agent in stats.agents:
        known = records.pop(agent.agent, None)
        agents.append(msgspec.structs.replace(agent, disk_bytes=known.nbytes) if known is not None else agent)
    agents += [
        AgentStats(
            agent=record.agent,
            where="warm",
            tokens=max((tail.tokens for tail in record.tails), default=record.blocks * BLOCK),
            resident_bytes=0,
            disk_bytes=record.nbytes,
            busy=False,
        )
        for record in records.values()
    ]
    return msgspec.structs.replace(stats, agents=tuple(agents))
