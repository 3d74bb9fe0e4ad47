"""Looking into a host: its actors, page by page, its counters, its dead letters.

Owns the answers of ``host/NAME``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from offbook.bus.errors import InvalidRequest, OffbookError

from . import deadletters, statements
from .control import (
    ActorInfo,
    ActorPage,
    DeadPage,
    DropDead,
    FailureInfo,
    HostInfo,
    HostStatus,
    ListActors,
    ListDead,
    ResendDead,
)
from .memory import unpack

if TYPE_CHECKING:
    from offbook.bus.delivery import Delivery

    from .host import Host

_LARGEST_PAGE = 10_000
_MOST_LETTERS = 1000


async def answer(host: Host, delivery: Delivery) -> None:
    """Do what a message to the host itself asks for."""
    try:
        request = delivery.decode(ListActors, HostStatus, ListDead, ResendDead, DropDead)
        match request:
            case ListActors():
                await delivery.reply(await page_of(host, request))
            case ListDead():
                await delivery.reply(await dead_of(host, request))
            case ResendDead():
                await delivery.reply(await host.resend(*await _chosen(host, request)))
            case DropDead():
                await delivery.reply(await host.drop_dead(*await _chosen(host, request)))
            case _:
                await delivery.reply(await host_info(host))
    except OffbookError as exc:
        await delivery.fail(exc)


async def dead_of(host: Host, request: ListDead) -> DeadPage:
    """The dead letters that a request asks for.

    Raises:
        InvalidRequest: the limit is out of range.
    """
    if not 1 <= request.limit <= _MOST_LETTERS:
        raise InvalidRequest(f"limit must be from 1 to {_MOST_LETTERS}, got {request.limit}")
    return await host.journal.do("dead", lambda db: deadletters.page(db, request))


async def _chosen(host: Host, request: ResendDead | DropDead) -> list[int]:
    return await host.journal.do("dead", lambda db: deadletters.chosen(db, request))


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
        "counts", lambda db: (statements.count_actors(db), deadletters.count(db))
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
