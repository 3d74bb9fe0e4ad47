"""What quantising the KV cache costs: perplexity with 16-bit KV, plain 4-bit, and ours.

Method. Contexts of 2,048 tokens; the tokens of the last quarter are scored. The caches are real: the
first three quarters are prefilled in chunks, then the last quarter is fed 16 tokens at a time, so that
what a token attends to is quantised as it would be when an agent reads or speaks. The same tokens go
through three caches in one run:

* ``fp``: mlx-lm's own unquantised cache.
* ``plain``: mlx-lm's ``QuantizedKVCache``, 4 bits, groups of 64 along the width, no tail: the published
  system's scheme (window layers at full length, MLA with decompressed heads, as there).
* ``ours``: the block pool with the scheme an engine would use (the model's profile, else the default).

SmolLM2 and Gemma read the topics of Python's ``help()``; the tiny DeepSeek reads the held-out part of
the prose it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from offbook.runtime.engine.batch import split_head
from offbook.runtime.kv.arrays import PoolArrays
from offbook.runtime.kv.cache import Step
from offbook.runtime.kv.pool import BlockPool
from offbook.runtime.kv.probe import derive
from offbook.runtime.kv.scheme import BLOCK, KVScheme
from offbook.runtime.kv.spec import ModelCacheSpec
from offbook.runtime.kv.table import AgentTable
from offbook.runtime.models.load import load

CONTEXT = 2048
SCORED = CONTEXT // 4
CHUNK = 512
FEED = 16

TINY = Path(__file__).resolve().parent.parent / "tests" / "data" / "deepseek_tiny"

Feed = Callable[[np.ndarray, bool], "mx.array | None"]
"""Run some tokens; with True, give the logits of each of them."""


def score(ids: np.ndarray, feed: Feed) -> float:
    """Sum of the negative log-likelihood of the last quarter of ``ids``."""
    start = CONTEXT - SCORED
    # The token before the first scored one is fed with them: its logits predict that one.
    at = 0
    while at < start - 1:
        end = min(at + CHUNK, start - 1)
        feed(ids[at:end], False)
        at = end
    total = 0.0
    while at < CONTEXT - 1:
        end = min(at + FEED, CONTEXT - 1)
        logits = feed(ids[at:end], True)
        assert logits is not None
        targets = mx.array(ids[at + 1 : end + 1])
        loss = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        total += float(mx.sum(loss.astype(mx.float32)))
        at = end
    return total


class Runner:
    """Feeds one model through any kind of cache, computing logits only where they are scored."""

    def __init__(self, model: Any) -> None:
        self.model, self.split = model, split_head(model)

    def forward(self, ids: np.ndarray, caches: Sequence[Any], logits: bool) -> mx.array | None:
        tokens = mx.array(ids[None])
        if self.split is None:
            out = self.model(tokens, cache=caches)
            return out[0] if logits else None
        body, head = self.split
        hidden = body(tokens, cache=caches)
        return head(hidden)[0] if logits else hidden

    def with_mlx(self, make: Callable[[], Sequence[Any]]) -> Callable[[np.ndarray], float]:
        """Scores through mlx-lm's caches."""

        def run(ids: np.ndarray) -> float:
            caches = make()

            def feed(part: np.ndarray, logits: bool) -> mx.array | None:
                out = self.forward(part, caches, logits)
                mx.eval(out, [cache.state for cache in caches])
                return out

            return score(ids, feed)

        return run

    def with_pool(self, spec: ModelCacheSpec, scheme: KVScheme) -> Callable[[np.ndarray], float]:
        """Scores through the block pool."""
        blocks = CONTEXT // BLOCK + 1
        pool = BlockPool([(group.name, blocks) for group in spec.groups], scheme.pages + 1)
        arrays = PoolArrays(spec, scheme, [blocks] * len(spec.groups), scheme.pages + 1, host=True)

        def run(ids: np.ndarray) -> float:
            agent = AgentTable("perplexity", "", spec.groups, scheme)

            def feed(part: np.ndarray, logits: bool) -> mx.array | None:
                step = Step(arrays, pool, [agent], [len(part)])
                out = self.forward(part, step.caches, logits)
                mx.eval(out, [getattr(c, "pending", None) for c in step.caches])
                step.commit()
                return out if logits else None

            total = score(ids, feed)
            agent.release(pool)
            return total

        return run


