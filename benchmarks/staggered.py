"""B arrives while A decodes: how long B waits for its first token, and what A loses meanwhile.

* *warm B*: B's memory is in its files only. Its time to first token, while A decodes, against the same on an
  idle engine at the same context.
* *cold B*: B has to prefill. A's rate from its last token before B's arrival to its first after B's first
  token, against A's rate over 48 tokens alone just before.

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


ALONE = 48
"""Tokens over which A's rate alone is taken."""


def wait_for_tokens(turn: Turn, count: int) -> None:
    while len(turn.times) < count:
        time.sleep(0.005)


def rate(times: list[float]) -> float:
    """Tokens a second, from the first of these tokens to the last."""
    return (len(times) - 1) / (times[-1] - times[0])


def warm_turn(team: Team, agent: str) -> float:
    """Milliseconds to the first token of an agent that is brought from its files."""
    team.evict(agent)
    team.flush()
    before, blocks = team.loaded_blocks(), team.full_blocks(agent)
    turn = team.say(agent, "Go on.", max_tokens=4)
    assert turn.reply.result().usage.source == "warm", turn.reply.result().usage
    assert team.loaded_blocks() - before >= blocks, "B is read from its files"
    return turn.ttft_ms


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
            idle.append(warm_turn(team, "b"))
            team.transcripts.update(before)

            # Another text each time: what A said before is on disk, and would be looked at.
            a = team.ask("a", f"Go on, part {repeat}.", max_tokens=LONG, ignore_end=True)
            wait_for_tokens(a, 4)
            busy.append(warm_turn(team, "b"))
            at = len(a.times)
            wait_for_tokens(a, at + ALONE)
            alone.append(rate(a.times[at : at + ALONE]))
            arrived = len(a.times) - 1
            cold = team.say(f"cold-{repeat}", reader.text(size - 40) + QUESTION, max_tokens=1)
            ended = len(a.times)
            wait_for_tokens(a, ended + 1)
            beside.append(rate(a.times[arrived : ended + 1]))
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
