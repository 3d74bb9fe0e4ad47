"""Weights kept a second time in the few bits they have, for products of few rows on the CPU.

A decode step reads every weight once, so its time is the bytes of the weights over the memory's bandwidth.
Weights that were quantised before they became float32 (those of GGUF files) still have few different
values: ``pack`` finds 4 or 8 bits, a scale and a bias for each group of 32 that give back each float bit for
bit, and the kernel unpacks them into the processor's cache on its way. Weights of another kind are left as
they are. Results do not change in either case.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kv import native_library
from .few_rows import Packed, address, readable

PIECE = 64
"""Inputs that are packed together."""


def pack(weight: mx.array) -> Packed | None:
    """Pack a float32 matrix [outputs, inputs] without loss; None if it cannot be."""
    if weight.ndim != 2 or not weight.size or weight.shape[1] % PIECE or not readable(weight):
        return None
    library = native_library.library()
    outputs, inputs = weight.shape
    for bits in (4, 8):
        data = np.empty(library.offbook_packed_bytes(outputs, inputs, bits), np.uint8)
        done = library.offbook_pack(address(weight), outputs, inputs, bits, address(data))
        if done < 0:
            raise MemoryError("the linear kernel could not get working memory")
        if done:
            return Packed(weight, data, bits)
    return None


def install(model: nn.Module) -> int:
    """Pack what can be packed of a model's linear layers and embeddings; bytes that takes."""
    total = 0
    for _, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module._packed = pack(module.weight)
            total += module._packed.data.nbytes if module._packed is not None else 0
    return total


def uninstall(model: nn.Module) -> None:
    for _, module in model.named_modules():
        if "_packed" in vars(module):
            del module._packed
