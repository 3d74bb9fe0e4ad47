"""What a request asks for, through the whole engine: seeds, stop strings, log-probabilities."""

from __future__ import annotations

from typing import Any

from offbook.actors.lm import SamplingParams
from tests.runtime.engine.replies import Engine, tokens


def test_a_seed_gives_the_same_words_whatever_the_neighbours(engine: Engine, ids: Any) -> None:
    prompt = ids(40)
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    one = engine()
    expected = tokens(one.run("a", prompt, sampling=sampling), prompt)
    mine = one.job("b", prompt, sampling=sampling)
    others = [
        one.job(f"o{i}", ids(20 + i, i), sampling=SamplingParams(max_tokens=20, temperature=1.5, seed=i))
        for i in range(3)
    ]
    one.submit(*others, mine)
    assert tokens(mine.wait(), prompt) == expected
    for other in others:
        other.wait()


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
