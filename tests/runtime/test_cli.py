"""The command line: what it shows of a running team, and how it says what was wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbook.bus.errors import InvalidRequest, UnknownMessageType
from offbook.runtime import cli
from offbook.runtime.describe import FieldInfo, MessageInfo, text_message
from offbook.runtime.lockfile import LockFile

SCRIPT = Path(__file__).with_name("team_script.py")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))
    monkeypatch.delenv("OFFBOOK_RUNTIME", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running team, started with ``offbook run``; its home."""
    patch = pytest.MonkeyPatch()
    home = tmp_path_factory.mktemp("home")
    patch.setenv("OFFBOOK_HOME", str(home))
    patch.delenv("OFFBOOK_RUNTIME", raising=False)
    command = [sys.executable, "-m", "offbook.runtime.cli", "run", str(SCRIPT), "one", "--two"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up one --two\n"
        yield home
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert out == "down\n"
    assert process.returncode == 0
    patch.undo()


def test_ask_prints_the_answer_as_it_comes(team: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ask", "neighbour/ann", "What is new?"]) == 0
    assert capsys.readouterr().out == "You said: What is new?\n"


def test_ask_takes_a_whole_message_as_json(team: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ask", "neighbour/ann", '{"type": "Count"}']) == 0
    assert capsys.readouterr().out == "0\n"
    assert cli.run(["ask", "neighbour/ann", "x", "--type", "Heard"]) == 0
    capsys.readouterr()
    assert cli.run(["ask", "neighbour/ann", '{"type": "Count"}', "-r", "team"]) == 0
    assert capsys.readouterr().out == "1\n"


def test_ps_shows_actors_and_engine(team: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ps"]) == 0
    shown = capsys.readouterr().out
    assert "neighbour/ann" in shown
    assert "silent/stone" in shown
    assert "engine: fake" in shown
    assert cli.run(["ps", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [actor["id"] for actor in facts["actors"]] == ["neighbour/ann", "silent/stone"]
    assert facts["engine"]["model"] == "fake"


def test_memory_shows_and_sets_the_budget(team: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["memory"]) == 0
    assert "budget" in capsys.readouterr().out
    assert cli.run(["memory", "2GiB"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ask", "nobody", "hi"], "InvalidAddress"),
        (["ask", "ghost/x", "hi"], "NoSuchActor: there are no actors of kind 'ghost'"),
        (["ask", "silent/stone", "hi"], "no request takes a single text"),
        (["ask", "neighbour/ann", " "], "empty"),
        (["ask", "neighbour/ann", "hi", "--type", "Nope"], "UnknownMessageType: it takes no 'Nope'"),
        (["ask", "neighbour/ann", '{"question"'], "not JSON"),
        (["ask", "neighbour/ann", '{"question": "x"}'], "type"),
        (["ask", "neighbour/ann", '{"type": "Ask", "question": 7}'], "BadMessage"),
        (["ps", "-r", "elsewhere"], "there is no runtime 'elsewhere'"),
        (["ps", "-r", "../up"], "InvalidAddress"),
        (["memory", "plenty"], "InvalidConfig"),
        (["memory", "-5GiB"], "InvalidConfig: memory is '-5GiB'"),
        (["run", "absent.py"], "there is no file 'absent.py'"),
        (["run", "README.md"], "not a Python file"),
        (["models", "fetch", "wheel:nope"], "UnknownModel"),
        (["model", "profile", "wheel:nope"], "UnknownModel"),
        (["kv", "ls"], "nothing on disk"),
    ],
)
def test_an_error_is_one_line_that_says_what_was_wrong(
    team: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert cli.run(arguments) == 1
    out, error = capfd.readouterr()
    assert out == ""
    assert says in error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1


def test_wrong_usage_ends_with_two_and_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["frobnicate"]) == 2
    assert cli.run(["ask"]) == 2
    assert cli.run(["memory", "--frobnicate"]) == 2
    assert "--frobnicate" in capsys.readouterr().err
    capsys.readouterr()
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("run", "ps", "ask", "memory", "dead", "doctor", "models", "kv", "villager/ann"):
        assert word in shown


def test_debug_gives_the_traceback(home: Path) -> None:
    with pytest.raises(InvalidRequest):
        cli.run(["--debug", "run", "absent.py"])


def test_nothing_running_is_said_with_what_to_do(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ps"]) == 1
    assert "offbook run" in capfd.readouterr().err


def test_a_script_with_a_syntax_error_names_the_line(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("async def main():\n    await (\n")
    assert cli.run(["run", str(script)]) == 1
    assert "line 2" in capfd.readouterr().err


def test_a_plain_script_runs_as_a_program(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import sys\nif __name__ == '__main__':\n    print('ran', sys.argv[1:])\n")
    command = [sys.executable, "-m", "offbook.runtime.cli", "run", str(script), "--flag"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "ran ['--flag']\n"


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("def main():\n    print('ran')\n", False),
        ("import sys\n\nLIMIT = 3\n\ndef main():\n    print('ran')\n", False),
        ("def main():\n    print('ran')\n\nmain()\n", True),
        ("def main():\n    print('ran')\n\ndef start():\n    main()\n\nstart()\n", True),
        ("@lambda f: f()\ndef main():\n    print('ran')\n", True),
        ("async def main():\n    print('ran')\n", True),
    ],
)
def test_a_main_that_is_not_async_and_that_nobody_calls_is_an_error(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, runs: bool
) -> None:
    script = tmp_path / "team.py"
    script.write_text(text)
    argv, path = sys.argv, list(sys.path)
    try:
        code = cli.run(["run", str(script)])
    finally:
        sys.argv, sys.path[:] = argv, path
    out, error = capfd.readouterr()
    assert (code, out) == ((0, "ran\n") if runs else (1, ""))
    assert runs or "InvalidRequest" in error
    assert runs or "make it 'async def main()'" in error


def test_lines_are_not_folded_where_the_output_is_no_terminal(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / ("a-folder-with-a-long-name-" * 8)
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.run(["models"]) == 0
    assert f"Models are kept in {cache}" in capsys.readouterr().out


def message(name: str, *fields: FieldInfo, request: bool = True) -> MessageInfo:
    return MessageInfo(type=name, request=request, fields=fields)


def field(name: str, *, required: bool = True, text: bool = True) -> FieldInfo:
    return FieldInfo(name=name, required=required, text=text)


def test_a_text_goes_to_the_request_that_holds_one_text() -> None:
    known = [
        message("Ask", field("question"), field("politely", required=False, text=False)),
        message("Count"),
        message("Heard", field("text"), request=False),
    ]
    assert text_message(known, "Plans?") == {"type": "Ask", "question": "Plans?"}
    assert text_message(known, "News.", "Heard") == {"type": "Heard", "text": "News."}
    with pytest.raises(UnknownMessageType, match="Ask, Count, Heard"):
        text_message(known, "x", "Nope")
    with pytest.raises(InvalidRequest, match="Count takes"):
        text_message(known, "x", "Count")
    with pytest.raises(InvalidRequest, match="several"):
        text_message([*known, message("Beg", field("favour"))], "x")


def test_memory_waits_for_an_engine_that_loads_or_is_started_again(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script kills its engine, whose next one the command meets as it starts."""
    command = [sys.executable, "-m", "offbook.runtime.cli", "run", str(SCRIPT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        engine = LockFile(home / "team" / "engine.lock").holder()
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        assert cli.run(["memory", "2GiB"]) == 0
        assert "budget" in capsys.readouterr().out
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0] == "down\n"
