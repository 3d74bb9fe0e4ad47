"""Typed replies through the engine: whatever a random model would say, what it says is of the schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest

from offbook.actors.lm import SamplingParams
from offbook.bus.errors import Cancelled, EngineFailed
from offbook.runtime.engine.constrain import compile_schema
from tests.runtime.engine.replies import Engine, cancel, idle

PROMPT = np.arange(40, 70)


class Step(msgspec.Struct, tag="step"):
    what: Annotated[str, msgspec.Meta(min_length=1)]
    minutes: Annotated[int, msgspec.Meta(ge=1, le=600)]


class Pause(msgspec.Struct, tag="pause"):
    why: str | None = None


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    urgent: bool
    goal: str
    steps: list[Step | Pause]
    odds: Annotated[float, msgspec.Meta(ge=0, le=1)]
    mood: Literal["glad", "sad"] | None
    notes: dict[str, int]


KINDS: dict[str, Any] = {"plan": Plan, "text": str, "number": int, "list": list[str], "union": Step | Pause}


def typed(one: Any, agent: str, kind: Any, **sampling: Any) -> Any:
    """A job whose reply is of a type."""
    params = SamplingParams(**sampling)
    constraint = compile_schema(msgspec.json.schema(kind), one.loaded, params.max_tokens)
    return one.job(agent, PROMPT, sampling=params, constraint=constraint, ignore_end=False)


@pytest.mark.parametrize("most", [60, 77, 160])
def test_a_reply_is_of_its_type_every_time(engine: Engine, bytes_model: Any, most: int) -> None:
    one = engine(bytes_model.model, loaded=bytes_model)
    samplings: list[dict[str, Any]] = [{}, *({"temperature": 1.0 + seed, "seed": seed} for seed in range(3))]
    turns = [
        (kind, typed(one, f"{name} {i}", kind, max_tokens=most, **sampling))
        for name, kind in KINDS.items()
        for i, sampling in enumerate(samplings)
    ]
    one.submit(*(turn for _, turn in turns))
    for kind, turn in turns:
        reply = turn.wait()
        assert reply.finish_reason == "stop"
        assert reply.usage.generated_tokens <= most
        assert "".join(turn.pieces) == reply.text
        msgspec.json.decode(reply.text, type=kind)


def test_a_typed_reply_is_the_same_whatever_its_neighbours(engine: Engine, bytes_model: Any) -> None:
    one = engine(bytes_model.model, loaded=bytes_model)
    sampling = {"max_tokens": 90, "temperature": 1.0, "seed": 5}
    expected = one.submit(typed(one, "alone", Plan, **sampling)).wait().text
    mine = typed(one, "mine", Plan, **sampling)
    others = [typed(one, f"o{i}", list[str], max_tokens=30, temperature=2.0) for i in range(3)]
    one.submit(*others, mine)
    assert mine.wait().text == expected


def test_unconstrained_rows_of_the_same_batch_say_what_they_say_alone(
    engine: Engine, bytes_model: Any
) -> None:
    one, prompt = engine(bytes_model.model, loaded=bytes_model), np.arange(50, 90)
    expected = one.run("alone", prompt, max_tokens=12).text
    free = one.job("free", prompt, max_tokens=12)
    plan = typed(one, "typed", Plan, max_tokens=100)
    one.submit(plan, free)
    assert free.wait().text == expected
    assert msgspec.json.decode(plan.wait().text, type=Plan)


def test_a_turn_after_a_typed_reply_goes_on_from_it(engine: Engine, bytes_model: Any) -> None:
    one = engine(bytes_model.model, loaded=bytes_model)
    reply = one.submit(typed(one, "a", Plan, max_tokens=80)).wait()
    transcript = np.frombuffer(reply.appended, "<u4")
    usage = one.run("a", np.concatenate([transcript, PROMPT]), max_tokens=2).usage
    assert usage.source == "hot"
    assert usage.reused_tokens >= len(transcript) - 1
    assert json.loads(bytes_model.tokenizer.decode(transcript[len(PROMPT) :].tolist())) == json.loads(
        reply.text
    )


def test_log_probabilities_of_a_typed_reply_are_the_models_own(engine: Engine, bytes_model: Any) -> None:
    one = engine(bytes_model.model, loaded=bytes_model)
    reply = one.submit(typed(one, "a", Plan, max_tokens=70, logprobs=2)).wait()
    assert [len(tops) for tops in reply.logprobs] == [2] * reply.usage.generated_tokens


def test_a_typed_reply_cancelled_in_the_middle_is_over_within_a_step(
    engine: Engine, gate: Callable[..., Any], bytes_model: Any
) -> None:
    one = engine(bytes_model.model, loaded=bytes_model)
    held = gate(one, "decode")
    turn = one.submit(typed(one, "a", Plan, max_tokens=160))
    for _ in range(5):
        held.wait()
        held.step()
    held.wait()
    cancel(one, turn)
    held.open()
    with pytest.raises(Cancelled):
        turn.wait()
    assert len(turn.job.generated) <= 7
    assert idle(one)
    one.evict("a")
    assert one.used() == (0, 0)


def test_a_constraint_that_fails_fails_alone(engine: Engine, bytes_model: Any) -> None:
    one = engine(bytes_model.model, loaded=bytes_model)
    bad, good = (typed(one, name, Plan, max_tokens=80) for name in ("bad", "good"))

    def broken(*args: Any) -> int:
        raise RuntimeError("no such token")

    bad.job.constraint.draw = broken
    one.submit(bad, good)
    with pytest.raises(EngineFailed, match="no such token"):
        bad.wait()
    assert msgspec.json.decode(good.wait().text, type=Plan)
