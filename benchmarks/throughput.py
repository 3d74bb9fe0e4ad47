"""Tokens a second of 1 to 16 agents at once, against one after another and against mlx-lm's batch.

Agents hold histories of 1K and 4K tokens (different text each). Every variant generates the same number
of tokens per agent from the same histories, in one run, interleaved: (a) all at once on our engine,
(b) the same agents one after another on our engine, (c) mlx-lm's ``BatchGenerator`` with unquantised
caches, prefilled beforehand. Time is from the first to the last token: histories are in memory. (a) and (b)
take a fraction of (c)'s time and are measured several times for each of its measurements.

The engine changes the model it is given (its linear layers, see ``runtime/models/linear.py``), so mlx-lm
runs a second copy of the model, as mlx-lm makes it: with weights and caches in float32, which is the fastest
that it has on the CPU (MLX's 16-bit and quantised products are slower there). Ours keeps the model's 4-bit
weights packed and multiplies with them as they are, so part of the ratio is weights, not caches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import common
from benchmarks.team import Reader, Team, budget_for, load_embedded

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from offbook.runtime.models.load import LoadedModel

ALONE = 4
"""Agents that are timed one after another; the rate does not depend on how many."""


def our_batch(team: Team, agents: list[str], tokens: int) -> float:
    """Tokens a second of all agents at once."""
    before = {agent: team.transcripts[agent] for agent in agents}
    turns = [team.ask(agent, "Go on.", max_tokens=tokens, ignore_end=True) for agent in agents]
    replies = [turn.reply.result() for turn in turns]
    rate = measured_rate(replies)
    team.transcripts.update(before)  # the same histories for the next repeat
    return rate


def our_sequence(team: Team, agents: list[str], tokens: int) -> float:
    before = {agent: team.transcripts[agent] for agent in agents}
    seconds = 0.0
    for agent in agents[:ALONE]:
        reply = team.say(agent, "Go on.", max_tokens=tokens, ignore_end=True).reply.result()
        seconds += reply.usage.decode_ms / 1e3
    team.transcripts.update(before)
    return len(agents[:ALONE]) * (tokens - 1) / seconds


def measured_rate(replies: list[Any]) -> float:
    """Tokens a second while all rows decoded: the longest decode spans them all."""
    seconds = max(float(reply.usage.decode_ms) for reply in replies) / 1e3
    return float(sum(reply.usage.generated_tokens - 1 for reply in replies)) / seconds


def mlx_caches(loaded: LoadedModel, ids: np.ndarray) -> list[Any]:
    """mlx-lm's own caches over all but the last id."""
    caches = make_prompt_cache(loaded.model)
    for at in range(0, len(ids) - 1, 512):
        loaded.model(mx.array(ids[at : min(at + 512, len(ids) - 1)].astype(np.int32))[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    return list(caches)


def mlx_batch(loaded: LoadedModel, histories: list[tuple[np.ndarray, list[Any]]], tokens: int) -> float:
    """Tokens a second of mlx-lm's batch generator from prefilled caches."""
    generator = BatchGenerator(loaded.model, completion_batch_size=32, prefill_batch_size=32)
    generator.insert(
        [[int(ids[-1])] for ids, _ in histories],
        max_tokens=[tokens] * len(histories),
        caches=[copy.deepcopy(caches) for _, caches in histories],
    )
    produced, first, last = 0, 0.0, 0.0
    while True:
        responses = generator.next_generated()
        if not responses:
            break
        now = time.perf_counter()
        if not first:
            first = now
        else:
            produced += len(responses)
            last = now
    generator.close()
    return produced / (last - first)


PAIRS = 3
"""Measurements of our engine for each of mlx-lm's."""

Rates = dict[str, float]


def compare(
    loaded: LoadedModel,
    plain: LoadedModel,
    reader: Reader,
    size: int,
    counts: list[int],
    tokens: int,
    repeats: int,
) -> dict[int, Rates]:
    """Median tokens a second of every variant, per number of agents; ``plain`` is for mlx-lm."""
    most = max(counts)
    out: dict[int, Rates] = {}
    with Team(loaded, budget_for(loaded, agents=most + 1, tokens=size + 1024), persistent=False) as team:
        agents = [f"agent/{size}-{i}" for i in range(most)]
        for agent in agents:
            team.say(agent, reader.text(size - 40), max_tokens=2, ignore_end=True)
        # Rates do not depend on what the tokens are: one history is prefilled for mlx-lm and copied.
        first = team.transcripts[agents[0]]
        histories = [(first, mlx_caches(plain, first))] * most
        for count in counts:
            ours: dict[str, Callable[[], float]] = {
                "batch": partial(our_batch, team, agents[:count], tokens),
                "sequence": partial(our_sequence, team, agents[:count], tokens),
            }
            common.interleaved(ours, 1)  # caches and clocks warm up
            values: dict[str, list[float]] = {"batch": [], "sequence": [], "mlx_lm": []}
            for _ in range(repeats):
                for name, of in common.interleaved(ours, PAIRS).items():
                    values[name] += of
                values["mlx_lm"].append(mlx_batch(plain, histories[:count], tokens))
            out[count] = {name: common.median(of) for name, of in values.items()}
    return out


def main() -> None:
    args = common.arguments(__doc__ or "")
    tokens, repeats = (24, 2) if args.quick else (48, 3)
    settings = [(1024, [1, 2, 4, 8, 16]), (4096, [1, 2, 4, 8])]
    if args.quick:
        settings = [(1024, [1, 8]), (4096, [8])]
    loaded, plain = load_embedded(), load_embedded(plain=True)
    reader = Reader(loaded)
    rows: list[list[Any]] = []
    summary: dict[str, float] = {}
    for size, counts in settings:
        for count, m in compare(loaded, plain, reader, size, counts, tokens, repeats).items():
            over_sequence, over_mlx = m["batch"] / m["sequence"], m["batch"] / m["mlx_lm"]
            rows.append(
                [f"{count} x {size}", m["batch"], m["sequence"], m["mlx_lm"], over_sequence, over_mlx]
            )
            label = f"{count}x{size // 1024}k"
            summary[f"speedup_vs_sequential_{label}"] = over_sequence
            summary[f"vs_mlx_lm_{label}"] = over_mlx
            summary[f"tokens_per_s_{label}"] = m["batch"]
        mx.clear_cache()
    columns = ["agents", "at once", "in sequence", "mlx-lm batch", "x sequence", "x mlx-lm"]
    common.table("Tokens a second", columns, rows)
    common.report(args, summary)


if __name__ == "__main__":
    main()
