"""Linear layers of few rows on the CPU, by the native kernel instead of MLX's matrix product.

A decode step has one row for each agent. BLAS libraries are made for large products: with a few rows
they take several times what reading the weights takes. ``install`` turns a model's float32 ``nn.Linear``
layers (and an ``nn.Embedding`` that is the head) into ones that hand few rows to the kernel, which reads
the weights where they are, once. More rows, other dtypes, and what is being traced go MLX's way.

The kernel needs values, so such a layer evaluates its input: a forward is computed as it goes instead
of at the end. A row's result has the same bits alone and in any batch of up to ``LIMIT`` rows.

Layers that get the very same array (queries, keys and values; gate and up) are one call: the first one
computes all, the others take their result if they come with that array.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ..kv import native_library

LIMIT = 32
"""Rows up to which the kernel is faster than MLX with OpenBLAS (``benchmarks/native_linear.py``)."""

TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Names that layers of one parent have when they get the same input. A wrong guess costs time, once."""

F32 = NDArray[np.float32]


class _Layer(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("outputs", ctypes.c_int64)]


class _Weights:
    """The layers' arrays as the kernel takes them, as long as the modules hold these very arrays."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.arrays = [(module["weight"], module.get("bias")) for module in modules]
        self.outputs = [int(weight.shape[0]) for weight, _ in self.arrays]
        self.inputs = int(self.arrays[0][0].shape[1])
        self.fit = all(_readable(array) for pair in self.arrays for array in pair) and all(
            weight.shape[1] == self.inputs for weight, _ in self.arrays
        )
        if self.fit:
            self._struct = (_Layer * len(modules))()
            for layer, (weight, bias) in zip(self._struct, self.arrays, strict=True):
                layer.weight, layer.outputs = _address(weight), weight.shape[0]
                layer.bias = 0 if bias is None else _address(bias)
            self.pointer = ctypes.addressof(self._struct)

    def of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are still the modules and their arrays."""
        return modules is self.modules and all(
            module["weight"] is weight and module.get("bias") is bias
            for module, (weight, bias) in zip(modules, self.arrays, strict=True)
        )


class _Held:
    """The results for one input that are not taken yet.

    ``same`` is a second handle of the input: with it an in-place update of the input goes to new memory,
    which ``address`` then tells.
    """

    __slots__ = ("address", "results", "same", "x")

    def __init__(self, x: mx.array, address: int, results: dict[int, mx.array]) -> None:
        self.x, self.same, self.address, self.results = x, copy.copy(x), address, results


class _PerThread(threading.local):
    held: _Held | None = None


