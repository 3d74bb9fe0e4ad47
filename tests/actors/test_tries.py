"""What counts as a try: the handler's own mishaps, and not that a process ended while it waited to begin."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import anyio
import pytest

from offbook.actors import Agent, Message, Request, Supervision, on
from offbook.actors.lm import Generate
from offbook.actors.testing import stored_state, team

TRIES = 3
QUICK = Supervision(max_tries=TRIES, backoff=0.001)


class Go(Message):
    number: int


class Read(Request[str]):
    number: int


class Speaker(Agent):
    supervision = QUICK
    done: list[int] = []

    @on
    async def go(self, msg: Go) -> None:
        await self.say(f"number {msg.number}")
        if msg.number == 13:
            os._exit(9)
        self.done.append(msg.number)

    @on
    async def read(self, ask: Read) -> str:
        return (await self.say(f"read {ask.number}")).text


class Asker(Agent):
    supervision = QUICK
    heard: list[str] = []

    @on
    async def go(self, msg: Go) -> None:
        self.heard.append(await self.ask("speaker/asked", Read(msg.number)))


async def started(folder: Path, *, engine: bool, tell: bool) -> int:
    """One process: the team is up, and either ends its work or is killed while it waits for the engine."""
    failures = -1
    async with team(folder, engine=engine) as (host, _):
        await host.register(Speaker, Asker)
        if tell:
            await host.tell("speaker/a", Go(1), once="one")
            await host.tell("speaker/a", Go(2), once="two")
            await host.tell("asker/a", Go(3), once="three")
        if not engine:
            while not {"speaker/a", "asker/a"} <= set(host.engine_waits):
                await anyio.sleep(0.01)
            await host.journal.do("look", lambda db: None)
            os.kill(os.getpid(), signal.SIGKILL)
        await host.idle()
        failures = len((await host.run(until=0)).failures)
    return failures


def in_child(folder: Path, *, engine: bool, tell: bool = False) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(anyio.run(lambda: started(folder, engine=engine, tell=tell)))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(100)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_processes_killed_while_the_engine_loads_do_not_use_a_message_up(tmp_path: Path) -> None:
    for number in range(TRIES + 2):
        assert in_child(tmp_path, engine=False, tell=number == 0) == -signal.SIGKILL

    assert in_child(tmp_path, engine=True) == 0, "no failure"

    async def look() -> None:
        async with team(tmp_path, engine=False) as (host, _):
            assert not await host.dead_letters()
            assert (await stored_state(host, "speaker/a"))["done"] == [1, 2]
            assert (await stored_state(host, "asker/a"))["heard"] == ["You said: read 3"]

    anyio.run(look)


async def test_hosts_that_stop_in_order_do_not_use_a_message_up(tmp_path: Path) -> None:
    for number in range(TRIES + 2):
        async with team(tmp_path) as (host, engine):
            engine.hold()
            await host.register(Speaker)
            if number == 0:
                await host.tell("speaker/a", Go(1))
                await host.tell("speaker/a", Go(2))
            await engine.started.wait()
    async with team(tmp_path) as (host, _):
        await host.register(Speaker)
        await host.idle()
        assert (await stored_state(host, "speaker/a"))["done"] == [1, 2]
        assert not await host.dead_letters()


async def test_a_class_that_does_not_fit_the_state_does_not_use_a_message_up(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, _):
        await host.register(Speaker)
        await host.tell("speaker/a", Go(1))
        await host.idle()

    class Changed(Speaker):
        kind = "speaker"
        added: int  # without a default: the old state cannot be loaded

    for number in range(TRIES + 2):
        async with team(tmp_path) as (host, _):
            await host.register(Changed)
            if number == 0:
                await host.tell("speaker/a", Go(2))
            await host.idle()
            assert [failure.verdict for failure in host.failures] == ["stop"]
    async with team(tmp_path) as (host, _):
        await host.register(Speaker)
        await host.idle()
        assert (await stored_state(host, "speaker/a"))["done"] == [1, 2]
        assert not await host.dead_letters()


def test_a_message_that_kills_the_process_is_given_up_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> int:
        seen: list[str] = []

        def answer(request: Generate) -> str:
            seen.append(request.messages[-1].content)
            return "yes"

        async with team(tmp_path, answer=answer) as (host, _):
            await host.register(Speaker)
            await host.tell("speaker/a", Go(13), once="thirteen")
            await host.tell("speaker/a", Go(4), once="four")
            await host.idle()
            report = await host.run(until=0)
            (letter,) = await host.dead_letters()
            assert (letter.tries, len(report.failures)) == (TRIES, 1)
            assert report.failures[0].verdict == "dead letter"
            assert f"gave up after {TRIES} tries" in report.failures[0].error
            assert not (await host.run(until=0)).failures, "listed once"
            assert (await stored_state(host, "speaker/a"))["done"] == [4]
        return 0

    for _ in range(TRIES):
        pid = os.fork()
        if pid == 0:
            try:
                anyio.run(run)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    with caplog.at_level(logging.ERROR, logger="offbook.actors"):
        assert anyio.run(run) == 0
    assert "gave up after" in caplog.text


async def test_a_turn_that_asks_where_its_memory_is_waits_for_the_engine(tmp_path: Path) -> None:
    class Where(Request[str]):
        pass

    class Lost(Agent):
        supervision = QUICK

        @on
        async def where(self, ask: Where) -> str:
            return (await self.locate()).where

    async with team(tmp_path, engine=False) as (host, engine), anyio.create_task_group() as tasks:
        await host.register(Lost)

        async def come() -> None:
            while not host.engine.retries:
                await anyio.sleep(0.01)
            await tasks.start(engine.run)

        tasks.start_soon(come)
        assert await host.ask("lost/a", Where()) == "hot"
        tasks.cancel_scope.cancel()
