"""Gated feed-forward blocks of few rows as one call of the native kernel: down(activation(gate(x)) * up(x)).

Besides one call instead of three, this saves MLX's elementwise work in between, which on the CPU costs
more than the products do. A block is known by its layers' names and found out by what it computes: only
one whose results on some inputs are the kernel's is changed.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kv import native_library
from .few_rows import F32, Weights, address, few_rows, shape_of

NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the three layers: gate, up, down."""

ACTIVATIONS = (0, 1)
"""The kernel's activations: SiLU, and GELU approximated with tanh."""

TOLERANCE = 1e-4
"""Largest difference, as a share of the largest result, between the block and the kernel."""


class Gated:
    """The kernel's call for one block."""

    def __init__(self, layers: tuple[nn.Module, ...], activation: int, limit: int) -> None:
        self.layers, self.activation, self.limit = layers, activation, limit
        self._call = native_library.library().offbook_gated
        self._weights: Weights | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy's arrays are elsewhere.
        return {"layers": self.layers, "activation": self.activation, "limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def result(self, block: nn.Module, x: mx.array) -> mx.array | None:
        """The block's output for ``x``; None if it is MLX's to compute."""
        values = few_rows(block, x, self.limit)
        return None if values is None else self.product(values)

    def product(self, values: F32) -> mx.array | None:
        weights = self._weights
        if weights is None or not weights.of(self.layers):
            weights = self._weights = Weights(self.layers)
        inner, outputs = weights.outputs[0], weights.outputs[2]
        if not (weights.fit and weights.inputs == [values.shape[-1], values.shape[-1], inner]):
            return None
        inputs = values.shape[-1]
        rows = values.size // inputs
        out = np.empty((*values.shape[:-1], outputs), np.float32)
        if self._call(weights.pointer, self.activation, rows, inputs, address(values), address(out)):
            raise MemoryError("the linear kernel could not get working memory")
        return mx.array(out)


class _Block:
    """What a changed block's class begins with."""

    plain: type[nn.Module]

    def __call__(self, x: mx.array, *arguments: Any, **named: Any) -> Any:
        y = None if arguments or named else cast(Any, self)._gated.result(self, x)
        return cast(Any, super()).__call__(x, *arguments, **named) if y is None else y


_classes: dict[type, type] = {}


def install(model: nn.Module, limit: int) -> int:
    """Change the model's gated blocks of float32 linear layers; how many there were."""
    changed = 0
    for _, module in model.named_modules():
        if isinstance(module, _Block):
            continue
        for names in NAMES:
            layers = tuple(module.get(name) for name in names)
            if all(isinstance(layer, nn.Linear) for layer in layers) and (
                found := _find(module, layers, limit)
            ):
                module.__class__ = _native(type(module))
                module._gated = found
                changed += 1
    return changed


def uninstall(model: nn.Module) -> None:
    for _, module in model.named_modules():
        if isinstance(module, _Block):
            cast(Any, module).__class__ = module.plain
            del cast(Any, module)._gated


def _native(cls: type) -> type:
    if cls not in _classes:
        _classes[cls] = type(f"Native{cls.__name__}", (_Block, cls), {"plain": cls})
    return _classes[cls]


def _find(block: nn.Module, layers: tuple[nn.Module, ...], limit: int) -> Gated | None:
    """The call that computes what the block does, if there is one."""
    inputs = shape_of(layers[0])[1]
    # Small and large inputs: an activation that is clipped, or another one, shows.
    rows = np.random.default_rng(0).standard_normal((3, inputs), np.float32)
    rows *= np.array([[0.3], [3], [30]], np.float32)
    try:
        expected = np.asarray(block(mx.array(rows[None])))[0]
    except (TypeError, ValueError, AttributeError):  # it takes something else
        return None
    size = np.abs(expected).max(axis=-1, keepdims=True)
    if expected.shape[0] != 3 or not np.all(np.isfinite(size) & (size > 0)):
        return None
    for activation in ACTIVATIONS:
        call = Gated(layers, activation, limit)
        got = call.product(rows)
        if got is None or got.shape != expected.shape:
            return None
        if np.all(np.abs(np.asarray(got) - expected) <= TOLERANCE * size):
            return call
    return None
