"""The village example and what the demo counts, without a model."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from examples import demo as driver
from examples import village
from examples.village import TRADES, Report, Turn, life_story
from examples.watch import Board, Tally, compare
from offbook.actors.lm import EngineStats
from offbook.bus import connect
from offbook.bus.errors import NoSuchActor
from offbook.runtime import child as child_module
from offbook.runtime.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(config: EngineConfig) -> list[str]:
        return [sys.executable, str(FAKE), "--config", config.to_json()]

    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))
    monkeypatch.setattr(child_module, "engine_command", command)


async def served(ask: Callable[[], Awaitable[Any]]) -> Any:
    """The answer, once the script has spawned whom we ask."""
    with anyio.fail_after(30):
        while True:
            try:
                return await ask()
            except NoSuchActor:
                await anyio.sleep(0.02)


async def test_news_goes_round_once_also_if_the_script_runs_again(
    fake_engine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    await village.main(days=1)
    await village.main(days=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: village.main(days=2, stay=True))
        async with connect("village", timeout=30) as bus:
            heard = {}
            for name in TRADES:
                report = await served(lambda to=f"villager/{name}": bus.ask(to, Report()))
                heard[name] = report["days"]
            assert heard == {name: [0, 1] for name in TRADES}
            async with bus.subscribe(village.TURNS, after=0) as events:
                tally = Tally()
                for _ in range(2 * len(TRADES)):
                    tally.add((await anext(events)).decode(Turn))
            assert tally.lost_and_repeated(heard, 2) == (0, 0)
            said = capsys.readouterr().out
            assert said.count("\n") == said.count("the village is up: ask villager/ann") == 1
            example = [sys.executable, str(ROOT / "examples" / "ask.py"), "ann", "Plans?"]
            done = await anyio.run_process(example)
            assert done.stdout.decode() == "You said: Plans?\n"
        tasks.cancel_scope.cancel()


def test_the_external_example_is_under_ten_lines() -> None:
    lines = (ROOT / "examples" / "ask.py").read_text().split('"""')[2].splitlines()
    body = [line for line in lines if line.strip() and not line.startswith(("import", "from"))]
    assert len(body) < 10


def test_stories_differ_and_are_reproducible() -> None:
    stories = {name: life_story(name, trade) for name, trade in TRADES.items()}
    assert len(set(stories.values())) == len(TRADES)
    assert stories["ann"] == life_story("ann", TRADES["ann"])
    assert all(len(story) > 4000 for story in stories.values())


def turn(
    agent: str,
    what: str = "day 1",
    *,
    source: str = "warm",
    reused: int = 1000,
    context: int = 1100,
    ttft: float = 50.0,
    evictions: int = 0,
) -> Turn:
    return Turn(agent, what, "said", source, reused, 20, 10, context, ttft, 0.0, 500.0, evictions)


def filled(*turns: Turn, kill_at: int | None = None, compare_at: int | None = None) -> Tally:
    tally = Tally()
    for one in turns:
        tally.add(one)
    tally.kill_at, tally.compare_at = kill_at, compare_at
    return tally


def test_lost_and_repeated_are_counted_from_state_and_from_the_topic() -> None:
    everyone = [turn(name) for name in TRADES]
    heard = {name: [0] for name in TRADES}
    assert filled(*everyone).lost_and_repeated(heard, 1) == (0, 0)
    assert filled(*everyone[1:]).lost_and_repeated(heard, 1) == (1, 0)
    assert filled(*everyone).lost_and_repeated({**heard, "ann": []}, 1) == (1, 0)
    assert filled(*everyone, turn("ann")).lost_and_repeated(heard, 1) == (0, 1)
    assert filled(*everyone).lost_and_repeated({**heard, "bert": [0, 0]}, 1) == (0, 1)


def test_resumed_needs_everyone_to_go_on_from_memory() -> None:
    before = [turn("ann", context=1100), turn("bert", context=1200)]
    good = [turn("bert", reused=1100), turn("ann", reused=1090), turn("ann", source="cold", reused=0)]
    assert filled(*before, *good, kill_at=2).resumed()
    assert not filled(*before, *good).resumed()
    assert not filled(*before, *good[:1], kill_at=2).resumed()
    assert not filled(*before, good[0], turn("ann", source="cold", reused=0), kill_at=2).resumed()
    assert not filled(*before, good[0], turn("ann", reused=500), kill_at=2).resumed()
    assert not filled(*good, kill_at=0).resumed()


def test_the_result_has_the_promised_keys_and_leaves_the_comparison_out_of_the_village() -> None:
    tally = filled(
        turn("ann", source="cold", reused=0, evictions=0),
        turn("ann", "day 2", evictions=2),
        turn("ann", "answer", ttft=40),
        turn("ann", "answer", source="cold", reused=0, ttft=4000),
        turn("ann", "answer", ttft=60, evictions=1),
        kill_at=1,
        compare_at=2,
    )
    stats = EngineStats(
        model="m", fingerprint="f", device="d", pid=1, budget_bytes=100, used_bytes=80, peak_bytes=90,
        weights_bytes=50, pool_bytes=30, pool_used_bytes=10, disk_bytes=5, context_limit=10,
    )  # fmt: skip
    tally.saw(stats)
    result = tally.result({"ann": [0, 1]}, 2)
    assert set(result) == {
        "agents", "turns", "lost", "repeated", "resumed", "evictions", "restores", "cold_prefills",
        "warm_ttft_ms", "cold_ttft_ms", "reused_tokens", "budget_bytes", "peak_bytes", "model",
    }  # fmt: skip
    assert (result["turns"], result["evictions"], result["restores"], result["cold_prefills"]) == (2, 2, 1, 1)
    assert (result["warm_ttft_ms"], result["cold_ttft_ms"]) == (50, 4000)
    assert (result["peak_bytes"], result["budget_bytes"], result["model"]) == (90, 100, "m")
    assert result["lost"] == 2 * (len(TRADES) - 1)

    console = Console(file=io.StringIO(), width=120)
    compare(console, tally, result, 12.0)
    assert "80 times sooner" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


def test_the_board_prints_a_line_per_turn_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    with Board(console) as board:
        tally = filled(turn("ann"))
        board.show(tally)
        tally.add(turn("bert"))
        board.show(tally)
        board.show(tally)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert [line.split()[1] for line in lines] == ["ann", "bert"]


def demo(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", "--home", str(home), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_demo_refuses_a_budget_that_is_none(tmp_path: Path) -> None:
    done = demo(tmp_path, "--memory", "plenty")
    assert done.returncode == 2
    assert "plenty" in done.stderr


async def test_a_village_that_ends_by_itself_ends_the_demo_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(days: int, memory: str, log: Path) -> anyio.abc.Process:
        with log.open("wb") as out:
            return await anyio.open_process(
                [sys.executable, "-c", "raise SystemExit('no bread')"], stderr=out
            )

    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "start_village", start)
    with pytest.raises(BaseExceptionGroup) as caught:
        await driver.run(1, "1 GiB", tmp_path, Console(file=io.StringIO()))
    died = caught.value.subgroup(driver.VillageDied)
    assert died is not None
    assert "no bread" in str(died.exceptions[0])
