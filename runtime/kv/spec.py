"""``ModelCacheSpec``: what a model keeps per layer, derived by asking the model itself.

A forward over recording caches tells each layer's kind, heads and widths, so no table of models is
kept. Layers that see the same span of the past form a *layer group* with its own block slots, so
window layers give blocks back once these have left the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .scheme import BLOCK, GROUP, KVScheme, LayerScheme

Kind = Literal["full", "window", "latent", "state"]
Dtype = Literal["U32", "BF16"]

ITEM_BYTES = {"U32": 4, "BF16": 2}


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the model.

    Attributes:
        index: its place in the model's cache list.
        kind: ``full``, ``window``, ``latent`` (keys only, values are their first channels) or ``state``.
        heads: KV heads. key_width, value_width: channels per head.
        window: tokens a window layer sees, itself included.
        arrays: arrays a ``state`` layer keeps.
    """

    index: int
    kind: Kind
    heads: int = 0
    key_width: int = 0
    value_width: int = 0
    window: int | None = None
    arrays: int = 0


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a block or of a page: its name, element type and shape without the slot axis."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def value_group(width: int, wanted: int) -> int | None:
    """The quantisation group of values of this width, or None if they must stay at 16 bits."""
    for group in (128, 64, 32):
        if group <= wanted and width % group == 0:
            return group
    return None


def value_bits(layer: LayerSpec, scheme: LayerScheme) -> int | None:
    """Bits of the layer's values; None (16-bit) when the width fits no quantisation group."""
    return scheme.value_bits if value_group(layer.value_width, scheme.value_group) else None


def block_tensors(layer: LayerSpec, scheme: LayerScheme) -> list[TensorLayout]:
    """The tensors one block holds for one layer, in file order."""
    prefix = f"layers.{layer.index}"
    heads = layer.heads
    tensors: list[TensorLayout] = []
    bits: int | None = scheme.key_bits
    if bits is None:
        tensors.append(TensorLayout(f"{prefix}.k.raw", "BF16", (heads, BLOCK, layer.key_width)))
    else:
        per_group = (heads, layer.key_width, BLOCK // GROUP)
        packed = (heads, layer.key_width, BLOCK * bits // 32)
        tensors.append(TensorLayout(f"{prefix}.k.packed", "U32", packed))
        tensors.append(TensorLayout(f"{prefix}.k.scales", "BF16", per_group))
        tensors.append(TensorLayout(f"{prefix}.k.biases", "BF16", per_group))
    if layer.kind == "latent":
        return tensors
    bits = value_bits(layer, scheme)
    group = value_group(layer.value_width, scheme.value_group)
    if bits is None or group is None:
        tensors.append(TensorLayout(f"{prefix}.v.raw", "BF16", (heads, BLOCK, layer.value_width)))
    else:
        per_token = (heads, BLOCK, layer.value_width // group)
        packed = (heads, BLOCK, layer.value_width * bits // 32)
        tensors.append(TensorLayout(f"{prefix}.v.packed", "U32", packed))
        tensors.append(TensorLayout(f"{prefix}.v.scales", "BF16", per_token))
        tensors.append(TensorLayout(f"{prefix}.v.biases", "BF16", per_token))
    return tensors


def page_tensors(layer: LayerSpec) -> list[TensorLayout]:
    """The tensors of one 64-token page of the hot tail for one layer."""
    prefix = f"layers.{layer.index}"
    pages = [TensorLayout(f"{prefix}.tail.k", "BF16", (layer.heads, GROUP, layer.key_width))]
    if layer.kind != "latent":
        pages.append(TensorLayout(f"{prefix}.tail.v", "BF16", (layer.heads, GROUP, layer.value_width)))
    return pages


@dataclass(frozen=True)
class LayerGroup:
    """Layers that see the same span of the past and so share block slots."""

    name: str
    window: int | None
    layers: tuple[LayerSpec, ...]

    def tensors(self, scheme: KVScheme) -> list[TensorLayout]:
        windowed = self.window is not None
        return [
            tensor
            for layer in self.layers
            for tensor in block_tensors(layer, scheme.of(layer.index, windowed=windowed))
        ]

    def block_bytes(self, scheme: KVScheme) -> int:
        return sum(tensor.nbytes for tensor in self.tensors(scheme))

    def first_block(self, tokens: int) -> int:
        """The first block that the token at position ``tokens`` can see."""
        return 0 if self.window is None else max(0, tokens - self.window + 1) // BLOCK

    def blocks(self, tokens: int, sealed: int) -> int:
        """Blocks of this group an agent of ``tokens`` tokens, ``sealed`` of them sealed, keeps.

        A part-filled block stays whatever the window: it is still to be saved.
        """
        return -(-sealed // BLOCK) - min(self.first_block(tokens), sealed // BLOCK)


@dataclass(frozen=True)
class ModelCacheSpec:
    """Every layer's cache, and the groups the attention layers form."""

    layers: tuple[LayerSpec, ...]
    dtype_bytes: int = 2

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        spans: dict[int | None, list[LayerSpec]] = {}
        for layer in self.layers:
            if layer.kind != "state":
                spans.setdefault(layer.window, []).append(layer)
        return tuple(
            LayerGroup("full" if window is None else f"window{window}", window, tuple(layers))
            for window, layers in sorted(spans.items(), key=lambda item: (item[0] is not None, item[0] or 0))
        )

    @property
    def attention_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if layer.kind != "state")

    @property
    def state_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if layer.kind == "state")

    @property
    def page_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.attention_layers for tensor in page_tensors(layer))

    def block_bytes(self, scheme: KVScheme) -> int:
        """Bytes of one 256-token block over all layer groups: the size of a file on disk."""
        return sum(group.block_bytes(scheme) for group in self.groups)

    def agent_bytes(self, tokens: int, scheme: KVScheme) -> int:
        """Bytes an idle agent of ``tokens`` tokens takes in the pool: blocks and pages."""
        sealed = scheme.sealed(tokens)
        blocks = sum(group.blocks(tokens, sealed) * group.block_bytes(scheme) for group in self.groups)
        return blocks + -(-(tokens - sealed) // GROUP) * self.page_bytes

    def fp16_bytes(self, tokens: int) -> int:
        """Bytes of the same history as plain 16-bit KV at full length in every layer."""
        return (
            2
            * tokens
            * sum(
                layer.heads * (layer.key_width + (0 if layer.kind == "latent" else layer.value_width))
                for layer in self.attention_layers
            )
        )

    def describe(self) -> str:
        """A canonical string, part of the fingerprint."""
        return ";".join(
            f"{s.index}:{s.kind}:{s.heads}:{s.key_width}:{s.value_width}:{s.window or 0}" for s in self.layers
        )
