"""Typed replies of the embedded model: small enough to ramble on, and whole every time."""

from __future__ import annotations

import enum
from datetime import date
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
from msgspec import Meta

from offbook.actors.lm import ChatMessage, SamplingParams
from offbook.actors.typed import schema_of
from offbook.bus.errors import InvalidRequest
from offbook.runtime.engine.constrain import compile_schema
from tests.runtime.engine.replies import Engine

pytestmark = pytest.mark.model

MIB = 1 << 20


class Trade(enum.Enum):
    BAKER = "baker"
    MILLER = "miller"
    FERRYMAN = "ferryman"


class Person(msgspec.Struct):
    name: Annotated[str, Meta(min_length=2, max_length=30)]
    age: Annotated[int, Meta(ge=0, le=120)]
    trade: Trade
    likes: list[str] = []
    spouse: Person | None = None


class Buy(msgspec.Struct, tag="buy"):
    what: str
    price: Annotated[float, Meta(gt=0, lt=1000)]


class Go(msgspec.Struct, tag="go"):
    where: Literal["mill", "river", "market"]
    when: date | None = None


class Day(msgspec.Struct):
    thoughts: str
    plan: Annotated[list[Buy | Go], Meta(min_length=1)]
    feelings: dict[str, Annotated[float, Meta(ge=0, le=1)]]
    code: Annotated[str, Meta(pattern="^[A-Z]{3}-[0-9]{2}$")]


ASKED: dict[str, tuple[Any, str]] = {
    "person": (Person, "Describe the miller of the village."),
    "day": (Day, "Tell me about your day, in every detail, and then say it again."),
    "list": (list[str], "Count from one to one hundred."),
    "text": (str, "Tell me a very long story."),
    "number": (float, "How much is a loaf of bread?"),
    "choice": (Buy | Go, "What do you do next?"),
    "map": (dict[str, list[int]], "Give the lucky numbers of each person in the village."),
}


def least(schema: Any, loaded: Any) -> int:
    try:
        compile_schema(schema, loaded, 1)
    except InvalidRequest as error:
        return int(error.details["needed"])
    return 1


@pytest.mark.parametrize("room", [0, 9, 60])
def test_a_typed_reply_is_whole_however_little_room_there_is(engine: Engine, smollm2: Any, room: int) -> None:
    one = engine(smollm2.model, loaded=smollm2, budget=900 * MIB, slots=48, pages=100)
    turns = []
    for name, (kind, question) in ASKED.items():
        schema, message = schema_of(kind), ChatMessage("user", question)
        ids = one.dialogue.prompt("You live in a village.", np.zeros(0, np.uint32), [message])
        most = least(schema, smollm2) + room
        for sampling in (
            {},
            {"temperature": 0.8, "seed": room},
            {"temperature": 1.5, "top_p": 0.9, "seed": 1},
        ):
            params = SamplingParams(max_tokens=most, **sampling)
            constraint = compile_schema(schema, smollm2, most)
            turn = one.job(
                f"{name} {len(turns)}", ids, sampling=params, constraint=constraint, ignore_end=False
            )
            turns.append((kind, turn))
    one.submit(*(turn for _, turn in turns))
    for kind, turn in turns:
        reply = turn.wait(300)
        assert reply.finish_reason == "stop"
        msgspec.json.decode(reply.text, type=kind)
