"""B arrives while A decodes: how long B waits for its first token, and what A loses meanwhile.

* *warm B*: B's memory is on disk. Its time to first token, while A decodes, against the same on an idle
  engine at the same context.
* *cold B*: B has to prefill. A's rate during B's prefill against A's rate alone.

The reference system's B waits until A has finished (16.7 s sequential, 34.1 s batched, on Gemma 3 12B).
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from benchmarks import common
from benchmarks.team import QUESTION, Reader, Team, Turn, budget_for, load_embedded
from offbook.bus.errors import Cancelled

LONG = 1500


def wait_for_pieces(turn: Turn, count: int) -> None:
    while len(turn.pieces) < count:
        time.sleep(0.005)


def rate(pieces: list[float]) -> float:
    return (len(pieces) - 1) / (pieces[-1] - pieces[0]) if len(pieces) > 1 else 0.0


def main() -> None:
    args = common.arguments(__doc__ or "")
    repeats = 2 if args.quick else 5
    size = 1024 if args.quick else 2048
    loaded = load_embedded()
    reader = Reader(loaded)
    idle, busy, alone, beside = [], [], [], []
    with Team(loaded, budget_for(loaded, agents=4, tokens=size + LONG + 512)) as team:
        team.say("a", reader.text(size - 40) + QUESTION, max_tokens=8)
        team.say("b", reader.text(size - 40) + QUESTION, max_tokens=8)
        for repeat in range(repeats):
            before = dict(team.transcripts)
            team.evict("b")
            idle.append(team.say("b", "Go on.", max_tokens=4).ttft_ms)
            team.transcripts.update(before)

            a = team.ask("a", "Go on.", max_tokens=LONG, ignore_end=True)
            wait_for_pieces(a, 4)
            team.evict("b")
            busy.append(team.say("b", "Go on.", max_tokens=4).ttft_ms)
            at = len(a.pieces)
            wait_for_pieces(a, at + 12)
            alone.append(rate(a.pieces[at : at + 12]))
            # Cold B: A's pieces between B's arrival and B's first token.
            arrived = time.perf_counter()
            cold = team.say(f"cold-{repeat}", reader.text(size - 40) + QUESTION, max_tokens=1)
            ended = time.perf_counter()
            during = [t for t in a.pieces if arrived <= t <= ended]
            beside.append(rate(during))
            assert a.job is not None
            assert a.job.phase.value == "decode", "A must decode all the while"
            assert cold.reply.result().usage.source == "cold"
            team.loop.post(partial(team.loop.cancel, a.job))
            with suppress(Cancelled):
                a.reply.result()
            team.transcripts.clear()
            team.transcripts.update(before)
    rows = [
        ["B's first token, engine idle, ms", common.spread(idle)],
        ["B's first token, A decoding, ms", common.spread(busy)],
        ["A's tokens/s alone", common.spread(alone)],
        ["A's tokens/s while B prefills cold", common.spread(beside)],
    ]
    common.table(f"Staggered arrival at {size} tokens", ["", "median (range)"], rows)
    summary = {
        "ttft_ratio_b": common.median(busy) / common.median(idle),
        "rate_ratio_a": common.median(beside) / common.median(alone),
        "ttft_b_idle_ms": common.median(idle),
        "ttft_b_busy_ms": common.median(busy),
    }
    common.report(args, summary)


if __name__ == "__main__":
    main()
