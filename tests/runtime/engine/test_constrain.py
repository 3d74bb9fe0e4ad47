"""A constraint completes every reply in time, whatever the logits are: they are as bad as can be here."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import numpy as np
import pytest
from msgspec import Meta

from offbook.actors.lm import SamplingParams
from offbook.actors.typed import schema_of
from offbook.bus.errors import InvalidRequest
from offbook.runtime.engine.constrain import Constraint, compile_schema
from offbook.runtime.engine.sampling import Sampler

# ---- what may be asked for


class Mood(enum.Enum):
    GLAD = "glad"
    SAD = "a very long word"


class Move(msgspec.Struct, tag=True):
    to: str


class Wait(msgspec.Struct, tag=True):
    seconds: Annotated[int, Meta(ge=1, le=600)]
    why: str | None = None


class Row(msgspec.Struct, array_like=True):
    number: int
    name: str = "none"


class Kin(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    children: list[Kin] = []


class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    first_name: str
    is_here: bool = False


class Plan(msgspec.Struct):
    goal: str
    mood: Mood
    steps: Annotated[list[Move | Wait], Meta(min_length=1)]
    odds: Annotated[float, Meta(ge=0, le=1)]
    notes: dict[str, str]
    leader: Kin | None
    more: Plan | None = None


class Point(NamedTuple):
    x: float
    y: float


class Loose(TypedDict, total=False):
    a: int
    b: str


def whole(**limits: Any) -> Any:
    return Annotated[int, Meta(**limits)]


def real(**limits: Any) -> Any:
    return Annotated[float, Meta(**limits)]


def text(**limits: Any) -> Any:
    return Annotated[str, Meta(**limits)]


TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "null": None,
    "anything": Any,
    "int range": whole(ge=3, le=40),
    "int open range": whole(gt=-3, lt=1000),
    "int multiple": whole(multiple_of=7),
    "int least": whole(ge=100_000),
    "float range": real(ge=0, le=1),
    "float open range": real(gt=0.5, lt=1.5),
    "float above": real(gt=0),
    "float multiple": real(multiple_of=0.25),
    "str lengths": text(min_length=5, max_length=9),
    "str pattern": text(pattern="^[a-c]{2,4}$"),
    "str holds": text(pattern="[0-9]x"),
    "str pattern and lengths": text(pattern="^(ab)*c?$", min_length=5, max_length=7),
    "str classes": text(pattern=r"^\w+@\d{2,}\.org$"),
    "literal": Literal["flee", "stay", 3, None],
    "enum": Mood,
    "optional": int | None,
    "choice": int | str | list[bool],
    "list": list[str],
    "list lengths": Annotated[list[bool], Meta(min_length=2, max_length=4)],
    "list of lists": list[list[list[int]]],
    "tuple": tuple[int, str, bool],
    "set": set[int],
    "dict": dict[str, int],
    "dict least": Annotated[dict[str, bool], Meta(min_length=1, max_length=2)],
    "dict literal": dict[Literal["a", "b"], float],
    "dict enum": dict[Mood, int],
    "dict pattern": dict[text(pattern="^k[0-9]$"), str],
    "dict lengths": dict[text(min_length=2, max_length=3), bool],
    "datetime": Annotated[datetime, Meta(tz=True)],
    "date": date,
    "time": Annotated[time, Meta(tz=True)],
    "time of day": Annotated[time, Meta(tz=False)],
    "duration": timedelta,
    "uuid": uuid.UUID,
    "decimal": Decimal,
    "bytes": bytes,
    "struct": Strict,
    "nested": Plan,
    "recursive": Kin,
    "tagged": Move | Wait,
    "list of tagged": list[Move | Wait],
    "array-like": Row,
    "named tuple": Point,
    "typed dict": Loose,
}

# ---- models that never come to an end

Logits = Callable[[int], np.ndarray[Any, Any]]
VOCABULARY = 300


def random_words(seed: int) -> Logits:
    """Weights of no meaning."""
    numbers = np.random.default_rng(seed)
    return lambda step: numbers.normal(size=VOCABULARY) * 3


def one_word(loaded: Any, word: str) -> Logits:
    """A model in a loop: one token above all, and nothing that ends anything."""
    logits = np.random.default_rng(len(word)).normal(size=VOCABULARY)
    for token in range(len(loaded.tokenizer.vocab)):
        spelling = loaded.tokenizer.decode([token])
        logits[token] += 50.0 * (spelling == word) - 20.0 * any(mark in spelling for mark in '"]}')
    return lambda step: logits


def opening(loaded: Any) -> Logits:
    """Begins one thing after the other."""
    logits = np.random.default_rng(0).normal(size=VOCABULARY)
    for token in range(len(loaded.tokenizer.vocab)):
        spelling = loaded.tokenizer.decode([token])
        logits[token] += 20.0 * (spelling[-1:] in ("[", "{", ",", '"', ":")) - 20.0 * ("}" in spelling)
    return lambda step: logits


def speak(constraint: Constraint, logits: Logits, most: int, loaded: Any, **sampling: Any) -> str:
    """A reply, drawn as the engine draws it."""
    sampler, tokens = Sampler(SamplingParams(max_tokens=most, **sampling)), []
    stream, said = constraint.detokenizer(), ""
    while len(tokens) < most and not constraint.finished:
        row = logits(len(tokens)).astype(np.float32)
        tokens.append(constraint.draw(sampler, row, tokens, most - len(tokens)))
        if tokens[-1] in loaded.eos_token_ids:
            break
        stream.add_token(tokens[-1])
        said += stream.last_segment
    stream.finalize()
    assert constraint.complete
    return said + stream.last_segment


def needed(schema: Any, loaded: Any) -> int:
    """Tokens of the shortest reply, as the refusal of less says."""
    try:
        compile_schema(schema, loaded, 1)
    except InvalidRequest as error:
        return int(error.details["needed"])
    return 1


@pytest.mark.parametrize("kind", TYPES)
def test_a_reply_decodes_however_few_tokens_it_may_have(bytes_model: Any, kind: str) -> None:
    wanted, schema = TYPES[kind], schema_of(TYPES[kind])
    least = needed(schema, bytes_model)
    for most in (least, least + 1, least + 3, least + 11, 70 + least):
        models = [
            (random_words(most), {"temperature": 1.0, "seed": most}),
            (random_words(most + 1), {"temperature": 2.0, "seed": 1, "top_p": 0.9}),
            (one_word(bytes_model, "9"), {}),
            (one_word(bytes_model, "the"), {"repetition_penalty": 1.2}),
            (opening(bytes_model), {"temperature": 0.7, "seed": 3, "top_k": 5}),
        ]
        for logits, sampling in models:
            said = speak(compile_schema(schema, bytes_model, most), logits, most, bytes_model, **sampling)
            msgspec.json.decode(said, type=wanted)


def test_what_a_model_says_stands_as_long_as_there_is_room(bytes_model: Any) -> None:
    """Only the end is ours."""
    most = 40
    constraint = compile_schema(schema_of(list[str]), bytes_model, most)
    said = speak(constraint, one_word(bytes_model, "the"), most, bytes_model)
    [only] = msgspec.json.decode(said, type=list[str])
    assert only.count("the") >= most - 4


@pytest.mark.parametrize("kind", [Plan, Kin, Any, list[list[int]]], ids=str)
def test_nesting_ends_before_a_reader_would_give_up(bytes_model: Any, kind: Any) -> None:
    most = 700
    logits = one_word(bytes_model, "[[") if kind is not Kin else opening(bytes_model)
    said = speak(compile_schema(schema_of(kind), bytes_model, most), logits, most, bytes_model)
    msgspec.json.decode(said, type=kind)


def test_no_space_is_ever_drawn_between_the_parts_of_a_reply(bytes_model: Any) -> None:
    for word in (" ", "\n", "\t"):
        said = speak(
            compile_schema(schema_of(Plan), bytes_model, 200), one_word(bytes_model, word), 200, bytes_model
        )
        plan = msgspec.json.decode(said, type=Plan)
        assert msgspec.json.encode(msgspec.json.decode(said)).decode() == said
        assert plan.mood in Mood


def test_the_refusal_of_too_few_tokens_says_how_many_it_takes(bytes_model: Any) -> None:
    least = needed(schema_of(Plan), bytes_model)
    with pytest.raises(InvalidRequest, match=f"max_tokens={least - 1}: .* takes {least} tokens"):
        compile_schema(schema_of(Plan), bytes_model, least - 1)
    compile_schema(schema_of(Plan), bytes_model, least)


def test_a_matcher_that_gives_up_leaves_a_whole_reply(bytes_model: Any) -> None:
    """llguidance has limits of its own; what is known to complete the reply needs it no more."""
    constraint = compile_schema(schema_of(Plan), bytes_model, 120)
    matcher, drawn = constraint._matcher, 0

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

        def is_error(self) -> bool:
            nonlocal drawn
            drawn += 1
            return drawn > 12

    constraint._matcher = Failing()
    said = speak(constraint, random_words(0), 120, bytes_model, temperature=1.0, seed=0)
    assert msgspec.json.decode(said, type=Plan)
    assert constraint._lost


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"$ref": "#/$defs/Missing"}, "Missing"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        (
            {
                "$ref": "#/$defs/Ever",
                "$defs": {
                    "Ever": {
                        "type": "object",
                        "properties": {"more": {"$ref": "#/$defs/Ever"}},
                        "required": ["more"],
                    }
                },
            },
            "no text was found",
        ),
        ({"type": "integer", "multipleOf": 50, "minimum": 3, "maximum": 9}, "cannot be enforced"),
    ],
)
def test_a_schema_that_no_grammar_is_made_of_is_refused(bytes_model: Any, schema: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot be enforced.*{says}|{says}"):
        compile_schema(schema, bytes_model, 200)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1}, '{"a":null}', "{}"),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, "4", "6"),
        ({"type": ["string", "null"], "maxLength": 1}, "null", '"ab"'),
        ({"type": "object", "required": ["k"], "additionalProperties": {"type": "null"}}, '{"k":null}', "{}"),
        ({"patternProperties": {"^k": {"type": "null"}}}, '{"ka":null}', '{"a":null}'),
        ({"enum": [1.5, {"a": [1]}]}, '{"a":[1]}', "1"),
    ],
)
def test_what_the_grammar_takes_is_of_the_schema(bytes_model: Any, schema: Any, good: str, bad: str) -> None:
    for reply, expected in ((good, True), (bad, False)):
        constraint = compile_schema(schema, bytes_model, 60)
        tokens = bytes_model.tokenizer.encode(reply)
        taken = all(constraint._take(token, 60) for token in tokens)
        assert (taken and constraint.complete) is expected


def test_a_tokenizer_of_another_kind_is_refused(tiny: Callable[..., Any], loaded_like: Any) -> None:
    with pytest.raises(InvalidRequest, match="fast tokenizer"):
        compile_schema({"type": "boolean"}, loaded_like(tiny("llama")), 9)
