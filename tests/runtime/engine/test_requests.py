"""What a request asks for, through the whole engine: each value changes what it says it changes."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from offbook.actors.lm import SamplingParams
from tests.runtime.engine.replies import Engine, tokens


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.9999}, {"temperature": 1e-6}])
def test_a_draw_from_the_likeliest_token_alone_is_greedy(
    engine: Engine, ids: Any, narrow: dict[str, Any]
) -> None:
    one, prompt = engine(), ids(40)
    expected = tokens(one.run("a", prompt, max_tokens=12), prompt)
    wide = {"max_tokens": 12, "temperature": 2.0, "seed": 1}
    drawn = [
        one.run(f"{i}", prompt, sampling=SamplingParams(**wide | more)) for i, more in enumerate(({}, narrow))
    ]
    assert [tokens(reply, prompt) == expected for reply in drawn] == [False, True]


def test_a_repetition_penalty_keeps_words_from_coming_back(engine: Engine, ids: Any) -> None:
    one, prompt = engine(), ids(40)

    def most_repeated(agent: str, **penalty: Any) -> int:
        reply = one.run(agent, prompt, sampling=SamplingParams(max_tokens=40, **penalty))
        return Counter(tokens(reply, prompt)).most_common(1)[0][1]

    free = most_repeated("a")
    assert free > 3
    assert most_repeated("b", repetition_penalty=5.0, repetition_context=80) < free
    assert most_repeated("c", repetition_penalty=5.0, repetition_context=0) == free


@pytest.mark.parametrize("count", [1, 2, 17])
def test_there_are_never_more_tokens_than_asked_for(engine: Engine, ids: Any, count: int) -> None:
    reply = engine().run("a", ids(20), max_tokens=count)
    assert (len(tokens(reply, ids(20))), reply.finish_reason) == (count, "length")


@pytest.mark.parametrize("length", [40, 96, 97, 128, 300, 575])
def test_a_seed_gives_the_same_words_whatever_the_neighbours(engine: Engine, ids: Any, length: int) -> None:
    """Also where the prompt is read in pieces while others decode and short prompts come."""
    prompt = ids(length)
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=7, logprobs=3)
    one = engine()
    expected = one.run("a", prompt, sampling=sampling)
    neighbours = [
        one.start(f"o{i}", ids(20 + i, i), sampling=SamplingParams(max_tokens=60, temperature=1.5, seed=i))
        for i in range(3)
    ]
    mine = one.start("b", prompt, salt="another", sampling=sampling)
    neighbours += [one.start(f"p{i}", ids(30, 50 + i), max_tokens=30) for i in range(3)]
    reply = mine.wait()
    assert tokens(reply, prompt) == tokens(expected, prompt)
    assert reply.logprobs == expected.logprobs
    for neighbour in neighbours:
        neighbour.wait()


def test_turns_without_a_seed_differ(engine: Engine, ids: Any) -> None:
    one, prompt = engine(), ids(40)
    sampling = SamplingParams(max_tokens=24, temperature=2.0)
    assert len({one.run(f"a{i}", prompt, sampling=sampling).text for i in range(4)}) > 1


def test_a_stop_string_split_over_tokens_never_reaches_the_stream(engine: Engine, ids: Any) -> None:
    one, prompt = engine(), ids(40)
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
    text = one.run("a", prompt, sampling=sampling).text
    stop = text[20:24]
    turn = one.start(
        "b", prompt, sampling=SamplingParams(max_tokens=60, temperature=1.0, seed=3, stop=(stop, "never"))
    )
    reply = turn.wait()
    assert reply.finish_reason == "stop"
    assert reply.text == text[: text.index(stop)]
    assert "".join(turn.pieces) == reply.text


def test_logprobs_come_with_every_token(engine: Engine, ids: Any) -> None:
    reply = engine().run("a", ids(40), sampling=SamplingParams(max_tokens=3, logprobs=4))
    assert [len(tops) for tops in reply.logprobs] == [4, 4, 4]
    assert all(list(tops.values()) == sorted(tops.values(), reverse=True) for tops in reply.logprobs)


@pytest.mark.parametrize("values", [{}, {"temperature": 2.0, "top_k": 2, "repetition_penalty": 3.0}])
def test_logprobs_are_the_models_own(engine: Engine, ids: Any, values: dict[str, Any]) -> None:
    """Also where the draw is made from something else than the model's distribution."""
    one, prompt = engine(), ids(40)
    [tops] = one.run("a", prompt, sampling=SamplingParams(max_tokens=1, logprobs=5, **values)).logprobs
    logits = one.call(lambda: np.array(one.loop.model(mx.array(prompt)[None])[0, -1], np.float64))
    own = logits - np.log(np.exp(logits).sum())
    # The KV is kept in bfloat16.
    assert np.allclose(list(tops.values()), np.sort(own)[:-6:-1], atol=0.03)
    assert np.allclose([own[ord(char)] for char in tops], list(tops.values()), atol=0.03)


def test_a_turn_with_an_earlier_deadline_goes_first(engine: Engine, gate: Any, ids: Any) -> None:
    one = engine()
    held = gate(one, "prefill")
    blocker = one.start("blocker", ids(600, 9), max_tokens=1)
    held.wait()
    now = time.monotonic()
    late, soon, never = (
        one.job(name, ids(600, i), max_tokens=1, **deadline)
        for i, (name, deadline) in enumerate(
            {"late": {"deadline": now + 900}, "soon": {"deadline": now + 300}, "never": {}}.items()
        )
    )
    one.submit(never, late, soon)
    held.open()
    for turn in (blocker, never, late, soon):
        turn.wait()
    assert soon.order < late.order < never.order
