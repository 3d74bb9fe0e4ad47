"""Who is read next, and how much of it: the policy alone, with an imagined clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offbook.runtime.engine.job import Phase
from offbook.runtime.engine.scheduler import MIN_BESIDE, SHORT_PREFILL, Scheduler

ROOM = 128


def job(order: int, remaining: int, phase: Phase = Phase.PREFILL) -> Any:
    ids = np.zeros(max(1, remaining), np.uint32)
    return SimpleNamespace(
        order=(order,), ids=ids, remaining=ids[:remaining], phase=phase, key=(str(order), "")
    )


class Machine:
    """Steps that take a time of their own: a decode step, and each token read beside one or apart."""

    def __init__(self, *, alone: float, beside: float = 0.001, apart: float = 0.002) -> None:
        self.scheduler = Scheduler(None, None)  # type: ignore[arg-type]
        self.alone, self.beside, self.apart = alone, beside, apart
        self.now, self.spoken, self.chunks = 0.0, 0, list[int]()

    def turn(self, room: int) -> list[tuple[Any, int]]:
        """What the engine's loop does in one turn."""
        rows = len(self.scheduler.decoding())
        chunk = self.scheduler.prefill(workspace=1 << 30, score_bytes=1, beside=room if rows else 0)
        count = sum(count for _, count in chunk)
        if count:
            self.chunks.append(count)
        if count and rows and count <= room:
            self._pass(self.alone + count * self.beside)
            self.scheduler.observe_both(rows, count, self.alone + count * self.beside)
            self.spoken += rows
        else:
            if count:
                self._pass(count * self.apart)
                self.scheduler.observe_prefill(count, count * self.apart)
            if rows:
                self._pass(self.alone)
                self.scheduler.observe_decode(rows, self.alone)
                self.spoken += rows
        for one, count in chunk:
            one.remaining = one.remaining[count:]
            if not len(one.remaining):
                self.scheduler.running.remove(one)
        return chunk

    def _pass(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("room", [ROOM, 0])
@pytest.mark.parametrize("alone", [0.004, 0.012, 0.05])
@pytest.mark.parametrize("beside", [0.0003, 0.001, 0.004])
def test_rows_keep_half_their_rate_while_a_long_prompt_is_read(
    room: int, alone: float, beside: float
) -> None:
    machine = Machine(alone=alone, beside=beside)
    machine.scheduler.running = [job(0, 0, Phase.DECODE), job(1, 4000)]
    while len(machine.scheduler.running) > 1:
        machine.turn(room)
    assert machine.spoken * alone >= 0.5 * machine.now
    # ... and no more than they are owed: the prompt has its share too.
    assert machine.spoken * alone <= 0.75 * machine.now


def test_how_long_rows_take_alone_is_learned_before_anything_is_read_beside_them() -> None:
    machine = Machine(alone=0.01)
    machine.scheduler.running = [job(0, 0, Phase.DECODE), job(1, 4000)]
    assert not machine.turn(ROOM)
    assert machine.turn(ROOM)
    machine.scheduler.running.append(job(2, 0, Phase.DECODE))
    assert not machine.turn(ROOM)


def test_a_long_prompt_is_read_in_small_pieces_beside_rows_and_in_large_ones_without() -> None:
    machine = Machine(alone=0.012)
    machine.scheduler.running = [job(0, 0, Phase.DECODE), job(1, 4000)]
    for _ in range(40):
        machine.turn(ROOM)
    assert all(MIN_BESIDE <= count < ROOM // 2 for count in machine.chunks)
    machine.scheduler.running.pop(0)
    machine.chunks.clear()
    machine.turn(ROOM)
    assert machine.chunks[0] > ROOM


def test_short_prompts_go_first_and_whole_and_a_long_one_is_not_starved() -> None:
    machine = Machine(alone=0.012)
    long = job(1, 4000)
    machine.scheduler.running = [job(0, 0, Phase.DECODE), long]
    machine.turn(ROOM)
    left = len(long.remaining)
    for order in range(2, 60):
        machine.scheduler.running.append(job(order, 14))
        read = machine.turn(ROOM)
        assert all(count == 14 for one, count in read if one is not long)
    assert len(long.remaining) < left


def test_short_prompts_are_read_together_as_far_as_there_is_room() -> None:
    machine = Machine(alone=0.012)
    machine.scheduler.running = [job(0, 0, Phase.DECODE), *(job(order, 40) for order in range(1, 6))]
    machine.turn(ROOM)
    assert machine.chunks == [120]
    assert SHORT_PREFILL >= 40
