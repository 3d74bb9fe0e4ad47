"""Runtime: the parts wired, one of a name, the engine replaced when it dies, everything gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from offbook.actors import Actor, Agent, Message, Request, VirtualClock, on
from offbook.actors.lm import Stats
from offbook.bus import connect
from offbook.bus.errors import (
    ActorFailed,
    DeadlineExceeded,
    EngineBusy,
    InvalidAddress,
    InvalidRequest,
    NoSuchActor,
    UnknownModel,
)
from offbook.runtime import InvalidConfig, Runtime, RuntimeInUse, hours, minutes, seconds
from offbook.runtime import app as app_module
from offbook.runtime import child as child_module
from offbook.runtime.config import EngineConfig
from offbook.runtime.waiting import ask_engine

FAKE = Path(__file__).with_name("fake_engine.py")


class Heard(Message):
    text: str


class Ask(Request[str]):
    question: str


class Count(Request[int]):
    pass


class Neighbour(Agent):
    kind = "neighbour"
    topics = ("square",)
    heard: list[str] = []

    @on
    async def hear(self, msg: Heard) -> None:
        self.heard.append(msg.text)

    @on
    async def answer(self, ask: Ask) -> str:
        async with self.speak(ask.question) as turn:
            async for piece in turn:
                await ask.progress(piece)
        return turn.text

    @on
    async def count(self, ask: Count) -> int:
        return len(self.heard)


class Wake(Message):
    pass


class Sleeper(Actor):
    kind = "sleeper"
    woken: int = 0

    @on
    async def wake(self, msg: Wake) -> None:
        self.woken += 1
        self.after(hours(1), Wake())

    @on
    async def count(self, ask: Count) -> int:
        return self.woken


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(child_module, "FIRST_PAUSE_S", 0.01)

    def command(config: EngineConfig) -> list[str]:
        return [sys.executable, str(FAKE), "--config", config.to_json()]

    monkeypatch.setattr(child_module, "engine_command", command)
    return tmp_path / "home"


async def test_a_script_and_another_process_talk_to_the_same_team() -> None:
    async with Runtime("team") as rt:
        assert await rt.spawn(Neighbour, "ann") == "neighbour/ann"
        assert await rt.ask("neighbour/ann", Ask("Plans?")) == "You said: Plans?"
        async with connect("team") as bus:
            pieces = []
            async with bus.stream("neighbour/ann", {"type": "Ask", "question": "And now?"}) as reply:
                pieces = [piece async for piece in reply]
            assert "".join(pieces) == reply.result == "You said: And now?"


async def test_once_means_once_however_often_the_script_runs() -> None:
    for _ in range(2):
        async with Runtime("team", engine=False) as rt:
            await rt.spawn(Neighbour, "ann")
            await rt.publish("square", Heard("A stranger came."), once="opening")
            await rt.tell("neighbour/ann", Heard("He has left."), once="departure")
            await rt.idle()
            assert await rt.ask("neighbour/ann", Count()) == 2


async def test_the_engine_is_replaced_when_it_is_killed() -> None:
    async with Runtime("team") as rt:
        assert rt.engine is not None
        await rt.spawn(Neighbour, "ann")
        assert (await rt.ready()).model == "fake"
        pid = rt.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await rt.ask("neighbour/ann", Ask("Still there?")) == "You said: Still there?"
        assert rt.engine.pid not in (None, pid)
        assert rt.engine.restarts == 1


async def test_a_budget_set_while_the_engine_loads_waits_for_it() -> None:
    async with Runtime("team") as rt:
        with pytest.raises(NoSuchActor):
            await rt.stats()  # it is not there yet
        stats = await rt.set_memory("1 GiB")
        assert stats.model == "fake"
        assert rt.config.budget_bytes == 1 << 30
    async with Runtime("team", engine=False) as rt:
        with pytest.raises(NoSuchActor):
            await rt.set_memory("1 GiB")
    async with Runtime("team", model="missing") as rt:
        with pytest.raises(UnknownModel):
            await rt.set_memory("1 GiB")


async def test_why_there_is_no_engine_is_told_before_anybody_answers_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def later(*_: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(app_module, "_stand_in", later)
    async with Runtime("team", model="missing") as rt:
        for ask in (rt.set_memory("1 GiB"), rt.ready()):
            with anyio.fail_after(60), pytest.raises(UnknownModel, match="missing"):
                await ask


async def test_an_engine_that_loads_for_long_is_said_to_load() -> None:
    async with Runtime("team", engine=False) as rt:
        with pytest.raises(EngineBusy, match="loading its model"):
            await ask_engine(rt.bus, Stats(), expected=lambda: True, patience=0.0)


async def test_no_process_is_left_at_the_end() -> None:
    async with Runtime("team") as rt:
        assert rt.engine is not None
        await rt.ready()
        pid = rt.engine.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_error_of_the_script_comes_out_as_it_is_after_an_orderly_end() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Runtime("team") as rt:
            await rt.ready()
            raise KeyError("mine")
    assert rt.engine is not None
    assert rt.engine.pid is None


async def test_a_cancelled_script_ends_in_order() -> None:
    with anyio.move_on_after(60) as scope:
        async with Runtime("team") as rt:
            await rt.ready()
            scope.cancel()
            await anyio.sleep_forever()
    assert rt.engine is not None
    assert rt.engine.pid is None
    async with Runtime("team", engine=False):
        pass


async def test_cancelled_at_any_moment_of_its_start_it_ends_in_order() -> None:
    with anyio.fail_after(60):
        for step in range(16):
            with anyio.move_on_after(0.01 * step):
                async with Runtime("team") as rt:
                    await rt.spawn(Neighbour, "ann")
                    await anyio.sleep_forever()
        async with Runtime("team", engine=False) as rt:
            await rt.spawn(Neighbour, "ann")
            assert await rt.ask("neighbour/ann", Count()) == 0


async def test_one_runtime_of_a_name_at_a_time_and_the_error_names_it() -> None:
    async with Runtime("team", engine=False):
        with pytest.raises(RuntimeInUse, match=str(os.getpid())):
            async with Runtime("team", engine=False):
                pass
    async with Runtime("team", engine=False):
        pass


async def test_a_model_that_does_not_exist_is_said_to_everyone_who_asks() -> None:
    async with Runtime("team", model="missing") as rt:
        await rt.spawn(Neighbour, "ann")
        with pytest.raises(UnknownModel, match="missing"):
            await rt.ready()
        with pytest.raises(UnknownModel, match="missing"):
            await rt.ask("neighbour/ann", Ask("Anyone?"))
        with pytest.raises(UnknownModel, match="missing"):
            await rt.run(until=minutes(1))


async def test_without_an_engine_it_is_said_at_once() -> None:
    async with Runtime("team", engine=False) as rt:
        with pytest.raises(NoSuchActor, match="engine/main"):
            await rt.stats()


async def test_without_an_engine_a_call_says_so_long_before_its_deadline() -> None:
    async with Runtime("team", engine=False) as rt:
        await rt.spawn(Neighbour, "ann")
        with anyio.fail_after(20), pytest.raises(ActorFailed, match="no engine serves engine/main"):
            await rt.ask("neighbour/ann", Ask("Anyone?"), timeout=40)


async def test_a_call_waits_for_an_announced_engine_of_another_process() -> None:
    async with Runtime("team", engine=False, peers=["engine"]) as rt:
        await rt.spawn(Neighbour, "ann")
        with pytest.raises(DeadlineExceeded):
            await rt.ask("neighbour/ann", Ask("Anyone?"), timeout=app_module.ABSENT_PATIENCE_S + 1)


@pytest.mark.parametrize(
    ("name", "settings", "error", "names"),
    [
        ("no/slash", {}, InvalidAddress, "no/slash"),
        ("", {}, InvalidAddress, "name"),
        ("team", {"memory": "plenty"}, InvalidConfig, "plenty"),
        ("team", {"memory": 2}, InvalidConfig, "2 GiB"),
        ("team", {"disk": "-1"}, InvalidConfig, "disk"),
        ("team", {"kv_bits": 5}, InvalidConfig, "kv_bits"),
        ("team", {"model": " "}, InvalidConfig, "model"),
        ("team", {"model": 5}, InvalidConfig, "model is 5"),
        ("team", {"model": None, "engine": False}, InvalidConfig, "model is None"),
        ("team", {"kv_bits": 4.0}, InvalidConfig, r"kv_bits is 4\.0"),
        ("team", {"kv_bits": [4]}, InvalidConfig, r"kv_bits is \[4\]"),
        ("team", {"trace": 5}, InvalidConfig, "trace is 5"),
        ("team", {"clock": 5}, InvalidConfig, "clock is 5"),
        ("team", {"clock": 0}, InvalidConfig, "clock is 0"),
        ("team", {"clock": VirtualClock}, InvalidConfig, "clock is <class"),
        ("team", {"peers": "abc"}, InvalidConfig, r"peers is 'abc': give .* \['abc'\]"),
        ("team", {"peers": 5}, InvalidConfig, "peers is 5"),
        ("team", {"peers": ["a b"]}, InvalidAddress, "a b"),
        ("n" * 121, {}, InvalidAddress, "has 121 characters: it may have 120 at most"),
        (5, {}, InvalidAddress, "runtime name 5"),
        ("team", {"trace": "/proc"}, InvalidConfig, "a folder"),
        ("team", {"trace": "/proc/trace.json"}, InvalidConfig, "/proc/trace.json"),
        ("team", {"trace": "/dev/null/trace.json"}, InvalidConfig, "cannot be written"),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_given(
    name: Any, settings: dict[str, object], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        Runtime(name, **settings)  # type: ignore[arg-type]  # wrong on purpose


async def test_a_name_of_the_greatest_length_works() -> None:
    async with Runtime("n" * 120, engine=False) as rt:
        assert await rt.spawn(Sleeper, "s") == "sleeper/s"


def test_a_trace_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "deeper" / "new.json"
    old.write_text("[")
    assert Runtime("team", trace=old).config.trace == str(old)
    assert old.read_text() == "["
    Runtime("team", trace=new)
    assert not new.exists()


async def test_a_disk_with_little_room_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "DISK_LOOK_S", 0.001)
    free = 50 << 20
    monkeypatch.setattr(app_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    async with Runtime("team") as rt:
        await rt.spawn(Neighbour, "ann")  # there is room for messages
        await anyio.sleep(0.02)
    assert caplog.text.count("agents' memory that was unused longest goes") == 1
    assert "50 MiB left" in caplog.text


async def test_outside_of_async_with_it_says_how_to_use_it() -> None:
    with pytest.raises(InvalidRequest, match="async with"):
        await Runtime("team", engine=False).tell("neighbour/ann", Heard("x"))


async def test_run_ends_when_the_given_function_returns_and_reports_what_happened() -> None:
    async with Runtime("team", engine=False) as rt:
        await rt.spawn(Neighbour, "ann")

        async def told() -> None:
            await rt.tell("neighbour/ann", Heard("x"))
            await rt.idle()

        report = await rt.run(until=told)
        assert (report.turns, report.failures) == (1, ())


@pytest.mark.parametrize("until", ["x", True, float("nan"), [1]])
async def test_run_refuses_what_is_no_end(until: Any) -> None:
    async with Runtime("team", engine=False, clock=VirtualClock(seed=1)) as rt:
        with pytest.raises(InvalidRequest, match=r"until is .*: give a duration") as caught:
            await rt.run(until=until)
        assert repr(until) in str(caught.value)


async def test_run_says_that_it_wants_the_function_not_its_call() -> None:
    async def told() -> None: ...

    async with Runtime("team", engine=False) as rt:
        with pytest.raises(InvalidRequest, match=r"told\(\): give the function, not its call"):
            await rt.run(until=told())  # type: ignore[arg-type]  # the point of the test


async def test_run_hands_on_the_error_of_the_given_function() -> None:
    async def wrong() -> None:
        raise LookupError("nobody")

    async with Runtime("team", engine=False) as rt:
        with pytest.raises(LookupError, match="nobody"):
            await rt.run(until=wrong)


async def test_run_with_a_virtual_clock_goes_on_after_a_restart() -> None:
    async def simulate(until: float) -> int:
        async with Runtime("sim", engine=False, clock=VirtualClock(seed=1)) as rt:
            await rt.spawn(Sleeper, "s")
            await rt.tell("sleeper/s", Wake(), once="first")
            await rt.run(until=hours(until))
            return await rt.ask("sleeper/s", Count())

    assert await simulate(3.5) == 4
    assert await simulate(3.5) == 4
    assert await simulate(5.5) == 6


def test_durations() -> None:
    assert hours(1) == minutes(60) == seconds(3600)


SCRIPT = """
import asyncio
import sys
import anyio
from offbook.runtime import Runtime, hours
sys.path.insert(0, {tests!r})
from orphan import end_with_parent
end_with_parent()

async def main():
    async with Runtime("team", engine=False) as rt:
        # Printed by the loop once run() has done all it can at once: its signal handlers are in place.
        asyncio.get_running_loop().call_later(0.05, lambda: print("up", flush=True))
        await rt.run({until})
        print("went on", flush=True)

anyio.run(main)
"""


@pytest.mark.parametrize(
    ("until", "number", "code", "output"),
    [
        ("", signal.SIGTERM, 0, "went on"),
        ("", signal.SIGINT, 0, "went on"),
        ("until=hours(1)", signal.SIGTERM, 128 + signal.SIGTERM, ""),
        ("until=hours(1)", signal.SIGINT, -signal.SIGINT, ""),
    ],
)
def test_signals_end_a_script_in_order(until: str, number: int, code: int, output: str) -> None:
    script = textwrap.dedent(SCRIPT).format(until=until, tests=str(Path(__file__).parents[1]))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    assert out.strip() == output
    assert process.returncode == code
