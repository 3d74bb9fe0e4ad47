"""Supervision: retries, poison, dead letters, restart intensity; all of it survives the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from offbook.actors import (
    Actor,
    ActorFailed,
    ActorStopped,
    Message,
    Request,
    StateNotLoadable,
    StateNotStorable,
    Supervision,
    on,
)
from offbook.actors.testing import stored_state, team

QUICK = Supervision(max_tries=3, backoff=0.001, intensity=1000)


class Do(Message):
    what: str


class Get(Request[list[str]]):
    pass


class Worker(Actor):
    supervision = QUICK
    done: list[str] = []
    tries: ClassVar[list[str]] = []

    @on
    async def do(self, msg: Do) -> None:
        type(self).tries.append(msg.what)
        self.done.append(msg.what)
        if msg.what == "bad":
            raise RuntimeError("cannot")
        if msg.what == "flaky" and type(self).tries.count("flaky") < 3:
            raise RuntimeError("not yet")
        if msg.what == "die":
            os._exit(9)
        if msg.what == "unstorable":
            self.done.append(object())  # type: ignore[arg-type]

    @on
    async def get(self, ask: Get) -> list[str]:
        return self.done


async def test_a_failed_message_is_tried_again_in_its_place(tmp_path: Path) -> None:
    Worker.tries = []
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        for what in ("a", "flaky", "b"):
            await host.tell("worker/w", Do(what))
        await host.idle()
        assert (await stored_state(host, "worker/w"))["done"] == ["a", "flaky", "b"]
        assert [failure.verdict for failure in host.failures] == ["retry", "retry"]


async def test_poison_goes_to_the_dead_letters_and_the_actor_goes_on(tmp_path: Path) -> None:
    Worker.tries = []
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        for what in ("a", "bad", "unstorable", "b"):
            await host.tell("worker/w", Do(what))
        await host.idle()
        assert await host.ask("worker/w", Get()) == ["a", "b"]
        letters = {letter.reason.split(":")[0]: letter.tries for letter in await host.dead_letters()}
        assert letters == {"RuntimeError": 3, "StateNotStorable": 3}
        assert "$.done[2]" in next(
            letter.reason for letter in await host.dead_letters() if "StateNotStorable" in letter.reason
        )


async def test_an_asker_gets_the_path_of_what_cannot_be_stored(tmp_path: Path) -> None:
    class Spoil(Request[str]):
        pass

    class Spoiler(Actor):
        data: dict[str, Any] = {}

        @on
        async def spoil(self, ask: Spoil) -> str:
            self.data["x"] = [1, object()]
            return "done"

    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Spoiler)
        with pytest.raises(StateNotStorable, match=r"\$\.data\['x'\]\[1\]"):
            await host.ask("spoiler/s", Spoil())


def run_child(folder: Path) -> int:
    """A process that tries the messages it has; returns how it ended."""

    async def main() -> None:
        async with team(folder, engine=False) as (host, _):
            await host.register(Worker)
            for what in ("a", "die", "b"):
                await host.tell("worker/w", Do(what), once=what)
            await host.idle()

    pid = os.fork()
    if pid == 0:
        try:
            anyio.run(main)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_handler_that_ends_the_process_is_given_up_after_n_tries(tmp_path: Path) -> None:
    ends: list[int] = []
    while not ends or ends[-1] != 0:
        ends.append(run_child(tmp_path))
        assert len(ends) < 10
    assert ends == [9, 9, 9, 0], "the count is stored before each try"

    async def look() -> None:
        async with team(tmp_path, engine=False) as (host, _):
            assert (await stored_state(host, "worker/w"))["done"] == ["a", "b"]
            (letter,) = await host.dead_letters()
            assert letter.body == b"\x82\xa4type\xa2Do\xa4what\xa3die"
            assert "gave up after 3 tries" in letter.reason

    anyio.run(look)


async def test_dead_letters_do_not_stop_recovery(tmp_path: Path) -> None:
    Worker.tries = []
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        await host.tell("worker/w", Do("bad"))
        await host.idle()
        # What a broken or older version may have left: a row that nothing can handle.
        await host.journal.do(
            "test",
            lambda db: db.execute(
                "INSERT INTO inbox "
                "(id, actor, type, body, mode, sender, deadline, chain, traceparent, tries, at) VALUES "
                "('x', 'worker/w', 'Gone', x'c1', 0, '', 0, '[]', '', 1, 0), "
                "('y', 'worker/ghost', 'Do', x'c1', 0, '', 0, '[]', '', 1, 0)"
            ),
        )
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        await host.tell("worker/w", Do("after"))
        await host.idle()
        assert (await stored_state(host, "worker/w"))["done"] == ["after"]
        assert len(await host.dead_letters()) == 3


async def test_too_many_failures_stop_the_actor_and_restart_lets_it_go_on(tmp_path: Path) -> None:
    class Frail(Worker):
        supervision = Supervision(max_tries=1, backoff=0.001, intensity=2)
        gate: ClassVar[anyio.Event] = anyio.Event()

        async def on_start(self) -> None:
            await self.gate.wait()

    Worker.tries = Frail.tries = []
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Frail)
        for what in ("bad", "bad", "bad", "late"):
            await host.tell("frail/f", Do(what))
        Frail.gate.set()
        await host.idle()
        with pytest.raises(ActorStopped, match="more than 2 failures within 60 s"):
            await host.ask("frail/f", Get())
        page = await host.actors()
        assert page.actors[0].state == "stopped"
        assert page.actors[0].mailbox == 1
        assert host.failures[-1].verdict == "stop"
        await host.restart("frail/f")
        assert await host.ask("frail/f", Get()) == ["late"]


async def test_state_that_does_not_load_stops_that_actor_alone(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        await host.ask("worker/bad", Get())
        await host.ask("worker/good", Get())
        await host.journal.do(
            "test", lambda db: db.execute("UPDATE actors SET state=x'81a4646f6e6503' WHERE id='worker/bad'")
        )
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Worker)
        with pytest.raises(StateNotLoadable, match=r"worker/bad: stored state of version 1.*\$\.done"):
            await host.ask("worker/bad", Get())
        assert await host.ask("worker/good", Get()) == []
        assert host.failures[0].actor == "worker/bad"


async def test_messages_that_cannot_be_delivered_become_dead_letters(tmp_path: Path) -> None:
    class Post(Message):
        to: str

    class Stranger(Message):
        pass

    class Postman(Actor):
        @on
        async def post(self, msg: Post) -> None:
            await self.tell(msg.to, Stranger())

    class Needy(Actor):
        name: str

        @on
        async def hear(self, msg: Stranger) -> None: ...

    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Postman, Needy, Worker)
        await host.tell("postman/p", Post("worker/w"))
        await host.tell("postman/p", Post("needy/never-spawned"))
        await host.idle()
        reasons = sorted(letter.reason.split(":")[0] for letter in await host.dead_letters())
        assert reasons == ["NoSuchActor", "UnknownMessageType"]
        assert len(host.failures) == 2


async def test_hooks_run_in_their_order(tmp_path: Path) -> None:
    class Hooked(Actor):
        log: list[str] = []
        calls: ClassVar[list[str]] = []
        _resource: str

        async def on_spawn(self) -> None:
            self.log.append("spawn")
            await self.tell(self.id, Do("first"))

        async def on_start(self) -> None:
            self._resource = "open"
            self.calls.append("start")

        async def on_stop(self) -> None:
            self.calls.append(f"stop {self._resource}")

        @on
        async def do(self, msg: Do) -> None:
            self.log.append(msg.what)

    for round in range(2):
        async with team(tmp_path, engine=False) as (host, _):
            await host.spawn(Hooked, "h")
            await host.tell("hooked/h", Do(f"round {round}"))
            await host.idle()
            assert (await stored_state(host, "hooked/h"))["log"][0] == "spawn"
    async with team(tmp_path, engine=False) as (host, _):
        state = await stored_state(host, "hooked/h")
        assert sorted(state["log"]) == ["first", "round 0", "round 1", "spawn"], "on_spawn runs once"
    assert Hooked.calls == ["start", "stop open"] * 2


async def test_a_failing_start_fails_the_message(tmp_path: Path) -> None:
    class Stubborn(Worker):
        async def on_start(self) -> None:
            raise RuntimeError("no start")

    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Stubborn)
        with pytest.raises(ActorFailed, match="no start"):
            await host.ask("stubborn/s", Get())
