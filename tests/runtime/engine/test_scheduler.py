"""Who is read next, and how much of it: the policy alone, with an imagined clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offbook.runtime.engine.job import Phase
from offbook.runtime.engine.scheduler import LARGEST_CHUNK, MIN_CHUNK, SHORT_PREFILL, Scheduler, chunk_tokens

ROOM = 127


class Prompt(SimpleNamespace):
    """As much of a job as the policy looks at."""

    @property
    def remaining(self) -> Any:
        return self.ids[self.read :]

    @property
    def unread(self) -> int:
        return len(self.remaining) + (self.early if self.read == self.begun else 0)


def job(order: int, tokens: int, phase: Phase = Phase.PREFILL, *, read: int = 0, early: int = 0) -> Any:
    ids, known = np.zeros(read + tokens, np.uint32), {"key": (str(order), ""), "phase": phase}
    return Prompt(order=(order,), ids=ids, begun=read, read=read, early=early, **known)


class Machine:
    """Steps that take a time of their own: a decode step, and each token read beside one or apart."""

    def __init__(self, *, alone: float, token: float = 0.002) -> None:
        self.scheduler = Scheduler(None, None)  # type: ignore[arg-type]
        self.alone, self.token = alone, token
        self.now, self.spoken, self.chunks = 0.0, 0, list[int]()
        self.gaps: list[float] = []

    def turn(self) -> list[tuple[Any, int]]:
        """What the engine's loop does in one turn."""
        began = self.now
        rows = len(self.scheduler.decoding())
        chunk = self.scheduler.prefill(workspace=1 << 30, score_bytes=1, room=max(0, ROOM - rows))
        count = sum(count for _, count in chunk)
        if count:
            self.chunks.append(count)
        if count and rows and count <= ROOM - rows:
            self.now += self.alone + count * self.token
            self.scheduler.observe_both(self.alone + count * self.token)
        else:
            if count:
                self.now += count * self.token
                self.scheduler.observe_prefill(count, count * self.token)
            if rows:
                self.now += self.alone
                self.scheduler.observe_decode(self.alone)
        self.spoken += rows
        self.gaps.append(self.now - began)
        for one, count in chunk:
            one.read += count
            if not len(one.remaining):
                self.scheduler.running.remove(one)
        return chunk


@pytest.mark.parametrize("alone", [0.004, 0.012, 0.05])
@pytest.mark.parametrize("token", [0.0003, 0.002, 0.01])
def test_rows_keep_half_their_rate_while_a_long_prompt_is_read(alone: float, token: float) -> None:
    machine = Machine(alone=alone, token=token)
    machine.scheduler.running = [job(0, 0, Phase.DECODE), job(1, 4000)]
    while len(machine.scheduler.running) > 1:
        machine.turn()
    assert machine.spoken * alone >= 0.5 * machine.now
    # ... and the prompt has its share too, of what is more than a step.
    assert machine.spoken * alone <= 0.75 * machine.now or alone > LARGEST_CHUNK["cpu"] * token / 2
    # The stated bound on a row's wait.
    assert max(machine.gaps) <= alone + LARGEST_CHUNK["cpu"] * token + 1e-9


def test_where_a_prompt_is_cut_does_not_depend_on_the_neighbours() -> None:
    def cuts(neighbours: int, begins: int, tokens: int) -> list[int]:
        machine = Machine(alone=0.01)
        mine = job(1000, tokens, read=begins)
        machine.scheduler.running = [*(job(i, 0, Phase.DECODE) for i in range(neighbours)), mine]
        pieces = []
        for turn in range(5000):
            if neighbours and turn % 3 == 0:
                machine.scheduler.running.append(job(2000 + turn, 20))
            pieces += [count for one, count in machine.turn() if one is mine]
            if mine not in machine.scheduler.running:
                return pieces
        raise AssertionError("it was never read")

    for begins in (0, 1, 127, 128, 1000):
        for tokens in (1, 96, 97, 128, 575, 1500):
            alone = cuts(0, begins, tokens)
            assert sum(alone) == tokens
            for neighbours in (1, 5, 31):
                assert cuts(neighbours, begins, tokens) == alone, (begins, tokens, neighbours)


def test_where_a_prompt_is_cut_does_not_depend_on_what_was_read_early() -> None:
    def cuts(begins: int, tokens: int, early: int) -> list[int]:
        machine = Machine(alone=0.01)
        machine.scheduler.running = [job(1, tokens - early, read=begins + early, early=early)]
        pieces = []
        while machine.scheduler.running:
            pieces += [count for _, count in machine.turn()]
        return [early + pieces[0], *pieces[1:]]

    for begins in (0, 1, 100, 128, 1000):
        for tokens in (7, 96, 97, 101, 102, 128, 575):
            assert cuts(begins, tokens, 6) == cuts(begins, tokens, 0), (begins, tokens)


def test_a_long_prompt_is_not_starved_by_short_ones_however_many_come() -> None:
    """From the first turn on there is a short prompt in each, so rows never have a step to themselves."""
    machine = Machine(alone=0.012)
    long = job(1, 1500)
    machine.scheduler.running = [job(0, 0, Phase.DECODE), long]
    for order in range(2, 400):
        machine.scheduler.running.append(job(order, 14))
        machine.turn()
        if long not in machine.scheduler.running:
            break
    assert long not in machine.scheduler.running


def test_short_prompts_are_read_whole_and_together_as_far_as_there_is_room() -> None:
    machine = Machine(alone=0.012)
    machine.scheduler.running = [job(0, 0, Phase.DECODE), *(job(order, 40) for order in range(1, 6))]
    machine.turn()
    assert machine.chunks == [120]
    assert SHORT_PREFILL >= 40


def test_chunks_follow_the_models_size_and_the_device() -> None:
    assert chunk_tokens(135e6, "cpu") == chunk_tokens(1, "cpu") == LARGEST_CHUNK["cpu"]
    assert chunk_tokens(1e9, "cpu") == 64
    assert chunk_tokens(8e9, "cpu") == MIN_CHUNK
    assert chunk_tokens(8e9, "gpu") == 256
    assert chunk_tokens(70e9, "gpu") == MIN_CHUNK
