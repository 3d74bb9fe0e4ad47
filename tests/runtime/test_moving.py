"""An agent moves to another home as one file, by the command line, and goes on there with its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from offbook.actors import Agent, Message, Request, on
from offbook.bus.errors import InvalidRequest, NoSuchActor
from offbook.runtime import Runtime, cli
from offbook.runtime.moving import StoreFailed, export_agent, import_agent

MODEL = str(Path(__file__).parents[1] / "data" / "deepseek_tiny")
BUDGET = "256 MiB"


class Said(Message):
    text: str


class Ask(Request[dict[str, Any]]):
    question: str


class Rewind(Message):
    turn: int


class Diarist(Agent):
    heard: list[str] = []

    def persona(self) -> str:
        return "You keep a diary of what happens in the town. " * 12

    @on
    async def hear(self, said: Said) -> None:
        self.heard.append(said.text)
        await self.observe(said.text)

    @on
    async def answer(self, ask: Ask) -> dict[str, Any]:
        reply = await self.say(ask.question, max_tokens=6)
        usage = reply.usage
        return {
            "text": reply.text,
            "source": usage.source,
            "reused": usage.reused_tokens,
            "context": usage.context_tokens,
            "heard": self.heard,
        }

    @on
    async def go_back(self, rewind: Rewind) -> None:
        await self.rewind(rewind.turn)


async def first_day() -> dict[str, Any]:
    async with Runtime("here", model=MODEL, memory=BUDGET) as rt:
        await rt.spawn(Diarist, "ann")
        await rt.tell("diarist/ann", Said("The mill was sold."))
        return await rt.ask("diarist/ann", Ask("What is new?"), timeout=60)


async def next_day(name: str, agent: str = "diarist/ann", *, back: int | None = None) -> dict[str, Any]:
    async with Runtime(name, model=MODEL, memory=BUDGET) as rt:
        await rt.register(Diarist)
        if back is not None:
            await rt.tell(agent, Rewind(back))
        return await rt.ask(agent, Ask("And today?"), timeout=60)


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``homes("one")``: from now on this is home."""
    monkeypatch.delenv("OFFBOOK_RUNTIME", raising=False)

    def at(name: str) -> Path:
        monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path / name))
        return tmp_path / name

    return at


async def test_an_agent_moves_with_state_transcript_and_memory(
    homes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homes("one")
    file = str(tmp_path / "ann.offbook")
    first = await first_day()
    assert await run(["kv", "export", "diarist/ann", file]) == 0
    stayed = await next_day("here")
    assert (stayed["source"], stayed["heard"]) == ("warm", ["The mill was sold."])

    homes("two")
    assert await run(["kv", "import", file, "-r", "there"]) == 0
    assert "diarist/ann is now in 'there'" in capsys.readouterr().out
    assert await next_day("there") == stayed
    assert stayed["reused"] == first["context"] - 1  # the last word said has no KV yet

    # Under another name, back to before its first turn of speech.
    assert await run(["kv", "import", file, "-r", "there", "--as", "diarist/eve"]) == 0
    again = await next_day("there", "diarist/eve", back=0)
    assert again["heard"] == stayed["heard"]
    assert again["context"] < first["context"]

    assert await run(["kv", "import", file, "-r", "there"]) == 1
    assert "diarist/ann exists already" in capsys.readouterr().err


async def test_an_agent_that_moved_goes_back_to_an_earlier_turn_without_reading_it_again(
    homes: Any, tmp_path: Path
) -> None:
    homes("one")
    file = str(tmp_path / "ann.offbook")
    first = await first_day()  # turns 1 and 2
    second = await next_day("here")
    assert await run(["kv", "export", "diarist/ann", file]) == 0
    homes("two")
    assert await run(["kv", "import", file, "-r", "there"]) == 0
    again = await next_day("there", back=2)
    assert (again["source"], again["reused"]) == ("warm", second["reused"])
    assert again["reused"] == first["context"] - 1


async def test_operators_list_verify_and_collect_what_is_on_disk(
    homes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    home = homes("one")
    first = await first_day()
    assert (home / "here" / "engine.ready").exists()  # from here its life was counted
    capsys.readouterr()
    assert await run(["kv", "ls", "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out)
    assert (record["agent"], record["tokens"]) == ("diarist/ann", first["context"] - 1)
    assert await run(["kv", "ls"]) == 0
    assert "diarist/ann" in capsys.readouterr().out
    assert await run(["kv", "gc"]) == 0
    assert "0 blocks deleted" in capsys.readouterr().out
    assert await run(["kv", "verify"]) == 0
    [tail] = (home / "here" / "kv" / "tails").glob("*/*")
    raw = bytearray(tail.read_bytes())
    raw[-1] ^= 1
    tail.write_bytes(raw)
    assert await run(["kv", "verify"]) == 1
    assert str(tail) in capsys.readouterr().out
    assert await run(["kv", "verify", "--quarantine"]) == 1
    assert await run(["kv", "verify"]) == 0
    again = await next_day("here")
    assert again["source"] == "cold"
    assert again["heard"] == first["heard"]


async def run(arguments: list[str]) -> int:
    """A command in a thread: some start an event loop of their own."""
    return await anyio.to_thread.run_sync(cli.run, arguments)


async def test_what_cannot_be_moved_says_why_and_changes_nothing(homes: Any, tmp_path: Path) -> None:
    homes("one")
    file = tmp_path / "ann.offbook"
    async with Runtime("here", engine=False) as rt:
        await rt.spawn(Diarist, "ann")
        await rt.tell("diarist/ann", Said("The mill was sold."))
        await rt.host.idle()
        moved = await offloaded(export_agent, "here", "diarist/ann", file)  # beside the running team
        assert (moved.tokens, moved.kept) == (0, 0)
        with pytest.raises(StoreFailed, match="is running"):
            await offloaded(import_agent, "here", file)
    with pytest.raises(NoSuchActor, match="there is no diarist/bob"):
        export_agent("here", "diarist/bob", file)
    with pytest.raises(StoreFailed, match="No such file"):
        export_agent("here", "diarist/ann", tmp_path / "no" / "folder")
    for agent, error in (("diarist/ann", "exists already"), ("miller/ann", "another diarist")):
        with pytest.raises(InvalidRequest, match=error):
            await offloaded(import_agent, "here", file, agent)
    with pytest.raises(NoSuchActor, match="there is no file"):
        import_agent("there", tmp_path / "nothing")
    whole = file.read_bytes()
    file.write_bytes(whole[:-40] + b"?" + whole[-39:])
    with pytest.raises(StoreFailed, match="damaged"):
        import_agent("there", file)
    assert not (tmp_path / "one" / "there").exists()
    file.write_bytes(whole)
    assert (await offloaded(import_agent, "there", file)).agent == "diarist/ann"


async def offloaded(function: Any, *args: Any) -> Any:
    return await anyio.to_thread.run_sync(function, *args)
