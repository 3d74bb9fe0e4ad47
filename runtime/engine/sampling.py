"""Drawing tokens: validation of sampling values, and one sampler per row.

A row's draw depends on its own seed and step only, never on its neighbours. Rows that are all greedy
take one argmax together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from offbook.actors.lm import SamplingParams
from offbook.bus.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20


def validate(params: SamplingParams) -> None:
    """Refuse values that mean nothing, before any work.

    Raises:
        InvalidRequest: names the field, its value and the range.
    """

    def need(ok: bool, field: str, value: object, rule: str) -> None:
        if not ok:
            raise InvalidRequest(f"{field}={value!r}: {rule}")

    def finite(x: float) -> bool:
        return isinstance(x, int | float) and math.isfinite(x)

    p = params
    need(p.max_tokens >= 1, "max_tokens", p.max_tokens, "use 1 or more")
    need(finite(p.temperature) and 0 <= p.temperature <= 100, "temperature", p.temperature, "use 0 to 100")
    need(finite(p.top_p) and 0 < p.top_p <= 1, "top_p", p.top_p, "use more than 0, at most 1")
    need(p.top_k >= 0, "top_k", p.top_k, "use 0 (off) or more")
    need(finite(p.min_p) and 0 <= p.min_p < 1, "min_p", p.min_p, "use 0 (off) up to below 1")
    need(
        finite(p.repetition_penalty) and 0 < p.repetition_penalty <= 10,
        "repetition_penalty",
        p.repetition_penalty,
        "use more than 0, at most 10 (1 is off)",
    )
    need(p.repetition_context >= 0, "repetition_context", p.repetition_context, "use 0 or more")
    need(p.seed is None or 0 <= p.seed < 2**64, "seed", p.seed, "use 0 to 2**64 - 1, or None")
    need(len(p.stop) <= MAX_STOPS, "stop", len(p.stop), f"at most {MAX_STOPS} stop strings")
    for stop in p.stop:
        need(0 < len(stop) <= MAX_STOP_CHARS, "stop", stop[:40], f"1 to {MAX_STOP_CHARS} characters each")
    need(0 <= p.logprobs <= MAX_LOGPROBS, "logprobs", p.logprobs, f"use 0 to {MAX_LOGPROBS}")


class Sampler:
    """Draws one row's tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        # A call without a seed is still drawn from its own stream, so neighbours do not matter.
        self.seed = random.getrandbits(63) if params.seed is None else params.seed
        self._key: mx.array | None = None

    @property
    def greedy(self) -> bool:
        """Whether a plain argmax of the logits is this row's next token."""
        return self.params.temperature == 0 and self.params.repetition_penalty == 1

    def penalised(self, logits: mx.array, history: Sequence[int]) -> mx.array:
        """Logits [vocabulary] after the repetition penalty (Keskar et al., arXiv 1909.05858)."""
        p = self.params
        recent = history[-p.repetition_context :] if p.repetition_context else []
        if p.repetition_penalty == 1 or not len(recent):
            return logits
        seen = mx.array(np.unique(np.asarray(recent, np.uint32)))
        chosen = logits[seen]
        scaled = mx.where(chosen > 0, chosen / p.repetition_penalty, chosen * p.repetition_penalty)
        logits = logits + 0  # the caller's array is not ours to change
        logits[seen] = scaled
        return logits

    def draw(self, logits: mx.array, history: Sequence[int]) -> int:
        """The next token from float logits [vocabulary]; ``history`` are the ids before it."""
        p = self.params
        logits = self.penalised(logits.astype(mx.float32), history)
        if p.temperature == 0:
            return int(mx.argmax(logits))
        logits = filtered(logits / p.temperature, p)
        # One stream of keys a row. Made here, on the thread that owns MLX.
        if self._key is None:
            self._key = mx.random.key(self.seed)
        self._key, key = mx.random.split(self._key)
        return int(mx.random.categorical(logits, key=key))


def filtered(logits: mx.array, p: SamplingParams) -> mx.array:
    """Top-k, then min-p, then top-p (nucleus): excluded tokens at minus infinity."""
    if p.top_k and p.top_k < logits.shape[-1]:
        floor = mx.min(mx.topk(logits, p.top_k))
        logits = mx.where(logits < floor, -mx.inf, logits)
    if p.min_p > 0:
        logits = mx.where(logits < mx.max(logits) + math.log(p.min_p), -mx.inf, logits)
    if p.top_p < 1:
        order = mx.argsort(-logits)
        probabilities = mx.softmax(logits[order], precise=True)
        # A token stays if the mass before it has not reached top_p: at least the first stays.
        before = mx.cumsum(probabilities) - probabilities
        ranked = mx.where(before < p.top_p, logits[order], -mx.inf)
        logits = mx.full(logits.shape, -mx.inf)
        logits[order] = ranked
    return logits


def top_logprobs(logits: mx.array, count: int) -> list[tuple[int, float]]:
    """The ``count`` likeliest tokens of logits [vocabulary] and their log-probabilities."""
    wide = np.array(logits.astype(mx.float32))
    wide = wide - wide.max()
    wide = wide - np.log(np.exp(wide).sum())
    count = min(count, len(wide))
    best = np.argpartition(-wide, count - 1)[:count]
    best = best[np.argsort(-wide[best], kind="stable")]
    return [(int(i), float(wide[i])) for i in best]
