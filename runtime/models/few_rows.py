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
    """A matrix [outputs, inputs] in 4 or 8 bits, made by ``packed.pack``.

    Attributes:
        weight: the array that was packed: this counts for a module as long as it holds that very one.
            None where the module was relieved of it.
        data: what the kernel reads (runtime/kv/native_pack.h).
    """

    weight: mx.array | None
    shape: tuple[int, int]
    data: NDArray[np.uint8]
    bits: int


def packed_form(module: nn.Module) -> Packed | None:
    """The packed form of a module's weight, if it has one."""
    packed: Packed | None = vars(module).get("_packed")
    return packed if packed is not None and packed.weight is module.get("weight") else None


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a module's weight, packed or not."""
    packed = packed_form(module)
    return packed.shape if packed is not None else module["weight"].shape


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
        self.arrays = [(module.get("weight"), module.get("bias")) for module in modules]
        self.packed = [packed_form(module) for module in modules]
        self.outputs, self.inputs = ([shape_of(module)[side] for module in modules] for side in (0, 1))
        self.fit = all(readable(array) for pair in self.arrays for array in pair)
        if self.fit:
            self._struct = (LinearStruct * len(modules))()
            self.fill(self._struct)
            self.pointer = ctypes.addressof(self._struct)

    def fill(self, structs: Iterable[LinearStruct]) -> None:
        """Make ``structs`` point to the layers' arrays, which this object keeps alive."""
        parts = zip(structs, self.arrays, self.packed, self.outputs, strict=True)
        for layer, (weight, bias), packed, outputs in parts:
            layer.weight = address(weight if packed is None else packed.data)
            layer.bits = 0 if packed is None else packed.bits
            layer.outputs = outputs
            layer.bias = 0 if bias is None else address(bias)

    def of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are still the modules and their arrays."""
        return modules is self.modules and all(
            module.get("weight") is weight and module.get("bias") is bias and packed_form(module) is packed
            for module, (weight, bias), packed in zip(modules, self.arrays, self.packed, strict=True)
        )


def readable(array: mx.array | None) -> bool:
    """Whether the kernel can read an array where it is."""
    return array is None or (array.dtype == mx.float32 and bool(np.asarray(array).flags.c_contiguous))


def address(array: Any) -> int:
    return cast(int, np.asarray(array).__array_interface__["data"][0])
