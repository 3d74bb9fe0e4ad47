"""The demo: the village, with memory for three of its eight, killed in the middle and going on.

    make demo                                  # or: python -m examples.demo

Starts ``examples/village.py`` as a process of its own and watches it from outside, over the bus. In the
middle of a day it kills that process with SIGKILL, starts it again and lets it finish. Then it visits:
every villager is asked something with their memory on disk (warm) and with it dropped (cold), to compare
the two on the same histories. The last line is one JSON object; every number in it was counted or
measured in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import anyio
import anyio.abc
from rich.console import Console

from examples.village import MODEL, TRADES, TURNS, Report, Turn
from examples.watch import Board, Tally, compare
from offbook.actors.lm import ENGINE_ADDRESS, EngineStats, Forget, Stats
from offbook.bus import Bus, connect
from offbook.bus.errors import OffbookError
from offbook.runtime.cli_machine import model_progress
from offbook.runtime.config import InvalidConfig, check_budget, parse_memory
from offbook.runtime.doctor import device
from offbook.runtime.kv import native_library
from offbook.runtime.models.resolve import resolve

QUESTION = "What worries you most today?"


def budget() -> str:
    """Room for the embedded model's weights, workspace, and about three villagers' caches.

    The weights take 110 MiB packed by the CPU kernel, 260 at 16 bits on a GPU, 515 where the kernel is
    missing.
    """
    if device() == "gpu":
        return "416 MiB"
    return "256 MiB" if native_library.available() else "664 MiB"


class VillageDied(RuntimeError):
    """The village's process ended when it should not have."""


async def start_village(days: int, memory: str, log: Path) -> anyio.abc.Process:
    """The village in its own process and process group, so that a kill hits it and nothing else."""
    command = [sys.executable, "-m", "examples.village", f"--days={days}", f"--memory={memory}", "--stay"]
    with log.open("ab") as out:
        return await anyio.open_process(
            command, stdin=None, stdout=out, stderr=out, start_new_session=True, cwd=Path(__file__).parents[1]
        )


class Demo:
    """One run: the process, and what was seen of it."""

    def __init__(self, days: int, memory: str, log: Path, board: Board) -> None:
        self.days = days
        self.memory = memory
        self.log = log
        self.board = board
        self.tally = Tally()
        self.process: anyio.abc.Process | None = None
        self._ending = False
        self._news = anyio.Event()

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start the village; if it ends before it is ended, ``tasks`` fail with ``VillageDied``."""
        self._ending = False
        self.process = await start_village(self.days, self.memory, self.log)
        tasks.start_soon(self._watch_process, self.process)

    async def _watch_process(self, process: anyio.abc.Process) -> None:
        code = await process.wait()
        if not self._ending:
            lines = self.log.read_text(errors="replace").splitlines()[-8:]
            raise VillageDied(f"the village ended by itself, code {code}:\n  " + "\n  ".join(lines))

    async def kill(self) -> None:
        """What a power cut does to the host."""
        assert self.process is not None
        self._ending = True
        self.process.kill()
        await self.process.wait()
        self.tally.killed()

    async def stop(self) -> None:
        """End the village in order."""
        assert self.process is not None
        self._ending = True
        self.process.terminate()
        with anyio.move_on_after(30):
            await self.process.wait()
        if self.process.returncode != 0:
            raise VillageDied(
                f"the village did not end in order (code {self.process.returncode}); see {self.log}"
            )

    async def watch_turns(self, bus: Bus) -> None:
        """Every turn, in order, from the first: a subscription goes on where it was after a kill."""
        async with bus.subscribe(TURNS, after=0) as events:
            async for event in events:
                self.tally.add(event.decode(Turn))
                self.board.show(self.tally)
                news, self._news = self._news, anyio.Event()
                news.set()

    async def watch_memory(self, bus: Bus) -> None:
        """The engine's own account of its memory, twice a second, over all its lives."""
        while True:
            try:
                stats = await bus.ask(ENGINE_ADDRESS, Stats(), timeout=5, returns=EngineStats)
            except OffbookError:
                pass  # no engine at this moment: it is loading, or was killed
            else:
                self.tally.saw(stats)
                self.board.show(self.tally)
            await anyio.sleep(0.5)

    async def until(self, turns: int) -> None:
        """Wait until so many turns were seen."""
        while len(self.tally.turns) < turns:
            await self._news.wait()

    async def visit(self, bus: Bus, *, cold: bool) -> None:
        """Ask every villager, one after another, so that times are not spent waiting for each other."""
        for name in TRADES:
            if cold:
                await bus.ask(ENGINE_ADDRESS, Forget(agent=f"villager/{name}"), timeout=30)
            seen = len(self.tally.turns)
            body = {"type": "Ask", "question": QUESTION}
            async with bus.stream(f"villager/{name}", body, timeout=120) as reply:
                await reply.final()
            await self.until(seen + 1)

    async def reports(self, bus: Bus) -> dict[str, list[int]]:
        """From each villager's durable state: which days' news they heard."""
        found = {}
        for name in TRADES:
            report = await bus.ask(f"villager/{name}", Report(), timeout=60)
            found[name] = report["days"]
        return found


