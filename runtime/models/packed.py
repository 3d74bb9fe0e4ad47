"""Weights in the few bits they have, on the CPU.

A decode step reads every weight once, so its time is the bytes of the weights over the memory's bandwidth.
Weights that were quantised before they became float32 (GGUF's, MLX's) still have few different values:
``pack`` finds 4 or 8 bits, a scale and a bias for each group of 32 that give back each float (a zero without
its sign), and the kernel unpacks them into the processor's cache on its way. Weights of another kind are left
as they are. Results do not change in either case.

With the packed form a module no longer needs the floats: they can go (``release``), and what is not the
kernel's to compute (many rows) unpacks a matrix for as long as it is used.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from ..kv import native_library
from .few_rows import F32, LinearStruct, Packed, address, packed_form, readable

PIECE = 64
"""Inputs that are packed together."""

SHELF = 32 << 20
"""Bytes of memory taken at once for packed matrices. NumPy asks Linux to keep what is so large in large
pages. A decode step touches every page of the weights: it is spared thousands of misses in the table of
pages, a tenth of a step of 135M weights."""

LINE = 64
"""Bytes of a cache line, at which a matrix begins."""


def pack(weight: mx.array) -> Packed | None:
    """Pack a float32 matrix [outputs, inputs] without loss; None if it cannot be."""
    if weight.ndim != 2 or not weight.size or weight.shape[1] % PIECE or not readable(weight):
        return None
    library = native_library.library()
    outputs, inputs = weight.shape
    with _shelf:
        for bits in (4, 8):
            data = _shelf.room(library.offbook_packed_bytes(outputs, inputs, bits))
            done = library.offbook_pack(address(weight), outputs, inputs, bits, address(data))
            if done < 0:
                raise MemoryError("the linear kernel could not get working memory")
            if done:
                _shelf.keep(data)
                return Packed(weight, (outputs, inputs), data, bits)
    return None


class _Shelf:
    """Memory for packed matrices, one after the other; a piece of it goes when all its matrices have gone.

    For one thread at a time: use it as a context manager.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = np.zeros(0, np.uint8)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """The next free bytes. They stay free until they are kept."""
        if len(self._free) < nbytes:
            piece = np.empty(max(SHELF, nbytes) + LINE, np.uint8)
            self._free = piece[-address(piece) % LINE :]
        return self._free[:nbytes]

    def keep(self, data: NDArray[np.uint8]) -> None:
        """What ``room`` gave last is in use."""
        self._free = self._free[-(-len(data) // LINE) * LINE :]


_shelf = _Shelf()


def install(module: nn.Module, *, release: bool) -> None:
    """Pack a layer's or an embedding's weight if it can be; with ``release`` the floats go."""
    packed = packed_form(module)
    if packed is None:
        packed = pack(module["weight"])
    if packed is not None and release and packed.weight is not None:
        module.pop("weight")
        packed = replace(packed, weight=None)
        mx.clear_cache()
    module._packed = packed


def restore(module: nn.Module) -> None:
    """Undo ``install`` and ``release``."""
    packed = packed_form(module)
    if packed is not None and packed.weight is None:
        module.weight = unpacked(packed)
    vars(module).pop("_packed", None)


def unpacked(packed: Packed) -> mx.array:
    """The whole matrix as float32."""
    out = mx.zeros(packed.shape)
    mx.eval(out)
    _unpack(packed, None, 0, np.array(out, copy=False))
    return out


def rows(packed: Packed, numbers: NDArray[np.int64]) -> F32:
    """Some rows of the matrix as float32, [numbers, inputs].

    Raises:
        IndexError: there is no such row.
    """
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < packed.shape[0]:
        raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {packed.shape[0]}")
    numbers = np.ascontiguousarray(numbers, np.int64)
    out = np.empty((len(numbers), packed.shape[1]), np.float32)
    _unpack(packed, address(numbers), len(numbers), out)
    return out


def _unpack(packed: Packed, numbers: int | None, count: int, out: F32) -> None:
    layer = LinearStruct(address(packed.data), 0, packed.shape[0], packed.bits)
    unpack = native_library.library().offbook_unpack
    if unpack(ctypes.addressof(layer), packed.shape[1], numbers, count, address(out)):
        raise MemoryError("the linear kernel could not get working memory")


def weights_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters as they are in memory now, packed or not."""
    return sum(int(array.nbytes) for _, array in tree_flatten(model.parameters())) + packed_bytes(model)


def weight_count(model: nn.Module) -> float:
    """About how many numbers a model's weights are, in whatever form they are kept."""
    forms = (packed_form(module) for _, module in model.named_modules())
    held = sum(form.shape[0] * form.shape[1] for form in forms if form is not None and form.weight is None)
    # MLX keeps quantised weights in words of 32 bits, mostly eight to a word.
    arrays = [array for _, array in tree_flatten(model.parameters())]
    return float(held + sum(array.size * (8 if array.dtype == mx.uint32 else 1) for array in arrays))


def packed_bytes(model: nn.Module) -> int:
    """What of that MLX does not know of."""
    forms = (packed_form(module) for _, module in model.named_modules())
    return sum(form.data.nbytes for form in forms if form is not None)
