"""Asks for typed replies over a real bus: answered with what decodes, or refused before any work."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from offbook.actors.lm import ChatMessage, Generate, Generated, MemoryRef, SamplingParams
from offbook.actors.typed import schema_of
from offbook.bus.errors import InvalidRequest
from tests.runtime.engine.replies import Engine
from tests.runtime.engine.serving import ENGINE, serving


class Answer(msgspec.Struct):
    text: str
    sure: bool


def ask(schema: dict[str, Any], **sampling: Any) -> Generate:
    return Generate(
        memory=MemoryRef(agent="villager/ann"),
        messages=(ChatMessage("user", "Is the mill open?"),),
        sampling=SamplingParams(**sampling),
        json_schema=schema,
    )


@pytest.mark.parametrize(
    ("request_", "says", "details"),
    [
        (ask(schema_of(Answer), max_tokens=3), "max_tokens=3: the shortest reply", {"needed"}),
        (ask(schema_of(Answer), stop=("}",)), "stop", set()),
        (ask({"type": "object", "properties": {"a": {"not": {}}}}), r"reply\.a: not", {"feature", "where"}),
        (ask({"type": "string", "pattern": "(?<=a)b"}), "look-behind", set()),
    ],
    ids=["short", "stop", "feature", "pattern"],
)
async def test_what_cannot_be_typed_is_refused_before_any_work(
    engine: Engine, bytes_model: Any, request_: Generate, says: str, details: set[str]
) -> None:
    harness = engine(bytes_model.model, loaded=bytes_model)
    async with serving(harness) as bus:
        with pytest.raises(InvalidRequest, match=says) as caught:
            await bus.ask(ENGINE, request_)
        assert details <= set(caught.value.details)
        assert harness.counters.get("prefilled_tokens", 0) == 0
        assert "turns" not in harness.counters


async def test_as_many_tokens_as_the_refusal_asks_for_are_enough(engine: Engine, bytes_model: Any) -> None:
    schema = schema_of(Answer)
    async with serving(engine(bytes_model.model, loaded=bytes_model)) as bus:
        with pytest.raises(InvalidRequest) as caught:
            await bus.ask(ENGINE, ask(schema, max_tokens=1))
        for more in (0, 1, 20):
            request = ask(
                schema, max_tokens=caught.value.details["needed"] + more, temperature=1.0, seed=more
            )
            reply = await bus.ask(ENGINE, request, returns=Generated)
            assert reply.finish_reason == "stop"
            assert msgspec.json.decode(reply.text, type=Answer)


async def test_a_typed_reply_streams_as_it_is_said(engine: Engine, bytes_model: Any) -> None:
    async with serving(engine(bytes_model.model, loaded=bytes_model)) as bus:
        pieces = []
        async with bus.stream(ENGINE, ask(schema_of(Answer), max_tokens=60)) as reply:
            async for piece in reply:
                pieces.append(piece["text"])
        assert "".join(pieces) == reply.result["text"]
        assert len(pieces) > 5
