"""Messages to kinds that nobody serves: a slip is an error at once, what may yet come is waited for."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from offbook.actors import Actor, Message, Request, on
from offbook.actors.host import Host
from offbook.actors.supervision import Supervision
from offbook.actors.testing import team
from offbook.bus import connect
from offbook.bus.errors import ActorFailed, InvalidAddress, NoSuchActor
from offbook.bus.suggest import MOST, closest, hint


class Letter(Message):
    text: str = ""


class Post(Request[str]):
    to: str


class Postman(Actor):
    supervision = Supervision(max_tries=3, backoff=0.005)

    @on
    async def post(self, ask: Post) -> str:
        await self.tell(ask.to, Letter("from the postman"))
        return "posted"


class Villager(Actor):
    letters: list[str] = []

    @on
    async def read(self, letter: Letter) -> None:
        self.letters.append(letter.text)


async def posted(host: Host, to: str) -> str:
    return await host.ask("postman/p", Post(to))


async def test_a_slip_is_refused_at_once_with_what_was_probably_meant(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Postman, Villager)
        for wrong in ("vilager/ann", "Villager/ann", "villagers/ann"):
            with pytest.raises(ActorFailed, match=r"NoSuchActor: nobody serves .*did you mean 'villager'\?"):
                await posted(host, wrong)
        await host.idle()  # nothing is on its way
        assert await host.dead_letters() == []
        assert await posted(host, "villager/ann") == "posted"


async def test_once_a_script_runs_every_unknown_kind_is_refused(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Postman, Villager)
        await host.run(until=0.01)
        with pytest.raises(ActorFailed, match=r"known kinds: .*'postman', 'villager'.*peers=\['zebra'\]"):
            await posted(host, "zebra/z")
        await host.idle()


async def test_while_a_script_sets_up_a_message_waits_for_a_kind_that_comes_later(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Postman)
        assert await posted(host, "villager/ann") == "posted"
        await host.register(Villager)
        await host.idle()
        assert await host.dead_letters() == []
        assert (await host.actors(prefix="villager/")).actors[0].turns == 1


@pytest.mark.parametrize("how", ["told", "seen", "seen before the restart"])
async def test_a_message_to_another_process_waits_until_it_comes(tmp_path: Path, how: str) -> None:
    """``told``: the host knows its kind. ``seen``: it was there once."""
    peers = ("scout",) if how == "told" else ()
    if how == "seen before the restart":
        async with team(tmp_path, engine=False) as (host, _):
            await host.register(Postman)
            await one_scout(tmp_path, host)
    async with team(tmp_path, engine=False, peers=peers) as (host, _):
        await host.register(Postman)
        await host.run(until=0.01)
        if how == "seen":
            await one_scout(tmp_path, host)
        assert await posted(host, "scout/s") == "posted"  # nobody is there now
        await take_one(tmp_path)
        await host.idle()
        assert await host.dead_letters() == []


async def one_scout(folder: Path, host: Host) -> None:
    async with anyio.create_task_group() as tasks:
        await tasks.start(take_one, folder)
        assert await posted(host, "scout/s") == "posted"
    await host.idle()  # else a restart sends it again: whether the scout has it would be unknown


async def take_one(
    folder: Path, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Another process's part: serve until one message came."""
    async with connect(f"ipc://{folder}/team.sock") as bus:
        await bus.serve("scout/*")
        task_status.started()
        async for delivery in bus.deliveries():
            assert delivery.decode(Letter) == Letter("from the postman")
            await delivery.accept()
            return


async def test_a_script_and_a_stranger_learn_which_kinds_there_are(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Villager)
        for send in (host.tell, host.bus.ask):
            with pytest.raises(NoSuchActor, match=r"nobody serves 'vilager/a'; did you mean 'villager'\?"):
                await send("vilager/a", Letter())


async def test_a_peer_that_can_be_no_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidAddress, match="no kind"):
        Host("x", journal_path=tmp_path / "j", peers=["no kind"])


def test_a_hint_is_a_line_however_many_kinds_there_are() -> None:
    many = tuple(f"kind{n}" for n in range(10 * MOST))
    assert len(hint("zebra", many)) < 1000
    assert hint("zebra", many).endswith(", ...")
    assert hint("x", ()) == "no kinds are known"
    assert closest("zebra", ("villager",)) is None
