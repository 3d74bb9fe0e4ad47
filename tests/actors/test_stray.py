"""A CancelledError that leaks out of a handler is an error of its turn, and nobody else's end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from offbook.actors import Actor, ActorFailed, Cancelled, DeadlineExceeded, Message, Request, Supervision, on
from offbook.actors.testing import stored_state, team


class Leak(Message):
    how: str


class AskLeak(Request[str]):
    how: str


class Wait(Request[str]):
    pass


class Leaky(Actor):
    supervision = Supervision(max_tries=2, backoff=0.001, intensity=1000)
    done: list[str] = []

    async def leak(self, how: str) -> None:
        if how == "child":
            child = asyncio.create_task(anyio.sleep(10))
            child.cancel()
            await child
        if how == "itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await anyio.lowlevel.checkpoint()
        if how == "raised":
            raise asyncio.CancelledError
        if how == "caught":
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            try:
                await future
            except asyncio.CancelledError:
                self.done.append("caught")
        self.done.append("went on")

    @on
    async def told(self, msg: Leak) -> None:
        await self.leak(msg.how)

    @on
    async def asked(self, ask: AskLeak) -> str:
        await self.leak(ask.how)
        return "done"

    @on
    async def wait(self, ask: Wait) -> str:
        await anyio.sleep(60)
        return "late"

    async def on_stop(self) -> None:
        raise asyncio.CancelledError


@pytest.mark.parametrize("how", ["child", "itself", "raised"])
async def test_it_becomes_a_dead_letter_and_the_team_goes_on(tmp_path: Path, how: str) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Leaky)
        await host.tell("leaky/a", Leak(how))
        await host.tell("leaky/a", Leak("caught"))
        await host.idle()
        (letter,) = await host.dead_letters()
        assert "StrayCancellation" in letter.reason
        assert letter.tries == 2
        assert (await stored_state(host, "leaky/a"))["done"] == ["caught", "went on"]


@pytest.mark.parametrize("how", ["child", "itself", "raised"])
async def test_an_asker_is_told(tmp_path: Path, how: str) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Leaky)
        with pytest.raises(ActorFailed, match="CancelledError"):
            await host.ask("leaky/a", AskLeak(how))
        assert await host.ask("leaky/a", AskLeak("caught")) == "done"


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Wordless(Actor):
    supervision = Supervision(max_tries=1, intensity=1000)

    @on
    async def told(self, msg: Leak) -> None:
        raise Mute

    @on
    async def asked(self, ask: AskLeak) -> str:
        if ask.how == "mute":
            raise Mute
        return "well"


async def test_an_error_that_cannot_say_what_it_is_harms_nobody(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Wordless)
        await host.tell("wordless/a", Leak("mute"))
        with pytest.raises(ActorFailed, match="Mute"):
            await host.ask("wordless/a", AskLeak("mute"))
        assert await host.ask("wordless/a", AskLeak("")) == "well"
        (letter,) = await host.dead_letters()
        assert "Mute" in letter.reason


async def test_a_turn_that_is_cancelled_in_earnest_ends_as_ever(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Leaky)
        with anyio.move_on_after(0.3):
            await host.ask("leaky/a", Wait())
        with pytest.raises((DeadlineExceeded, Cancelled)):
            await host.ask("leaky/a", Wait(), timeout=0.3)
        assert await host.ask("leaky/a", AskLeak("caught")) == "done"
        assert await host.dead_letters() == []
