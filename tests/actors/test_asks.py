"""Questions: answers, deadlines, circles, and the typed errors for everything that goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from offbook.actors import (
    Actor,
    ActorFailed,
    ActorStopped,
    BadMessage,
    CycleError,
    DeadlineExceeded,
    InvalidAddress,
    InvalidRequest,
    MailboxFull,
    Message,
    MessageTooLarge,
    NoSuchActor,
    Request,
    UnknownMessageType,
    on,
)
from offbook.actors.testing import stored_state, team
from offbook.bus.errors import OffbookError


class Add(Request[int]):
    number: int


class Chain(Request[str]):
    to: list[str]


class Wait(Request[str]):
    pass


class Break(Request[str]):
    how: str


class Note(Message):
    text: str


class Counter(Actor):
    total: int = 0
    notes: list[str] = []
    made: ClassVar[int] = 0
    entered: ClassVar[anyio.Event]
    gate: ClassVar[anyio.Event]

    async def on_start(self) -> None:
        type(self).made += 1

    @on
    async def add(self, ask: Add) -> int:
        before = self.total
        await anyio.lowlevel.checkpoint()
        self.total = before + ask.number
        return self.total

    @on
    async def chain(self, ask: Chain) -> str:
        if not ask.to:
            return self.id
        return await self.ask(ask.to[0], Chain(ask.to[1:]))

    @on
    async def wait(self, ask: Wait) -> str:
        type(self).entered.set()
        await type(self).gate.wait()
        return "done"

    @on
    async def broken(self, ask: Break) -> str:
        self.total = 1000
        await self.tell(self.id, Note("never sent"))
        if ask.how == "raise":
            raise ValueError("no good")
        if ask.how == "exit":
            raise SystemExit(3)
        if ask.how == "type":
            return 5  # type: ignore[return-value]
        if ask.how == "large":
            return "x" * (17 << 20)
        if ask.how == "send large":
            await self.tell("counter/b", Note("x" * (64 << 20)))
        if ask.how == "group":
            async with anyio.create_task_group():
                raise ValueError("inside")
        return "fine"

    @on
    async def note(self, msg: Note) -> None:
        self.notes.append(msg.text)


class Needy(Actor):
    name: str

    @on
    async def chain(self, ask: Chain) -> str:
        return self.name


def fresh() -> None:
    Counter.made = 0
    Counter.entered = anyio.Event()
    Counter.gate = anyio.Event()


async def test_one_hundred_questions_make_one_actor_and_serial_turns(tmp_path: Path) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        answers: list[int] = []

        async def ask() -> None:
            answers.append(await host.ask("counter/new", Add(1)))

        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(ask)
        assert sorted(answers) == list(range(1, 101))
        assert Counter.made == 1


async def test_a_circle_of_questions_fails_at_once_and_names_the_chain(tmp_path: Path) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        for path in (["counter/a"], ["counter/b", "counter/a"], ["counter/b", "counter/c", "counter/a"]):
            with pytest.raises(CycleError) as caught:
                await host.ask("counter/a", Chain(path), timeout=20)
            assert caught.value.details["chain"] == ["counter/a", *path]
        assert await host.ask("counter/a", Chain(["counter/b", "counter/c"])) == "counter/c"


async def test_two_actors_that_ask_each_other_do_not_wait_for_ever(tmp_path: Path) -> None:
    class Meet(Request[str]):
        other: str

    class Hello(Request[str]):
        pass

    here: set[str] = set()
    both = anyio.Event()

    class Guest(Actor):
        @on
        async def meet(self, ask: Meet) -> str:
            here.add(self.key)
            if len(here) == 2:
                both.set()
            await both.wait()
            return await self.ask(ask.other, Hello())

        @on
        async def hello(self, ask: Hello) -> str:
            return self.key

    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Guest)
        results: list[Any] = []

        async def ask(one: str, other: str) -> None:
            try:
                results.append(await host.ask(f"guest/{one}", Meet(f"guest/{other}"), timeout=30))
            except OffbookError as exc:
                results.append(exc)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "a", "b")
            tasks.start_soon(ask, "b", "a")
        errors = [one for one in results if isinstance(one, Exception)]
        assert len(errors) == 1
        assert isinstance(errors[0], CycleError)


@pytest.mark.parametrize(
    ("to", "body", "error", "words"),
    [
        ("counter/a", {"type": "Nothing"}, UnknownMessageType, "it takes 'Add', 'Break'"),
        ("counter/a", {"type": "offbook.tick"}, UnknownMessageType, "takes no message of type"),
        ("counter/a", {"type": "Add", "number": "x"}, BadMessage, r"\$\.number"),
        ("counter/a", {"type": "Add"}, BadMessage, "number"),
        ("nobody/a", {"type": "Add", "number": 1}, NoSuchActor, "nobody"),
        ("needy/a", {"type": "Chain", "to": []}, NoSuchActor, "needs 'name' to begin"),
        ("counter/a\x00", {"type": "Add", "number": 1}, InvalidAddress, "printed"),
        ("counter/" + "x" * 10_000, {"type": "Add", "number": 1}, InvalidAddress, "longer than"),
        ("counter", {"type": "Add", "number": 1}, InvalidAddress, "kind/key"),
    ],
)
async def test_bad_questions_are_refused_before_any_work(
    tmp_path: Path, to: str, body: dict[str, Any], error: type[Exception], words: str
) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter, Needy)
        with pytest.raises(error, match=words):
            await host.bus.ask(to, body)
        assert host.turns == 0
        assert not len(host.stage)


@pytest.mark.parametrize("key", ["user@example.com", "../x", "a/b", "ключ", "x y", "k" * 500])
async def test_any_printable_key_is_legal(tmp_path: Path, key: str) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        assert await host.ask(f"counter/{key}", Chain([])) == f"counter/{key}"


@pytest.mark.parametrize("how", ["raise", "exit", "type", "group"])
async def test_a_failed_turn_is_rolled_back_and_its_asker_told(tmp_path: Path, how: str) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        await host.ask("counter/a", Add(1))
        with pytest.raises(ActorFailed, match="counter/a failed"):
            await host.ask("counter/a", Break(how))
        assert await host.ask("counter/a", Add(1)) == 2
        await host.idle()
        assert len(host.failures) == 1
        assert host.failures[0].actor == "counter/a"
        page = await host.actors()
        assert page.actors[0].mailbox == 0


@pytest.mark.parametrize("how", ["large", "send large"])
async def test_what_is_too_large_is_refused_in_the_handler(tmp_path: Path, how: str) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        with pytest.raises(ActorFailed, match="MessageTooLarge"):
            await host.ask("counter/a", Break(how))
        with pytest.raises(MessageTooLarge):
            await host.tell("counter/a", Note("x" * (64 << 20)))


async def test_a_deadline_ends_the_turn_and_rolls_it_back(tmp_path: Path) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        with pytest.raises(DeadlineExceeded):
            await host.ask("counter/a", Wait(), timeout=0.2)
        assert await host.ask("counter/a", Add(1)) == 1, "the actor is free again"
        for timeout in (0, -1, float("nan"), float("inf")):
            with pytest.raises(InvalidRequest):
                await host.ask("counter/a", Wait(), timeout=timeout)


async def test_a_cancelled_question_ends_its_turn(tmp_path: Path) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.ask, "counter/a", Wait())
            await Counter.entered.wait()
            tasks.cancel_scope.cancel()
        assert await host.ask("counter/a", Add(1)) == 1
        assert not host.failures, "nobody's fault"


async def test_stopping_answers_a_question_in_flight(tmp_path: Path) -> None:
    from offbook.bus import connect

    fresh()
    errors: list[OffbookError] = []
    async with anyio.create_task_group() as tasks, team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        async with connect(host.bus.endpoint) as bus:

            async def ask(type: str) -> None:
                try:
                    await bus.ask("counter/a", {"type": type, "number": 1})
                except OffbookError as exc:
                    errors.append(exc)

            tasks.start_soon(ask, "Wait")
            await Counter.entered.wait()
            tasks.start_soon(ask, "Add")
            while len(next(iter(host.stage)).mailbox) < 2:
                await anyio.lowlevel.checkpoint()
            await host.stop()
            while len(errors) < 2:
                await anyio.lowlevel.checkpoint()
    assert [type(error) for error in errors] == [ActorStopped, ActorStopped]


async def test_stopping_is_no_failure_of_the_turns_it_ends(tmp_path: Path) -> None:
    class Start(Message):
        pass

    class Asker(Actor):
        got: str = ""

        @on
        async def start(self, msg: Start) -> None:
            self.got = await self.ask("counter/a", Wait())

    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Asker, Counter)
        await host.tell("asker/a", Start())
        await Counter.entered.wait()
    assert not host.failures
    Counter.gate.set()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Asker, Counter)
        await host.idle()
        assert (await stored_state(host, "asker/a"))["got"] == "done"
        assert not host.failures
        assert not await host.dead_letters()


async def test_the_same_question_again_has_the_same_answer_and_one_effect(tmp_path: Path) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        answers = [await host.bus.ask("counter/a", Add(1), id="q1") for _ in range(3)]
        assert answers == [1, 1, 1]
        assert await host.ask("counter/a", Add(1), once="first") == 2
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        assert await host.bus.ask("counter/a", Add(1), id="q1") == 1
        assert await host.ask("counter/a", Add(1), once="first") == 2
        assert await host.ask("counter/a", Add(1)) == 3


async def test_a_full_mailbox_refuses_and_is_bounded(tmp_path: Path) -> None:
    fresh()
    async with team(tmp_path, engine=False, mailbox_limit=5) as (host, _):
        await host.register(Counter)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.ask, "counter/a", Wait())
            await Counter.entered.wait()
            for number in range(4):
                await host.tell("counter/a", Note(str(number)))
            with pytest.raises(MailboxFull, match="its limit is 5"):
                await host.tell("counter/a", Note("too many"))
            Counter.gate.set()
        await host.idle()
        await host.tell("counter/a", Note("4"))
        await host.idle()
        state = next(iter(host.stage))
        assert len(state.mailbox) == 0


async def test_an_actor_that_sends_faster_than_the_receiver_takes_waits(tmp_path: Path) -> None:
    class Flood(Message):
        count: int

    class Producer(Actor):
        @on
        async def flood(self, msg: Flood) -> None:
            for number in range(msg.count):
                await self.tell("counter/slow", Note(str(number)))

    fresh()
    async with team(tmp_path, engine=False, mailbox_limit=4) as (host, _):
        await host.register(Producer, Counter)
        await host.tell("producer/a", Flood(40))
        await host.idle()
        state = await stored_state(host, "counter/slow")
        assert state["notes"] == [str(number) for number in range(40)]
        assert not await host.dead_letters()


async def test_a_turn_may_not_be_used_after_its_end(tmp_path: Path) -> None:
    class Leak(Request[str]):
        pass

    class Leaky(Actor):
        kept: ClassVar[Any] = None

        @on
        async def leak(self, ask: Leak) -> str:
            type(self).kept = self
            return "x"

    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Leaky)
        await host.ask("leaky/a", Leak())
        with pytest.raises(InvalidRequest, match="outside of a turn"):
            await Leaky.kept.tell("leaky/b", Leak())
        with pytest.raises(InvalidRequest, match="only inside the handler"):
            await Leak().progress("x")


async def test_tells_of_one_sender_keep_their_order(tmp_path: Path) -> None:
    fresh()
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Counter)
        for number in range(50):
            await host.tell("counter/a", Note(str(number)))
        await host.idle()
        state = await stored_state(host, "counter/a")
        assert state["notes"] == [str(number) for number in range(50)]
