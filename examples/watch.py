"""What the demo counts and shows: a tally of turns, a live table of them, and the comparison at the end."""

from __future__ import annotations

from collections import Counter
from statistics import median
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.village import TRADES, Turn
from offbook.actors.lm import EngineStats
from offbook.runtime.config import format_bytes

SHOWN = 14
"""Turns in the live table."""

TAIL = 256
"""Most tokens to read again after a kill: the 16-bit tail (up to 191) and the end of the last turn."""

COLOURS = {"hot": "red", "warm": "yellow", "cold": "blue"}


class Tally:
    """Everything seen of one run, and the figures that follow from it."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.kill_at: int | None = None
        self.compare_at: int | None = None
        self.stats: EngineStats | None = None
        self.peak_bytes = 0
        self.model = ""
        self.budget_bytes = 0

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)

    def saw(self, stats: EngineStats) -> None:
        self.stats = stats
        self.peak_bytes = max(self.peak_bytes, stats.peak_bytes)
        self.budget_bytes = stats.budget_bytes
        self.model = stats.model

    def killed(self) -> None:
        self.kill_at = len(self.turns)

    def compare_from_here(self) -> None:
        self.compare_at = len(self.turns)

    @property
    def village(self) -> list[Turn]:
        """The turns of the village itself, without those of the comparison."""
        return self.turns[: self.compare_at]

    @property
    def visits(self) -> list[Turn]:
        return self.turns[self.compare_at :] if self.compare_at is not None else []

    def lost_and_repeated(self, heard: dict[str, list[int]], days: int) -> tuple[int, int]:
        """Turns about news that are missing, and that are there twice.

        Each villager should have heard the news of each day once, according to their durable state
        (``heard``) and to the turns they published.
        """
        expected = Counter({(name, day): 1 for name in TRADES for day in range(days)})
        in_state = Counter((name, day) for name, found in heard.items() for day in found)
        published = Counter(
            (turn.agent, int(turn.what.removeprefix("day ")) - 1)
            for turn in self.turns
            if turn.what.startswith("day ")
        )
        lost = (expected - in_state) | (expected - published)
        repeated = (in_state - expected) | (published - expected)
        return lost.total(), repeated.total()

    def resumed(self) -> bool:
        """Whether everyone who had a memory at the kill went on from it: at most its tail was read again."""
        if self.kill_at is None:
            return False
        before = {turn.agent: turn for turn in self.turns[: self.kill_at]}
        after: dict[str, Turn] = {}
        for turn in self.turns[self.kill_at :]:
            after.setdefault(turn.agent, turn)
        return bool(before) and all(
            agent in after and after[agent].source != "cold" and after[agent].reused >= last.context - TAIL
            for agent, last in before.items()
        )

    def warm_and_cold(self) -> tuple[list[Turn], list[Turn]]:
        """The visits that found a memory on disk, and those that found none."""
        return [t for t in self.visits if t.source == "warm"], [t for t in self.visits if t.source == "cold"]

    def result(self, heard: dict[str, list[int]], days: int) -> dict[str, object]:
        """The figures of the JSON line; those of the village exclude the comparison's visits."""
        warm, cold = self.warm_and_cold()
        lost, repeated = self.lost_and_repeated(heard, days)
        return {
            "agents": len({turn.agent for turn in self.turns}),
            "turns": len(self.village),
            "lost": lost,
            "repeated": repeated,
            "resumed": self.resumed(),
            "evictions": sum(turn.evictions for turn in self.village),
            "restores": sum(turn.source == "warm" for turn in self.village),
            "cold_prefills": sum(turn.source == "cold" for turn in self.village),
            "warm_ttft_ms": round(median(turn.ttft_ms for turn in warm), 1) if warm else None,
            "cold_ttft_ms": round(median(turn.ttft_ms for turn in cold), 1) if cold else None,
            "reused_tokens": sum(turn.reused for turn in self.village),
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "model": self.model,
        }


