"""``kill -9`` at every boundary of the journal: nothing lost, nothing done twice, no half turn."""

from __future__ import annotations

import json
import os
import select
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import anyio
import pytest

from offbook.actors import Actor, Agent, Message, Request, VirtualClock, on
from offbook.actors.lm import Generate
from offbook.actors.testing import stored_state, stored_transcript, team
from offbook.bus import connect
from offbook.bus.errors import ConnectionLost, NoSuchActor

STEPS = 2


class Go(Message):
    number: int


class Step(Message):
    number: int


class News(Message):
    number: int
    text: str


class Later(Message):
    number: int


class Take(Request[int]):
    number: int


class Ledger(Actor):
    steps: list[int] = []
    taken: list[int] = []
    topics = ("news",)
    news: list[int] = []

    @on
    async def step(self, msg: Step) -> None:
        self.steps.append(msg.number)

    @on
    async def take(self, ask: Take) -> int:
        self.taken.append(ask.number)
        return len(self.taken)

    @on
    async def read(self, msg: News) -> None:
        self.news.append(msg.number)


class Source(Agent):
    done: list[int] = []
    later: list[int] = []
    answers: list[int] = []

    @on
    async def go(self, msg: Go) -> None:
        reply = await self.say(f"number {msg.number}.")
        self.answers.append(await self.ask("ledger/main", Take(msg.number)))
        await self.tell("ledger/main", Step(msg.number))
        await self.publish("news", News(msg.number, reply.text))
        self.after(10, Later(msg.number))
        self.done.append(msg.number)

    @on
    async def wait(self, msg: Later) -> None:
        self.later.append(msg.number)


async def scenario(folder: Path, fault: Callable[[str], None] | None) -> None:
    """The script of every process: the same each time it is started."""

    def answer(request: Generate) -> str:
        with (folder / "requests").open("a") as file:
            file.write(request.messages[-1].content + "\n")
        return "yes"

    async with team(folder, clock=VirtualClock(1), answer=answer, fault=fault) as (host, _):
        await host.spawn(Ledger, "main")
        await host.spawn(Source, "main")
        for number in range(STEPS):
            await host.tell("source/main", Go(number), once=f"go {number}")
        report = await host.run(until=60)
        ledger = await stored_state(host, "ledger/main")
        source = await stored_state(host, "source/main")
        rest = await host.journal.do(
            "test",
            lambda db: {
                table: db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
                for table in ("inbox", "outbox", "timers", "calls", "dead")
            },
        )
        result = {
            "ledger": ledger,
            "source": source,
            "rest": rest,
            "text": await stored_transcript(host, "source/main"),
            "failures": [failure.error for failure in report.failures],
        }
    (folder / "result").write_text(json.dumps(result))


def child(folder: Path, fault: Callable[[str], None] | None) -> int:
    """Run the scenario in a process of its own; returns how it ended (0, or minus the signal)."""
    pid = os.fork()
    if pid == 0:
        try:
            anyio.run(scenario, folder, fault)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def kill_at(count: int, log: Path | None = None) -> Callable[[str], None]:
    """A fault hook that kills the process at its ``count``-th boundary."""
    left = count

    def fault(point: str) -> None:
        nonlocal left
        if log is not None:
            with log.open("a") as file:
                file.write(point + "\n")
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


def check(folder: Path, crashes: int) -> None:
    """Every invariant, after the last process ended well."""
    result = json.loads((folder / "result").read_text())
    numbers = list(range(STEPS))
    assert result["failures"] == []
    assert result["rest"] == {"inbox": 0, "outbox": 0, "timers": 0, "calls": 0, "dead": 0}
    assert result["source"]["done"] == numbers, "each turn of the source once, in order"
    assert result["source"]["answers"] == [1, 2], "an answered question stays answered"
    assert sorted(result["source"]["later"]) == numbers, "each timer once"
    assert result["ledger"]["steps"] == numbers, "each message once, in order"
    assert result["ledger"]["taken"] == numbers, "each question once"
    assert result["ledger"]["news"] == numbers, "each event once, in order"
    assert result["text"].count("[user]number") == STEPS, "each prompt once in the transcript"
    requests = Counter((folder / "requests").read_text().split("\n")[:-1])
    assert all(count <= 1 + crashes for count in requests.values())


