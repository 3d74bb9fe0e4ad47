"""The native CPU attention kernel: a typed wrapper around ``native.c``, NumPy arrays in and out.

``LayerHandle`` names one layer's pool tensors and is built once; ``StepTables`` names the rows of one
step and is built once per step and layer group; a call then costs a few microseconds. The kernel reads
the pool in place, releases the GIL, and spreads its work over a small pool of threads. Calls from
several threads take turns.

Rows of a decode whose tables name the same slots (agents with a common prefix) are attended to there as
one product. The library is compiled at install time and optional: ask ``available()`` first. A row's result
has the same bits alone, in a batch, sharing a prefix or not, and on any number of threads.

Memory rule: a handle keeps the arrays it was built from alive, but not their place. When the pool is
rebuilt, build new handles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .native_library import (
    NativeUnavailable,
    available,
    default_threads,
    instruction_set,
    library,
    set_threads,
    unavailable_reason,
)
from .scheme import BLOCK, GROUP

__all__ = [
    "LayerHandle",
    "NativeUnavailable",
    "StepTables",
    "available",
    "default_threads",
    "instruction_set",
    "seal",
    "set_threads",
    "unavailable_reason",
]

F32 = NDArray[np.float32]
Bits = Literal[4, 8, 16]
_FLOAT32 = np.dtype(np.float32)


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "rep", "dk", "dv", "key_bits", "value_bits")),
        *((name, ctypes.c_int64) for name in ("value_group", "latent", "slots", "pages")),
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_scales", "k_biases", "v_scales", "v_biases")),
        *((name, ctypes.c_void_p) for name in ("tail_k", "tail_v")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("blocks", "pages", "block_at", "page_at")),
        *((name, ctypes.c_void_p) for name in ("sealed", "length", "start", "runs", "members")),
        ("run_count", ctypes.c_int64),
    ]


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]  # half the cost of .ctypes.data


def _check(name: str, array: NDArray[Any] | None, dtype: Any, shape: tuple[int, ...]) -> int:
    if array is None:
        raise ValueError(f"{name} is missing: expected {np.dtype(dtype)} {list(shape)}")
    if array.dtype != dtype or array.shape[1:] != shape[1:] or array.ndim != len(shape):
        want = ["slots", *shape[1:]]
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}: expected {np.dtype(dtype)} {want}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous: the kernel reads the pool's own memory")
    return _address(array)


class StepTables:
    """Where the rows of one step are in the pool, for the layers of one group.

    Per row: ``sealed`` tokens (a multiple of 64) are in blocks, those from ``sealed`` to ``length`` in
    pages of 64. A decode's new token is position ``length - 1``: its page must be in ``pages`` and the
    call fills its place. For a prefill ``length`` counts the history only.

    Args:
        blocks: per row the slots of its blocks from position 0; blocks before ``starts`` may be -1.
        pages: per row the page ids from position ``sealed`` on.
        sealed, lengths: per row.
        starts: per row the first visible position (0 for full attention, the default). Ignored by
            ``prefill``, whose window moves with the query.

    Raises:
        ValueError: a row's numbers contradict each other.
    """

    __slots__ = (
        "_arrays", "_blocks", "_runs", "_struct", "address", "has_new", "lengths", "max_page", "max_slot",
        "rows", "sealed",
    )  # fmt: skip

    def __init__(
        self,
        blocks: Sequence[Sequence[int]],
        pages: Sequence[Sequence[int]],
        sealed: Sequence[int],
        lengths: Sequence[int],
        starts: Sequence[int] | None = None,
    ) -> None:
        rows = len(lengths)
        if starts is None:
            starts = [0] * rows
        if not len(blocks) == len(pages) == len(sealed) == len(starts) == rows:
            raise ValueError(
                f"{len(blocks)} block tables, {len(pages)} page tables, {len(sealed)} sealed counts and "
                f"{len(starts)} starts for {rows} lengths: one of each per row"
            )
        flat_blocks: list[int] = []
        flat_pages: list[int] = []
        block_at, page_at = [], []
        self.max_slot = self.max_page = -1
        for row in range(rows):
            seal, length, start = sealed[row], lengths[row], starts[row]
            table, tail = blocks[row], pages[row]
            if seal % GROUP or not 0 <= seal <= length or not 0 <= start <= length:
                raise ValueError(
                    f"row {row}: {seal} sealed of {length} tokens, visible from {start}: sealed must be a "
                    f"multiple of {GROUP}, and neither may exceed the length"
                )
            needed, needed_pages = -(-seal // BLOCK), -(-(length - seal) // GROUP)
            if len(table) < needed or len(tail) < needed_pages:
                raise ValueError(
                    f"row {row}: {len(table)} blocks and {len(tail)} pages hold less than {seal} sealed of "
                    f"{length} tokens ({needed} blocks and {needed_pages} pages)"
                )
            visible = table[start // BLOCK : needed]
            if len(visible) and min(visible) < 0:
                raise ValueError(
                    f"row {row}: a visible block has no slot: {list(visible)} from position {start}"
                )
            if needed_pages and min(tail[:needed_pages]) < 0:
                raise ValueError(f"row {row}: a page has no id: {list(tail)}")
            self.max_slot = max(self.max_slot, *visible) if len(visible) else self.max_slot
            self.max_page = max(self.max_page, *tail[:needed_pages]) if needed_pages else self.max_page
            block_at.append(len(flat_blocks))
            page_at.append(len(flat_pages))
            flat_blocks.extend(table[:needed])
            flat_pages.extend(tail[:needed_pages])
        self.rows = rows
        self.lengths = tuple(lengths)
        self.sealed = tuple(sealed)
        self.has_new = all(length > seal for length, seal in zip(lengths, sealed, strict=True))
        if any(start and start >= length for start, length in zip(starts, lengths, strict=True)):
            self.has_new = False
        numbers = np.array([block_at, page_at, sealed, lengths, starts], np.int64)
        tables = np.array(flat_blocks + flat_pages, np.int32)
        self._arrays = (numbers, tables)
        self._blocks = len(flat_blocks)
        self._runs: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        at, table_at = _address(numbers), _address(tables)
        offsets = [at + 8 * rows * i for i in range(5)]
        self._struct = _Step(rows, table_at, table_at + 4 * len(flat_blocks), *offsets)
        self.address = ctypes.addressof(self._struct)

    def runs(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Who shares what: (first block, one past the last, rows) of each run of blocks that these rows, and
        no others, read from the same slots. Each visible block of each row is in one run. Computed once.
        """
        self.share()
        assert self._runs is not None
        runs, members = self._runs
        return [
            (block, last, tuple(members[at : at + count].tolist()))
            for block, last, at, count in runs[: self._struct.run_count].tolist()
        ]

    def share(self) -> None:
        """Find the runs that a decode works by, unless that was done."""
        if self._runs is None:
            runs, members = np.empty((self._blocks, 4), np.int32), np.empty(self._blocks, np.int32)
            self._struct.runs, self._struct.members = _address(runs), _address(members)
            if library().offbook_share(self.address) < 0:
                raise MemoryError("the attention kernel could not get working memory")
            self._runs = runs, members