class Board:
    """The live table on a terminal; one line per turn where there is none."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )
        self._printed = 0

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(Text(text, style="bold"), soft_wrap=True)

    def show(self, tally: Tally) -> None:
        if self._live is not None:
            self._live.update(Group(turn_table(tally.turns[-SHOWN:]), memory_bar(tally)))
            return
        for number, turn in enumerate(tally.turns[self._printed :], self._printed + 1):
            used = f"{in_use(tally.stats) / tally.stats.budget_bytes:.0%}" if tally.stats else "?"
            self._console.print(
                f"{number:3} {turn.agent:6} {turn.what:7} {turn.source:4} reused {turn.reused:5}, "
                f"read {turn.prefilled:5}, "
                f"first {turn.ttft_ms:6.0f} ms, {rate(turn):5.1f} tok/s, memory {used}",
                highlight=False,
                soft_wrap=True,
            )
        self._printed = len(tally.turns)


def rate(turn: Turn) -> float:
    """Tokens per second of the generation."""
    return (turn.generated - 1) / turn.decode_ms * 1000 if turn.decode_ms > 0 and turn.generated > 1 else 0.0


def in_use(stats: EngineStats) -> int:
    """Bytes of the budget that hold something: the pool is allocated whole, and filled by and by."""
    return stats.used_bytes - stats.pool_bytes + stats.pool_used_bytes


def turn_table(turns: list[Turn]) -> Table:
    """The most recent turns."""
    table = Table(expand=True)
    for name in ("agent", "turn", "memory", "reused", "prefilled", "first token", "tokens/s", "said"):
        numeric = name in ("reused", "prefilled", "first token", "tokens/s")
        table.add_column(
            name, justify="right" if numeric else "left", no_wrap=True, ratio=1 if name == "said" else None
        )
    for turn in turns:
        table.add_row(
            turn.agent,
            turn.what,
            Text(turn.source, style=COLOURS.get(turn.source, "")),
            f"{turn.reused}",
            f"{turn.prefilled}",
            f"{turn.ttft_ms:.0f} ms",
            f"{rate(turn):.1f}",
            Text(" ".join(turn.said.split()), overflow="ellipsis"),
        )
    return table


def memory_bar(tally: Tally) -> Table:
    """Memory in use of the budget, and where everyone's is."""
    grid = Table.grid(padding=(0, 1))
    stats = tally.stats
    if stats is None:
        grid.add_row(Text("the engine is loading its model", style="dim"))
        return grid
    places = Counter(agent.where for agent in stats.agents)
    grid.add_row(
        "memory",
        ProgressBar(total=stats.budget_bytes, completed=in_use(stats), width=40),
        f"{format_bytes(in_use(stats))} of {format_bytes(stats.budget_bytes)}",
        "  ".join(f"{places[where]} {where}" for where in ("hot", "warm", "cold") if places[where]),
    )
    return grid


def compare(console: Console, tally: Tally, result: dict[str, object], took: float) -> None:
    """The summary: what was counted, and warm restores beside cold prefills of the same histories."""
    warm, cold = tally.warm_and_cold()
    console.print(
        f"\n{result['turns']} turns of {result['agents']} villagers in {took:.0f} s: "
        f"{result['lost']} lost, {result['repeated']} repeated; killed after turn {tally.kill_at}, "
        + ("everyone went on from memory" if result["resumed"] else "not everyone went on from memory")
        + f"\n{result['cold_prefills']} histories read once, {result['restores']} restored from disk, "
        f"{result['evictions']} evicted, {result['reused_tokens']} tokens reused; "
        f"at most {format_bytes(tally.peak_bytes)} of {format_bytes(tally.budget_bytes)}\n",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(title="The same question to the same histories (medians, tokens)")
    for name in ("memory", "visits", "history", "of that read", "first token"):
        table.add_column(name, justify="left" if name == "memory" else "right")
    for label, turns in (("restored", warm), ("read again", cold)):
        if turns:
            table.add_row(
                label,
                f"{len(turns)}",
                f"{median(t.context for t in turns):.0f}",
                f"{median(t.prefilled for t in turns):.0f}",
                f"{median(t.ttft_ms for t in turns):.0f} ms",
            )
    console.print(table)
    if warm and cold:
        speed = median(t.ttft_ms for t in cold) / median(t.ttft_ms for t in warm)
        console.print(f"A restored villager speaks {speed:.0f} times sooner.\n", highlight=False)
