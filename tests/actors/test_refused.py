"""What a newcomer may get wrong about actors is refused early, by an error that names the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from offbook.actors import (
    Actor,
    ActorFailed,
    Agent,
    InvalidAddress,
    InvalidRequest,
    Request,
    Supervision,
    on,
)
from offbook.actors.actor import spec_of
from offbook.actors.reasons import reason_of
from offbook.actors.testing import team


class Ask(Request[str]):
    text: str = ""


class Do(Request[Any]):
    method: str
    args: list[Any] = []


class Poet(Agent):
    @on
    async def do(self, ask: Do) -> Any:
        return await getattr(self, ask.method)(*ask.args)


def subclass(base: type[Actor], **attributes: Any) -> type[Actor]:
    return type("Odd", (base,), attributes)


async def later(self: Agent) -> str:
    return "I am late."


@pytest.mark.parametrize(
    ("base", "attributes", "words"),
    [
        (Actor, {"supervision": 5}, r"Odd\.supervision is 5: it must be a Supervision"),
        (Actor, {"supervision": Supervision}, r"Odd\.supervision is <class"),
        (Actor, {"kind": "a/b"}, r"Odd: kind 'a/b': must be a letter.*; set kind = "),
        (Actor, {"kind": "has space"}, r"Odd: kind 'has space'"),
        (Actor, {"kind": ""}, r"Odd: kind ''"),
        (Actor, {"kind": 5}, r"Odd: kind 5"),
        (Actor, {"state_version": "2"}, r"Odd\.state_version is '2'"),
        (Actor, {"topics": 5}, r"Odd\.topics is 5"),
        (Actor, {"topics": ("news", 5)}, r"Odd\.topics is \('news', 5\)"),
        (Agent, {"persona": later}, r"Odd\.persona is async: it must be a plain method"),
        (Agent, {"persona": "a poet"}, r"Odd\.persona is 'a poet': it must be a plain method"),
        (Agent, {"salt": 5}, r"Odd\.salt is 5"),
        (Agent, {"pinned": "no"}, r"Odd\.pinned is 'no'"),
    ],
)
async def test_a_class_with_an_unusable_attribute_is_refused_when_registered(
    tmp_path: Path, base: type[Actor], attributes: dict[str, Any], words: str
) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        with pytest.raises(TypeError, match=words):
            await host.register(subclass(base, **attributes))


@pytest.mark.parametrize("wrong", [int, Actor, "poet", None, [Poet]])
async def test_what_is_no_class_of_actors_is_named(tmp_path: Path, wrong: Any) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        with pytest.raises(
            TypeError, match="is no class of actors: give a class derived from Actor or Agent"
        ):
            await host.register(wrong)
        with pytest.raises(TypeError, match="is no class of actors"):
            await host.spawn(wrong, "x")


def test_a_plain_actor_may_have_an_async_method_of_any_name() -> None:
    assert spec_of(subclass(Actor, persona=later, salt=5)).kind == "odd"


@pytest.mark.parametrize(
    "values",
    [{"max_tries": 0}, {"max_tries": "3"}, {"max_tries": True}, {"intensity": -1}, {"intensity": 1.5},
     {"backoff": "1"}, {"backoff_max": -1}, {"period": None}, {"period": float("nan")}],
)  # fmt: skip
def test_a_policy_that_could_not_be_followed_is_refused_where_it_is_made(values: dict[str, Any]) -> None:
    (name, value), *_ = values.items()
    with pytest.raises(InvalidRequest, match=f"Supervision: {name} must be .*, got {value!r}"):
        Supervision(**values)


def test_a_policy_of_very_many_tries_has_a_delay_for_each() -> None:
    assert Supervision(max_tries=10_000).delay(9_999, ValueError()) == Supervision().backoff_max


async def test_a_key_that_is_no_text_is_refused_by_spawn_and_fork(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        with pytest.raises(InvalidAddress, match="the key of a poet must be text, got 5"):
            await host.spawn(Poet, 5)  # type: ignore[arg-type]  # the point of the test
        await host.spawn(Poet, "p")
        with pytest.raises(InvalidAddress, match="the key of a poet must be text, got 5"):
            await host.ask("poet/p", Do("fork", [5]))
        with pytest.raises(InvalidAddress, match="is empty"):
            await host.ask("poet/p", Do("fork", [""]))
        assert [one.id for one in (await host.actors()).actors] == ["poet/p"]


@pytest.mark.parametrize("persona", [5, None, ["a poet"], "\ud800"])
async def test_a_persona_that_is_no_text_is_refused_at_the_call(tmp_path: Path, persona: Any) -> None:
    class Masked(Poet):
        def persona(self) -> str:
            text: str = persona
            return text

    async with team(tmp_path) as (host, engine):
        await host.register(Masked)
        for method, args in (("say", ["x"]), ("locate", [])):
            with pytest.raises(InvalidRequest, match=r"Masked\.persona\(\) "):
                await host.ask("masked/m", Do(method, args))
        assert not engine.requests


async def test_a_reply_in_pieces_says_why_it_ended(tmp_path: Path) -> None:
    class Speaker(Agent):
        @on
        async def speak_up(self, ask: Ask) -> str:
            async with self.speak("Plans?") as turn:
                pass
            return turn.finish_reason

    async with team(tmp_path) as (host, _):
        await host.register(Speaker)
        assert await host.ask("speaker/s", Ask()) == "stop"


async def test_the_errors_of_a_task_group_are_told_to_the_asker(tmp_path: Path) -> None:
    class Grouped(Actor):
        @on
        async def work(self, ask: Ask) -> str:
            async def fail() -> None:
                raise ValueError("no such trade")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fail)
            return "done"

    async with team(tmp_path, engine=False) as (host, _):
        await host.register(Grouped)
        with pytest.raises(ActorFailed, match=r"ExceptionGroup: .*: ValueError: no such trade"):
            await host.ask("grouped/g", Ask())


def test_a_reason_names_the_errors_in_a_group() -> None:
    assert reason_of(ValueError("x")) == "ValueError: x"
    inner = ExceptionGroup("inner", [KeyError("k")])
    assert reason_of(ExceptionGroup("outer", [ValueError("x"), inner])) == (
        "ExceptionGroup: outer (2 sub-exceptions): ValueError: x; KeyError: 'k'"
    )
    many = reason_of(ExceptionGroup("many", [ValueError(str(n)) for n in range(9)]))
    assert many.endswith("ValueError: 4; and 4 more")
