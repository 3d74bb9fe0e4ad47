"""The pool's arrays side by side in a few allocations: zeros, at cache lines, seen by MLX and NumPy alike."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from offbook.runtime.kv import host_memory
from offbook.runtime.store.reading import address

WANTED: list[host_memory.Wanted] = [
    ((3, 5), mx.uint16),  # an odd number of halves of words
    ((1, 7, 4), mx.uint32),
    ((2, 100_000), mx.uint32),
    ((1,), mx.uint16),
    ((4, 2, 64, 64), mx.uint16),
]


@pytest.mark.parametrize("shelf", [1 << 30, 4096])
def test_arrays_are_apart_and_begin_at_cache_lines(monkeypatch: pytest.MonkeyPatch, shelf: int) -> None:
    monkeypatch.setattr(host_memory, "SHELF", shelf)
    arrays = host_memory.zeros(WANTED)
    views = [np.array(array, copy=False) for array in arrays]
    assert [(array.shape, array.dtype) for array in arrays] == WANTED
    assert all(not view.any() and view.flags.c_contiguous for view in views)
    assert all(address(view) % host_memory.LINE == 0 for view in views)
    for number, view in enumerate(views, 1):
        view[...] = number
    for number, (view, array) in enumerate(zip(views, arrays, strict=True), 1):
        assert (view == number).all()
        assert mx.all(mx.take(array, mx.array([0]), axis=0) == number).item(), "what NumPy writes, MLX reads"


def test_an_array_outlives_the_list_it_came_in() -> None:
    array = host_memory.zeros(WANTED)[2]
    view = np.array(array, copy=False)
    view[1] = 9
    del array
    mx.eval(mx.zeros((1 << 20,)))
    assert (view[1] == 9).all()
    assert not view[0].any()


def test_no_arrays_take_no_memory() -> None:
    assert host_memory.zeros([]) == []
