"""What happens between two steps of something else: no order, message or answer is lost by it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event, Timer
from typing import Any, ClassVar

import anyio
import pytest

from offbook.actors import Actor, Message, Request, Supervision, on
from offbook.actors.host import Host
from offbook.actors.testing import stored_state, team
from offbook.bus import connect
from tests.actors.between import beside

NEWS = "news"


class News(Message):
    number: int


class Reader(Actor):
    topics = (NEWS,)
    news: list[int] = []

    @on
    async def read(self, msg: News) -> None:
        self.news.append(msg.number)


class Work(Request[int]):
    pass


class Worker(Actor):
    """Hangs in its first turn, and takes its time to end when that is cancelled."""

    supervision = Supervision(max_tries=1)
    gate: ClassVar[anyio.Event]
    turns_begun: ClassVar[int] = 0
    done: int = 0

    @on
    async def work(self, ask: Work) -> int:
        Worker.turns_begun += 1
        if Worker.turns_begun == 1:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await Worker.gate.wait()
        self.done += 1
        return self.done


class Hello(Message):
    pass


class Child(Actor):
    name: str
    log: list[str] = []

    async def on_spawn(self) -> None:
        self.log.append("born")

    @on
    async def hello(self, msg: Hello) -> None:
        self.log.append("hello")


@asynccontextmanager
async def waiting_journal(host: Host) -> AsyncIterator[None]:
    """What the journal is given within the block, it does at the end of the block, in one transaction."""
    begun, go = Event(), Event()
    host.journal.post("wait", lambda db: (begun.set(), go.wait()))
    while not begun.is_set():
        await anyio.sleep(0.001)
    try:
        yield
    finally:
        go.set()


async def test_an_event_published_while_its_topic_is_first_followed_keeps_nothing_busy(
    tmp_path: Path,
) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        beside(host, "cursor", "given", lambda: host.publish(NEWS, News(0)))
        await host.register(Reader)
        with anyio.fail_after(10):
            await host.idle()
        await host.spawn(Reader, "r")
        await host.publish(NEWS, News(1))
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [1]


@pytest.mark.parametrize("moment", ["ending", "being dropped", "dropped"])
async def test_a_question_asked_again_while_its_turn_is_cancelled_is_answered(
    tmp_path: Path, moment: str
) -> None:
    Worker.gate, Worker.turns_begun = anyio.Event(), 0
    answers: list[int] = []

    async def ask() -> None:
        answers.append(await host.bus.ask("worker/w", Work(), id="question", timeout=10))

    async def ask_beside() -> None:
        again.start_soon(ask)
        await anyio.sleep(0.1)

    async with team(tmp_path, engine=False) as (host, _), anyio.create_task_group() as again:
        await host.register(Worker)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while not Worker.turns_begun:
                await anyio.sleep(0.005)
            if moment != "ending":
                Worker.gate.set()
            if moment == "being dropped":
                beside(host, "drop", "given", ask_beside)
            tasks.cancel_scope.cancel()
        if moment != "being dropped":
            again.start_soon(ask)
            await anyio.sleep(0.1)
            Worker.gate.set()
        with anyio.fail_after(10):
            while not answers:
                await anyio.sleep(0.005)
        await host.idle()
        assert answers == [1]
        assert (await stored_state(host, "worker/w"))["done"] == 1


async def test_the_first_turn_of_a_life_goes_before_a_message_stored_in_the_same_moment(
    tmp_path: Path,
) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Child, Reader)
        async with anyio.create_task_group() as tasks, waiting_journal(host):
            for act in (
                partial(host.tell, "reader/r", News(0)),
                partial(host.spawn, Child, "c", name="c"),
                partial(host.tell, "child/c", Hello()),
            ):
                tasks.start_soon(act)
                await anyio.sleep(0.05)
        await host.idle()
        assert (await stored_state(host, "child/c"))["log"] == ["born", "hello"]


async def test_a_spawn_that_is_cancelled_happens_or_does_not(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Child)
        async with anyio.create_task_group() as tasks, waiting_journal(host):
            tasks.start_soon(partial(host.spawn, Child, "c", name="c"))
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
        await host.spawn(Child, "c", name="c")
        await host.tell("child/c", Hello())
        await host.idle()
        assert (await stored_state(host, "child/c"))["log"] == ["born", "hello"]


class Fragile(Actor):
    supervision = Supervision(max_tries=1)
    broken: ClassVar[bool] = True
    heard: int = 0

    @on
    async def hello(self, msg: Hello) -> None:
        if Fragile.broken:
            raise RuntimeError("not yet")
        self.heard += 1


async def test_dead_letters_are_sent_again_although_the_call_is_cancelled(tmp_path: Path) -> None:
    Fragile.broken = True
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Fragile)
        await host.tell("fragile/f", Hello())
        await host.idle()
        (letter,) = await host.dead_letters()
        Fragile.broken = False
        async with anyio.create_task_group() as tasks, waiting_journal(host):
            tasks.start_soon(host.resend, letter.seq)
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
        await host.idle()
        assert await host.dead_letters() == []
        assert (await stored_state(host, "fragile/f"))["heard"] == 1


class Careful(Actor):
    """What it began, it does not begin again."""

    supervision = Supervision(max_tries=1)
    news: list[int] = []

    @on
    async def read(self, msg: News) -> None:
        await anyio.sleep(0.001)
        self.news.append(msg.number)


@pytest.mark.parametrize("work", ["work:turn", "work:accept"])
async def test_a_host_that_stops_while_the_journal_writes_uses_no_message_up(
    tmp_path: Path, work: str
) -> None:
    reached, go = Event(), Event()
    armed = False

    def fault(point: str) -> None:
        if point == work and armed:
            reached.set()
            go.wait()

    async with team(tmp_path, engine=False, fault=fault) as (host, _):
        await host.register(Careful)
        await host.tell("careful/c", News(0))
        await host.idle()
        armed = True
        async with connect(host.bus.endpoint) as outside, anyio.create_task_group() as tasks:
            if work == "work:turn":
                async with waiting_journal(host):
                    for number in (1, 2):
                        tasks.start_soon(outside.tell, "careful/c", News(number))
                        await anyio.sleep(0.02)
            else:
                tasks.start_soon(outside.tell, "careful/c", News(1))
            while not reached.is_set():
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        Timer(0.1, go.set).start()
        armed = False
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Careful)
        await host.idle()
        assert await host.dead_letters() == []
        assert (await stored_state(host, "careful/c"))["news"] == [0, 1, 2][: 3 if work == "work:turn" else 2]


async def test_a_message_behind_the_first_turn_of_a_life_has_not_been_tried(tmp_path: Path) -> None:
    class Late(Actor):
        supervision = Supervision(max_tries=1)

        async def on_spawn(self) -> None:
            begun.set()
            await anyio.sleep_forever()

        @on
        async def hello(self, msg: Hello) -> None:
            pass

    begun = anyio.Event()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Late)
        await host.tell("late/a", Hello())
        await begun.wait()
        tries = await host.journal.do(
            "look", lambda db: db.execute("SELECT tries FROM inbox ORDER BY seq").fetchall()
        )
        assert tries == [(1,), (0,)], "a process that is killed now has not used the second one up"


class Relay(Actor):
    @on
    async def read(self, msg: News) -> None:
        await self.tell("careful/c", msg)


async def test_a_delivery_that_was_not_noted_is_known_after_weeks(tmp_path: Path) -> None:
    """The process ends between a delivery and its sender's note of it, and is started again long after."""
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Relay, Careful)
        post = host.journal.post

        def forgetful(label: str, work: Callable[[Any], Any]) -> None:
            if label != "sent":
                post(label, work)

        host.journal.post = forgetful  # type: ignore[method-assign]
        await host.tell("relay/r", News(1))
        await host.idle()
        await host.journal.do("age", lambda db: db.execute("UPDATE done SET at=at-30*86400"))
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Relay, Careful)
        await host.idle()
        assert (await stored_state(host, "careful/c"))["news"] == [1]


async def test_a_repeated_message_brings_nobody_into_memory(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False, max_active=0) as (host, _):
        await host.register(Reader)
        for _ in range(2):
            await host.bus.tell("reader/r", News(1), id="one")
            await host.idle()
            assert len(host.stage) == 0
        assert (await stored_state(host, "reader/r"))["news"] == [1]
