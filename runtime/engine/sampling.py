"""Drawing tokens: validation of sampling values, and one sampler per row.

A row's draw depends on its own seed and step only, never on its neighbours. Rows that are all greedy
take one argmax together. All this is NumPy's: on the CPU, MLX needs 6 ms to rank a vocabulary for top-p, as
long as a decode step takes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offbook.actors.lm import SamplingParams
from offbook.bus.errors import InvalidRequest

Logits = NDArray[np.float32]

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
        self._random: np.random.Generator | None = None

    @property
    def greedy(self) -> bool:
        """Whether a plain argmax of the logits is this row's next token."""
        return self.params.temperature == 0 and self.params.repetition_penalty == 1

    def penalised(self, logits: Logits, history: Sequence[int]) -> Logits:
        """Logits [vocabulary] after the repetition penalty (Keskar et al., arXiv 1909.05858)."""
        p = self.params
        recent = history[-p.repetition_context :] if p.repetition_context else []
        if p.repetition_penalty == 1 or not len(recent):
            return logits
        seen = np.unique(np.asarray(recent, np.uint32))
        chosen = logits[seen]
        logits = logits.copy()  # the caller's array is not ours to change
        wide = chosen.astype(np.float64)  # the smallest penalties are no float32, nor is what they make
        with np.errstate(over="ignore"):
            wide = np.where(wide > 0, wide / p.repetition_penalty, wide * p.repetition_penalty)
        logits[seen] = np.minimum(wide, np.finfo(np.float32).max)
        return logits

    def draw(self, logits: Logits, history: Sequence[int]) -> int:
        """The next token from logits [vocabulary]; ``history`` are the ids before it."""
        p = self.params
        logits = self.penalised(logits, history)
        if p.temperature == 0:
            return int(logits.argmax())
        # At a very low temperature all but the likeliest are infinitely far. The lowest are no float32.
        with np.errstate(over="ignore"):
            scaled = (logits - logits.max()).astype(np.float64) / p.temperature
            logits = filtered(scaled.astype(np.float32), p)
        weights = np.exp(logits)
        mass = np.cumsum(weights, dtype=np.float64)
        if self._random is None:
            self._random = np.random.Generator(np.random.PCG64(self.seed))
        token = int(np.searchsorted(mass, self._random.random() * mass[-1], side="right"))
        return token if token < len(mass) else int(np.flatnonzero(weights)[-1])


def filtered(logits: Logits, p: SamplingParams) -> Logits:
    """Top-k, then min-p, then top-p (nucleus): excluded tokens at minus infinity."""
    size, nothing = len(logits), np.float32(-np.inf)
    if p.top_k and p.top_k < size:
        floor = np.partition(logits, size - p.top_k)[size - p.top_k]
        logits = np.where(logits < floor, nothing, logits)
    if p.min_p > 0:
        logits = np.where(logits < logits.max() + np.float32(math.log(p.min_p)), nothing, logits)
    if p.top_p < 1:
        weights = np.exp(logits - logits.max())
        shares = weights / weights.sum(dtype=np.float64)
        # All tokens with less than this have less than 1 - top_p together, so none of them can stay; few are
        # left to be ranked. A little less, for what rounding does to equal shares.
        likely = np.flatnonzero(shares >= 0.999 * (1 - p.top_p) / size)
        ranked = likely[np.argsort(-shares[likely], kind="stable")]
        # A token stays if the mass before it has not reached top_p: at least the first stays.
        before = np.cumsum(shares[ranked]) - shares[ranked]
        stay = ranked[before < p.top_p]
        kept = np.full(size, nothing)
        kept[stay] = logits[stay]
        logits = kept
    return logits


def top_logprobs(logits: Logits, count: int) -> list[tuple[int, float]]:
    """The ``count`` likeliest tokens of logits [vocabulary] and their log-probabilities."""
    wide = logits - logits.max()
    wide = wide - np.log(np.exp(wide).sum())
    count = min(count, len(wide))
    best = np.argpartition(-wide, count - 1)[:count]
    best = best[np.argsort(-wide[best], kind="stable")]
    return [(int(i), float(wide[i])) for i in best]