def boundaries(folder: Path) -> list[str]:
    log = folder / "points"
    assert child(folder, kill_at(0, log)) == 0
    return log.read_text().split()


def test_kill_at_every_boundary(tmp_path: Path) -> None:
    calm = tmp_path / "calm"
    calm.mkdir()
    points = boundaries(calm)
    check(calm, crashes=0)
    kinds = set(points)
    assert {"work:accept", "work:turn", "work:call", "work:event", "work:fire", "work:publish"} <= kinds
    for number, point in enumerate(points, 1):
        if point not in ("commit", "committed"):
            continue  # on disk, the points before the commit of one transaction look the same
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = child(folder, kill_at(number))
        if ended == 0:
            continue  # this run grouped its commits otherwise and had fewer boundaries
        assert ended == -signal.SIGKILL
        assert child(folder, None) == 0
        check(folder, crashes=1)


@pytest.mark.parametrize("seed", range(4))
def test_kill_again_and_again_at_random(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    crashes = 0
    while (ended := child(tmp_path, kill_at(random.randint(45, 120)))) != 0:
        assert ended == -signal.SIGKILL
        crashes += 1
        assert crashes < 50
    check(tmp_path, crashes)


def test_a_finished_language_model_call_is_not_made_again(tmp_path: Path) -> None:
    def fault(point: str) -> None:
        if point == "committed" and seen == ["work:call"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if point == "work:call":
            seen.append(point)

    seen: list[str] = []
    assert child(tmp_path, fault) == -signal.SIGKILL
    assert child(tmp_path, None) == 0
    check(tmp_path, crashes=0)


async def serve(folder: Path, fault: Callable[[str], None] | None) -> None:
    """Host the ledger until killed."""
    async with team(folder, engine=False, fault=fault) as (host, _):
        await host.register(Ledger)
        await anyio.sleep_forever()


@contextmanager
def hosted(folder: Path, fault: Callable[[str], None]) -> Iterator[None]:
    """A process hosts the ledger; when the fault kills it, it is started again, without a fault."""
    read, write = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(write)
        faults: list[Callable[[str], None] | None] = [fault, None]
        worker = 0
        while faults:
            worker = os.fork()
            if worker == 0:
                anyio.run(serve, folder, faults[0])
                os._exit(1)
            faults.pop(0)
            while os.waitpid(worker, os.WNOHANG)[0] == 0:
                if select.select([read], [], [], 0.005)[0]:  # the test is over
                    os.kill(worker, signal.SIGKILL)
                    os.waitpid(worker, 0)
                    os._exit(0)
        os._exit(1)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        assert os.waitpid(supervisor, 0)[1] == 0


def test_an_outside_question_repeated_over_crashes_has_one_effect(tmp_path: Path) -> None:
    answers: list[int] = []

    async def ask(number: int) -> None:
        """What a careful client does: the same question, under the same id, until it is answered."""
        while True:
            try:
                async with connect(f"ipc://{tmp_path}/team.sock", timeout=2) as bus:
                    answers.append(await bus.ask("ledger/x", Take(number), id=f"question {number}"))
                    return
            except (ConnectionLost, NoSuchActor):
                await anyio.sleep(0.005)

    async def look() -> None:
        async with team(tmp_path, engine=False) as (host, _):
            assert (await stored_state(host, "ledger/x"))["taken"] == list(range(len(answers)))

    for number in range(12):
        with hosted(tmp_path, kill_at(8 + 3 * number)):
            anyio.run(ask, number)
    assert answers == list(range(1, 13))
    anyio.run(look)
