"""What comes while earlier messages are read from the journal does not go before them."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from offbook.actors import Actor, Message, Supervision, on
from offbook.actors.host import Host
from offbook.actors.journal import JournalFailed
from offbook.actors.testing import stored_state, team
from offbook.bus import connect
from offbook.bus.errors import ProtocolError
from tests.actors.between import When, beside

NEWS = "news"


class News(Message):
    number: int


class Fall(Message):
    pass


class Reader(Actor):
    topics = (NEWS,)
    supervision = Supervision(max_tries=1, intensity=0)
    news: list[int] = []

    @on
    async def read(self, msg: News) -> None:
        self.news.append(msg.number)

    @on
    async def fall(self, msg: Fall) -> None:
        raise RuntimeError("it falls")


async def waiting(host: Host) -> int:
    return await host.journal.do(
        "test", lambda db: int(db.execute("SELECT COUNT(*) FROM inbox").fetchone()[0])
    )


async def publish(host: Host, number: int) -> None:
    """Publish, and wait until it is in the mailbox of the only subscriber."""
    before = await waiting(host)
    await host.bus.publish(NEWS, News(number))
    with anyio.fail_after(10):
        while await waiting(host) == before:
            await anyio.sleep(0.005)


async def leave_one(folder: Path) -> None:
    """A reader that has an event in its mailbox, which nobody has handled."""
    async with team(folder, engine=False) as (host, _):
        await host.spawn(Reader, "r")
    async with team(folder, engine=False) as (host, _):
        await publish(host, 0)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_event_that_comes_while_a_class_is_registered(tmp_path: Path, when: When) -> None:
    await leave_one(tmp_path)
    async with team(tmp_path, engine=False) as (host, _):
        beside(host, "mailboxes", when, lambda: publish(host, 1))
        await host.register(Reader)
        await publish(host, 2)
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [0, 1, 2]
        assert await host.dead_letters() == []


async def test_a_registration_that_fails_leaves_all_for_the_next(tmp_path: Path) -> None:
    await leave_one(tmp_path)
    async with team(tmp_path, engine=False) as (host, _):
        beside(host, "mailboxes", "failing", lambda: publish(host, 1))
        with pytest.raises(JournalFailed, match="the disk is gone"):
            await host.register(Reader)
        await publish(host, 2)
        await host.register(Reader)
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [0, 1, 2]


async def test_a_kind_that_another_peer_still_serves_loses_nothing(tmp_path: Path) -> None:
    await leave_one(tmp_path)
    async with team(tmp_path, engine=False) as (host, _):
        async with connect(host.bus.endpoint) as other:
            await other.serve("reader/*")
            with pytest.raises(ProtocolError, match="served by"):
                await host.register(Reader)
            await host.idle()
            await host.publish(NEWS, News(1))
            await host.idle()
        with anyio.fail_after(10):
            while True:  # the other one has just left
                try:
                    await host.register(Reader)
                    break
                except ProtocolError:
                    await anyio.sleep(0.01)
        await host.tell("reader/r", News(2))
        await host.publish(NEWS, News(3))
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [0, 1, 2, 3]


async def test_who_waits_for_a_full_mailbox_does_not_wait_for_a_registration_that_failed(
    tmp_path: Path,
) -> None:
    await leave_one(tmp_path)

    async def fill() -> None:
        await publish(host, 1)
        await host.bus.publish(NEWS, News(2))
        await anyio.sleep(0.1)  # the listener waits for room by now

    async with team(tmp_path, engine=False, mailbox_limit=1) as (host, _):
        beside(host, "mailboxes", "failing", fill)
        with pytest.raises(JournalFailed, match="the disk is gone"):
            await host.register(Reader)
        await host.register(Reader)
        with anyio.fail_after(10):
            await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [0, 1, 2]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_event_that_comes_while_an_actor_is_started_again(tmp_path: Path, when: When) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Reader, "r")
        await host.tell("reader/r", Fall())
        await host.idle()
        await publish(host, 0)  # it is stopped: this waits in the journal
        beside(host, "mailbox", when, lambda: publish(host, 1))
        await host.restart("reader/r")
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [0, 1]


async def test_an_actor_whose_messages_cannot_be_read_stays_stopped(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.spawn(Reader, "r")
        await host.tell("reader/r", Fall())
        await host.idle()
        await publish(host, 0)
        beside(host, "mailbox", "failing", lambda: publish(host, 1))
        with pytest.raises(JournalFailed, match="the disk is gone"):
            await host.restart("reader/r")
        assert (await host.actors(prefix="reader/")).actors[0].state == "stopped"
        await host.restart("reader/r")
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [0, 1]


async def test_who_waits_for_a_full_mailbox_does_not_wait_for_a_restart_that_failed(tmp_path: Path) -> None:
    async def fill() -> None:
        await publish(host, 1)
        await host.bus.publish(NEWS, News(2))
        await anyio.sleep(0.1)

    async with team(tmp_path, engine=False, mailbox_limit=1) as (host, _):
        await host.spawn(Reader, "r")
        await host.tell("reader/r", Fall())
        await host.idle()
        await publish(host, 0)
        beside(host, "mailbox", "failing", fill)
        with pytest.raises(JournalFailed, match="the disk is gone"):
            await host.restart("reader/r")
        with anyio.fail_after(10):
            while await waiting(host) < 3:
                await anyio.sleep(0.01)
        await host.restart("reader/r")
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [0, 1, 2]
