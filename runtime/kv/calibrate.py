"""Measuring KV schemes on a model: how much each changes what the model predicts, and what it takes.

Owns the method, which the perplexity benchmark shares. Contexts of 2,048 tokens; the tokens of the last
quarter are scored. Each scheme has real caches in a real pool: the first three quarters are prefilled in
chunks, then the last quarter is fed 16 tokens at a time, so that what a token attends to is quantised as
it is when an agent reads. All schemes and the 16-bit caches they are compared with read the same tokens
in lock-step, so that their predictions can be compared token by token without keeping any.

Two figures come out: the increase of the perplexity, and the Kullback-Leibler divergence from the 16-bit
predictions. A candidate is chosen by the divergence: its noise is far smaller, because a scheme that
changes a prediction for the better by chance is not rewarded for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from offbook.bus.errors import InvalidRequest

from ..engine.batch import split_head
from .arrays import PoolArrays
from .cache import BatchQuantizedKVCache, Step
from .candidates import TYPICAL, bytes_per_token, candidates, sharpened, target_bytes
from .kernel import NativeAttention, supported
from .pool import BlockPool
from .probe import derive, make_caches
from .profile import default_scheme
from .scheme import BLOCK, GROUP, KVScheme
from .spec import ModelCacheSpec
from .table import AgentTable, Ids

CONTEXT: Final = 2048
CHUNK: Final = 128
FEED: Final = 16
TOGETHER: Final = 12

Feed = Callable[[Ids, bool], "mx.array | None"]
"""Run some tokens; with True, give their logits [tokens, vocabulary]."""

MakeFeed = Callable[[], Feed]
"""Empty caches, and the feed that fills them."""


# ---- scoring


@dataclass(frozen=True)
class Loss:
    """Sums over scored tokens.

    Attributes:
        tokens: how many. nll: negative log-likelihood, nats.
        divergence: Kullback-Leibler divergence from the reference's predictions, nats.
    """

    tokens: int = 0
    nll: float = 0.0
    divergence: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.tokens + other.tokens, self.nll + other.nll, self.divergence + other.divergence)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / max(1, self.tokens))


def compare(ids: Ids, feeds: Sequence[Feed], *, scored: int | None = None) -> list[Loss]:
    """Feed one context to all of ``feeds`` in lock-step. The first is what the others are compared with.

    Args:
        scored: how many of the last tokens count; a quarter when None.
    """
    scored = len(ids) // 4 if scored is None else scored
    # The token before the first scored one is fed with them: its logits predict that one.
    at, start = 0, len(ids) - scored - 1
    while at < start:
        end = min(at + CHUNK, start)
        for feed in feeds:
            feed(ids[at:end], False)
        at = end
    losses = [Loss()] * len(feeds)
    while at < len(ids) - 1:
        end = min(at + FEED, len(ids) - 1)
        targets = mx.array(ids[at + 1 : end + 1])[:, None]
        reference: mx.array | None = None
        for index, feed in enumerate(feeds):
            logits = feed(ids[at:end], True)
            assert logits is not None
            logits = logits.astype(mx.float32)
            logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            reference = logp if reference is None else reference
            nll = -mx.sum(mx.take_along_axis(logp, targets, axis=-1))
            divergence = mx.sum(mx.exp(reference) * (reference - logp))
            mx.eval(nll, divergence)
            losses[index] += Loss(end - at, float(nll), float(divergence))
        at = end
    return losses


class Runner:
    """Feeds one model through any kind of cache, computing logits only where they are scored."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.split = model, split_head(model)

    def forward(self, ids: Ids, caches: Sequence[Any], logits: bool) -> Any:
        """Logits [tokens, vocabulary], or an array to evaluate for the caches' sake."""
        tokens = mx.array(ids[None])
        if self.split is None:
            return self.model(tokens, cache=caches)[0]
        body, head = self.split
        hidden = body(tokens, cache=caches)
        return head(hidden)[0] if logits else hidden

    def with_mlx(self, make: Callable[[], Sequence[Any]] | None = None) -> MakeFeed:
        """Through mlx-lm's caches, the model's own unless ``make`` makes others."""

        def begin() -> Feed:
            caches = make() if make is not None else make_caches(self.model)

            def feed(part: Ids, logits: bool) -> mx.array | None:
                out = self.forward(part, caches, logits)
                mx.eval(out, [cache.state for cache in caches])
                return out if logits else None

            return feed

        return begin

    def with_pool(self, spec: ModelCacheSpec, scheme: KVScheme, context: int = CONTEXT) -> MakeFeed:
        """Through a block pool of its own, with the native kernel where an engine would use it."""
        blocks, pages = context // BLOCK + 1, -(-context // GROUP) + 1
        pages = min(pages, scheme.pages + 1)
        pool = BlockPool([(group.name, blocks) for group in spec.groups], pages)
        host = mx.default_device() == mx.Device(mx.cpu)
        arrays = PoolArrays(spec, scheme, [blocks] * len(spec.groups), pages, host=host)
        native = NativeAttention(arrays) if supported(arrays) else None
        last: list[AgentTable] = []

        def begin() -> Feed:
            for table in last:
                table.release(pool)
            agent = AgentTable("calibration", "", spec.groups, scheme)
            last[:] = [agent]

            def feed(part: Ids, logits: bool) -> mx.array | None:
                step = Step(arrays, pool, [agent], [len(part)], decoding=False, native=native)
                out = self.forward(part, step.caches, logits)
                pending = [
                    c.pending if isinstance(c, BatchQuantizedKVCache) else c.cache for c in step.caches
                ]
                mx.eval(out, pending)
                step.commit()
                if agent.failed is not None:
                    raise agent.failed
                return out if logits else None

            return feed

        return begin