class LayerHandle:
    """One layer's tensors in the pool, ready to be attended to.

    Args:
        query_heads: a multiple of ``heads``.
        heads: KV heads. key_width, value_width: multiples of 8.
        tensors: by the name behind the layer, NumPy views of the pool's own memory (contiguous, leading
            slot axis): ``k.packed``/``k.scales``/``k.biases`` or ``k.raw``, the same for ``v`` unless
            ``latent``, and ``tail.k``, ``tail.v``. bfloat16 is uint16.
        latent: values are the first ``value_width`` channels of the keys (one head, no ``v.*``).
        scale: of the scores; default ``key_width ** -0.5``.
        softcap: scores become ``cap * tanh(score / cap)``; None for no cap.

    Raises:
        NativeUnavailable: no kernel.
        ValueError: a tensor is missing or has another shape or type than the layout asks for.
    """

    __slots__ = (
        "_decode", "_library", "_struct", "_tensors", "address", "heads", "key_bits", "key_width", "latent",
        "pages", "query_heads", "scale", "slots", "value_bits", "value_group", "value_width",
    )  # fmt: skip

    def __init__(
        self,
        *,
        query_heads: int,
        heads: int,
        key_width: int,
        value_width: int,
        tensors: dict[str, NDArray[Any]],
        latent: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self._library = library()
        if heads < 1 or query_heads % heads:
            raise ValueError(f"{query_heads} query heads do not divide by {heads} KV heads")
        for what, width in (("key", key_width), ("value", value_width)):
            if width < 8 or width % 8:
                raise ValueError(f"{what} width {width}: the kernel takes multiples of 8")
        if latent and (heads != 1 or value_width > key_width):
            raise ValueError(
                f"a latent layer has 1 KV head and values no wider than its keys, not {heads} heads, "
                f"{value_width} of {key_width} channels"
            )
        self.query_heads, self.heads, self.latent = query_heads, heads, latent
        self.key_width, self.value_width = key_width, value_width
        self._tensors = dict(tensors)
        get = tensors.get
        u32, u16 = np.uint32, np.uint16
        parts = BLOCK // GROUP
        k = k_scales = k_biases = v = v_scales = v_biases = tail_v = 0
        self.key_bits, self.value_bits, self.value_group = 16, 16, GROUP
        if "k.packed" in tensors:
            self.key_bits = self._bits("k.packed", BLOCK)
            k = _check("k.packed", get("k.packed"), u32, (0, heads, key_width, BLOCK * self.key_bits // 32))
            k_scales = _check("k.scales", get("k.scales"), u16, (0, heads, key_width, parts))
            k_biases = _check("k.biases", get("k.biases"), u16, (0, heads, key_width, parts))
        else:
            k = _check("k.raw", get("k.raw"), u16, (0, heads, BLOCK, key_width))
        tail_k = _check("tail.k", get("tail.k"), u16, (0, heads, GROUP, key_width))
        if not latent:
            if "v.packed" in tensors:
                self.value_bits = self._bits("v.packed", value_width)
                words = value_width * self.value_bits // 32
                v = _check("v.packed", get("v.packed"), u32, (0, heads, BLOCK, words))
                groups = tensors["v.scales"].shape[-1] if "v.scales" in tensors else value_width // GROUP
                self.value_group = value_width // max(1, groups)
                if self.value_group not in (32, 64, 128) or value_width % self.value_group:
                    raise ValueError(
                        f"v.scales has {groups} groups for width {value_width}: use groups of 128, 64 or 32"
                    )
                v_scales = _check("v.scales", get("v.scales"), u16, (0, heads, BLOCK, groups))
                v_biases = _check("v.biases", get("v.biases"), u16, (0, heads, BLOCK, groups))
            else:
                v = _check("v.raw", get("v.raw"), u16, (0, heads, BLOCK, value_width))
            tail_v = _check("tail.v", get("tail.v"), u16, (0, heads, GROUP, value_width))
        counts = {name: len(tensor) for name, tensor in tensors.items()}
        self.slots = min(count for name, count in counts.items() if not name.startswith("tail."))
        self.pages = min(count for name, count in counts.items() if name.startswith("tail."))
        self.scale = key_width**-0.5 if scale is None else scale
        self._struct = _Layer(
            heads, query_heads // heads, key_width, value_width, self.key_bits, self.value_bits,
            self.value_group, latent, self.slots, self.pages,
            k, v, k_scales, k_biases, v_scales, v_biases, tail_k, tail_v,
            self.scale, softcap or 0.0,
        )  # fmt: skip
        self.address = ctypes.addressof(self._struct)
        self._decode = self._library.offbook_decode

    def decode(
        self,
        tables: StepTables,
        queries: F32,
        keys: F32,
        values: F32 | None,
        out: F32 | None = None,
        *,
        scale: float | None = None,
        sinks: F32 | None = None,
    ) -> F32:
        """One new token for each row: write its key and value into the tail, then attend.

        Args:
            tables: one row per agent; position ``length - 1`` is the new token.
            queries: float32 [rows, query heads, key width].
            keys, values: float32 [rows, heads, width], kept as bfloat16 (nearest even). ``values`` is
                None for a latent layer.
            out: where to put the result, [rows, query heads, value width]; made if None.
            sinks: float32 [query heads], a logit per head that takes part in the softmax and has no value.

        The first two axes of each array may have any strides; the last must be contiguous.
        """
        rows = tables.rows
        self._fits(tables)
        if not tables.has_new:
            raise ValueError(
                f"decode: no page place for a new token: lengths {tables.lengths}, sealed {tables.sealed}"
            )
        if out is None:
            out = np.empty((rows, self.query_heads, self.value_width), np.float32)
        if scale is not None and scale != self.scale:
            self._rescale(scale)
        tables.share()
        if self._decode(
            self.address,
            tables.address,
            *self._rows("queries", queries, rows, self.query_heads, self.key_width),
            *self._rows("keys", keys, rows, self.heads, self.key_width),
            *self._values(values, rows),
            *self._rows("out", out, rows, self.query_heads, self.value_width),
            None if sinks is None else self._sinks(sinks),
        ):
            raise MemoryError("the attention kernel could not get working memory")
        return out

    def prefill(
        self,
        tables: StepTables,
        row: int,
        queries: F32,
        keys: F32,
        values: F32 | None,
        out: F32 | None = None,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: F32 | None = None,
    ) -> F32:
        """Several new tokens of one row, causal among themselves, after the row's history in the pool.

        Nothing is written to the pool. ``keys`` and ``values`` are taken as bfloat16 (nearest even), as the
        pool will keep them, so that tokens read in two calls have the bits they have in one, unless some of
        them were sealed between the calls.

        Args:
            tables, row: the row's ``length`` is its history, without the new tokens.
            queries: float32 [asked, query heads, key width], of the last tokens; those before only have keys
                and values.
            keys, values: float32 [tokens, heads, width]; ``values`` None for a latent layer.
            window: each token sees this many positions, itself included; None for all.
            out: [asked, query heads, value width]; made if None.
        """
        self._fits(tables)
        self._has_row(tables, row)
        tokens, asked = len(keys), len(queries)
        if asked > tokens:
            raise ValueError(f"queries of {asked} tokens, keys of {tokens}: each query's token has a key")
        if out is None:
            out = np.empty((asked, self.query_heads, self.value_width), np.float32)
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} tokens: use 1 or more")
        if scale is not None and scale != self.scale:
            self._rescale(scale)
        if asked and self._library.offbook_prefill(
            self.address,
            tables.address,
            row,
            tokens,
            asked,
            window or 0,
            *self._rows("queries", queries, asked, self.query_heads, self.key_width),
            *self._rows("keys", keys, tokens, self.heads, self.key_width),
            *self._values(values, tokens),
            *self._rows("out", out, asked, self.query_heads, self.value_width),
            None if sinks is None else self._sinks(sinks),
        ):
            raise MemoryError("the attention kernel could not get working memory")
        return out

    def dequantise(
        self, tables: StepTables, row: int, start: int = 0, stop: int | None = None
    ) -> tuple[F32, F32 | None]:
        """Positions ``start`` to ``stop`` (default: all) of a row as float32, blocks and pages alike.

        Returns:
            Keys [heads, tokens, key width] and values [heads, tokens, value width]; no values for a
            latent layer (they are the first channels of the keys). Equal to ``mx.dequantize`` with
            float32 scales, within a rounding of the last bit.
        """
        self._fits(tables)
        self._has_row(tables, row)
        length = tables.lengths[row]
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"positions {start} to {stop} of a row of {length} tokens")
        tokens = stop - start
        keys = np.empty((self.heads, tokens, self.key_width), np.float32)
        values = None if self.latent else np.empty((self.heads, tokens, self.value_width), np.float32)
        if tokens and self._library.offbook_dequantise(
            self.address, tables.address, row, start, stop,
            _address(keys), tokens * self.key_width,
            None if values is None else _address(values), tokens * self.value_width,
        ):  # fmt: skip
            raise MemoryError("the attention kernel could not get working memory")
        return keys, values

    # ---- checks: a wrong pointer must never reach C

    def _bits(self, name: str, elements: int) -> Bits:
        words = self._tensors[name].shape[-1]
        both: tuple[Bits, Bits] = (4, 8)
        for bits in both:
            if words * 32 == elements * bits:
                return bits
        raise ValueError(f"{name} has {words} words for {elements} elements: neither 4 nor 8 bits")

    def _fits(self, tables: StepTables) -> None:
        if tables.max_slot >= self.slots or tables.max_page >= self.pages:
            raise ValueError(
                f"the tables name slot {tables.max_slot} and page {tables.max_page}; this layer has "
                f"{self.slots} slots and {self.pages} pages"
            )

    @staticmethod
    def _has_row(tables: StepTables, row: int) -> None:
        if not 0 <= row < tables.rows:
            raise ValueError(f"row {row} of {tables.rows}")

    def _rows(self, name: str, array: F32, tokens: int, heads: int, width: int) -> tuple[int, int, int]:
        if array.shape != (tokens, heads, width) or array.dtype != _FLOAT32:
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}: expected float32 {[tokens, heads, width]}"
            )
        token, head, item = array.strides
        if item != 4 or token % 4 or head % 4:
            raise ValueError(f"{name} has strides {array.strides}: the last axis must be contiguous")
        return array.__array_interface__["data"][0], token >> 2, head >> 2

    def _values(self, values: F32 | None, tokens: int) -> tuple[int | None, int, int]:
        if self.latent:
            return None, 0, 0
        if values is None:
            raise ValueError("values are missing: only a latent layer has none")
        return self._rows("values", values, tokens, self.heads, self.value_width)

    def _sinks(self, sinks: F32) -> int:
        if sinks.shape != (self.query_heads,) or sinks.dtype != _FLOAT32 or not sinks.flags.c_contiguous:
            raise ValueError(
                f"sinks are {sinks.dtype} {list(sinks.shape)}: expected float32 [{self.query_heads}]"
            )
        return _address(sinks)

    def _rescale(self, scale: float) -> None:
        self.scale = self._struct.scale = scale


def seal(
    layers: Sequence[LayerHandle], pages: Sequence[int], slots: Sequence[int], groups: Sequence[int]
) -> None:
    """Quantise whole pages into groups (0..3) of blocks, as ``mx.quantize`` would, bit for bit.

    Each layer has a page, a slot and a group of its own.

    Raises:
        ValueError: a layer has no such page, slot or group.
    """
    count = len(layers)
    if not count == len(pages) == len(slots) == len(groups):
        raise ValueError(
            f"{count} layers, {len(pages)} pages, {len(slots)} slots, {len(groups)} groups: one of each"
        )
    for layer, page, slot, group in zip(layers, pages, slots, groups, strict=True):
        given = (("page", page, layer.pages), ("slot", slot, layer.slots), ("group", group, BLOCK // GROUP))
        for what, number, limit in given:
            if not 0 <= number < limit:
                raise ValueError(f"{what} out of range: {number}, there are {limit}")
    if not count:
        return
    addresses = np.array([layer.address for layer in layers], np.int64)
    ids = np.array([pages, slots, groups], np.int32)
    at = _address(ids)
    if library().offbook_seal(_address(addresses), count, at, at + 4 * count, at + 8 * count):
        raise MemoryError("the attention kernel could not get working memory")
