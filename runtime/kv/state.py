"""Recurrent layers of hybrid models: their state travels with the agent, kept as it is.

A state stands for all tokens so far and cannot go back, so it is reused only at exactly the token
count it was kept at (a turn's end). mlx-lm's ``ArraysCache`` holds the arrays; rows of a step are put
together along the batch axis and taken apart again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray

from .spec import LayerSpec

if TYPE_CHECKING:
    from .cache import Step

BITS = {mx.bfloat16: mx.uint16}


@dataclass(frozen=True)
class RecurrentState:
    """One layer's state of one agent: the arrays of an ``ArraysCache``, batch axis of 1."""

    arrays: tuple[mx.array | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not None)

    def export(self) -> dict[str, NDArray[Any]]:
        """NumPy copies by part name; bfloat16 as its bits. The name says the slot and the MLX type."""
        out = {}
        for index, array in enumerate(self.arrays):
            if array is not None:
                kind = str(array.dtype).removeprefix("mlx.core.")
                bits = array.view(BITS[array.dtype]) if array.dtype in BITS else array
                out[f"{index}of{len(self.arrays)}.{kind}"] = np.array(bits)
        return out

    @classmethod
    def restore(cls, parts: dict[str, NDArray[Any]]) -> RecurrentState:
        """The inverse of ``export``. Raises ValueError if the parts are not a state."""
        if not parts:
            raise ValueError("no recurrent state in the saved tail")
        arrays: list[mx.array | None] = []
        for name, part in parts.items():
            place, _, kind = name.partition(".")
            index, _, count = place.partition("of")
            if not arrays:
                arrays = [None] * int(count)
            dtype = getattr(mx, kind)
            array = mx.array(part)
            arrays[int(index)] = array.view(dtype) if dtype in BITS else array
        mx.eval([array for array in arrays if array is not None])
        return cls(tuple(arrays))


class StateView(ArraysCache):  # type: ignore[misc]  # mlx-lm has no types
    """One recurrent layer's cache during one step: the rows' states side by side."""

    def __init__(self, step: Step, layer: LayerSpec) -> None:
        super().__init__(layer.arrays)
        self._step, self._layer = step, layer
        if len(set(step.counts)) > 1:
            self.lengths = mx.array(step.counts)  # rows are padded on the right
        states = [table.state.get(layer.index) for table in step.tables]
        if any(state is not None for state in states):
            for slot in range(layer.arrays):
                parts = [s.arrays[slot] if s is not None else None for s in states]
                like = next((p for p in parts if p is not None), None)
                if like is not None:
                    filled = [p if p is not None else mx.zeros_like(like) for p in parts]
                    self.cache[slot] = mx.concatenate(filled, axis=0) if len(filled) > 1 else filled[0]

    def pending_arrays(self) -> list[mx.array]:
        """What must be evaluated before ``commit``."""
        return [array for array in self.cache if array is not None]

    def commit(self) -> None:
        """Give every row its state after this step."""
        rows = len(self._step.tables)
        for row, table in enumerate(self._step.tables):
            arrays = tuple(
                None if a is None else (a if rows == 1 else mx.contiguous(a[row : row + 1]))
                for a in self.cache
            )
            mx.eval([array for array in arrays if array is not None])
            table.state[self._layer.index] = RecurrentState(arrays)
