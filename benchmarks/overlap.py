"""Loads from disk under other agents' decoding: what they cost, and how much of them is hidden.

Two agents decode throughout. *without*: nothing else happens. *with*: other agents are evicted, forgotten
and loaded from their files (``Prefetch``) continuously, at the pace a turn-taking team causes: one load per
turn of 24 tokens. Rates are compared in alternating stretches of one run. ``hidden_fraction`` is the share
of the loads' time during which the step thread was computing (from the engine's own trace).
``--png FILE`` draws the trace around the loads (``benchmarks.timeline``).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.team import QUESTION, Reader, Team, Turn, budget_for, load_embedded
from benchmarks.timeline import draw
from offbook.runtime.observe.trace import LOAD_TRACK, STEP_TRACK, read

TURN_TOKENS = 24


def stretch(team: Team, turns: list[Turn], tokens: int, loads: list[str] | None) -> float:
    """Tokens a second of the running turns over ``tokens`` tokens of the first of them."""
    first = turns[0]
    before, started = [len(t.times) for t in turns], time.perf_counter()
    next_load, index = before[0], 0
    while len(first.times) < before[0] + tokens:
        if loads and len(first.times) >= next_load:
            agent = loads[index % len(loads)]
            index += 1
            next_load += TURN_TOKENS

            def reload(agent: str = agent) -> None:
                team.loop.memory.evict((agent, ""))
                team.forget_free()

            team.loop.post(reload)
            team.prefetch(agent)
        time.sleep(0.002)
    seconds = time.perf_counter() - started
    return sum(len(t.times) - b for t, b in zip(turns, before, strict=True)) / seconds


def hidden(events: list[dict[str, Any]]) -> tuple[float, int]:
    """Share of load time that lies under a decode step or prefill chunk, and the number of loads."""
    spans = {
        track: sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("tid") == track and e["ph"] == "X"
        )
        for track in (STEP_TRACK, LOAD_TRACK)
    }
    total = covered = 0.0
    for start, end in spans[LOAD_TRACK]:
        total += end - start
        covered += sum(max(0.0, min(end, e) - max(start, s)) for s, e in spans[STEP_TRACK])
    return (covered / total if total else 0.0), len(spans[LOAD_TRACK])


def main() -> None:
    args = common.arguments(__doc__ or "", png=True)
    repeats, tokens = (3, 48) if args.quick else (6, 96)
    loaded = load_embedded()
    reader = Reader(loaded)
    with_loads, without = [], []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with Team(loaded, budget_for(loaded, agents=6, tokens=2048), trace=trace) as team:
            for agent in ("a", "b"):
                team.say(agent, reader.text(900) + QUESTION, max_tokens=2, ignore_end=True)
            others = [f"other/{i}" for i in range(3)]
            for agent in others:
                team.say(agent, reader.text(1400), max_tokens=2, ignore_end=True)
            team.evict(*others)
            blocks = min(team.full_blocks(agent) for agent in others)
            length = 2 * repeats * tokens + 64
            turns = [team.ask(agent, "Go on.", max_tokens=length, ignore_end=True) for agent in ("a", "b")]
            while min(len(turn.times) for turn in turns) < 4:
                time.sleep(0.005)
            loaded_before = team.loaded_blocks()
            for _ in range(repeats):
                without.append(stretch(team, turns, tokens, None))
                with_loads.append(stretch(team, turns, tokens, others))
            for turn in turns:
                turn.reply.result()
            blocks_loaded = team.loaded_blocks() - loaded_before
        events = read(trace)
    if args.png:
        draw(events, args.png, "Two agents decode while others are loaded from disk")
    share, loads = hidden(events)
    assert loads, "nothing was loaded"
    assert blocks_loaded >= loads * blocks, f"{loads} loads read {blocks_loaded} blocks of {blocks} each"
    ratio = common.median([w / wo for w, wo in zip(with_loads, without, strict=True)])
    common.table(
        "Decoding while others load",
        ["", "tokens/s, median (range)"],
        [["without loads", common.spread(without)], ["with loads", common.spread(with_loads)]],
    )
    summary = {
        "decode_rate_ratio": ratio,
        "hidden_fraction": share,
        "loads": loads,
        "blocks_loaded": blocks_loaded,
    }
    common.report(args, summary, with_loads=with_loads, without_loads=without)


if __name__ == "__main__":
    main()
