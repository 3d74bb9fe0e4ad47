"""Putting a saved tail where it belongs: which bytes of its file go to which place of the pool.

A tail is some hundred small pieces, and copying each by itself takes longer than reading them all. What goes
where depends on the layout alone (how many groups of the part-filled block, how many pages), so it is worked
out once, and one call of the native kernel does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store.reading import FlatArrays, address
from . import native_library
from .arrays import PoolArrays
from .scheme import BLOCK, GROUP, KVScheme
from .spec import ITEM_BYTES, ModelCacheSpec, TensorLayout, page_tensors
from .table import AgentTable

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Copies:
    """The way of every piece, for tails of one layout.

    Attributes:
        names, sizes: of the tensors of such a tail, in file order.
        source: where in the file's data each piece begins.
        shape: [pieces, 4]: rows, bytes of a row, and from row to row in the file and in the pool.
    """

    names: tuple[str, ...]
    sizes: Ints
    source: Ints
    shape: Ints


def leading(tensor: TensorLayout, groups: int) -> tuple[int, int, int]:
    """Of the part of a block's tensor that its first ``groups`` sealed groups fill: rows, bytes of a row, and
    bytes from row to row."""
    whole = tensor.shape[-1] * ITEM_BYTES[tensor.dtype]
    if tensor.name.endswith(("k.packed", "k.scales", "k.biases")):  # groups along the last axis
        return int(np.prod(tensor.shape[:-1])), whole // (BLOCK // GROUP) * groups, whole
    return tensor.shape[0], whole * GROUP * groups, whole * BLOCK


class Unpacking:
    """Restores tails of one model into one pool, on the CPU and with the native kernel."""

    def __init__(self, spec: ModelCacheSpec, scheme: KVScheme, arrays: PoolArrays) -> None:
        self._spec, self._scheme, self._arrays = spec, scheme, arrays
        self._known: dict[tuple[int, int], Copies] = {}
        self.possible = arrays.host and native_library.available() and not spec.state_layers

    def restore(self, table: AgentTable, tail: Any) -> bool:
        """Fill a table's part-filled block and its pages.

        False, and nothing is done, if the tail's arrays are not as they are expected: then they are to be
        looked at one by one.
        """
        groups = table.sealed % BLOCK // GROUP
        if not self.possible or not isinstance(tail, FlatArrays):
            return False
        copies = self._copies(groups, len(table.pages))
        if tail.layout.names != copies.names or not np.array_equal(
            tail.layout.pieces.sizes[1:], copies.sizes
        ):
            return False
        places = [self._arrays.page_addresses(page) for page in table.pages]
        if groups:
            blocks = [self._arrays.block_addresses(i, slots[-1]) for i, slots in enumerate(table.slots)]
            places = [*blocks, *places]
        if places:
            table_of = np.empty((len(copies.source), 6), np.int64)
            table_of[:, 0] = address(tail.data) + copies.source
            table_of[:, 1] = np.concatenate(places)
            table_of[:, 2:] = copies.shape
            native_library.library().offbook_copy(len(table_of), address(table_of))
        return True

    def _copies(self, groups: int, pages: int) -> Copies:
        known = self._known.get((groups, pages))
        if known is None:
            known = self._known[groups, pages] = self._work_out(groups, pages)
        return known

    def _work_out(self, groups: int, pages: int) -> Copies:
        block = (
            [tensor for group in self._spec.groups for tensor in group.tensors(self._scheme)]
            if groups
            else []
        )
        tails = (
            [tensor for layer in self._spec.attention_layers for tensor in page_tensors(layer)]
            if pages
            else []
        )
        shapes: list[Sequence[int]] = []
        sizes: list[int] = []
        for tensor in block:
            rows, size, whole = leading(tensor, groups)
            shapes.append((rows, size, size, whole))
            sizes.append(rows * size)
        sizes += [tensor.nbytes * pages for tensor in tails]
        begins = np.cumsum([0, *sizes])
        source = [begins[: len(block)]]
        for page in range(pages):
            source.append(begins[len(block) : -1] + [page * tensor.nbytes for tensor in tails])
            shapes += [(1, tensor.nbytes, 0, 0) for tensor in tails]
        return Copies(
            tuple(tensor.name for tensor in (*block, *tails)),
            np.array(sizes, np.int64),
            np.concatenate(source),
            np.array(shapes, np.int64).reshape(-1, 4),
        )
