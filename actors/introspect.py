"""Looking into a host: its actors, page by page, and its counters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from offbook.bus.errors import InvalidRequest

from . import statements
from .control import ActorInfo, ActorPage, FailureInfo, HostInfo, ListActors
from .memory import unpack

if TYPE_CHECKING:
    from .host import Host

_LARGEST_PAGE = 10_000


async def page_of(host: Host, request: ListActors) -> ActorPage:
    """The actors that a request asks for.

    Raises:
        InvalidRequest: the limit is out of range.
    """
    if not 1 <= request.limit <= _LARGEST_PAGE:
        raise InvalidRequest(f"limit must be from 1 to {_LARGEST_PAGE}, got {request.limit}")
    limit = request.limit
    rows, total = await host.journal.do(
        "list",
        lambda db: (
            statements.list_actors(db, request.after, limit + 1, request.prefix),
            statements.count_actors(db),
        ),
    )
    infos = []
    for id_, turns, memory, mailbox in rows[:limit]:
        record = unpack(memory)
        cell = host.stage.find(id_)
        infos.append(
            ActorInfo(
                id=id_,
                state=cell.state if cell else "passive",
                mailbox=mailbox,
                turns=turns,
                tokens=record.tokens,
                observed=len(record.pending),
                memory=record.handle,
                error=cell.stopped if cell else "",
            )
        )
    return ActorPage(host=host.name, actors=tuple(infos), total=total, more=len(rows) > limit)


async def host_info(host: Host) -> HostInfo:
    """The host's counters."""
    actors, dead = await host.journal.do(
        "counts", lambda db: (statements.count_actors(db), statements.count_dead(db))
    )
    return HostInfo(
        host=host.name,
        pid=os.getpid(),
        kinds=tuple(host.kinds()),
        now=host.clock.now(),
        actors=actors,
        active=len(host.stage),
        busy=host.quiet.holds,
        turns=host.turns,
        failed=host.failed_count,
        dead_letters=dead,
        failures=tuple(
            FailureInfo(
                actor=one.actor,
                message_id=one.message_id,
                type=one.type,
                error=one.error,
                tries=one.tries,
                verdict=one.verdict,
                at=one.at,
            )
            for one in list(host.failures)[-100:]
        ),
    )
