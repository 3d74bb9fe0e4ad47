"""Dead letters: looked at, sent again once the cause is mended, dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from offbook.actors import Actor, Host, JournalTopicStore, Message, Supervision, every, on
from offbook.actors.control import DeadInfo, DeadPage, DeadResult, DropDead, ListDead, ResendDead
from offbook.actors.testing import stored_state, team
from offbook.bus.errors import InvalidRequest
from offbook.bus.topics import TOPICS

BROKEN: set[str] = set()
"""What fails now: names of message types."""


def use(what: str) -> None:
    if what in BROKEN:
        raise RuntimeError(f"{what} is broken [for now]")


@pytest.fixture(autouse=True)
def mended() -> Iterator[None]:
    yield
    BROKEN.clear()


class Job(Message):
    text: str


class Forward(Message):
    to: str
    text: str


class Worker(Actor):
    supervision = Supervision(max_tries=2, backoff=0.001)
    done: list[str] = []

    @on
    async def work(self, job: Job) -> None:
        self.done.append(job.text)
        use("Job")

    @on
    async def forward(self, msg: Forward) -> None:
        if msg.to.startswith("#"):
            await self.publish(msg.to, Job(msg.text))
        else:
            await self.tell(msg.to, Job(msg.text))


class Ticker(Actor):
    supervision = Supervision(max_tries=1, backoff=0.001)
    ticks: int = 0

    @every(3600)
    async def tick(self) -> None:
        self.ticks += 1

    async def on_spawn(self) -> None:
        use("spawn")
        self.ticks = 100


class Named(Actor):
    name: str
    done: list[str] = []

    @on
    async def work(self, job: Job) -> None:
        self.done.append(job.text)


async def listed(host: Host, **choice: object) -> tuple[DeadInfo, ...]:
    page: DeadPage = await host.bus.ask(f"host/{host.name}", ListDead(**choice), returns=DeadPage)  # type: ignore[arg-type]
    return page.letters


async def test_a_letter_says_what_was_given_up_and_why(tmp_path: Path) -> None:
    BROKEN.add("Job")
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        await host.tell("worker/w", Job("dig"))
        await host.idle()
        [letter] = await listed(host)
        assert (letter.to, letter.type, letter.tries) == ("worker/w", "Job", 2)
        assert letter.body == '{"type":"Job","text":"dig"}'
        assert "RuntimeError: Job is broken [for now]" in letter.reason
        assert letter.number == (await host.dead_letters())[0].seq


async def test_sent_again_a_message_is_handled_once_and_is_dead_no_more(tmp_path: Path) -> None:
    BROKEN.add("Job")
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        for text in ("dig", "sow"):
            await host.tell("worker/w", Job(text))
        await host.idle()
        first, second = (letter.number for letter in await listed(host))
        assert (await host.resend(first)).done == (first,)
        await host.idle()
        assert [letter.to for letter in await listed(host)] == ["worker/w"] * 2  # still broken
        BROKEN.clear()
        result = await host.resend(second, second, 12345, first)
        assert result.done == (second,)
        assert result.refused == {
            12345: "there is no such dead letter",
            first: "there is no such dead letter",
        }
        await host.idle()
        assert (await stored_state(host, "worker/w"))["done"] == ["sow"]
        [left] = await listed(host)
        await host.resend(left.number)
        await host.idle()
        assert (await stored_state(host, "worker/w"))["done"] == ["sow", "dig"]
        assert await listed(host) == ()


async def test_a_message_that_nobody_took_is_sent_again_to_its_receiver(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker, Named)
        await host.tell("worker/w", Forward("named/n", "hello"))
        await host.idle()
        [letter] = await listed(host)
        assert (letter.to, letter.sender) == ("named/n", "worker/w")
        await host.spawn(Named, "n", name="Nan")
        await host.resend(letter.number)
        await host.idle()
        assert (await stored_state(host, "named/n"))["done"] == ["hello"]


async def test_letters_are_chosen_by_address_page_by_page_and_dropped(tmp_path: Path) -> None:
    BROKEN.add("Job")
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        for key in ("a1", "b1", "a2", "b2", "a3"):
            await host.tell(f"worker/{key}", Job(key))
            await host.idle()
        at = f"host/{host.name}"
        page: DeadPage = await host.bus.ask(at, ListDead(to="worker/a", limit=2), returns=DeadPage)
        assert ([one.to for one in page.letters], page.total, page.more) == (
            ["worker/a1", "worker/a2"],
            5,
            True,
        )
        assert [one.to for one in await listed(host, to="worker/a", after=page.letters[-1].number)] == [
            "worker/a3"
        ]
        with pytest.raises(InvalidRequest, match="limit must be from 1 to 1000"):
            await host.bus.ask(at, ListDead(limit=0))
        dropped: DeadResult = await host.bus.ask(at, DropDead(to="worker/a"), returns=DeadResult)
        assert len(dropped.done) == 3
        assert [one.to for one in await listed(host)] == ["worker/b1", "worker/b2"]
        BROKEN.clear()
        await host.bus.ask(at, ResendDead(to=""), returns=DeadResult)
        await host.idle()
        assert await listed(host) == ()
        assert (await host.drop_dead(1)).refused == {1: "there is no such dead letter"}


async def test_an_actors_own_first_turn_can_be_sent_again(tmp_path: Path) -> None:
    BROKEN.add("spawn")
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Ticker, "t")
        await host.idle()
        [letter] = await listed(host)
        BROKEN.clear()
        assert (await host.resend(letter.number)).done == (letter.number,)
        await host.idle()
        assert (await stored_state(host, "ticker/t"))["ticks"] == 100


async def test_a_publication_is_sent_again_and_an_event_that_was_published_is_not(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        fill = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
        await host.journal.do(
            "test",
            lambda db: db.execute(fill + "INSERT INTO topic_heads SELECT 't' || i, 1 FROM n", (TOPICS,)),
        )
        await host.tell("worker/w", Forward("#square", "hello"))
        await host.idle()
        [letter] = await listed(host)
        assert (letter.to, letter.reason.split(":")[0]) == ("topic #square", "TooManyTopics")
        await host.journal.do("test", lambda db: db.execute("DELETE FROM topic_heads"))
        await host.resend(letter.number)
        await host.idle()
        [event] = await JournalTopicStore(host.journal).read("#square", 0, 10)
        assert (event.type, event.sender) == ("Job", "worker/w")
        # As the host leaves an event that its actors cannot read.
        await host.journal.do(
            "test",
            lambda db: db.execute(
                "INSERT INTO dead VALUES (1000,?,?,?,?,?,?,?,?)",
                (event.id, "topic #square", "Job", event.body, "", "BadMessage", 1, 0.0),
            ),
        )
        [letter] = await listed(host)
        assert "was published, as event 1" in (await host.resend(letter.number)).refused[letter.number]
        assert len(await listed(host)) == 1


async def test_what_is_sent_again_survives_a_restart(tmp_path: Path) -> None:
    BROKEN.add("Job")
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        await host.tell("worker/w", Job("dig"))
        await host.idle()
        await host.resend((await listed(host))[0].number)
        # Ends here, wherever the message is on its way.
    BROKEN.clear()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        for letter in await listed(host):
            await host.resend(letter.number)
        with anyio.fail_after(20):
            await host.idle()
        assert (await stored_state(host, "worker/w"))["done"] == ["dig"]
