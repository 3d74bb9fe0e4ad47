"""The pool's arrays in the host's memory: side by side in a few large allocations.

An array by itself begins where ``malloc`` puts it, in the midst of a cache line, and lies in pages of 4 KB.
Side by side each begins at a cache line, so that the kernels' loads do not straddle two, and the whole is
large enough for the system's large pages (2 MB on Linux), which spares them most misses in the table of
pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..store.reading import address
from . import native_library

LINE = 64

SHELF = 1 << 30
"""Bytes of one allocation, unless an array is larger."""

MOST = (1 << 31) - 2 * LINE
"""Numbers along an axis, about, for MLX. An array that has more in all cannot be cut out of another."""

Wanted = tuple[tuple[int, ...], mx.Dtype]
"""Shape and type of an array."""


def zeros(wanted: Sequence[Wanted]) -> list[mx.array]:
    """Evaluated arrays of zeros, in contiguous memory that NumPy may view and write."""
    out: list[mx.array] = []
    for shelf in _shelves(wanted):
        out += _fill(shelf) if _numbers(shelf[0]) <= MOST else [_apart(*shelf[0])]
    return out


def _numbers(one: Wanted) -> int:
    return int(np.prod(one[0]))


def _words(one: Wanted) -> int:
    """Room for an array, in numbers of 32 bits, to the next cache line."""
    _, dtype = one
    return -(-_numbers(one) * dtype.size // LINE) * LINE // 4


def _shelves(wanted: Iterable[Wanted]) -> list[list[Wanted]]:
    shelves: list[list[Wanted]] = []
    used = 0
    for one in wanted:
        size = 4 * _words(one)
        if not shelves or used + size > SHELF:
            shelves.append([])
            used = 0
        shelves[-1].append(one)
        used += size
    return shelves


def _in_large_pages(array: mx.array) -> NDArray[Any]:
    """Evaluate zeros, and put them into large pages. Returns NumPy's view of them."""
    mx.eval(array)
    view: NDArray[Any] = np.array(array, copy=False)
    if native_library.available():
        native_library.library().offbook_large_pages(address(view), view.nbytes)
        view[...] = 0  # now, and not when a turn first needs them
    return view


def _apart(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array in an allocation of its own, wherever that begins."""
    array = mx.zeros(shape, dtype)
    _in_large_pages(array)
    return array


def _fill(shelf: Sequence[Wanted]) -> list[mx.array]:
    """Arrays in one allocation."""
    whole = mx.zeros(sum(map(_words, shelf)) + LINE // 4, mx.uint32)
    view = _in_large_pages(whole)
    at = -address(view) % LINE // 4
    arrays = []
    for one in shelf:
        shape, dtype = one
        array = whole[at : at + _words(one)].view(dtype)[: _numbers(one)].reshape(shape)
        mx.eval(array)
        assert address(np.array(array, copy=False)) == address(view) + 4 * at, "MLX has copied a slice"
        arrays.append(array)
        at += _words(one)
    return arrays
