"""What the native kernel for few rows takes: an evaluated input, and weights that are where they were.

Owns the limit, the decision whether a call is the kernel's or MLX's, and the kernel's view of a module's
arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

LIMITS = {"avx512": 128, "avx2": 32, "plain": 12}
"""Rows up to which the kernel beats MLX with OpenBLAS, as measured by ``benchmarks/native_linear.py``."""

F32 = NDArray[np.float32]


def few_rows(module: nn.Module, x: mx.array, limit: int) -> F32 | None:
    """The input as the kernel takes it, evaluated; None if ``module(x)`` is MLX's to compute."""
    rows = x.size // max(1, x.shape[-1]) if x.ndim else 0
    if not 0 < rows <= limit or x.dtype != mx.float32 or module.training:
        return None
    try:
        mx.eval(x)
    except ValueError:  # x has no values: a function is being traced
        return None
    values: F32 = np.asarray(x)
    return values if values.flags.c_contiguous else np.ascontiguousarray(values)


@dataclass(frozen=True)
class Packed:
    """A matrix in 4 or 8 bits, made by ``packed.pack``.

    Attributes:
        weight: the array that was packed: it counts for a module as long as it holds this very one.
        data: what the kernel reads (runtime/kv/native_pack.h).
    """

    weight: mx.array
    data: NDArray[np.uint8]
    bits: int


def packed_form(module: nn.Module, weight: mx.array) -> Packed | None:
    """The packed form of a module's weight, if it has one."""
    packed: Packed | None = vars(module).get("_packed")
    return packed if packed is not None and packed.weight is weight else None


class LinearStruct(ctypes.Structure):
    """A linear layer as the kernel's calls take it."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    ]


class Weights:
    """The layers' arrays as the kernel takes them, as long as the modules hold these very arrays."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.arrays = [(module["weight"], module.get("bias")) for module in modules]
        self.outputs = [int(weight.shape[0]) for weight, _ in self.arrays]
        self.inputs = [int(weight.shape[1]) for weight, _ in self.arrays]
        self.packed = [
            packed_form(module, weight) for module, (weight, _) in zip(modules, self.arrays, strict=True)
        ]
        self.fit = all(readable(array) for pair in self.arrays for array in pair)
        if self.fit:
            self._struct = (LinearStruct * len(modules))()
            self.fill(self._struct)
            self.pointer = ctypes.addressof(self._struct)

    def fill(self, structs: Iterable[LinearStruct]) -> None:
        """Make ``structs`` point to the layers' arrays, which this object keeps alive."""
        for layer, (weight, bias), packed in zip(structs, self.arrays, self.packed, strict=True):
            layer.weight, layer.bits = (
                (address(weight), 0) if packed is None else (address(packed.data), packed.bits)
            )
            layer.outputs = weight.shape[0]
            layer.bias = 0 if bias is None else address(bias)

    def of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are still the modules and their arrays."""
        return modules is self.modules and all(
            module["weight"] is weight and module.get("bias") is bias
            for module, (weight, bias) in zip(modules, self.arrays, strict=True)
        )


def readable(array: mx.array | None) -> bool:
    """Whether the kernel can read an array where it is."""
    return array is None or (array.dtype == mx.float32 and bool(np.asarray(array).flags.c_contiguous))


def address(array: Any) -> int:
    return cast(int, np.asarray(array).__array_interface__["data"][0])
