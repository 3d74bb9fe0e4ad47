"""``offbook dead``: beside a running team, and on the journal of one that is down."""

from __future__ import annotations

import json
from pathlib import Path

import anyio.to_thread
import pytest

from offbook.actors import Actor, Message, Supervision, on
from offbook.runtime import Runtime, cli


class Job(Message):
    text: str


class Worker(Actor):
    supervision = Supervision(max_tries=1)
    done: list[str] = []

    @on
    async def work(self, job: Job) -> None:
        if Path(job.text).exists():
            raise OSError(f"[{job.text}] is in the way")
        self.done.append(job.text)


async def run(*arguments: str) -> int:
    return await anyio.to_thread.run_sync(cli.run, list(arguments))


@pytest.mark.parametrize("running", [True, False])
async def test_dead_letters_are_listed_sent_again_and_dropped(
    running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))
    monkeypatch.delenv("OFFBOOK_RUNTIME", raising=False)
    stone, log = tmp_path / "stone", tmp_path / "log"

    async def look() -> list[dict[str, object]]:
        capsys.readouterr()
        assert await run("dead", "ls", "--json") == 0
        letters: list[dict[str, object]] = json.loads(capsys.readouterr().out)["letters"]
        return letters

    async def operate() -> None:
        first, second = await look()
        assert (first["to"], second["to"]) == ("worker/a", "worker/b")
        assert f"[{stone}] is in the way" in str(first["reason"])
        assert await run("dead", "ls", "--to", "worker/b") == 0
        shown = capsys.readouterr().out
        assert f"[{log}] is in the way" in shown
        assert "1 shown of 2" in shown
        assert await run("dead", "drop", str(second["number"])) == 0
        assert await run("dead", "drop", str(second["number"])) == 1
        assert "there is no such dead letter" in capsys.readouterr().out
        stone.unlink()
        assert await run("dead", "resend", "--all") == 0
        assert "1 dead letters sent again" in capsys.readouterr().out
        assert await look() == []

    stone.touch()
    log.touch()
    async with Runtime("team", engine=False) as rt:
        await rt.spawn(Worker, "a")
        await rt.tell("worker/a", Job(str(stone)))
        await rt.idle()
        await rt.tell("worker/b", Job(str(log)))
        await rt.idle()
        if running:
            await operate()
            await rt.idle()
    if not running:
        await operate()
    async with Runtime("team", engine=False) as rt:
        await rt.register(Worker)
        await rt.idle()
        snapshot = await rt.host.journal.do(
            "test", lambda db: db.execute("SELECT id, state FROM actors ORDER BY id").fetchall()
        )
    assert str(stone).encode() in dict(snapshot)["worker/a"]
    assert str(log).encode() not in dict(snapshot)["worker/b"]


@pytest.mark.parametrize("arguments", [(), ("1", "--all"), ("--all", "--to", "worker/")])
def test_which_letters_are_meant_is_said_in_one_way(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))
    assert cli.run(["dead", "drop", *arguments]) == 1
    assert "say which dead letters" in capsys.readouterr().err
