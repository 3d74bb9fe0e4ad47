"""The shape of what is stored: tensors of a block, and the record of an agent's tail.

A block is an ordered list of tensors. The order is the order in the file, so a caller that lists the
tensors of one layer group one after the other can fetch that group's part with one read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

BLOCK_TOKENS = 256
"""Tokens of a sealed block. Fixed by the format."""

OPENING = "opening"
"""In a tail's note: the last of the ids it stands for, which are no part of its agent's transcript yet but
what every next message begins with."""

# numpy has no bfloat16: its bits travel as uint16, and a uint16 array is always labelled BF16.
DTYPES: dict[str, np.dtype[Any]] = {
    "U32": np.dtype("<u4"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "BOOL": np.dtype("?"),
}
LABELS: dict[np.dtype[Any], str] = {dtype: label for label, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name in the file, safetensors dtype label (``U32 BF16 F32 F16`` ...), and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"tensor {self.name!r}: unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}"
            )
        if not self.name or self.name == "__metadata__":
            raise ValueError(f"{self.name!r} cannot name a tensor")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if any(n < 0 for n in self.shape):
            raise ValueError(f"tensor {self.name!r}: negative size in shape {self.shape}")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def empty(self) -> Array:
        """A new array of this shape, contents undefined."""
        return np.empty(self.shape, DTYPES[self.dtype])

    @classmethod
    def of(cls, name: str, array: Array) -> TensorSpec:
        """The spec of an array. uint16 is taken for the bits of bfloat16."""
        label = LABELS.get(array.dtype)
        if label is None:
            raise ValueError(f"tensor {name!r}: dtype {array.dtype} cannot be stored")
        return cls(name, label, array.shape)


@dataclass(frozen=True, slots=True)
class Tail:
    """What an agent needs beside its sealed blocks to go on at ``tokens`` tokens.

    Attributes:
        tokens: length of the transcript this stands for.
        chain: 16-byte ``chain_at`` of all those ids; compare it before use.
        blocks: names (16 bytes each) of the agent's full blocks, oldest first.
        arrays: any named arrays: groups of the part-filled block, hot pages, recurrent state.
        note: small JSON-able facts of the writer's own (counts, scheme details).
    """

    tokens: int
    chain: bytes
    blocks: Sequence[bytes]
    arrays: Mapping[str, Array]
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TailInfo:
    """What the index knows of a stored tail without reading it. ``nbytes`` is the file's size."""

    tokens: int
    chain: bytes
    nbytes: int
