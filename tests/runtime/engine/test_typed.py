"""Typed replies: whatever a random model would say, what it says is of the schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offbook.actors.lm import SamplingParams
from offbook.bus.errors import InvalidRequest
from offbook.runtime.engine.constrain import compile_schema


@pytest.fixture(scope="session")
def bytes_model(tiny: Callable[..., Any], loaded_like: Any) -> Any:
    """A tiny model whose tokens are bytes, with a tokenizer of the usual kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    end = fast.convert_tokens_to_ids("<end>")
    return loaded_like(
        tiny("llama", vocab_size=300),
        tokenizer=TokenizerWrapper(fast, eos_token_ids=[end]),
        eos_token_ids=frozenset({end}),
    )


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    urgent: bool
    steps: Annotated[list[Annotated[str, msgspec.Meta(max_length=8)]], msgspec.Meta(max_length=3)]
    mood: Literal["glad", "sad"] | None


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": 12, **more}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "string": (string(), lambda x: isinstance(x, str)),
    "boolean": ({"type": "boolean"}, lambda x: isinstance(x, bool)),
    "integer range": ({"type": "integer", "minimum": 3, "maximum": 40}, lambda x: 3 <= x <= 40),
    "enum": ({"enum": ["flee", "stay", 3, None]}, lambda x: x in ("flee", "stay", 3, None)),
    "const": ({"const": "yes"}, lambda x: x == "yes"),
    "pattern": (string(pattern="^[a-c]{2,4}$"), lambda x: 2 <= len(x) <= 4 and set(x) <= set("abc")),
    "array": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        lambda x: 2 <= len(x) <= 4 and all(isinstance(i, bool) for i in x),
    ),
    "object": (
        closed(name=string(), old={"type": "boolean"}),
        lambda x: set(x) == {"name", "old"} and isinstance(x["name"], str),
    ),
    "nested": (
        closed(plan=closed(steps={"type": "array", "items": string(), "maxItems": 2})),
        lambda x: len(x["plan"]["steps"]) <= 2,
    ),
    "any of": (
        {"anyOf": [closed(go={"const": True}), {"type": "null"}]},
        lambda x: x is None or x == {"go": True},
    ),
    "reference": (
        {"$ref": "#/$defs/Mood", "$defs": {"Mood": closed(mood={"enum": ["glad", "sad"]})}},
        lambda x: x["mood"] in ("glad", "sad"),
    ),
    "optional": (
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False},
        lambda x: x in ({}, {"a": True}, {"a": False}),
    ),
}


def reply(engine: Any, schema: dict[str, Any], agent: str, **sampling: Any) -> str:
    turn = engine.start(
        agent,
        np.arange(10, 40),
        sampling=SamplingParams(max_tokens=200, **sampling),
        constraint=compile_schema(schema, engine.loaded, 200),
        ignore_end=False,
    )
    done = turn.wait()
    assert done.finish_reason == "stop"
    return str(done.text)


@pytest.mark.parametrize("feature", SCHEMAS)
def test_a_reply_is_of_its_schema_every_time(
    engine: Callable[..., Any], bytes_model: Any, feature: str
) -> None:
    schema, valid = SCHEMAS[feature]
    one = engine(bytes_model.model, loaded=bytes_model)
    for seed in range(3):
        text = reply(one, schema, f"a{seed}", temperature=1.0, seed=seed)
        assert valid(json.loads(text)), text
    assert valid(json.loads(reply(one, schema, "greedy")))


def test_a_struct_comes_back_from_its_own_schema(engine: Callable[..., Any], bytes_model: Any) -> None:
    one = engine(bytes_model.model, loaded=bytes_model)
    schema = msgspec.json.schema(Plan)
    text = reply(one, schema, "a", temperature=1.0, seed=5)
    assert isinstance(msgspec.json.decode(text, type=Plan), Plan)


def test_unconstrained_rows_of_the_same_batch_say_what_they_say_alone(
    engine: Callable[..., Any], bytes_model: Any
) -> None:
    one, prompt = engine(bytes_model.model, loaded=bytes_model), np.arange(50, 90)
    expected = one.run("alone", prompt, max_tokens=12).text
    free = one.job("free", prompt, max_tokens=12)
    typed = one.job(
        "typed",
        np.arange(10, 40),
        sampling=SamplingParams(max_tokens=100),
        constraint=compile_schema(SCHEMAS["object"][0], one.loaded, 100),
    )
    one.submit(typed, free)
    assert free.wait().text == expected
    assert SCHEMAS["object"][1](json.loads(typed.wait().text))


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"type": "string", "pattern": "("}, {"$ref": "#/$defs/Missing"}],
    ids=["type", "pattern", "reference"],
)
def test_a_schema_that_cannot_be_enforced_is_refused(bytes_model: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="schema cannot be enforced"):
        compile_schema(schema, bytes_model, 200)


def test_a_tokenizer_of_another_kind_is_refused(tiny: Callable[..., Any], loaded_like: Any) -> None:
    with pytest.raises(InvalidRequest, match="fast tokenizer"):
        compile_schema({"type": "boolean"}, loaded_like(tiny("llama")), 9)
