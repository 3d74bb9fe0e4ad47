"""What quantising the KV cache costs: perplexity with 16-bit KV, plain 4-bit, and ours.

Method. Contexts of 2,048 tokens; the tokens of the last quarter are scored. The caches are real: the
first three quarters are prefilled in chunks, then the last quarter is fed 16 tokens at a time, so that
what a token attends to is quantised as it would be when an agent reads or speaks. The same tokens go
through three caches in lock-step (``offbook.runtime.kv.calibrate`` has the method):

* ``fp``: mlx-lm's own unquantised cache.
* ``plain``: mlx-lm's ``QuantizedKVCache``, 4 bits, groups of 64 along the width, no tail: the published
  system's scheme (window layers at full length, MLA with decompressed heads, as there).
* ``ours``: the block pool with the scheme an engine would use (the model's profile, else the default).

Beside the increase of the perplexity stands the Kullback-Leibler divergence from the 16-bit predictions,
in thousandths of a nat a token: it cannot be negative, and a few contexts are enough to tell schemes apart.

SmolLM2 and Gemma read the topics of Python's ``help()``; the tiny DeepSeek reads the held-out part of
the prose it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

import mlx.core as mx  # noqa: F401  isort: skip  (common has loaded the BLAS)
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from offbook.runtime.kv import profile
from offbook.runtime.kv.calibrate import Loss, Runner, compare, contexts
from offbook.runtime.kv.candidates import TYPICAL, bytes_per_token
from offbook.runtime.kv.probe import derive
from offbook.runtime.models.load import load

TINY = Path(__file__).resolve().parent.parent / "tests" / "data" / "deepseek_tiny"

COLUMNS = {
    "fp": "16-bit",
    "plain_q4": "plain 4-bit",
    "ours": "ours",
    "plain_delta_pct": "plain %",
    "ours_delta_pct": "ours %",
    "plain_divergence": "plain mnat",
    "ours_divergence": "ours mnat",
    "bytes_per_token": "bytes/token",
    "fp16_bytes_per_token": "16-bit bytes/token",
}


def plain_caches(model: Any) -> Callable[[], Sequence[Any]]:
    """mlx-lm's 4-bit caches, one a layer at full length, whatever the model would make itself."""
    count = len(make_prompt_cache(model))
    return lambda: [QuantizedKVCache(group_size=64, bits=4) for _ in range(count)]


def measure(name: str, ref: str, windows: int, text: str) -> dict[str, float]:
    """Perplexities of one model, and the bytes a token takes."""
    plain_form = load(ref, latent=False)
    loaded = load(ref) if plain_form.config.get("model_type") == "deepseek_v2" else plain_form
    # Deriving a spec rebinds the attention of the model's modules, which passes foreign caches through.
    spec = derive(loaded.model)
    scheme = profile.scheme_for(loaded, spec)
    plain, ours = Runner(plain_form.model), Runner(loaded.model)
    makers = {
        "fp": plain.with_mlx(),
        "plain_q4": plain.with_mlx(plain_caches(plain_form.model)),
        "ours": ours.with_pool(spec, scheme),
    }
    totals = dict.fromkeys(makers, Loss())
    read = contexts(loaded.tokenizer, text, windows)
    for number, window in enumerate(read, 1):
        losses = compare(window, [begin() for begin in makers.values()])
        totals = {name: totals[name] + loss for name, loss in zip(makers, losses, strict=True)}
        so_far = {name: round(total.perplexity, 4) for name, total in totals.items()}
        common.console.print(f"{name}: {number} of {len(read)} contexts: {so_far}")
    perplexity = {name: total.perplexity for name, total in totals.items()}
    ours_delta = (perplexity["ours"] / perplexity["fp"] - 1) * 100
    plain_delta = (perplexity["plain_q4"] / perplexity["fp"] - 1) * 100
    wide = derive(plain_form.model) if plain_form is not loaded else spec
    return {
        **perplexity,
        "ours_delta_pct": ours_delta,
        "plain_delta_pct": plain_delta,
        "ours_share_of_plain": ours_delta / plain_delta if plain_delta > 0 else 0.0,
        "ours_divergence": totals["ours"].divergence / totals["ours"].tokens * 1e3,
        "plain_divergence": totals["plain_q4"].divergence / totals["plain_q4"].tokens * 1e3,
        "bytes_per_token": bytes_per_token(spec, scheme),
        "fp16_bytes_per_token": wide.fp16_bytes(TYPICAL) / TYPICAL,
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
    common.table(
        "Perplexity, last quarter of 2K contexts",
        ["model", *COLUMNS.values()],
        [[name, *(result[key] for key in COLUMNS)] for name, result in results.items()],
    )
    summary = {f"{name}.{key}": value for name, result in results.items() for key, value in result.items()}
    common.report(args, results, flat=summary)


if __name__ == "__main__":
    main()
