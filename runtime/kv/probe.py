"""Asking a model what it caches, and refusing at load what cannot be served.

``derive`` runs one small forward over recording caches: the kinds come from the model's own
``make_cache``, heads, widths and windows from what its layers really pass. A layer that keeps
something but never calls the shared attention is found by counting calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.base import create_causal_mask

from offbook.bus.errors import ModelError, OffbookError

from .attention import install
from .cache import CausalMask
from .spec import LayerSpec, ModelCacheSpec

PROBE_TOKENS = 8


class Recorder:
    """Stands in for one layer's cache: passes everything on and remembers what it saw."""

    def __init__(self, index: int, inner: Any) -> None:
        self.index, self.inner = index, inner
        self.calls = 0
        self.heads = self.key_width = self.value_width = 0
        self.latent = False
        self.window: int | None = getattr(inner, "max_size", None)
        self.keep = getattr(inner, "keep", 0)
        self.sinks = False

    @property
    def offset(self) -> int:
        return int(self.inner.offset)

    @property
    def shape(self) -> tuple[int, ...]:
        """Heads, widths, and calls of the shared attention."""
        return self.heads, self.key_width, self.value_width, self.calls

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.heads, self.key_width = keys.shape[1], keys.shape[3]
        self.value_width = values.shape[3]
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return CausalMask(window_size)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        self.calls += 1
        if mask is not None and not isinstance(mask, CausalMask):
            raise ModelError(
                f"layer {self.index} attends with a mask of its own ({type(mask).__name__}); only causal "
                "and sliding-window attention can be served"
            )
        if self.window is None and mask is not None:
            self.window = mask.window
        if values.shape[-1] < keys.shape[-1] and getattr(self.inner, "latent", False):
            self.latent = True
        self.value_width = values.shape[-1]
        self.sinks = sinks is not None
        length = queries.shape[2]
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=create_causal_mask(length), sinks=sinks
        )


def make_caches(model: nn.Module) -> Sequence[Any]:
    """The model's own caches, one a layer, as mlx-lm makes them."""
    return mlx_cache.make_prompt_cache(model)  # type: ignore[no-any-return]


def derive(model: nn.Module) -> ModelCacheSpec:
    """The model's cache spec. Installs the attention dispatcher.

    Raises:
        ModelError: a cache of a kind that cannot be kept in blocks, a layer that does not use the
            shared attention, or a mask of the model's own. The message names the layer.
    """
    install(model)
    recorders, dtype_bytes = _record(model, PROBE_TOKENS)
    singles, _ = _record(model, 1)
    for several, single in zip(recorders, singles, strict=True):
        if isinstance(several, Recorder) and several.shape != single.shape:
            raise ModelError(
                f"layer {several.index} of {type(model).__module__} attends otherwise to one token than to "
                f"several (heads, widths, calls {single.shape} and {several.shape}); that cannot be served"
            )
    layers = []
    for index, cache in enumerate(recorders):
        if not isinstance(cache, Recorder):
            layers.append(LayerSpec(index, "state", arrays=len(cache.cache)))
            continue
        if cache.calls != 1:
            raise ModelError(
                f"layer {index} of {type(model).__module__} called the shared attention {cache.calls} times "
                "for one forward (1 expected); it would not read the block pool"
            )
        kind = "latent" if cache.latent else "full" if cache.window is None else "window"
        layers.append(
            LayerSpec(index, kind, cache.heads, cache.key_width, cache.value_width, cache.window)  # type: ignore[arg-type]
        )
    return ModelCacheSpec(tuple(layers), dtype_bytes=dtype_bytes)


def _record(model: nn.Module, length: int) -> tuple[list[Any], int]:
    """One forward of so many tokens: its caches, ``Recorder`` where it attends, and the bytes of a logit."""
    recorders: list[Any] = []
    for index, cache in enumerate(make_caches(model)):
        if type(cache) in (mlx_cache.KVCache, mlx_cache.RotatingKVCache) or getattr(cache, "latent", False):
            if getattr(cache, "keep", 0):
                raise ModelError(f"layer {index}: a rotating cache that keeps {cache.keep} first tokens")
            recorders.append(Recorder(index, cache))
        elif type(cache) is mlx_cache.ArraysCache:
            recorders.append(cache)
        else:
            raise ModelError(
                f"layer {index} of {type(model).__module__} keeps a {type(cache).__name__}; "
                "only full, sliding-window, latent and recurrent layers can be served"
            )
    try:
        logits = model(mx.array([[1 + i % 7 for i in range(length)]]), cache=recorders)
        mx.eval(logits)
    except OffbookError:
        raise
    except Exception as error:  # whatever a model does that our caches and masks do not allow
        raise ModelError(
            f"{type(model).__module__} uses its caches or masks in a way of its own, so its attention cannot "
            f"read the block pool ({type(error).__name__}: {error}); use another architecture"
        ) from error
    return recorders, int(logits.dtype.size)
