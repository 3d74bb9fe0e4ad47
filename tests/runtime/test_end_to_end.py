"""The whole path on the embedded model: script, actors, bus, engine process, disk, and kills in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from offbook.actors import Agent, Request, on
from offbook.bus import connect
from offbook.bus.errors import BadMessage, ContextTooLarge, InvalidRequest, NoSuchActor, UnknownMessageType
from offbook.runtime import Runtime

pytestmark = pytest.mark.model

SCRIPT = Path(__file__).with_name("reader_script.py")


class Ask(Request[str]):
    question: str
    tokens: int = 24


class Sage(Agent):
    @on
    async def answer(self, ask: Ask) -> str:
        async with self.speak(ask.question, max_tokens=ask.tokens) as speech:
            async for piece in speech:
                await ask.progress(piece)
        return speech.text


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))


def one_answer_then_kill() -> dict[str, Any]:
    with subprocess.Popen([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        process.kill()
    return dict(answer)


def test_after_a_kill_of_the_host_an_agent_goes_on_from_its_memory() -> None:
    first = one_answer_then_kill()
    assert first["source"] == "cold"
    assert "Paris" in first["text"]
    second = one_answer_then_kill()
    assert second["source"] == "warm"
    # At most the hot tail and the rest of the last turn are read again.
    assert second["reused"] >= first["context"] - 256
    assert second["context"] > first["context"]


async def test_an_engine_killed_in_mid_sentence_costs_a_delay_and_no_word() -> None:
    question = "Tell me about the sea."
    async with Runtime("team", memory="800 MiB") as rt:
        await rt.spawn(Sage, "calm")
        await rt.spawn(Sage, "hit")
        undisturbed = await rt.ask("sage/calm", Ask(question), timeout=300)
        pieces = []
        async with rt.stream("sage/hit", Ask(question), timeout=300) as reply:
            async for piece in reply:
                if not pieces:
                    assert rt.engine is not None
                    assert rt.engine.pid is not None
                    os.kill(rt.engine.pid, signal.SIGKILL)
                pieces.append(piece)
        assert reply.result == "".join(pieces) == undisturbed
        assert rt.engine is not None
        assert rt.engine.restarts == 1


async def test_bad_input_is_a_typed_error_and_the_team_goes_on() -> None:
    async with Runtime("team", memory="800 MiB") as rt, connect("team") as bus:
        await rt.spawn(Sage, "s")
        await rt.ready()
        for body, error in (
            ({"type": "Ask", "question": ""}, InvalidRequest),
            ({"type": "Ask", "question": "Hm?", "tokens": 0}, InvalidRequest),
            ({"type": "Ask", "question": "Hm?", "tokens": 10**6}, ContextTooLarge),
            ({"type": "Ask", "question": 7}, BadMessage),
            ({"type": "Nope"}, UnknownMessageType),
        ):
            with pytest.raises(error):
                await bus.ask("sage/s", body, timeout=60)
        with pytest.raises(NoSuchActor):
            await bus.ask("ghost/x", {"type": "Ask", "question": "Hm?"})
        stats = await rt.stats()
        assert stats.peak_bytes <= stats.budget_bytes
        assert "Paris" in await rt.ask("sage/s", Ask("What is the capital of France?"), timeout=120)


async def test_a_smaller_budget_while_it_runs_keeps_everyones_memory() -> None:
    async with Runtime("team", memory="1 GiB") as rt:
        await rt.spawn(Sage, "s")
        await rt.ask("sage/s", Ask("Count from one to ten.", tokens=8), timeout=300)
        stats = await rt.set_memory("700 MiB")
        assert stats.budget_bytes == 700 << 20
        (agent,) = (await rt.stats()).agents  # the pool was rebuilt: the agent is on disk alone
        assert (agent.agent, agent.where, agent.resident_bytes) == ("sage/s", "warm", 0)
        assert agent.disk_bytes > 0
        with anyio.fail_after(120):
            assert await rt.ask("sage/s", Ask("And back?", tokens=8), timeout=120)
        stats = await rt.stats()
        assert stats.used_bytes <= stats.budget_bytes
