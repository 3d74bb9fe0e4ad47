"""Random lives of a team in too small a pool: every answer is that of a cold run on plain caches.

KV stays at 16 bits here, so that a history that was restored, forked, rewound or read in other chunks
gives the same logits, but for rounding, as one that was not.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.actors.lm import SamplingParams
from offbook.bus.errors import Cancelled
from offbook.runtime.kv.scheme import KVScheme

AGENTS = ["ann", "bob", "cid", "dan", "eve"]
LONGEST = 1300

LIVES = int(os.environ.get("OFFBOOK_TEST_LIVES", "1"))
"""Lives of each architecture: more of them to look for rare faults."""


class Life:
    """What the agents have read and said, as their journal would have it: a history of committed turns."""

    def __init__(self, start: Callable[[], Any], oracle: Callable[[Any, Any], list[Any]], seed: int) -> None:
        self.start, self.oracle = start, oracle
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.engine = start()
        self.turns: dict[str, list[Any]] = {agent: [np.zeros(0, np.uint32)] for agent in AGENTS}
        self.origin = dict.fromkeys(AGENTS, "")

    def prompt(self, agent: str) -> Any:
        length = self.random.choice([1, 5, 30, 60, 130, 260, 400])
        return np.concatenate([self.turns[agent][-1], self.numbers.integers(3, 120, length, dtype=np.uint32)])

    def begin(self, agent: str) -> tuple[Any, Any]:
        if len(self.turns[agent][-1]) > LONGEST:
            self.turns[agent] = [np.zeros(0, np.uint32)]
        ids = self.prompt(agent)
        return ids, self.engine.job(
            agent,
            ids,
            sampling=SamplingParams(max_tokens=self.random.choice([1, 3, 6]), logprobs=8),
            origin=self.origin[agent],
        )

    def end(self, agent: str, ids: Any, turn: Any) -> None:
        transcript = np.frombuffer(turn.wait().appended, "<u4").astype(np.uint32)
        said = transcript[len(ids) :]
        for got, expected in zip(turn.result.logprobs, self.oracle(ids, said), strict=True):
            # Tiny models choose one word after many a history; how likely it was tells them apart.
            worst = max(abs(value - expected[ord(name)]) for name, value in got.items())
            assert worst < 2e-3, (agent, len(ids), turn.result.usage)
        self.turns[agent].append(transcript)

    # ---- what may happen

    def speak(self) -> None:
        agent = self.random.choice(AGENTS)
        ids, turn = self.begin(agent)
        self.engine.submit(turn)
        self.end(agent, ids, turn)

    def speak_together(self) -> None:
        agents = self.random.sample(AGENTS, self.random.randint(2, 4))
        begun = [(agent, *self.begin(agent)) for agent in agents]
        self.engine.submit(*(turn for _, _, turn in begun))
        for agent, ids, turn in begun:
            self.end(agent, ids, turn)

    def cancel(self) -> None:
        agent = self.random.choice(AGENTS)
        _, turn = self.begin(agent)
        self.engine.submit(turn)
        for _ in range(self.random.randint(0, 3)):
            self.engine.call(lambda: None)
        self.engine.loop.post(lambda: self.engine.loop.cancel(turn.job))
        with contextlib.suppress(Cancelled):  # A turn that was quicker is answered, to nobody.
            turn.wait()

    def rewind(self) -> None:
        turns = self.turns[self.random.choice(AGENTS)]
        del turns[self.random.randint(1, len(turns)) :]

    def fork(self) -> None:
        parent, child = self.random.sample(AGENTS, 2)
        self.turns[child] = list(self.turns[parent])
        self.origin[child] = parent

    def evict(self) -> None:
        self.engine.evict(*self.random.sample(AGENTS, 2), wait=self.random.random() < 0.5)

    def prefetch(self) -> None:
        agent = self.random.choice(AGENTS)
        if len(ids := self.turns[agent][-1]):
            self.engine.loop.post(lambda: self.engine.loop.prefetch((agent, ""), ids))

    def forget(self) -> None:
        agent = self.random.choice(AGENTS)
        self.engine.call(lambda: self.engine.loop.forget_agent(agent))

    def restart(self) -> None:
        self.engine.stop()
        self.engine = self.start()

    def step(self) -> None:
        names = ["speak"] * 5 + ["speak_together"] * 4 + ["cancel", "rewind", "fork"] * 2
        getattr(self, self.random.choice([*names, "evict", "prefetch", "forget", "restart"]))()


@pytest.mark.parametrize("seed", range(LIVES))
@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("llama", {}),
        ("gemma-96", {"use_native": False}),
        ("gemma-300", {}),
        ("gemma-300", {"host": False}),
        ("lfm2", {}),
        ("latent", {"use_native": False}),
    ],
    ids=["llama", "gemma-96-portable", "gemma-300", "gemma-300-device", "lfm2", "latent-portable"],
)
def test_whatever_happens_every_answer_is_that_of_a_cold_run(
    architecture: str,
    how: dict[str, bool],
    seed: int,
    engine: Callable[..., Any],
    oracle: Any,
    tiny: Callable[..., Any],
    tmp_path: Path,
) -> None:
    def cold(ids: Any, said: Any) -> list[Any]:
        reference = oracle(tiny(architecture))
        logits = [reference.feed(ids), *(reference.feed(said[i : i + 1]) for i in range(len(said) - 1))]
        return [row - np.log(np.exp(row).sum()) for row in logits]

    def start() -> Any:
        return engine(architecture, tmp_path, slots=11, pages=9, scheme=KVScheme.uniform(None), **how)

    life = Life(start, cold, seed)
    for _ in range(30):
        life.step()
        while life.engine.call(lambda: bool(life.engine.loop.memory.loading)):
            pass
        life.engine.check()


@pytest.mark.parametrize("seed", range(LIVES))
def test_in_a_storm_of_requests_every_turn_ends_and_every_answer_is_right(
    seed: int, engine: Callable[..., Any], oracle: Any, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """Arrivals, cancels, prefetches and changes of the budget, all at once, in a pool for about three."""
    one = engine("gemma-300", tmp_path, slots=10, pages=9, scheme=KVScheme.uniform(None))
    choose, numbers = random.Random(seed), np.random.default_rng(seed)
    histories = [numbers.integers(3, 120, 1400, dtype=np.uint32) for _ in range(12)]
    begun: list[tuple[Any, Any]] = []
    resizes: list[Any] = []
    for _ in range(45):
        agent = choose.randrange(12)
        ids = histories[agent][: choose.randint(1, 1200)]
        turn = one.job(
            f"a{agent}",
            ids,
            sampling=SamplingParams(max_tokens=choose.randint(1, 5), logprobs=8),
            priority=choose.randint(-1, 1),
        )
        begun.append((ids, turn))
        one.submit(turn)
        match choose.randrange(8):
            case 0 | 1:
                late = choose.choice(begun)[1].job
                one.loop.post(partial(one.loop.cancel, late))
            case 2 | 3:
                other = choose.randrange(12)
                one.loop.post(partial(one.loop.prefetch, (f"a{other}", ""), histories[other][:600]))
            case 4:
                resizes.append(one.loop.resize(choose.choice([110, 120, 128]) << 20))
            case 5:
                one.call(lambda: None)
    answered = 0
    for ids, turn in begun:
        with contextlib.suppress(Cancelled):
            said = np.frombuffer(turn.wait().appended, "<u4")[len(ids) :]
            reference = oracle(tiny("gemma-300"))
            for step, got in enumerate(turn.result.logprobs):
                row = reference.feed(said[step - 1 : step] if step else ids)
                row = row - np.log(np.exp(row).sum())
                assert max(abs(value - row[ord(name)]) for name, value in got.items()) < 2e-3
            answered += 1
    for resize in resizes:
        resize.result(60)
    while one.call(lambda: bool(one.loop.memory.loading)):
        pass
    one.check()
    assert answered > 20
