"""``offbook kv`` and ``memory``: which team is meant, and what is said of bad files and wrong budgets."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from offbook.runtime import cli, cli_team
from offbook.runtime import config as config_module
from offbook.runtime.cli_machine import model_progress
from offbook.runtime.lockfile import LockFile
from offbook.runtime.store import BlockStore, Tail


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))
    for name in ("OFFBOOK_RUNTIME", "OFFBOOK_STORE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def known(home: Path, *names: str) -> None:
    """Teams that were there, with one agent's tails on disk."""
    for name in names:
        (home / name).mkdir()
        (home / name / "runtime.lock").touch()
        with BlockStore.for_tools(home / name / "kv", read_only=False) as store:
            for tokens in (3, 5):
                ids = list(range(tokens))
                tail = Tail(tokens, store.chain_at(ids), [], {}, {})
                assert store.put_tail("villager/ann", tail).result().ok


def tails(home: Path, name: str) -> list[Path]:
    return sorted((home / name / "kv" / "tails").glob("*/*"))


@pytest.fixture
def two(home: Path) -> Iterator[Path]:
    """Two known teams, of which ``up`` is running."""
    known(home, "down", "up")
    with LockFile(home / "up" / "runtime.lock"):
        yield home


@pytest.mark.parametrize(
    "arguments", [["ls"], ["ls", "--json"], ["verify"], ["export", "villager/ann", "ann.offbook"]]
)
def test_of_several_teams_the_one_that_runs_is_meant(
    two: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    cli.run(["kv", *arguments])
    out, error = capsys.readouterr()
    assert "choose one" not in error
    assert "down" not in out + error
    assert arguments[0] != "export" or "up" in error  # which has no journal here


def test_what_must_not_run_is_named_if_there_are_several(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["gc"], ["verify", "--quarantine"], ["import", "ann.offbook"]):
        assert cli.run(["kv", *arguments]) == 1
        assert "choose one with -r: down, up" in capsys.readouterr().err
        start = time.monotonic()
        assert cli.run(["kv", *arguments, "-r", "up"]) == 1
        assert f"'up' is running, in process {os.getpid()}: end it first" in capsys.readouterr().err
        assert time.monotonic() - start < 5
    assert cli.run(["kv", "gc", "-r", "down"]) == 0


def shown_help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """As one line, without the frames."""
    assert cli.run([*arguments, "--help"]) == 0
    return " ".join(word for word in capsys.readouterr().out.split() if word != "│")


def test_help_says_when_a_team_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "export"):
        assert "not needed if one is running." in shown_help(capsys, "kv", command)
    for command in ("gc", "import"):
        assert "not needed if there is only one." in shown_help(capsys, "kv", command)
    assert "(with --quarantine: if there is only one)" in shown_help(capsys, "kv", "verify")


def test_files_in_quarantine_are_counted_beside_an_engine(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known(home, "team")
    with BlockStore.for_tools(home / "team" / "kv") as store:
        before = store.stats()
    for number in range(3):
        (home / "team" / "kv" / "quarantine" / f"{number}-bad.tail").write_bytes(b"x" * 5000)
    assert cli.run(["kv", "ls"]) == 0
    assert "3 files in quarantine" in capsys.readouterr().out
    with BlockStore.for_tools(home / "team" / "kv") as store:
        after = store.stats()
    assert (before.quarantined_files, after.quarantined_files) == (0, 3)
    assert after.disk_bytes - before.disk_bytes == 3 * 8192  # whole pages


@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_verify_says_how_bad_files_are_moved_away(
    home: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    known(home, "team")
    old, new = tails(home, "team")
    raw = bytearray(old.read_bytes())
    raw[-1] ^= 1
    old.write_bytes(raw if harm == "flip" else raw[:100])
    assert cli.run(["kv", "verify"]) == 1
    shown = capsys.readouterr().out
    assert "0 blocks and 1 tails are good" in shown
    assert "'offbook kv verify --quarantine -r team'" in shown
    assert (str(old) in shown) == (harm == "flip")  # a file cut short has left the index on opening
    assert cli.run(["kv", "verify", "--quarantine"]) == 1
    assert "moved to" in capsys.readouterr().out
    assert tails(home, "team") == [new]
    assert len(list((home / "team" / "kv" / "quarantine").iterdir())) == 1
    assert cli.run(["kv", "verify"]) == 0
    assert "--quarantine" not in capsys.readouterr().out


def test_files_that_an_engine_removes_meanwhile_are_not_bad(home: Path) -> None:
    known(home, "team")
    with BlockStore.for_tools(home / "team" / "kv") as beside:
        tails(home, "team")[0].unlink()
        found = beside.verify()
    assert (found.ok, found.tails) == (True, 1)


@pytest.mark.parametrize("group", [None, 4 << 30])
def test_a_budget_that_is_too_large_is_not_answered_with_what_the_command_refuses(
    two: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, group: int | None
) -> None:
    async def refuse(name: str, budget: int | None) -> None:
        assert budget is not None
        config_module.check_budget(budget)

    monkeypatch.setattr(config_module, "machine_bytes", lambda: 4 << 30)
    monkeypatch.setattr(config_module, "cgroup_limit_bytes", lambda: group)
    monkeypatch.setattr(cli_team, "_memory", refuse)
    assert cli.run(["memory", "1TiB"]) == 1
    error = capsys.readouterr().err
    assert "a memory budget of 1 TiB is more than" in error
    assert "give less" in error
    assert "None" not in error


def test_help_says_what_a_change_of_the_budget_does(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_help(capsys, "memory")
    assert "a larger one too" in shown
    assert "restored at its next turn" in shown
    assert '"Most used" starts over' in shown


def test_progress_prints_nothing_before_the_first_stage_or_without_a_terminal() -> None:
    quiet, bars, file = io.StringIO(), io.StringIO(), io.StringIO()
    with model_progress(Console(file=quiet, force_terminal=True)):
        pass
    assert quiet.getvalue() == ""
    with model_progress(Console(file=bars, force_terminal=True)) as report:
        report("fetching", 1, 2)
    assert "fetching" in bars.getvalue()
    with model_progress(Console(file=file, force_terminal=False)) as report:
        report("fetching", 1, 2)
    assert file.getvalue() == ""
