"""Linear layers of few rows on the CPU, by the native kernel instead of MLX's matrix product.

A decode step has one row for each agent. BLAS libraries are made for large products: with a few rows
they take several times what reading the weights takes. ``install`` turns a model's float32 ``nn.Linear``
layers (and an ``nn.Embedding`` that is the head) into ones that hand few rows to the kernel, which reads
the weights where they are, once. More rows, other dtypes, and what is being traced go MLX's way.

The kernel needs values, so such a layer evaluates its input: a forward is computed as it goes instead
of at the end. A row's result has the same bits alone and in any batch of up to that many rows.

Layers that get the very same array (queries, keys and values) are one call: the first one computes all,
the others take their result if they come with that array. A gated feed-forward block is one call too,
where it is found to compute what the kernel does (``gated.py``), and rotary positions are not left to
MLX either (``rotary.py``): with products this fast they would take a sixth of a step.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kv import native_library
from . import gated, packed, rotary
from .few_rows import F32, LIMITS, Weights, address, few_rows, packed_form

TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Names that layers of one parent have when they get the same input. A wrong guess costs time, once."""


class _Held:
    """The results for one input that are not taken yet.

    ``same`` is a second handle of the input: with it an in-place update of the input goes to new memory,
    which ``place`` then tells.
    """

    __slots__ = ("place", "results", "same", "x")

    def __init__(self, x: mx.array, place: int, results: dict[int, mx.array]) -> None:
        self.x, self.same, self.place, self.results = x, copy.copy(x), place, results


class _PerThread(threading.local):
    held: _Held | None = None


class Siblings:
    """Layers that get the same input, or one layer alone."""

    def __init__(self, modules: Sequence[nn.Module], limit: int) -> None:
        self.modules, self.limit = tuple(modules), limit
        self._call = native_library.library().offbook_linear
        self._weights: Weights | None = None
        self._mine = _PerThread()  # a model may run on several threads

    def __getstate__(self) -> dict[str, Any]:
        return {"modules": self.modules, "limit": self.limit}  # a copy's arrays are elsewhere

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def result(self, module: nn.Module, x: mx.array) -> mx.array | None:
        """``module``'s output for ``x``; None if it is MLX's to compute."""
        values = few_rows(module, x, self.limit)
        if values is None:
            return None
        place = address(x)
        held = self._mine.held
        if held is not None:
            if held.x is x and held.place == place:
                taken = held.results.pop(id(module), None)
                if taken is not None:
                    if not held.results:
                        self._mine.held = None
                    return taken
            self._mine.held = None
            self._part(held.results)
        weights = self._weights
        if weights is None or not weights.of(self.modules):
            weights = self._weights = Weights(self.modules)
        if not weights.fit or any(inputs != x.shape[-1] for inputs in weights.inputs):
            return None
        results = dict(zip(map(id, weights.modules), self._products(weights, values), strict=True))
        mine = results.pop(id(module), None)
        if mine is None:  # another thread has just set it apart
            return cast(mx.array | None, module._siblings.result(module, x))
        if results:
            self._mine.held = _Held(x, place, results)
        return mine

    def _products(self, weights: Weights, values: F32) -> list[mx.array]:
        lead, rows = values.shape[:-1], values.size // values.shape[-1]
        out = np.empty(rows * sum(weights.outputs), np.float32)
        count = len(weights.modules)
        if self._call(count, weights.pointer, rows, values.shape[-1], address(values), address(out)):
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
            module._siblings = Siblings([module], self.limit)
        self.modules = tuple(module for module in self.modules if id(module) not in left)


class _Released:
    """What a changed module's class begins with: its weight may be there in packed form only."""

    @property
    def weight(self) -> mx.array:
        module = cast(nn.Module, self)
        form = packed_form(module)
        if form is None or form.weight is not None:
            return cast(mx.array, module["weight"])
        return packed.unpacked(form)

    @weight.deleter
    def weight(self) -> None:
        """``nn.Module`` deletes an attribute that is none of its parameters before it sets it."""

    @property
    def relieved(self) -> bool:
        form = packed_form(cast(nn.Module, self))
        return form is not None and form.weight is None


class NativeLinear(_Released, nn.Linear):  # type: ignore[misc]  # mlx has no annotations
    """An ``nn.Linear`` whose few rows the kernel computes."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array | None = self._siblings.result(self, x)
        if y is None and self.relieved:
            y = x @ self.weight.T
            y = y + self["bias"] if "bias" in self else y
            mx.eval(y)  # so that the floats go before the next layer's come
        return cast(mx.array, super().__call__(x)) if y is None else y


class NativeEmbedding(_Released, nn.Embedding):  # type: ignore[misc]
    """An ``nn.Embedding`` whose few rows the kernel computes when it is the head."""

    def __call__(self, x: mx.array) -> mx.array:
        form = packed_form(self)
        if form is None or form.weight is not None:
            return cast(mx.array, super().__call__(x))
        numbers = np.asarray(x)
        return mx.array(packed.rows(form, numbers.reshape(-1)).reshape(*numbers.shape, -1))

    def as_linear(self, x: mx.array) -> mx.array:
        y = self._siblings.result(self, x)
        return cast(mx.array, x @ self.weight.T if y is None else y)


_NATIVE: dict[type, type] = {nn.Linear: NativeLinear, nn.Embedding: NativeEmbedding}


def install(model: nn.Module, *, limit: int | None = None, release: bool = False) -> int:
    """Let the kernel compute the few-row products of a model on the CPU.

    Weights are packed where that loses nothing (``packed.py``).

    The modules stay the objects they are, with the same parameters at the same paths. Modules of other
    types (quantised, stacked experts, subclasses) and other dtypes are left alone. Without the kernel
    nothing is done.

    The model goes into evaluation mode: what is trained (``model.train()``) is left to MLX, because the
    kernel's results carry no gradients.

    Args:
        limit: up to how many rows (default: where it was measured to be faster, by instruction set).
        release: let go of the floats of what is packed.

    Returns:
        How many linear layers and heads were changed.
    """
    if not native_library.available():
        return 0
    if limit is None:
        limit = LIMITS[native_library.instruction_set_in_use()]
    model.eval()
    changed = 0
    for _, parent in model.named_modules():
        children = {name: child for name, child in parent.items() if _can(child)}
        for names in TOGETHER:
            group = [children[name] for name in names if name in children]
            if len({id(child) for child in group}) == len(names) and all(
                child.weight.shape[1] == group[0].weight.shape[1] for child in group
            ):
                changed += _change(group, limit)
                children = {name: child for name, child in children.items() if name not in names}
    for _, module in model.named_modules():
        if _can(module):
            changed += _change([module], limit)
    for _, module in model.named_modules():
        if isinstance(module, _Released):
            packed.install(cast(nn.Module, module), release=release)
    gated.install(model, limit)
    rotary.install(model, limit)
    mx.clear_cache()
    return changed


def uninstall(model: nn.Module) -> None:
    """Undo ``install``."""
    plain = {native: cls for cls, native in _NATIVE.items()}
    gated.uninstall(model)
    rotary.uninstall(model)
    for _, module in model.named_modules():
        if type(module) in plain:
            packed.restore(module)
            module.__class__ = plain[type(module)]
            del module._siblings


def _can(module: Any) -> bool:
    return type(module) in _NATIVE and bool(module.weight.dtype == mx.float32)


def _change(group: Sequence[nn.Module], limit: int) -> int:
    siblings = Siblings(group, limit)
    for module in group:
        module.__class__ = _NATIVE[type(module)]
        module._siblings = siblings
    return len(group)
