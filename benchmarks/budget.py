"""The memory budget under a storm: 50 agents, random lengths, arrivals, cancels and resizes.

A sampler reads what MLX reports (active and cached bytes) every few milliseconds; the engine's own
accounting and MLX's peak are compared with the budget that was in force. Every turn must end in an
answer or a typed error.
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


class Sampler(threading.Thread):
    """Watches MLX's memory against the budget in force."""

    def __init__(self, team: Team) -> None:
        super().__init__(daemon=True)
        self.team, self.over, self.peak, self.samples = team, 0, 0, 0
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.wait(0.004):
            # The larger of the two budgets counts while one is being replaced by the other.
            before = self.team.loop.budget_bytes
            used = self.team.loop.used_bytes
            budget = max(before, self.team.loop.budget_bytes)
            self.samples += 1
            self.peak = max(self.peak, used)
            self.over = max(self.over, used - budget)


def main() -> None:
    args = common.arguments(__doc__ or "")
    seconds = 40 if args.quick else 240
    loaded = load_embedded()
    reader, dice = Reader(loaded), random.Random(11)
    low = budget_for(loaded, agents=3, tokens=2048)
    high = budget_for(loaded, agents=8, tokens=2048)
    turns: list[Turn] = []
    outcomes: dict[str, int] = {}
    longest = 0.0
    with Team(loaded, low) as team:
        sampler = Sampler(team)
        sampler.start()
        started, next_resize, budget = time.perf_counter(), 8.0, low
        running: list[Turn] = []
        while time.perf_counter() - started < seconds:
            running = [turn for turn in running if not turn.reply.done()]
            if len(running) < 12:
                agent = f"agent/{dice.randrange(AGENTS)}"
                if not any(turn.agent == agent for turn in running):
                    length = int(dice.choice([20, 60, 150, 400, 900]) * dice.uniform(0.5, 1.5))
                    turn = team.ask(agent, reader.text(length), max_tokens=dice.choice([1, 8, 24]))
                    turns.append(turn)
                    running.append(turn)
            victim = dice.choice(running).job if running and dice.random() < 0.05 else None
            if victim is not None:
                team.loop.post(partial(team.loop.cancel, victim))
            if time.perf_counter() - started > next_resize:
                budget = high if budget == low else low
                team.loop.resize(budget)
                next_resize += dice.uniform(6, 16)
            time.sleep(dice.expovariate(20))
        for turn in turns:
            try:
                turn.reply.result(timeout=300)
                outcome = "answered"
            except (Cancelled, ContextTooLarge, DeadlineExceeded, EngineBusy) as error:
                outcome = type(error).__name__
            except TimeoutError:
                outcome = "unanswered"
            except Exception as error:
                outcome = f"untyped {type(error).__name__}"
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if outcome == "answered":
                longest = max(longest, turn.reply.result().usage.queue_ms / 1e3)
        sampler.stopping.set()
        stats = team.stats()
    common.table(
        "Under a storm", ["", ""], [[k, v] for k, v in outcomes.items()] + [["longest wait, s", longest]]
    )
    unanswered = sum(n for k, n in outcomes.items() if k == "unanswered" or k.startswith("untyped"))
    summary = {
        "peak_over_budget": sampler.over,
        "unanswered": unanswered,
        "turns": len(turns),
        "longest_wait_s": longest,
        "samples": sampler.samples,
        "evictions": stats.counters.get("evictions", 0),
        "restores": stats.counters.get("restores", 0),
    }
    common.report(args, summary)


if __name__ == "__main__":
    main()
