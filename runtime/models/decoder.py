"""A whole forward of few rows on the CPU, layer by layer in the native kernel, with MLX looking on.

MLX computes a forward as a graph of some nine hundred small operations, and each native product in it is a
hand-over between threads. With few rows (a decode step, the short prefill of a turn whose memory was
restored) these cost as much as the products. Most models are the same thing with small variations: RMS
norms, projections with rotary positions, attention, a gated block, residual sums. ``find`` takes such a
model's parts by name and is strict about what they compute: a model is served here only if, on some tokens,
what comes out is what the model itself gives. All others, more rows, and other dtypes go the usual way.

A row's result has the same bits alone and in any batch; rows may have different numbers of tokens, and
nothing is padded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ..kv import native_library
from ..kv.cache import Step
from ..kv.probe import Recorder, make_caches
from ..kv.spec import ModelCacheSpec
from . import packed
from .few_rows import F32, LIMITS, LinearStruct, Weights, address, shape_of
from .gated import ACTIVATIONS, NAMES
from .rotary import Angles, Rotary

Attend = Callable[[int, float, F32, F32, F32, F32, bool], None]
"""(layer, scale, queries [tokens, heads, width], keys and values [tokens, kv heads, width], out)."""

TOLERANCE = 1e-4
"""Largest difference from the model's logits, as a share of the largest. Rounding makes a tenth of it; GELU
taken for its approximation with tanh, several times as much."""

FAR = 70_001
"""A position at which what depends on positions shows: some models scale their queries by them."""

NORMS = (
    # before attention, after it, before the gated block, after it
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)

_NORM_FIELDS = (
    "before_attention",
    "of_queries",
    "of_keys",
    "after_attention",
    "before_gated",
    "after_gated",
)


class _Block(ctypes.Structure):
    _fields_ = [
        ("projections", LinearStruct * 3),
        ("output", LinearStruct * 1),
        ("gated", LinearStruct * 3),
        *((name, ctypes.c_void_p) for name in _NORM_FIELDS),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "width")),
        *((name, ctypes.c_int64) for name in ("turned", "neighbours", "activation")),
        ("eps", ctypes.c_float),
    ]


class Interrupted(Exception):
    """A forward was given up between two layers, as its caller asked."""


class _Unlike(Exception):
    """The model is built in another way."""


def _norm(module: Any) -> tuple[F32, float] | None:
    """A norm's factors and epsilon; the factors may be kept as the difference from 1."""
    if module is None:
        return None
    weight, eps = module.get("weight"), getattr(module, "eps", None)
    if weight is None or eps is None or weight.dtype != mx.float32 or set(module.parameters()) != {"weight"}:
        raise _Unlike("a norm of another kind")
    x = mx.array(np.random.default_rng(1).standard_normal((1, weight.size), np.float32))
    got = np.asarray(module(x))
    for factors in (weight, 1.0 + weight):
        if np.allclose(got, np.asarray(mx.fast.rms_norm(x, factors, eps)), rtol=1e-5, atol=1e-6):
            return np.array(factors), float(eps)
    raise _Unlike("a norm that computes something else")


@dataclass
class _Layer:
    """One layer's parts, and the struct that points to them."""

    block: _Block
    scale: float
    angles: Angles
    rope: Any
    norms: list[F32]
    """Keeps the struct's memory."""

    @property
    def address(self) -> int:
        return ctypes.addressof(self.block)


