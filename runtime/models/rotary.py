"""Rotary positions of few tokens on the CPU, in NumPy.

MLX's CPU backend has no rotary kernel: each call is some fifteen small operations, most of them to get the
same angles again, in every layer. Here the layers share the angles of a step, which MLX's own operation
gives for unit vectors, so what comes out has the same bits. Many tokens and what is being traced go
MLX's way.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE
from numpy.typing import NDArray

from .few_rows import F32, few_rows

_Known = tuple[Any, F32, F32]


SPAN = 256
"""Positions whose angles are got together."""

SPANS = 64
"""Spans that are kept, some 100 KB each."""


class Angles:
    """Cosines and sines of positions, shared by layers that turn alike."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._at: _Known | None = None
        self._spans: OrderedDict[int, tuple[F32, F32]] = OrderedDict()

    def of(self, rope: Any, rows: int, length: int, offset: int | mx.array) -> tuple[F32, F32]:
        """Cosines and sines [rows or 1, 1, length, dims / 2] at ``offset`` and the positions behind it."""
        at: Any = offset if isinstance(offset, int) else np.asarray(offset).tobytes()
        return self._turned(rope, (rows, length, at), 1 if isinstance(offset, int) else rows, length, offset)

    def at(self, rope: Any, positions: NDArray[np.int64]) -> tuple[F32, F32]:
        """Cosines and sines [positions, dims / 2], from spans that are kept: getting them takes longer than a
        layer of a decode step."""
        key = positions.tobytes()
        if self._at is None or self._at[0] != key:
            count, half = len(positions), rope.dims // 2
            cosines, sines = np.empty((count, half), np.float32), np.empty((count, half), np.float32)
            spans = positions // SPAN
            for span in dict.fromkeys(spans.tolist()):
                kept = self._span(rope, span)
                here = spans == span
                cosines[here], sines[here] = (of[positions[here] - span * SPAN] for of in kept)
            self._at = key, cosines, sines
        return self._at[1], self._at[2]

    def _span(self, rope: Any, span: int) -> tuple[F32, F32]:
        kept = self._spans.get(span)
        if kept is None:
            positions = mx.arange(span * SPAN, (span + 1) * SPAN, dtype=mx.int32)
            pair = self._turned(rope, ("span", span), SPAN, 1, positions)
            kept = self._spans[span] = pair[0].reshape(SPAN, -1), pair[1].reshape(SPAN, -1)
            if len(self._spans) > SPANS:
                self._spans.popitem(last=False)
        self._spans.move_to_end(span)
        return kept

    def _turned(self, rope: Any, key: Any, rows: int, length: int, offset: int | mx.array) -> tuple[F32, F32]:
        known = self._known
        if known is None or known[0] != key:
            unit = np.zeros((rows, 1, length, rope.dims), np.float32)
            first, second = halves(rope, unit)
            first[...] = 1
            turned = np.asarray(rope.plainly(mx.array(unit), offset))
            first, second = halves(rope, turned)
            known = self._known = key, np.ascontiguousarray(first), np.ascontiguousarray(second)
        return known[1], known[2]


def halves(rope: Any, x: F32) -> tuple[F32, F32]:
    """Views of the first and the second number of each pair that is turned."""
    dims = rope.dims
    if rope.traditional:
        return x[..., 0:dims:2], x[..., 1:dims:2]
    return x[..., : dims // 2], x[..., dims // 2 : dims]


class Rotary:
    """What a changed module's class begins with."""

    plain: type[nn.Module]
    dims: int
    traditional: bool
    _angles: Angles
    _limit: int

    def plainly(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return cast(mx.array, cast(Any, super()).__call__(x, offset=offset))

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        this = cast(Any, self)
        values = few_rows(this, x, self._limit * x.shape[1]) if x.ndim == 4 else None
        if values is None or not isinstance(offset, int | mx.array) or this.dims % 2:
            return self.plainly(x, offset)
        try:
            cosines, sines = self._angles.of(self, x.shape[0], x.shape[2], offset)
        except ValueError:  # the offset is being traced
            return self.plainly(x, offset)
        out = np.empty(values.shape, np.float32)
        (a, b), (first, second) = halves(self, values), halves(self, out)
        np.multiply(a, cosines, out=first)
        first -= b * sines
        np.multiply(a, sines, out=second)
        second += b * cosines
        if this.dims < values.shape[-1]:
            out[..., this.dims :] = values[..., this.dims :]
        return mx.array(out)


class NativeRoPE(Rotary, nn.RoPE):  # type: ignore[misc]  # mlx has no annotations
    plain = nn.RoPE


class NativeLlama3RoPE(Rotary, Llama3RoPE):  # type: ignore[misc]
    plain = Llama3RoPE


_CLASSES: dict[type, Any] = {nn.RoPE: NativeRoPE, Llama3RoPE: NativeLlama3RoPE}


def install(model: nn.Module, limit: int) -> None:
    """Change the model's rotary modules: up to ``limit`` tokens are turned here."""
    shared: dict[Any, Angles] = {}
    for _, module in model.named_modules():
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
            module._angles, module._limit = shared.setdefault(_kind(module), Angles()), limit


def uninstall(model: nn.Module) -> None:
    for _, module in model.named_modules():
        if isinstance(module, Rotary):
            del module._angles, module._limit
            cast(Any, module).__class__ = module.plain


def _kind(rope: Any) -> tuple[Any, ...]:
    """Equal for modules that turn by the same angles."""
    if isinstance(rope, nn.RoPE):
        return rope.dims, rope.traditional, rope.base, rope.scale
    return rope.dims, rope.traditional, np.asarray(rope._freqs).tobytes()
