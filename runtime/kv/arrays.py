"""``PoolArrays``: the bytes of the pool.

For each layer one MLX array per tensor with a leading slot axis, allocated once; nothing grows by
copying. On the CPU every write goes through a NumPy view of the array's own memory, so a write never
copies, and I/O threads may fill slots that are reserved for them while the step thread computes. On
other devices writes are MLX slice updates, in place as long as nothing else refers to the array.

Invariant on the CPU: MLX only ever reads these arrays, and whatever reads a slot has been evaluated
before that slot is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..store.reading import address
from . import host_memory
from .scheme import KVScheme
from .spec import LayerSpec, ModelCacheSpec, TensorLayout, block_tensors, page_tensors

MLX_DTYPE = {"U32": mx.uint32, "BF16": mx.uint16}

LayerArrays = dict[str, mx.array]
"""Tensors of one layer, by the part of the name behind the layer: ``k.packed``, ``v.scales``, ..."""


KEPT_VIEWS = 512
"""Slots whose views are kept, some 20 KB each. Making them anew would take as long as reading the block."""


def to_bits(x: mx.array) -> mx.array:
    """bfloat16 as its bits (uint16), the form the pool keeps."""
    return x.astype(mx.bfloat16).view(mx.uint16)


def from_bits(x: mx.array) -> mx.array:
    return x.view(mx.bfloat16)


def _places(views: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """[2, views]: where each begins, and bytes from slot to slot."""
    return np.array([[address(view) for view in views], [view.strides[0] for view in views]], np.int64)


class PoolArrays:
    """Block and page memory of every attention layer.

    Attributes:
        blocks: per layer index, ``LayerArrays`` of shape ``[slots, ...]``.
        pages: per layer index, ``tail.k`` and ``tail.v`` of shape ``[pages, heads, 64, width]``.
        host: whether writes go through NumPy views (CPU).
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        scheme: KVScheme,
        group_slots: Sequence[int],
        pages: int,
        *,
        host: bool,
    ) -> None:
        self.spec, self.scheme, self.host = spec, scheme, host
        self.group_slots, self.page_count = tuple(group_slots), pages
        self.blocks: dict[int, LayerArrays] = {}
        self.pages: dict[int, LayerArrays] = {}
        self._views: dict[int, NDArray[Any]] = {}
        self._slot_views: dict[tuple[int, int], list[NDArray[Any]]] = {}
        self._places: dict[int, NDArray[np.int64]] = {}
        self._page_places: NDArray[np.int64] | None = None
        self._of = {
            layer.index: scheme.of(layer.index, windowed=layer.window is not None)
            for layer in spec.attention_layers
        }
        self._group_layouts = [group.tensors(scheme) for group in spec.groups]
        wanted: list[tuple[LayerArrays, TensorLayout, int]] = []
        for group, slots in zip(spec.groups, group_slots, strict=True):
            for layer in group.layers:
                blocks = self.blocks[layer.index] = {}
                tails = self.pages[layer.index] = {}
                wanted += [(blocks, layout, slots) for layout in block_tensors(layer, self._of[layer.index])]
                wanted += [(tails, layout, pages) for layout in page_tensors(layer)]
        self._allocate(wanted)

    def _allocate(self, wanted: Sequence[tuple[LayerArrays, TensorLayout, int]]) -> None:
        """Make arrays of so many slots each, and put them where they belong."""
        # One slot at least: an empty pool still has well-formed arrays.
        shapes = [((max(1, slots), *layout.shape), MLX_DTYPE[layout.dtype]) for _, layout, slots in wanted]
        made = host_memory.zeros(shapes) if self.host else [mx.zeros(*one) for one in shapes]
        mx.eval(made)
        for (arrays, layout, _), array in zip(wanted, made, strict=True):
            arrays[layout.name.split(".", 2)[2]] = array
            if self.host:
                view = np.array(array, copy=False)
                assert view.flags.c_contiguous, layout
                assert view.flags.writeable, layout
                self._views[id(array)] = view

    @property
    def nbytes(self) -> int:
        return sum(
            a.nbytes for layers in (self.blocks, self.pages) for d in layers.values() for a in d.values()
        )

    def view(self, array: mx.array) -> NDArray[Any]:
        """The NumPy view of one of the pool's arrays (host mode only)."""
        return self._views[id(array)]

    def sliceable(self, value: Any) -> Any:
        """An evaluated array in the form whose slices ``write`` takes at no cost: NumPy in host mode."""
        return np.asarray(value) if self.host else value

    def write(self, array: mx.array, index: Any, value: Any) -> None:
        """``array[index] = value`` in place; ``value`` is (a slice of) what ``sliceable`` gave."""
        if self.host:
            self._views[id(array)][index] = value
        else:
            array[index] = value

    def take(self, array: mx.array, slots: mx.array) -> mx.array:
        """Rows ``slots`` of one of the pool's arrays: ``[len(slots), ...]``."""
        return mx.take(array, slots, axis=0)

    def block_buffers(self, group: int, slot: int) -> list[NDArray[Any]]:
        """One contiguous NumPy array per tensor of the block, in file order.

        In host mode they are the pool's own memory: reading into them fills the slot. Otherwise they
        are copies; ``put_block`` writes such copies back.
        """
        if not self.host:
            return [np.array(array[slot]) for array in self._block_arrays(group)]
        views = self._slot_views.get((group, slot))
        if views is None:
            if len(self._slot_views) >= KEPT_VIEWS:
                self._slot_views.clear()
            views = [self.view(array)[slot] for array in self._block_arrays(group)]
            self._slot_views[group, slot] = views
        return list(views)

    def block_addresses(self, group: int, slot: int) -> NDArray[np.int64]:
        """Where ``block_buffers``' arrays are (host mode)."""
        places = self._places.get(group)
        if places is None:
            views = [self.view(array) for array in self._block_arrays(group)]
            places = self._places[group] = _places(views)
        addresses: NDArray[np.int64] = places[0] + slot * places[1]
        return addresses

    def _block_arrays(self, group: int) -> list[mx.array]:
        """The pool's arrays of a group, in file order."""
        named = (layout.name.split(".", 2) for layout in self._group_layouts[group])
        return [self.blocks[int(index)][name] for _, index, name in named]

    def empty_block(self, group: int) -> list[NDArray[Any]]:
        """Staging memory for one block of a group, in file order (device mode)."""
        return [
            np.empty(layout.shape, np.uint32 if layout.dtype == "U32" else np.uint16)
            for layout in self._group_layouts[group]
        ]

    def put_block(self, group: int, slot: int, tensors: Sequence[NDArray[Any]]) -> None:
        """Fill a slot from host copies of its tensors, in file order."""
        for layout, tensor in zip(self._group_layouts[group], tensors, strict=True):
            _, index, name = layout.name.split(".", 2)
            array = self.blocks[int(index)][name]
            if self.host:
                self.view(array)[slot] = tensor
            else:
                array[slot] = mx.array(tensor)

    def copy_block(self, group: int, source: int, target: int) -> None:
        self.put_block(group, target, self.block_buffers(group, source))

    def page_buffers(self, page: int) -> list[NDArray[Any]]:
        """The tensors of one page in layer order, as ``block_buffers`` gives those of a block."""
        return [
            self.view(array)[page] if self.host else np.array(array[page])
            for layer in self.spec.attention_layers
            for array in self.pages[layer.index].values()
        ]

    def page_addresses(self, page: int) -> NDArray[np.int64]:
        """Where ``page_buffers``' arrays are (host mode)."""
        if self._page_places is None:
            arrays = (a for layer in self.spec.attention_layers for a in self.pages[layer.index].values())
            self._page_places = _places([self.view(array) for array in arrays])
        addresses: NDArray[np.int64] = self._page_places[0] + page * self._page_places[1]
        return addresses

    def put_page(self, page: int, tensors: Sequence[NDArray[Any]]) -> None:
        arrays = [a for layer in self.spec.attention_layers for a in self.pages[layer.index].values()]
        for array, tensor in zip(arrays, tensors, strict=True):
            if self.host:
                self.view(array)[page] = tensor
            else:
                array[page] = mx.array(tensor)

    def copy_page(self, source: int, target: int) -> None:
        self.put_page(target, self.page_buffers(source))

    def evaluate(self) -> None:
        """Let pending slice updates happen (device mode), so that no graph refers to old arrays."""
        if not self.host:
            mx.eval([a for layers in (self.blocks, self.pages) for d in layers.values() for a in d.values()])

    def layer_scheme(self, layer: LayerSpec) -> Any:
        return self._of[layer.index]