def plain_caches(model: Any) -> Callable[[], Sequence[Any]]:
    """mlx-lm's 4-bit caches, one a layer at full length, whatever the model would make itself."""
    count = len(make_prompt_cache(model))
    return lambda: [QuantizedKVCache(group_size=64, bits=4) for _ in range(count)]


def full_caches(model: Any) -> Callable[[], Sequence[Any]]:
    return lambda: make_prompt_cache(model)


def measure(name: str, ref: str, windows: int, text: str) -> dict[str, float]:
    """Perplexities of one model, and the bytes a token takes."""
    plain_form = load(ref, latent=False)
    loaded = load(ref) if plain_form.config.get("model_type") == "deepseek_v2" else plain_form
    ids = np.array(loaded.tokenizer.encode(text, add_special_tokens=False), np.uint32)
    bos = loaded.tokenizer.bos_token_id if plain_form.config.get("model_type") == "gemma3_text" else None
    stride = max(CONTEXT, (len(ids) - CONTEXT) // max(1, windows))
    starts = range(0, len(ids) - CONTEXT, stride)[:windows]
    # mlx-lm's own forwards come first: deriving the spec rebinds the attention of the model's modules,
    # which passes foreign caches through unchanged.
    spec = derive(loaded.model)
    scheme = loaded.scheme() if hasattr(loaded, "scheme") else KVScheme()
    plain, ours = Runner(plain_form.model), Runner(loaded.model)
    variants = {
        "fp": plain.with_mlx(full_caches(plain_form.model)),
        "plain_q4": plain.with_mlx(plain_caches(plain_form.model)),
        "ours": ours.with_pool(spec, scheme),
    }
    totals = dict.fromkeys(variants, 0.0)
    for number, start in enumerate(starts):
        window = ids[start : start + CONTEXT].copy()
        if bos is not None:
            window[0] = bos
        for variant, run in variants.items():
            totals[variant] += run(window)
        scored = SCORED * (number + 1)
        so_far = {v: round(math.exp(t / scored), 4) for v, t in totals.items()}
        common.console.print(f"{name}: {number + 1} of {len(starts)} windows: {so_far}")
    perplexity = {v: math.exp(t / (SCORED * len(starts))) for v, t in totals.items()}
    ours_delta = (perplexity["ours"] / perplexity["fp"] - 1) * 100
    plain_delta = (perplexity["plain_q4"] / perplexity["fp"] - 1) * 100
    wide = derive(plain_form.model) if plain_form is not loaded else spec
    return {
        **perplexity,
        "ours_delta_pct": ours_delta,
        "plain_delta_pct": plain_delta,
        "ours_share_of_plain": ours_delta / plain_delta if plain_delta > 0 else 0.0,
        "bytes_per_token": spec.agent_bytes(4096, scheme) / 4096,
        "fp16_bytes_per_token": wide.fp16_bytes(4096) / 4096,
    }


def main() -> None:
    args = common.arguments(__doc__ or "")
    windows = 2 if args.quick else 12
    models = {
        "smollm2": (common.EMBEDDED, windows, common.prose()),
        "gemma3_270m": ("wheel:gemma3-270m", windows, common.prose()),
        "deepseek_tiny": (str(TINY), windows * 2, (TINY / "heldout.txt").read_text(encoding="utf-8")),
    }
    results = {name: measure(name, *setting) for name, setting in models.items()}
    columns = [
        "model",
        "16-bit",
        "plain 4-bit",
        "ours",
        "plain %",
        "ours %",
        "bytes/token",
        "16-bit bytes/token",
    ]
    keys = [
        "fp",
        "plain_q4",
        "ours",
        "plain_delta_pct",
        "ours_delta_pct",
        "bytes_per_token",
        "fp16_bytes_per_token",
    ]
    common.table(
        "Perplexity, last quarter of 2K contexts",
        columns,
        [[n, *(r[k] for k in keys)] for n, r in results.items()],
    )
    summary = {f"{name}.{key}": value for name, result in results.items() for key, value in result.items()}
    common.report(args, results, flat=summary)


if __name__ == "__main__":
    main()
