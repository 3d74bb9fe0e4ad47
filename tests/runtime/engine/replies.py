"""How the engine's tests compare replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from offbook.actors.lm import SamplingParams

Engine = Callable[..., Any]


def tokens(reply: Any, prompt: Any) -> list[int]:
    """The generated ids of a reply to ``prompt``, of which the engine was told nothing before."""
    return np.frombuffer(reply.appended, "<u4")[len(prompt) :].tolist()


def alone(engine: Engine, prompt: Any, architecture: str = "llama", **options: Any) -> list[int]:
    """What a fresh engine generates for ``prompt`` by itself."""
    return tokens(engine(architecture).run("alone", prompt, **options), prompt)


TOPS = 8


def greedy(count: int) -> SamplingParams:
    """Greedy, with log-probabilities: tiny models choose the same words for many a history."""
    return SamplingParams(max_tokens=count, logprobs=TOPS)


CLOSE = 0.05
"""Log-probabilities that differ by less are the same: chunks end elsewhere when others run, so sums differ
in their last bits, and one that crosses a step of the 4-bit codes moves a prediction by some hundredths."""


def assert_same(reply: Any, expected: Any) -> None:
    """Both replies to one prompt have the same ids, drawn from the same distributions.

    Where the two likeliest ids are a near-tie either may be drawn, and what follows is another text.
    """
    assert len(reply.logprobs) > 0
    mine, theirs = (np.frombuffer(r.appended, "<u4")[-len(r.logprobs) :] for r in (reply, expected))
    for step, (got, wanted) in enumerate(zip(reply.logprobs, expected.logprobs, strict=False)):
        near = [abs(value - wanted[name]) for name, value in got.items() if name in wanted]
        assert len(near) >= TOPS - 3  # some at the end may change places
        assert max(near) < CLOSE
        if mine[step] != theirs[step]:
            first, second = sorted(wanted.values())[-1:-3:-1]
            assert first - second < CLOSE
            return
    assert len(reply.logprobs) == len(expected.logprobs)


def idle(one: Any) -> bool:
    return bool(one.call(lambda: one.loop.scheduler.idle))


def cancel(one: Any, turn: Any) -> None:
    one.loop.post(lambda: one.loop.cancel(turn.job))