async def run(days: int, memory: str, home: Path, console: Console) -> dict[str, object]:
    """The whole demo, in an empty ``home``; returns the JSON object of its last line."""
    started = time.monotonic()
    per_day = len(TRADES)
    with Board(console) as board:
        demo = Demo(days, memory, home / "village.log", board)
        try:
            async with anyio.create_task_group() as tasks:
                board.say(
                    f"{per_day} villagers, {days} days of news, {memory} for weights and memory together"
                )
                await demo.start(tasks)
                async with connect("village", timeout=120) as bus:
                    tasks.start_soon(demo.watch_turns, bus)
                    tasks.start_soon(demo.watch_memory, bus)

                    # In the middle of a day, with several villagers in the middle of a sentence.
                    await demo.until(days // 2 * per_day + 3)
                    await demo.kill()
                    board.say("killed the village's process with SIGKILL; starting it again")
                    await demo.start(tasks)
                    await demo.until(days * per_day)

                    board.say(f"a visitor asks everyone: {QUESTION!r} (warm, then cold, then warm)")
                    demo.tally.compare_from_here()
                    await demo.visit(bus, cold=False)
                    await demo.visit(bus, cold=True)
                    await demo.visit(bus, cold=False)
                    heard = await demo.reports(bus)
                    await demo.stop()
                    tasks.cancel_scope.cancel()
        finally:
            if demo.process is not None and demo.process.returncode is None:
                demo.process.kill()
    result = demo.tally.result(heard, days)
    compare(console, demo.tally, result, time.monotonic() - started)
    return result


def main() -> None:
    """Parse, run, print the JSON line; exit 1 if something was lost or repeated."""
    parser = argparse.ArgumentParser(description="The village demo; see the top of examples/demo.py.")
    parser.add_argument("--days", type=int, default=4)
    parser.add_argument(
        "--memory", default=budget(), help="memory budget of the engine (default: %(default)s)"
    )
    parser.add_argument("--home", type=Path, default=Path("out/demo").absolute(), help="emptied at the start")
    options = parser.parse_args()
    try:
        check_budget(parse_memory(options.memory))
    except InvalidConfig as exc:
        parser.error(str(exc))
    shutil.rmtree(options.home, ignore_errors=True)
    options.home.mkdir(parents=True)
    os.environ["OFFBOOK_HOME"] = str(options.home)  # the village's process inherits it; connect() looks there
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # take the village along, whoever ends us
    console = Console()
    try:
        with model_progress(console) as progress:  # the first run fetches and converts the model
            resolve(MODEL, progress=progress)
        result = anyio.run(run, options.days, options.memory, options.home, console)
    except OffbookError as exc:
        raise SystemExit(f"{exc.code}: {exc}") from exc
    except BaseExceptionGroup as group:
        died = group.subgroup(VillageDied)
        if died is None:
            raise
        raise SystemExit(str(died.exceptions[0])) from None
    print(json.dumps(result), flush=True)
    if result["lost"] or result["repeated"] or not result["resumed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
