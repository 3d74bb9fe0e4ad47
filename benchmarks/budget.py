"""The memory budget under a storm: 50 agents, random lengths, priorities, deadlines, cancels, resizes.

Two watchers compare bytes with the budget in force. One reads what MLX holds (active and cached bytes) and
the packed weights every few milliseconds, also while a pool is replaced by another; then the larger of the
two budgets counts. The other reads the engine's own peak since the budget was set (MLX's peak within steps
is in it), on the step thread between steps. ``peak_over_budget`` is the most that either saw above it.

Every turn must end in an answer or a typed error, and none may starve: ``starved`` counts turns that waited
longer than ``STARVED_SECONDS`` to be admitted, whatever their priority and end.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial

from benchmarks import common
from benchmarks.team import Reader, Team, Turn, budget_for, load_embedded
from offbook.bus.errors import Cancelled, ContextTooLarge, DeadlineExceeded, EngineBusy

AGENTS = 50
OUTSTANDING = 12
"""Turns under way or waiting at one time, at most."""

CANCELLED_SHARE, DEADLINE_SHARE, URGENT_SHARE = 0.06, 0.15, 0.2

STARVED_SECONDS = 60.0
"""Several times what ``OUTSTANDING`` turns before it and a resize take."""


class Watch(threading.Thread):
    """Watches what is held against the budget in force."""

    def __init__(self, team: Team) -> None:
        super().__init__(daemon=True)
        self.team, self.over, self.samples = team, 0, 0
        self.stopping = threading.Event()

    def run(self) -> None:
        loop = self.team.loop
        peak = loop.call(self._peak)
        while not self.stopping.wait(0.004):
            before = loop.budget_bytes
            used = loop.used_bytes
            self.over = max(self.over, used - max(before, loop.budget_bytes))
            self.samples += 1
            if peak.done():
                self.over = max(self.over, peak.result())
                peak = loop.call(self._peak)

    def _peak(self) -> int:
        """On the step thread: the peak since the budget was set, beyond the budget."""
        return self.team.loop.most_bytes - self.team.loop.budget_bytes


def outcome(turn: Turn) -> str:
    try:
        turn.reply.result(timeout=300)
    except (Cancelled, ContextTooLarge, DeadlineExceeded, EngineBusy) as error:
        return type(error).__name__
    except TimeoutError:
        return "unanswered"
    except Exception as error:
        return f"untyped {type(error).__name__}"
    return "answered"


def submit(team: Team, agent: str, reader: Reader, dice: random.Random) -> Turn:
    """A turn of random length, some with priority, some with a deadline that may be too near."""
    return team.ask(
        agent,
        reader.text(int(dice.choice([20, 60, 150, 400, 900]) * dice.uniform(0.5, 1.5))),
        max_tokens=dice.choice([1, 8, 24]),
        priority=dice.choice([1, 2]) if dice.random() < URGENT_SHARE else 0,
        within=dice.uniform(2, 40) if dice.random() < DEADLINE_SHARE else float("inf"),
    )


def main() -> None:
    args = common.arguments(__doc__ or "")
    seconds = 40 if args.quick else 240
    loaded = load_embedded()
    reader, dice = Reader(loaded), random.Random(11)
    low = budget_for(loaded, agents=3, tokens=2048)
    high = budget_for(loaded, agents=8, tokens=2048)
    turns: list[Turn] = []
    outcomes: dict[str, int] = {}
    resizes = 0
    with Team(loaded, low) as team:
        watch = Watch(team)
        watch.start()
        started, next_resize, budget = time.perf_counter(), 8.0, low
        running: list[Turn] = []
        cancels: list[tuple[float, Turn]] = []
        while (now := time.perf_counter() - started) < seconds:
            running = [turn for turn in running if not turn.reply.done()]
            agent = f"agent/{dice.randrange(AGENTS)}"
            if len(running) < OUTSTANDING and not any(turn.agent == agent for turn in running):
                turn = submit(team, agent, reader, dice)
                turns.append(turn)
                running.append(turn)
                if dice.random() < CANCELLED_SHARE:
                    cancels.append((now + dice.uniform(0, 4), turn))
            for at, turn in cancels:
                if at <= now and turn.job is not None:
                    team.loop.post(partial(team.loop.cancel, turn.job))
            cancels = [(at, turn) for at, turn in cancels if at > now]
            if now > next_resize:
                budget = high if budget == low else low
                team.loop.resize(budget)
                resizes += 1
                next_resize += dice.uniform(6, 16)
            time.sleep(dice.expovariate(20))
        for turn in turns:
            kind = outcome(turn)
            outcomes[kind] = outcomes.get(kind, 0) + 1
        watch.stopping.set()
        watch.join()
        stats = team.stats()
    waits = [turn.waited for turn in turns]
    common.table(
        "Under a storm",
        ["", ""],
        [*([kind, count] for kind, count in outcomes.items()), ["longest wait, s", max(waits)]],
    )
    summary = {
        "peak_over_budget": watch.over,
        "unanswered": sum(n for k, n in outcomes.items() if k == "unanswered" or k.startswith("untyped")),
        "starved": sum(wait > STARVED_SECONDS for wait in waits),
        "starvation_threshold_s": STARVED_SECONDS,
        "longest_wait_s": max(waits),
        "median_wait_s": common.median(waits),
        "turns": len(turns),
        "answered_share": outcomes.get("answered", 0) / len(turns),
        "resizes": resizes,
        "samples": watch.samples,
        "evictions": stats.counters.get("evictions", 0),
        "restores": stats.counters.get("restores", 0),
    }
    common.report(args, summary, outcomes=outcomes)


if __name__ == "__main__":
    main()
