"""Many actors: idle ones cost no memory, start-up does not grow with them, and they come and go unseen."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import anyio
import pytest

from offbook.actors import Actor, Message, Request, every, on
from offbook.actors.control import ActorPage, HostInfo, HostStatus, ListActors
from offbook.actors.statements import create
from offbook.actors.testing import stored_state, team
from offbook.bus import connect


class Hit(Request[int]):
    pass


class Note(Message):
    text: str


class Unit(Actor):
    hits: int = 0
    stopped: ClassVar[list[str]] = []

    @on
    async def hit(self, ask: Hit) -> int:
        self.hits += 1
        return self.hits

    async def on_stop(self) -> None:
        self.stopped.append(self.id)


class Clocked(Actor):
    topics = ("news",)

    @every(3600)
    async def tick(self) -> None: ...

    @on
    async def note(self, msg: Note) -> None: ...


async def test_ten_thousand_idle_actors_are_not_in_memory(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Clocked, "first")
        birth = host.birth(host.spec("clocked"))  # type: ignore[arg-type]
        assert birth is not None
        await host.journal.do(
            "test",
            lambda db: [create(db, f"clocked/{n}", birth, host.clock.now()) for n in range(10_000)] and None,
        )
    works = 0

    def count(point: str) -> None:
        nonlocal works
        works += point.startswith("work:")

    async with team(tmp_path, engine=False, fault=count) as (host, _):
        await host.register(Clocked)
        await host.idle()
        assert works < 50, "start-up does not look at actors that have nothing to do"
        assert not len(host.stage)
        async with connect(host.bus.endpoint) as bus:
            page = await bus.ask("host/team", ListActors(limit=10), returns=ActorPage)
            assert (page.total, len(page.actors), page.more) == (10_001, 10, True)
            assert {one.state for one in page.actors} == {"passive"}
            rest = await bus.ask(
                "host/team", ListActors(prefix="clocked/99", after=page.actors[-1].id), returns=ActorPage
            )
            assert len(rest.actors) == 111
            info = await bus.ask("host/team", HostStatus(), returns=HostInfo)
            assert (info.kinds, info.actors, info.active) == (("clocked",), 10_001, 0)


async def test_actors_leave_memory_and_come_back_with_their_state(tmp_path: Path) -> None:
    Unit.stopped.clear()
    async with team(tmp_path, engine=False, max_active=3) as (host, _):
        await host.register(Unit)
        for _ in range(3):
            for number in range(10):
                await host.ask(f"unit/{number}", Hit())
        await host.idle()
        assert len(host.stage) == 3
        assert len(Unit.stopped) == 27
        assert await host.ask("unit/0", Hit()) == 4


async def test_idle_actors_leave_memory_after_a_while(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False, passivate_after=0.02) as (host, _):
        await host.register(Unit)
        await host.ask("unit/a", Hit())
        while len(host.stage):
            await anyio.sleep(0.005)
        assert await host.ask("unit/a", Hit()) == 2


async def test_a_message_that_comes_while_an_actor_leaves_is_not_lost(tmp_path: Path) -> None:
    leaving, go_on = anyio.Event(), anyio.Event()

    class Slow(Unit):
        async def on_stop(self) -> None:
            leaving.set()
            await go_on.wait()

    async with team(tmp_path, engine=False, max_active=0) as (host, _):
        await host.register(Slow)
        assert await host.ask("slow/s", Hit()) == 1
        await leaving.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.ask, "slow/s", Hit())
            while not next(iter(host.stage)).mailbox:
                await anyio.sleep(0.001)
            assert len(host.stage) == 1, "one instance"
            go_on.set()
        await host.idle()
        assert (await stored_state(host, "slow/s"))["hits"] == 2


async def test_a_sent_message_waits_for_an_actor_whose_class_is_registered_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Relay(Actor):
        @on
        async def note(self, msg: Note) -> None:
            await self.tell(msg.text, Note("for you"))

    class Target(Actor):
        notes: list[str] = []

        @on
        async def note(self, msg: Note) -> None:
            self.notes.append(msg.text)

    monkeypatch.setattr("offbook.actors.outbox._PATIENCE", 0.0)
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Target, "t")
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Relay)
        await host.tell("relay/r", Note("target/t"))
        await host.tell("relay/r", Note("target/never"))
        while not await host.dead_letters():
            await anyio.sleep(0.005)
        await host.register(Target)
        await host.idle()
        assert (await stored_state(host, "target/t"))["notes"] == ["for you"]
        (letter,) = await host.dead_letters()
        assert letter.actor == "target/never"


async def test_recovered_turns_wait_for_kinds_that_are_registered_later(tmp_path: Path) -> None:
    class Target(Actor):
        @on
        async def hit(self, ask: Hit) -> int:
            return 7

    class Source(Actor):
        got: int = 0
        gate: ClassVar[anyio.Event] = anyio.Event()
        entered: ClassVar[anyio.Event] = anyio.Event()

        @on
        async def note(self, msg: Note) -> None:
            self.entered.set()
            await self.gate.wait()
            self.got = await self.ask("target/t", Hit())

    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Source)
        await host.tell("source/s", Note("x"))
        await Source.entered.wait()
    Source.gate.set()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Source)
        await anyio.sleep(0.1)  # longer than the asked kind takes to be missed
        await host.register(Target)
        await host.idle()
        assert (await stored_state(host, "source/s"))["got"] == 7
        assert not host.failures