def _layer(module: Any, activation: int, names: Sequence[str | None], weights: list[Weights]) -> _Layer:
    """One layer's parts; the weights are added to ``weights``.

    Raises:
        _Unlike: it has other parts, or they do not meet.
    """
    attention, gated = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    if attention is None or gated is None:
        raise _Unlike("no self_attn or mlp")
    projections = [attention.get(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    three = next((n for n in NAMES if all(isinstance(gated.get(name), nn.Linear) for name in n)), None)
    rope: Any = attention.get("rope")
    if three is None or not all(isinstance(projection, nn.Linear) for projection in projections):
        raise _Unlike("other projections")
    if not isinstance(rope, Rotary):
        raise _Unlike("other positions")
    into, output, block = (
        Weights(modules)
        for modules in (projections[:3], projections[3:], [gated.get(name) for name in three])
    )
    if not (into.fit and output.fit and block.fit):
        raise _Unlike("weights that are not float32")
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    width, hidden, inner = into.outputs[0] // heads, into.inputs[0], block.outputs[0]
    meet = (
        into.outputs == [heads * width, kv_heads * width, kv_heads * width]
        and rope.dims <= width
        and (output.inputs, output.outputs) == ([heads * width], [hidden])
        and (block.inputs, block.outputs) == ([hidden, hidden, inner], [inner, inner, hidden])
    )
    if not meet:
        raise _Unlike("sizes that do not meet")
    weights += [into, output, block]
    norms, eps = _norms(module, names, hidden, width)
    struct = _Block(
        hidden=hidden, heads=heads, kv_heads=kv_heads, width=width, turned=rope.dims,
        neighbours=int(bool(rope.traditional)), activation=activation, eps=eps,
    )  # fmt: skip
    for name, norm in zip(_NORM_FIELDS, norms, strict=True):
        setattr(struct, name, None if norm is None else address(norm))
    for parts, structs in ((into, struct.projections), (output, struct.output), (block, struct.gated)):
        parts.fill(structs)
    return _Layer(struct, float(attention.scale), rope._angles, rope, [n for n in norms if n is not None])


def _norms(
    module: Any, names: Sequence[str | None], hidden: int, width: int
) -> tuple[list[F32 | None], float]:
    """A layer's norms in the order of the struct's fields, and their epsilon."""
    before, after, before_gated, after_gated = (module.get(name) if name else None for name in names)
    attention = module.self_attn
    modules = (before, attention.get("q_norm"), attention.get("k_norm"), after, before_gated, after_gated)
    if any(name is not None and module.get(name) is None for name in names):
        raise _Unlike("norms elsewhere")
    found = [_norm(norm) for norm in modules]
    sizes = (hidden, width, width, hidden, hidden, hidden)
    there = [(*norm, size) for norm, size in zip(found, sizes, strict=True) if norm is not None]
    if any(factors.shape != (size,) for factors, _, size in there):
        raise _Unlike("norms of other sizes")
    if len({eps for _, eps, _ in there}) != 1:
        raise _Unlike("norms with different epsilons")
    return [None if norm is None else norm[0] for norm in found], there[0][1]


class Decoder:
    """A model's forward in the kernel. Made by ``find``.

    Attributes:
        limit: tokens that are read in one forward at most; more at once are MLX's.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module, activation: int, names: Sequence[str | None]
    ) -> None:
        body: Any = model.model
        self._weights: list[Weights] = []
        self._layers = [_layer(layer, activation, names, self._weights) for layer in body.layers]
        final = _norm(body.get("norm"))
        if final is None:
            raise _Unlike("no last norm")
        self._final, self._eps = final
        self.hidden = self._layers[0].block.hidden
        self._head = Weights([head])
        self._embedding = body.embed_tokens
        table = Weights([self._embedding])
        if not self._head.fit or self._head.inputs != [self.hidden] or not table.fit:
            raise _Unlike("a head or an embedding of another kind")
        self._weights += [self._head, table]
        self._table: Any = table.packed[0]
        self._floats: F32 | None = None if self._table is not None else np.asarray(self._embedding.weight)
        if table.inputs != [self.hidden] or self._final.shape != (self.hidden,):
            raise _Unlike("hidden states of different sizes")
        self._held = [
            (module, *arrays)
            for w in self._weights
            for module, arrays in zip(w.modules, w.arrays, strict=True)
        ]
        self.factor = np.float32(1)
        self.limit = LIMITS[native_library.instruction_set_in_use()]
        library = native_library.library()
        self._in, self._out, self._logits = (
            library.offbook_block_in,
            library.offbook_block_out,
            library.offbook_head,
        )

    def current(self) -> bool:
        """Whether the model still holds the arrays that were found in it."""
        return all(
            module.get("weight") is weight and module.get("bias") is bias
            for module, weight, bias in self._held
        )

    def hidden_states(
        self,
        tokens: NDArray[Any],
        positions: NDArray[np.int64],
        attend: Attend,
        *,
        rounded: bool,
        wanted: NDArray[np.int64] | None = None,
        unless: Callable[[], bool] | None = None,
    ) -> F32:
        """What leaves the last layer, [wanted, hidden], before the last norm.

        Args:
            tokens, positions: of all rows, one after the other.
            attend: one layer's attention: fills its last array, [tokens or wanted, heads, width]; the wanted
                tokens only where it is told so.
            rounded: keys and values as bfloat16 would keep them.
            wanted: places of the tokens that are asked for, in order; None: all. Of the others the last layer
                gives keys and values alone.
            unless: asked before every layer; see ``forward``.
        """
        count = len(tokens)
        x: F32 = packed.rows(self._table, tokens) if self._floats is None else self._floats[tokens]
        x *= self.factor
        at_x = address(x)
        for index, layer in enumerate(self._layers):
            if unless is not None and unless():
                raise Interrupted
            block = layer.block
            heads, kv_heads, width = block.heads, block.kv_heads, block.width
            size = (heads + 2 * kv_heads) * width
            cosines, sines = layer.angles.at(layer.rope, positions)
            # Fresh memory for every layer: keys and values are kept until the step is committed.
            projected = np.empty(count * size, np.float32)
            few = wanted is not None and layer is self._layers[-1]
            attending = count if wanted is None or not few else len(wanted)
            attended = np.empty((attending, heads, width), np.float32)
            if self._in(
                layer.address, count, at_x, address(cosines), address(sines), rounded, address(projected)
            ):
                raise MemoryError("the layer kernel could not get working memory")
            ends = count * heads * width, count * (heads + kv_heads) * width
            attend(
                index,
                layer.scale,
                projected[: ends[0]].reshape(count, heads, width),
                projected[ends[0] : ends[1]].reshape(count, kv_heads, width),
                projected[ends[1] :].reshape(count, kv_heads, width),
                attended,
                few,
            )
            if few:
                x = x[wanted]
                count, at_x = len(x), address(x)
            if count and self._out(layer.address, count, address(attended), at_x):
                raise MemoryError("the layer kernel could not get working memory")
        return x

    def logits(self, hidden: F32) -> F32:
        """[rows, vocabulary] of hidden states [rows, hidden]."""
        out = np.empty((len(hidden), self._head.outputs[0]), np.float32)
        if len(hidden) and self._logits(
            self._head.pointer, address(self._final), self._eps, len(hidden), self.hidden,
            address(hidden), address(out),
        ):  # fmt: skip
            raise MemoryError("the layer kernel could not get working memory")
        return out

    # ---- steps over the pool

    def forward(
        self,
        steps: Sequence[tuple[Step, Sequence[NDArray[Any]] | NDArray[Any]]],
        *,
        logits: int,
        unless: Callable[[], bool] | None = None,
    ) -> mx.array:
        """Run steps together, each with the new tokens of its rows.

        Leaves them as forwards of the model do: to be committed. Each row has the bits that its step alone
        would give.

        Args:
            unless: when this is true, the forward is given up and the steps are dropped, not committed: so
                only for prefills, which write nothing before.

        Returns:
            Logits [logits, vocabulary] of the last tokens of the first so many rows.

        Raises:
            Interrupted: by ``unless``.
        """
        rows = [(step, past, len(new)) for step, of in steps for past, new in zip(step.past, of, strict=True)]
        ends = np.cumsum([count for _, _, count in rows])
        positions = np.concatenate([np.arange(past, past + count) for _, past, count in rows])
        parts: list[tuple[Step, slice, list[slice]]] = []
        at = 0
        for step, of in steps:
            bounds = np.cumsum([0, *map(len, of)]).tolist()
            spans = [slice(start, stop) for start, stop in pairwise(bounds)]
            parts.append((step, slice(at, at + bounds[-1]), spans))
            at += bounds[-1]

        def attend(
            index: int, scale: float, queries: F32, keys: F32, values: F32, out: F32, few: bool
        ) -> None:
            row = 0
            for step, part, spans in parts:
                to = slice(row, max(row, min(logits, row + len(spans)))) if few else part
                mine = (queries[part], keys[part], values[part], out[to])
                last_of = to.stop - to.start if few else None
                step.native.attend(step.caches[index], spans, scale, *mine, last_of=last_of)
                row += len(spans)

        tokens = np.concatenate([new for _, of in steps for new in of])
        # A decode step rounds as it writes; rounded before, the same comes out.
        rounded = any(not step.decoding for step, _ in steps)
        wanted = ends[:logits] - 1
        hidden = self.hidden_states(tokens, positions, attend, rounded=rounded, wanted=wanted, unless=unless)
        return mx.array(self.logits(hidden))


def find(model: nn.Module, spec: ModelCacheSpec) -> Decoder | None:
    """The kernel's forward of this model, or None if it is not one of those it computes.

    Call after ``linear.install`` and with every layer's cache known.
    """
    body: Any = getattr(model, "model", None)
    if (
        not native_library.available()
        or any(layer.kind not in ("full", "window") for layer in spec.layers)
        or not getattr(body, "layers", None)
        or len(body.layers) != len(spec.layers)
        or getattr(body, "embed_tokens", None) is None
    ):
        return None
    heads = [getattr(model, "lm_head", None), body.embed_tokens]
    vocabulary, hidden = shape_of(body.embed_tokens)
    tokens = np.random.default_rng(2).integers(0, vocabulary, 8)
    ids = mx.array(tokens[None].astype(np.uint32))
    expected = {
        first: np.asarray(model(ids, cache=[_From(first, *one) for one in enumerate(make_caches(model))])[0])
        for first in (0, FAR)
    }
    root = np.float32(np.asarray(mx.array(hidden**0.5).astype(mx.bfloat16).astype(mx.float32)))
    for names in NORMS:
        for activation in ACTIVATIONS:
            for head in heads:
                if head is None:
                    continue
                try:
                    decoder = Decoder(model, head, activation, names)
                except (_Unlike, AttributeError, TypeError):
                    continue
                for factor in (1, root):
                    decoder.factor = np.float32(factor)
                    if all(_agrees(decoder, tokens, *one) for one in expected.items()):
                        return decoder
    return None


class _From(Recorder):
    """A cache without a history whose first token is said to be at some position."""

    def __init__(self, first: int, index: int, inner: Any) -> None:
        super().__init__(index, inner)
        self.first = first

    @property
    def offset(self) -> int:
        return self.first


def _agrees(decoder: Decoder, tokens: NDArray[Any], first: int, expected: F32) -> bool:
    positions = np.arange(first, first + len(tokens))
    hidden = decoder.hidden_states(tokens, positions, _plain_attention, rounded=False)
    got = decoder.logits(hidden)
    return got.shape == expected.shape and bool(
        np.all(np.abs(got - expected) <= TOLERANCE * np.abs(expected).max())
    )


def _plain_attention(
    index: int, scale: float, queries: F32, keys: F32, values: F32, out: F32, few: bool
) -> None:
    """Causal attention without a history."""
    count, heads, _ = queries.shape
    repeats = heads // keys.shape[1]
    seen = np.tril(np.ones((count, count), bool))
    for head in range(heads):
        scores = queries[:, head] @ keys[:, head // repeats].T * np.float32(scale)
        weights = np.exp(np.where(seen, scores - scores.max(axis=-1, keepdims=True), -np.inf))
        out[:, head] = (weights / weights.sum(axis=-1, keepdims=True)) @ values[:, head // repeats]
