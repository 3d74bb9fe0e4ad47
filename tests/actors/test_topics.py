"""Topics: every subscriber hears every event once, and nothing that goes wrong there goes unnoticed."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.lowlevel
import pytest
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from offbook.actors import (
    Actor,
    Agent,
    Host,
    JournalTopicStore,
    Message,
    Request,
    Supervision,
    TooManyTopics,
    on,
    topic_statements,
)
from offbook.actors.journal import Journal
from offbook.actors.message import encode
from offbook.actors.records import Inbound, Mode
from offbook.actors.testing import stored_state, team
from offbook.bus import Broker, Event, Record, connect
from offbook.bus.topics import TOPICS


class News(Message):
    text: str


class Other(Message):
    pass


class Join(Request[str]):
    topic: str
    leave: bool = False


class Say(Message):
    text: str


class Reader(Actor):
    topics = ("news",)
    news: list[str] = []

    @on
    async def read(self, msg: News) -> None:
        self.news.append(msg.text)

    @on
    async def say(self, msg: Say) -> None:
        await self.publish("news", News(msg.text))


class Guest(Actor):
    news: list[str] = []

    @on
    async def join(self, ask: Join) -> str:
        if ask.leave:
            await self.unsubscribe(ask.topic)
        else:
            await self.subscribe(ask.topic)
        return "ok"

    @on
    async def read(self, msg: News) -> None:
        self.news.append(msg.text)


class Fragile(Actor):
    topics = ("news",)
    supervision = Supervision(max_tries=2, backoff=0.001)
    good: list[str] = []

    @on
    async def read(self, msg: News) -> None:
        if msg.text.startswith("bad"):
            raise ValueError(msg.text)
        self.good.append(msg.text)


async def test_subscribers_hear_events_in_order_and_the_publisher_does_not(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        for key in "abc":
            await host.spawn(Reader, key)
        for number in range(10):
            await host.publish("news", News(str(number)))
        await host.tell("reader/a", Say("from a"))
        await host.idle()
        numbers = [str(number) for number in range(10)]
        assert (await stored_state(host, "reader/a"))["news"] == numbers
        for key in "bc":
            assert (await stored_state(host, f"reader/{key}"))["news"] == [*numbers, "from a"]


async def test_what_is_published_right_after_spawning_or_subscribing_is_heard(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Guest)
        async with connect(host.bus.endpoint) as outside:
            for round in range(20):
                topic = f"topic {round}"
                await host.ask("guest/a", Join(topic))
                await outside.publish(topic, {"type": "News", "text": topic})
            while len((await stored_state(host, "guest/a"))["news"]) < 20:
                await anyio.sleep(0.01)
        await host.idle()
        assert (await stored_state(host, "guest/a"))["news"] == [f"topic {n}" for n in range(20)]


async def test_who_left_hears_nothing_and_who_came_late_hears_what_comes(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Guest)
        await host.ask("guest/early", Join("news"))
        await host.publish("news", News("one"))
        await host.idle()
        await host.ask("guest/late", Join("news"))
        await host.publish("news", News("two"))
        await host.idle()
        await host.ask("guest/early", Join("news", leave=True))
        await host.publish("news", News("three"))
        await host.idle()
        assert (await stored_state(host, "guest/early"))["news"] == ["one", "two"]
        assert (await stored_state(host, "guest/late"))["news"] == ["two", "three"]


async def test_events_published_while_the_class_is_not_registered_are_not_lost(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Reader, "a")
        await host.publish("news", News("one"))
        await host.idle()
    async with team(tmp_path, engine=False) as (host, _):
        await host.publish("news", News("two"))
        await host.spawn(Reader, "a")
        await host.publish("news", News("three"))
        await host.idle()
        assert (await stored_state(host, "reader/a"))["news"] == ["one", "two", "three"]


async def test_idle_waits_for_events_that_an_earlier_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Reader, "r")
    journal = await Journal.open(tmp_path / "team.journal")  # published, then the process ended
    await JournalTopicStore(journal).append("news", [Record(id="1", type="News", body=encode(News("late")))])
    await journal.close()
    read = JournalTopicStore.read

    async def slowly(store: JournalTopicStore, topic: str, after: int, limit: int) -> list[Event]:
        await anyio.sleep(0.1)
        return await read(store, topic, after, limit)

    monkeypatch.setattr(JournalTopicStore, "read", slowly)
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Reader)
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == ["late"]


async def test_a_handler_that_raises_is_noticed_and_the_actor_goes_on(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Fragile, "f")
        await host.spawn(Reader, "r")
        for text in ("a", "bad", "b"):
            await host.publish("news", News(text))
        with anyio.move_on_after(0):
            await host.run()
        await host.idle()
        assert (await stored_state(host, "fragile/f"))["good"] == ["a", "b"]
        assert (await stored_state(host, "reader/r"))["news"] == ["a", "bad", "b"]
        assert [(one.actor, one.tries, one.verdict) for one in host.failures] == [
            ("fragile/f", 1, "retry"),
            ("fragile/f", 2, "dead letter"),
        ]
        (letter,) = await host.dead_letters()
        assert (letter.actor, letter.type, letter.tries) == ("fragile/f", "News", 2)
        assert "ValueError: bad" in letter.reason


async def test_run_reports_failures(tmp_path: Path) -> None:
    from offbook.actors import VirtualClock

    async with team(tmp_path, engine=False, clock=VirtualClock()) as (host, _):
        await host.spawn(Fragile, "f")
        await host.publish("news", News("bad"))
        report = await host.run(until=10)
        assert [failure.error for failure in report.failures] == ["ValueError: bad", "ValueError: bad"]


async def test_events_of_types_that_nobody_takes_are_passed_over(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Reader, "a")
        await host.publish("news", Other())
        await host.publish("news", News("after"))
        await host.idle()
        assert (await stored_state(host, "reader/a"))["news"] == ["after"]
        assert not host.failures


async def test_an_event_that_does_not_decode_becomes_a_dead_letter(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Reader, "a")
        await host.publish("news", {"type": "News", "wrong": 1})
        await host.publish("news", News("after"))
        await host.idle()
        assert (await stored_state(host, "reader/a"))["news"] == ["after"]
        (letter,) = await host.dead_letters()
        assert letter.actor == "topic news"


async def test_a_publication_with_once_happens_once_over_restarts(tmp_path: Path) -> None:
    numbers = []
    for _ in range(2):
        async with team(tmp_path, engine=False) as (host, _engine):
            await host.spawn(Reader, "a")
            numbers += [await host.publish("news", News("only"), once="opening") for _ in range(2)]
            await host.idle()
            assert (await stored_state(host, "reader/a"))["news"] == ["only"]
    assert numbers == [1, 1, 1, 1]


async def test_a_slow_subscriber_holds_the_topic_up_and_memory_stays_bounded(tmp_path: Path) -> None:
    class Slow(Actor):
        topics = ("news",)
        seen: int = 0
        gate: ClassVar[anyio.Event] = anyio.Event()

        @on
        async def read(self, msg: News) -> None:
            await self.gate.wait()
            self.seen += 1

    async with team(tmp_path, engine=False, mailbox_limit=5) as (host, _):
        await host.spawn(Slow, "s")
        for number in range(30):
            await host.publish("news", News(str(number)))
        while host.stage.find("slow/s") is None:
            await anyio.sleep(0.001)
        cell = next(iter(host.stage))
        while len(cell.mailbox) < 5:
            await anyio.sleep(0.001)
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert len(cell.mailbox) == 5
        Slow.gate.set()
        await host.idle()
        assert (await stored_state(host, "slow/s"))["seen"] == 30


async def test_agents_may_have_topics_too(tmp_path: Path) -> None:
    class Listener(Agent):
        topics = ("news",)
        said: list[str] = []

        @on
        async def read(self, msg: News) -> None:
            self.said.append((await self.say(msg.text)).text)

    async with team(tmp_path) as (host, _):
        await host.spawn(Listener, "a")
        await host.publish("news", News("x"))
        await host.idle()
        assert (await stored_state(host, "listener/a"))["said"] == ["You said: x"]


async def test_a_topic_too_many_is_a_dead_letter_at_once_and_the_others_go_on(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Reader, "r")
        await host.publish("news", News("first"))
        store = JournalTopicStore(host.journal, max_topics=2)
        assert await store.append("more", [Record(id="1", body=b"\xc0")]) == [1]
        with pytest.raises(TooManyTopics, match="there are 2 topics"):
            await store.append("too", [Record(id="1", body=b"\xc0")])
        assert await store.append("more", [Record(id="2", body=b"\xc0")]) == [2]
        # As many as there may be.
        await host.journal.do(
            "test",
            lambda db: db.execute(
                "WITH RECURSIVE n(i) AS (SELECT 3 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
                "INSERT INTO topic_heads SELECT 't' || i, 1 FROM n",
                (TOPICS,),
            ),
        )
        await host.spawn(Diarist, "d")
        await host.tell("diarist/d", Say("today"))
        await host.idle()
        [letter] = await host.dead_letters()
        assert (letter.actor, letter.reason[:13]) == ("topic diary-today", "TooManyTopics")
        await host.tell("reader/r", Say("second"))
        await host.idle()
        assert len(await host.dead_letters()) == 1


class Diarist(Actor):
    @on
    async def say(self, msg: Say) -> None:
        await self.publish(f"diary-{msg.text}", News(msg.text))


@pytest.mark.parametrize("host_stops", [False, True])
async def test_a_broker_that_lost_its_topics_is_heard_from_their_new_beginning(
    tmp_path: Path, host_stops: bool
) -> None:
    endpoint = f"ipc://{tmp_path}/bus.sock"

    async def broker(
        end: anyio.Event, ended: anyio.Event, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
    ) -> None:
        async with Broker(endpoint):  # its topics are in memory
            task_status.started()
            await end.wait()
        ended.set()

    async def hear(host: Host, *numbers: int) -> None:
        await host.register(Reader)
        while not host.bus.connected:
            await anyio.sleep(0.01)
        for number in numbers:
            await host.publish("news", News(str(number)))
        with anyio.fail_after(10):
            await host.idle()
            while len((await stored_state(host, "reader/r"))["news"]) <= numbers[-1]:
                await anyio.sleep(0.01)
        assert (await stored_state(host, "reader/r"))["news"] == [str(one) for one in range(numbers[-1] + 1)]

    async with anyio.create_task_group() as tasks, AsyncExitStack() as last:
        end, ended = anyio.Event(), anyio.Event()
        await tasks.start(broker, end, ended)
        async with AsyncExitStack() as first:
            host = Host("h", journal_path=tmp_path / "j", endpoint=endpoint)
            await (first if host_stops else last).enter_async_context(host)
            await host.spawn(Reader, "r")
            await hear(host, 0, 1, 2, 3)
        end.set()
        await ended.wait()
        await host.bus.wait_lost()
        await tasks.start(broker, anyio.Event(), anyio.Event())
        if host_stops:
            host = Host("h", journal_path=tmp_path / "j", endpoint=endpoint)
            await last.enter_async_context(host)
        await hear(host, 4, 5)
        await hear(host, 6, 7, 8, 9, 10, 11)
        await last.aclose()
        tasks.cancel_scope.cancel()


async def test_events_of_one_number_from_two_logs_both_wait(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Reader, "r")
        await host.idle()
        pattern = Inbound(id="", actor="", type="News", body=encode(News("x")), mode=Mode.TOPIC)
        for _ in range(2):
            await host.journal.do("begin", lambda db: topic_statements.begin(db, "news", 0))
            stored = await host.journal.do(
                "event", lambda db: topic_statements.deliver_event(db, "news", 1, pattern, (), 1.0)
            )
            assert len(stored) == 1
