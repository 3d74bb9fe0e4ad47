"""Agents: what the engine is asked, what is remembered, and what a failing engine or turn changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import msgspec
import pytest

from offbook.actors import (
    ActorFailed,
    Agent,
    ChatMessage,
    ContextTooLarge,
    DeadlineExceeded,
    EngineBusy,
    EngineFailed,
    FullContext,
    InvalidRequest,
    Message,
    ModelError,
    NoSuchActor,
    Request,
    Supervision,
    on,
)
from offbook.actors.lm import Forget, Generate, Prefetch
from offbook.actors.testing import FakeEngine, stored_state, stored_transcript, team


class Ask(Request[str]):
    text: str


class Stream(Request[str]):
    text: str
    early: bool = False


class See(Message):
    text: str


class Call(Request[Any]):
    method: str
    args: list[Any] = []


class Twice(Request[list[str]]):
    fail_once: bool = False


class Options(Request[str]):
    options: dict[str, Any]


class Number(Request[str]):
    number: int


class Plan(msgspec.Struct):
    steps: list[str]
    days: int


class Poet(Agent):
    supervision = Supervision(backoff=0.001)
    mood: str = "calm"
    failed: ClassVar[bool] = False
    told: ClassVar[list[str]] = []

    def persona(self) -> str:
        return f"I am {self.key}."

    @on
    async def ask_me(self, ask: Ask) -> str:
        return (await self.say(ask.text)).text

    @on
    async def stream(self, ask: Stream) -> str:
        async with self.speak(ask.text) as turn:
            async for piece in turn:
                await ask.progress(piece)
                if ask.early:
                    break
        return turn.text

    @on
    async def see(self, msg: See) -> None:
        await self.observe(msg.text)

    @on
    async def call(self, ask: Call) -> Any:
        if ask.method == "memory":
            return self.memory
        return await getattr(self, ask.method)(*ask.args)

    @on
    async def twice(self, ask: Twice) -> list[str]:
        texts = []

        async def one(text: str) -> None:
            texts.append((await self.say(text)).text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "first")
            tasks.start_soon(one, "second")
        return texts

    @on
    async def number(self, ask: Number) -> str:
        return (await self.say(f"number {ask.number}", max_tokens=10)).text

    @on
    async def options(self, ask: Options) -> str:
        text: str = (await self.say("x", **ask.options)).text
        return text


async def test_the_transcript_grows_by_what_was_read_and_said(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        assert await host.ask("poet/p", Ask("one")) == "You said: one"
        assert await host.ask("poet/p", Ask("two")) == "You said: two"
        assert await stored_transcript(host, "poet/p") == (
            "[system]I am p.[user]one[assistant]You said: one[user]two[assistant]You said: two"
        )
        assert engine.requests[1].memory.system == "I am p."
        assert engine.requests[1].messages == (ChatMessage("user", "two"),)
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        await host.ask("poet/p", Ask("three"))
        assert engine.requests[0].memory.transcript.startswith(b"[\0\0\0s\0\0\0")
        page = await host.actors()
        assert page.actors[0].tokens == len(await stored_transcript(host, "poet/p"))


async def test_saving_a_turn_writes_only_its_own_tokens(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, _):
        await host.register(Poet)
        for _ in range(5):
            await host.ask("poet/p", Ask("x" * 100))
        sizes = await host.journal.do(
            "t",
            lambda db: [row[0] for row in db.execute("SELECT LENGTH(tokens) FROM transcript ORDER BY turn")],
        )
        assert len(set(sizes[1:])) == 1


async def test_observed_messages_are_durable_and_read_with_the_next_prompt(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        await host.tell("poet/p", See("rain"))
        await host.tell("poet/p", See("wind"))
        await host.idle()
        assert not engine.requests
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        await host.ask("poet/p", Ask("so?"))
        await host.ask("poet/p", Ask("and?"))
        assert [m.content for m in engine.requests[0].messages] == ["rain", "wind", "so?"]
        assert [m.content for m in engine.requests[1].messages] == ["and?"]


async def test_after_observing_the_prompt_may_be_empty(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        with pytest.raises(InvalidRequest, match="nothing to answer"):
            await host.ask("poet/p", Ask(""))
        await host.tell("poet/p", See("rain"))
        await host.ask("poet/p", Ask(""))
        assert [m.content for m in engine.requests[0].messages] == ["rain"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1, got 0"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature must be zero"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": [""]}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"temprature": 1}, "no such option"),
    ],
)
async def test_impossible_values_are_refused_before_any_work(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        with pytest.raises(InvalidRequest, match=words):
            await host.ask("poet/p", Options(options))
        assert not engine.requests


async def test_pieces_are_streamed_and_the_whole_is_kept(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, _):
        await host.register(Poet)
        for early in (False, True):
            async with host.stream("poet/p", Stream("a b c", early=early)) as reply:
                pieces = [piece async for piece in reply]
            assert reply.result == "You said: a b c"
            assert "".join(pieces) == ("You " if early else "You said: a b c")
        assert await host.ask("poet/p", Stream("plain ask")) == "You said: plain ask"


async def test_two_calls_at_once_are_made_one_after_another(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        assert await host.ask("poet/p", Twice()) == ["You said: first", "You said: second"]
        assert engine.requests[1].memory.transcript.endswith(b"t\0\0\0")
        text = await stored_transcript(host, "poet/p")
        assert text.count("[user]") == text.count("[assistant]") == 2


async def test_typed_replies_carry_a_schema_and_come_back_as_values(tmp_path: Path) -> None:
    class Planner(Agent):
        plan: Plan | None = None

        @on
        async def think(self, ask: Ask) -> str:
            stop = "}" if ask.text == "cut" else ()
            self.plan = await self.say(ask.text, returns=Plan, stop=stop)
            return str(self.plan.days)

        @on
        async def date(self, ask: Stream) -> str:
            return str(await self.say(ask.text, returns=dict[int, str]))

    def answer(request: Generate) -> str:
        assert request.json_schema is not None
        return '{"steps": ["a"], "days": 3}' if request.messages[-1].content == "good" else '{"steps": ['

    async with team(tmp_path, answer=answer) as (host, engine):
        await host.register(Planner)
        assert await host.ask("planner/p", Ask("good")) == "3"
        schema = engine.requests[0].json_schema
        assert schema is not None
        assert "Plan" in str(schema)
        with pytest.raises(ModelError, match="not a Plan"):
            await host.ask("planner/p", Ask("bad"))
        asked = len(engine.requests)
        with pytest.raises(InvalidRequest, match="stop texts would cut a typed reply"):
            await host.ask("planner/p", Ask("cut"))
        with pytest.raises(InvalidRequest, match="keys that are no texts"):
            await host.ask("planner/p", Stream("when?"))
        assert len(engine.requests) == asked


async def test_a_failed_turn_leaves_no_trace_in_the_memory(tmp_path: Path) -> None:
    class Sorry(Agent):
        @on
        async def think(self, ask: Ask) -> str:
            await self.observe("something")
            await self.say(ask.text)
            raise ValueError("after the call")

        @on
        async def fine(self, ask: Stream) -> str:
            return (await self.say(ask.text)).text

    async with team(tmp_path) as (host, engine):
        await host.register(Sorry)
        with pytest.raises(ActorFailed):
            await host.ask("sorry/s", Ask("x"))
        await host.ask("sorry/s", Stream("y"))
        assert [m.content for m in engine.requests[-1].messages] == ["y"]
        assert await stored_transcript(host, "sorry/s") == "[user]y[assistant]You said: y"
        rows = await host.journal.do("t", lambda db: db.execute("SELECT COUNT(*) FROM calls").fetchone()[0])
        assert rows == 0


async def test_a_repeated_turn_takes_finished_calls_from_the_journal(tmp_path: Path) -> None:
    class Unsure(Agent):
        supervision = Supervision(backoff=0.001)
        heard: list[str] = []
        tries: ClassVar[int] = 0

        @on
        async def see(self, msg: See) -> None:
            first = await self.say("one", temperature=1.0)
            async with self.speak("two") as second:
                pieces = [piece async for piece in second]
            type(self).tries += 1
            if self.tries < 3:
                raise ValueError("not yet")
            third = await self.say(f"three {self.tries}")
            self.heard += [first.text, *pieces, third.text]

    async with team(tmp_path) as (host, engine):
        await host.register(Unsure)
        await host.tell("unsure/u", See("x"))
        await host.idle()
        assert [request.messages[-1].content for request in engine.requests] == ["one", "two", "three 3"]
        assert engine.requests[0].sampling.seed is not None
        state = await stored_state(host, "unsure/u")
        assert state["heard"] == ["You said: one", "You said: two", "You said: three 3"]


async def test_a_call_whose_engine_dies_waits_for_the_next_one(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        engine.hold()
        answers: list[str] = []

        async def ask() -> None:
            async with host.stream("poet/p", Stream("a b c")) as reply:
                answers.extend([piece async for piece in reply])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await engine.started.wait()
            engine.kill()
            again = FakeEngine(engine.endpoint)
            while True:
                try:
                    await tasks.start(again.run)
                    break
                except Exception:  # the broker has not noticed yet that the first one is gone
                    await anyio.lowlevel.checkpoint()
            while not answers:
                await anyio.sleep(0.001)
            await host.idle()
            again.kill()
        assert "".join(answers) == "You said: a b c"
        assert not host.failures


async def test_streamed_pieces_are_not_repeated_when_the_engine_fails_in_between(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        engine.pieces = 2
        engine.errors.append(EngineFailed("lost in the middle"))
        async with host.stream("poet/p", Stream("a b c")) as reply:
            pieces = [piece async for piece in reply]
        assert "".join(pieces) == "You said: a b c"
        assert len(engine.requests) == 2


async def test_an_engine_that_always_fails_fails_the_turn(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        engine.errors.extend([EngineFailed("broken")] * 3)
        with pytest.raises(ActorFailed, match="broken"):
            await host.ask("poet/p", Ask("x"))
        for error in (EngineBusy("queue full"), ContextTooLarge("never fits"), InvalidRequest("no")):
            engine.errors.append(error)
            with pytest.raises(type(error), match=str(error)):
                await host.ask("poet/p", Ask("x"))


async def test_without_an_engine_a_question_ends_at_its_deadline(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Poet)
        with pytest.raises(DeadlineExceeded):
            await host.ask("poet/p", Ask("x"), timeout=0.3)
    async with team(tmp_path, engine=False, engine_patience=0.0) as (host, _):
        await host.register(Poet)
        with pytest.raises(ActorFailed, match="no engine serves engine/main"):
            await host.ask("poet/p", Ask("x"))


async def test_a_cancelled_question_is_cancelled_at_the_engine(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        for request in (Ask("x"), Stream("x")):
            engine.hold()
            cancelled = engine.cancelled
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(host.ask, "poet/p", request)
                await engine.started.wait()
                tasks.cancel_scope.cancel()
            while engine.cancelled == cancelled:
                await anyio.sleep(0.001)
        engine.gate.set()
        assert await host.ask("poet/p", Ask("y")) == "You said: y"
        assert await stored_transcript(host, "poet/p") == "[system]I am p.[user]y[assistant]You said: y"


async def test_fork_rewind_and_forget(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        for text in ("one", "two", "three"):
            await host.ask("poet/p", Ask(text))
        assert await host.ask("poet/p", Call("fork", ["q"])) == "poet/q"
        with pytest.raises(InvalidRequest, match="poet/q exists already"):
            await host.ask("poet/p", Call("fork", ["q"]))
        whole = await stored_transcript(host, "poet/p")
        assert await stored_transcript(host, "poet/q") == whole
        await host.ask("poet/q", Ask("other way"))
        await host.ask("poet/q", Ask("further"))
        assert [request.memory.origin for request in engine.requests[-2:]] == ["poet/p", ""]
        assert await stored_transcript(host, "poet/p") == whole

        await host.ask("poet/p", Call("rewind", [1]))
        await host.ask("poet/p", Ask("TWO"))
        text = await stored_transcript(host, "poet/p")
        assert "one" in text
        assert "two" not in text
        assert "TWO" in text
        await host.ask("poet/p", Call("rewind", [3]))
        assert await stored_transcript(host, "poet/p") == whole, "forward again to a turn that was left"
        with pytest.raises(InvalidRequest, match="rewind to one from 0 to"):
            await host.ask("poet/p", Call("rewind", [99]))

        await host.ask("poet/p", Call("forget"))
        assert await stored_transcript(host, "poet/p") == ""
        while not any(isinstance(hint, Forget) for hint in engine.hints):
            await anyio.sleep(0.001)
        await host.ask("poet/p", Ask("anew"))
        assert (await stored_transcript(host, "poet/p")).startswith("[system]I am p.[user]anew")


async def test_the_state_handle_names_the_memory(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, _):
        await host.register(Poet)
        before = await host.ask("poet/p", Call("memory"))
        assert (before["tokens"], before["where"]) == (0, "cold")
        await host.ask("poet/p", Ask("x"))
        after = await host.ask("poet/p", Call("memory"))
        assert after["tokens"] == len(await stored_transcript(host, "poet/p"))
        assert after["fingerprint"] == "fake"
        located = await host.ask("poet/p", Call("locate"))
        assert located == after


async def test_a_message_for_an_agent_with_a_memory_starts_its_load(tmp_path: Path) -> None:
    async with team(tmp_path) as (host, engine):
        await host.register(Poet)
        await host.ask("poet/p", Ask("x"))
        assert not engine.hints
        await host.idle()
        await host.tell("poet/p", See("y"))
        while not engine.hints:
            await anyio.sleep(0.001)
        hint = engine.hints[0]
        assert isinstance(hint, Prefetch)
        assert hint.memory.agent == "poet/p"
        assert hint.memory.transcript


async def test_a_full_context_keeps_the_persona_and_the_recent_half(tmp_path: Path) -> None:
    async with team(tmp_path, limit=700) as (host, engine):
        await host.register(Poet)
        for number in range(12):
            await host.ask("poet/p", Options({"max_tokens": 10}))
            await host.ask("poet/p", Number(number))
        text = await stored_transcript(host, "poet/p")
        assert text.startswith("[system]I am p.")
        assert text.endswith("number 11")
        assert "number 0[" not in text
        assert max(len(request.memory.transcript) // 4 for request in engine.requests) < 1400
        transcript = await host.ask("poet/p", Call("memory"))
        assert transcript["tokens"] == len(text)


async def test_on_context_full_may_refuse_or_choose(tmp_path: Path) -> None:
    class Strict(Agent):
        @on
        async def think(self, ask: Ask) -> str:
            return (await self.say(ask.text, max_tokens=10)).text

        async def on_context_full(self, full: FullContext) -> bytes:
            assert full.limit == 200
            if full.tokens < 150:
                raise full.error
            return b""

    async with team(tmp_path, limit=200) as (host, _):
        await host.register(Strict)
        with pytest.raises(ContextTooLarge):
            await host.ask("strict/s", Ask("x" * 300))
        await host.ask("strict/s", Ask("x" * 70))
        await host.ask("strict/s", Ask("y" * 70))
        assert await stored_transcript(host, "strict/s") == f"[user]{'y' * 70}[assistant]You said: {'y' * 70}"


async def test_an_agent_that_needs_state_does_not_exist_until_spawned(tmp_path: Path) -> None:
    class Villager(Agent):
        trade: str

        @on
        async def think(self, ask: Ask) -> str:
            return self.trade

    async with team(tmp_path) as (host, _):
        await host.register(Villager)
        with pytest.raises(NoSuchActor, match="villager/zed"):
            await host.ask("villager/zed", Ask("x"))
        await host.spawn(Villager, "zed", trade="smith")
        assert await host.ask("villager/zed", Ask("x")) == "smith"
        await host.spawn(Villager, "zed")
        with pytest.raises(InvalidRequest, match="trade"):
            await host.spawn(Villager, "ann")