class Siblings:
    """Layers that get the same input, or one layer alone."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self._call = native_library.library().offbook_linear
        self._weights: _Weights | None = None
        self._mine = _PerThread()  # a model may run on several threads

    def __getstate__(self) -> dict[str, Any]:
        return {"modules": self.modules}  # a copy's arrays are elsewhere

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["modules"])  # type: ignore[misc]

    def result(self, module: nn.Module, x: mx.array) -> mx.array | None:
        """``module``'s output for ``x``; None if it is MLX's to compute."""
        rows = x.size // max(1, x.shape[-1]) if x.ndim else 0
        if not 0 < rows <= LIMIT or x.dtype != mx.float32 or module.training:
            return None
        try:
            mx.eval(x)
        except ValueError:  # x has no values: a function is being traced
            return None
        values: F32 = np.asarray(x)
        address = _address(values)
        held = self._mine.held
        if held is not None:
            if held.x is x and held.address == address:
                taken = held.results.pop(id(module), None)
                if taken is not None:
                    if not held.results:
                        self._mine.held = None
                    return taken
            self._mine.held = None
            self._part(held.results)
        weights = self._weights
        if weights is None or not weights.of(self.modules):
            weights = self._weights = _Weights(self.modules)
        if not weights.fit or weights.inputs != x.shape[-1]:
            return None
        if not values.flags.c_contiguous:
            values = np.ascontiguousarray(values)
        results = dict(zip(map(id, weights.modules), self._products(weights, values), strict=True))
        mine = results.pop(id(module), None)
        if mine is None:  # another thread has just set it apart
            return cast(mx.array | None, module._siblings.result(module, x))
        if results:
            self._mine.held = _Held(x, address, results)
        return mine

    def _products(self, weights: _Weights, values: F32) -> list[mx.array]:
        lead, rows = values.shape[:-1], values.size // weights.inputs
        out = np.empty(rows * sum(weights.outputs), np.float32)
        count = len(weights.modules)
        if self._call(count, weights.pointer, rows, weights.inputs, _address(values), _address(out)):
            raise MemoryError("the linear kernel could not get working memory")
        results, at = [], 0
        for outputs in weights.outputs:
            results.append(mx.array(out[at : at + rows * outputs].reshape(*lead, outputs)))
            at += rows * outputs
        return results

    def _part(self, left: dict[int, mx.array]) -> None:
        """Some did not come for their results: they do not get the same input, or not always."""
        apart = [module for module in self.modules if id(module) in left]
        for module in apart:
            module._siblings = Siblings([module])
        self.modules = tuple(module for module in self.modules if id(module) not in left)


class NativeLinear(nn.Linear):  # type: ignore[misc]  # mlx has no annotations
    """An ``nn.Linear`` whose few rows the kernel computes."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self._siblings.result(self, x)
        return cast(mx.array, super().__call__(x)) if y is None else y


class NativeEmbedding(nn.Embedding):  # type: ignore[misc]
    """An ``nn.Embedding`` whose few rows the kernel computes when it is the head."""

    def as_linear(self, x: mx.array) -> mx.array:
        y = self._siblings.result(self, x)
        return cast(mx.array, super().as_linear(x)) if y is None else y


_NATIVE: dict[type, type] = {nn.Linear: NativeLinear, nn.Embedding: NativeEmbedding}


def install(model: nn.Module) -> int:
    """Let the kernel compute the few-row products of a model on the CPU.

    The modules stay the objects they are, with the same parameters at the same paths. Modules of other
    types (quantised, stacked experts, subclasses) and other dtypes are left alone. Without the kernel
    nothing is done.

    The model goes into evaluation mode: what is trained (``model.train()``) is left to MLX, because the
    kernel's results carry no gradients.

    Returns:
        How many modules were changed.
    """
    if not native_library.available():
        return 0
    model.eval()
    changed = 0
    for _, parent in model.named_modules():
        children = {name: child for name, child in parent.items() if _can(child)}
        for names in TOGETHER:
            group = [children[name] for name in names if name in children]
            if len({id(child) for child in group}) == len(names) and all(
                child.weight.shape[1] == group[0].weight.shape[1] for child in group
            ):
                changed += _change(group)
                children = {name: child for name, child in children.items() if name not in names}
    for _, module in model.named_modules():
        if _can(module):
            changed += _change([module])
    return changed


def uninstall(model: nn.Module) -> None:
    """Undo ``install``."""
    plain = {native: cls for cls, native in _NATIVE.items()}
    for _, module in model.named_modules():
        if type(module) in plain:
            module.__class__ = plain[type(module)]
            del module._siblings


def _can(module: Any) -> bool:
    return type(module) in _NATIVE and bool(module.weight.dtype == mx.float32)


def _change(group: Sequence[nn.Module]) -> int:
    siblings = Siblings(group)
    for module in group:
        module.__class__ = _NATIVE[type(module)]
        module._siblings = siblings
    return len(group)


def _readable(array: mx.array | None) -> bool:
    return array is None or (array.dtype == mx.float32 and bool(np.asarray(array).flags.c_contiguous))


def _address(array: Any) -> int:
    return cast(int, np.asarray(array).__array_interface__["data"][0])