def prose() -> str:
    """English text that comes with Python: the topics of ``help()``, about 700 KB."""
    import pydoc_data.topics

    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def contexts(
    tokenizer: Any, text: str, count: int, *, length: int = CONTEXT, shift: float = 0.0
) -> list[Ids]:
    """``count`` contexts spread over the text, each beginning as the tokenizer begins a text.

    Args:
        shift: where between two of them to begin, 0 to 1; other shifts give other tokens.

    Raises:
        InvalidRequest: the text is too short for one context.
    """
    # "verbose" is about a text longer than the model's limit, which is cut below.
    ids = np.array(tokenizer.encode(text, add_special_tokens=False, verbose=False), np.uint32)
    if len(ids) < length:
        raise InvalidRequest(f"a text of {len(ids)} tokens holds no context of {length}; give a longer one")
    stride = max(length, (len(ids) - length) // max(1, count))
    starts = range(int(shift * stride), len(ids) - length + 1, stride)[:count]
    windows = [ids[start : start + length].copy() for start in starts] or [ids[:length].copy()]
    bos = tokenizer.bos_token_id
    if bos is not None and bos in tokenizer.encode(""):
        for window in windows:
            window[0] = bos
    return windows


# ---- measuring


@dataclass(frozen=True)
class Measured:
    """One scheme as measured.

    Attributes:
        perplexity_pct: increase over 16-bit KV, percent. divergence: nats a token.
        bytes_per_token: of an agent of 4,096 tokens, tail included.
    """

    scheme: KVScheme
    bytes_per_token: float
    loss: Loss
    reference: Loss

    @property
    def perplexity_pct(self) -> float:
        return (self.loss.perplexity / self.reference.perplexity - 1) * 100

    @property
    def divergence(self) -> float:
        return self.loss.divergence / max(1, self.loss.tokens)


Progress = Callable[[int, int], None]
"""Called as ``progress(done, total)`` after each context."""


def measure(
    model: nn.Module,
    spec: ModelCacheSpec,
    schemes: Sequence[KVScheme],
    windows: Sequence[Ids],
    *,
    progress: Progress | None = None,
) -> list[Measured]:
    """Measure the schemes on the contexts, each beside 16-bit KV (mlx-lm's own caches)."""
    runner = Runner(model)
    longest = max(map(len, windows))
    makers = [runner.with_mlx(), *(runner.with_pool(spec, scheme, longest) for scheme in schemes)]
    totals = [Loss()] * len(makers)
    for done, window in enumerate(windows, 1):
        losses = compare(window, [begin() for begin in makers])
        totals = [total + loss for total, loss in zip(totals, losses, strict=True)]
        if progress is not None:
            progress(done, len(windows))
    reference = totals[0]
    return [
        Measured(scheme, bytes_per_token(spec, scheme), loss, reference)
        for scheme, loss in zip(schemes, totals[1:], strict=True)
    ]


def sensitivities(
    model: nn.Module,
    spec: ModelCacheSpec,
    windows: Sequence[Ids],
    *,
    progress: Progress | None = None,
) -> dict[int, float]:
    """By how much 8-bit keys in one layer alone lower the divergence of a 4-bit scheme, by layer index."""
    base = KVScheme(tail=GROUP)
    gains: dict[int, float] = {}
    batches = _batches(spec)
    for done, layers in enumerate(batches):
        schemes = [base, *(msgspec.structs.replace(base, sharp=(index,)) for index in layers)]

        def tell(at: int, _: int, before: int = done * len(windows)) -> None:
            if progress is not None:
                progress(before + at, len(batches) * len(windows))

        plain, *sharp = measure(model, spec, schemes, windows, progress=tell)
        gains |= {index: plain.divergence - one.divergence for index, one in zip(layers, sharp, strict=True)}
    return gains


def _batches(spec: ModelCacheSpec) -> list[list[int]]:
    """Layers whose sensitivity is measured at once: each has a pool of its own meanwhile."""
    indices = [layer.index for layer in spec.attention_layers]
    return [indices[at : at + TOGETHER] for at in range(0, len(indices), TOGETHER)]


def choose(measured: Sequence[Measured], target: float) -> Measured:
    """The least divergence within ``target`` bytes a token; the smaller one if two are alike."""
    fitting = [one for one in measured if one.bytes_per_token <= target]
    return min(fitting, key=lambda one: (one.divergence, one.bytes_per_token))


@dataclass(frozen=True)
class Calibration:
    """What ``calibrate`` found: all candidates, the target and the choice."""

    measured: tuple[Measured, ...]
    target: float
    chosen: Measured
    fp16_bytes_per_token: float


def calibrate(
    loaded: Any,
    *,
    per_token: float | None = None,
    ratio: float | None = None,
    windows: int = 6,
    context: int = CONTEXT,
    text: str | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Find the best scheme for a ``LoadedModel`` within a byte target (``target_bytes``).

    Args:
        windows: contexts to read. context: their length; shortened to the model's limit.
        text: what to read; the topics of ``help()`` when None.

    Raises:
        InvalidRequest: a target that cannot be, no windows, or contexts too short to quantise anything.
        ModelError: the model cannot be served at all.
    """
    if windows < 1:
        raise InvalidRequest(f"{windows} contexts: give at least 1")
    context = min(context, loaded.context_limit)
    if context < 2 * BLOCK:
        raise InvalidRequest(f"contexts of {context} tokens: at least {2 * BLOCK} are needed")
    spec = derive(loaded.model)
    default = default_scheme(spec, loaded.ref)
    target = target_bytes(spec, per_token=per_token, ratio=ratio, default=default)
    # Other contexts than the perplexity benchmark reads: a choice should not be judged by what made it.
    read = contexts(loaded.tokenizer, text or prose(), windows, length=context, shift=0.5)
    # Which layers matter differs between texts, so several short ones say more than a long one.
    short = [window[: max(2 * BLOCK, context // 3)] for window in read[: max(2, windows // 2)]]
    first = len(_batches(spec)) * len(short)

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, first + len(read))

    gains = sensitivities(loaded.model, spec, short, progress=lambda done, _: tell(done))
    schemes = candidates(spec, target, default)
    schemes += [one for one in sharpened(spec, target, gains) if one not in schemes]
    measured = measure(loaded.model, spec, schemes, read, progress=lambda done, _: tell(first + done))
    return Calibration(tuple(measured), target, choose(measured, target), spec.fp16_bytes(TYPICAL) / TYPICAL)
