"""Putting what a prefill made into pages: keys and values of all layers with one call of the native kernel.

A few tokens of a layer are a few hundred bytes here and there, and writing them from Python one layer after
the other takes longer than computing one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..store.reading import address
from . import native_library
from .arrays import PoolArrays
from .scheme import GROUP
from .spec import page_tensors

Bits = NDArray[np.uint16]


class Appending:
    """Writes new tokens into the pages of one pool in the host's memory."""

    def __init__(self, arrays: PoolArrays) -> None:
        self._arrays = arrays
        shapes = [tensor.shape for layer in arrays.spec.attention_layers for tensor in page_tensors(layer)]
        self._strides = [(2 * width, 2 * width * heads, 2) for heads, _, width in shapes]
        parts = [
            (t, head, heads, width) for t, (heads, _, width) in enumerate(shapes) for head in range(heads)
        ]
        tensor, head, heads, width = np.array(parts, np.int64).reshape(-1, 4).T
        self._tensor = tensor
        self._row, self._token = 2 * width, 2 * width * heads  # bytes: of a head's row, of a token
        self._from, self._to = head * self._row, head * self._row * GROUP

    def sources(self, bits: Sequence[Bits]) -> NDArray[np.int64]:
        """Where the new tokens are: bits [heads, tokens, width] of every tensor of a page, in its order.

        Raises:
            ValueError: they do not lie in memory token by token, as the kernel's forward leaves them.
        """
        if (strides := [x.strides for x in bits]) != self._strides:
            raise ValueError(f"new tokens with strides {strides}: expected {self._strides}")
        return np.array([address(x) for x in bits], np.int64)

    def append(self, sources: NDArray[np.int64], first: int, count: int, page: int, offset: int) -> None:
        """Copy new tokens [first, first + count) to the places of a page from ``offset`` on."""
        copies = np.empty((len(self._tensor), 6), np.int64)
        copies[:, 0] = sources[self._tensor] + self._from + first * self._token
        copies[:, 1] = self._arrays.page_addresses(page)[self._tensor] + self._to + offset * self._row
        copies[:, 2], copies[:, 3] = count, self._row
        copies[:, 4], copies[:, 5] = self._token, self._row
        native_library.library().offbook_copy(len(copies), address(copies))
