"""The pool's arrays side by side in a few allocations: zeros, at cache lines, seen by MLX and NumPy alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

Fill = Callable[[Sequence[host_memory.Wanted]], list[mx.array]]


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


def test_an_array_of_more_numbers_than_an_axis_may_have_is_one_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "SHELF", 4096)
    monkeypatch.setattr(host_memory, "MOST", 5000)  # and not 2 ** 31 or so
    monkeypatch.setattr(host_memory, "_fill", _without_long_axes(host_memory._fill))
    arrays = host_memory.zeros(WANTED)
    views = [np.array(array, copy=False) for array in arrays]
    assert [(array.shape, array.dtype) for array in arrays] == WANTED
    assert all(not view.any() and view.flags.c_contiguous and view.flags.writeable for view in views)
    for number, view in enumerate(views, 1):
        view[...] = number
    for number, array in enumerate(arrays, 1):
        assert mx.all(array == number).item()


def _without_long_axes(fill: Fill) -> Fill:
    """``fill``, which raises what MLX raises for more than 5000 numbers along an axis."""

    def filled(shelf: Sequence[host_memory.Wanted]) -> list[mx.array]:
        if sum(int(np.prod(shape)) for shape, _ in shelf) > 5000:
            raise ValueError("Slice indices must be 32-bit integers.")
        return fill(shelf)

    return filled
