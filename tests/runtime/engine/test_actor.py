"""``engine/main`` over a real bus: requests are checked before any work, answered once, and let go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from offbook.actors.lm import (
    ChatMessage,
    EngineStats,
    Forget,
    Generate,
    Generated,
    Locate,
    MemoryRef,
    Observe,
    Observed,
    Prefetch,
    SamplingParams,
    SetMemory,
    Shutdown,
    StateHandle,
)
from offbook.bus.errors import (
    BadMessage,
    ContextTooLarge,
    DeadlineExceeded,
    InvalidAddress,
    InvalidRequest,
    OffbookError,
)
from offbook.runtime.config import InvalidConfig
from tests.runtime.engine.serving import ENGINE, serving


def generate(
    agent: str = "villager/ann", text: str = "Hello?", *, transcript: bytes = b"", **more: Any
) -> Generate:
    sampling = more.pop("sampling", None) or SamplingParams(max_tokens=more.pop("max_tokens", 6))
    memory = MemoryRef(agent=agent, transcript=transcript, system="You bake bread.", **more.pop("memory", {}))
    return Generate(memory=memory, messages=(ChatMessage("user", text),), sampling=sampling, **more)


async def test_a_conversation_goes_on_from_its_transcript(engine: Callable[..., Any]) -> None:
    harness = engine()
    async with serving(harness) as bus:
        transcript = b""
        for turn in range(3):
            reply = await bus.ask(
                ENGINE, generate(text=f"Turn {turn}.", transcript=transcript), returns=Generated
            )
            assert reply.kept == len(transcript) // 4
            transcript += reply.appended
            assert reply.usage.source == ("hot" if turn else "cold")
            assert reply.handle.tokens == len(transcript) // 4
        text = harness.loaded.tokenizer.decode(np.frombuffer(transcript, "<u4"))
        assert text.count("You bake bread.") == 1
        assert [text.count(f"Turn {turn}.") for turn in range(3)] == [1, 1, 1]


async def test_pieces_are_streamed_and_make_up_the_text(engine: Callable[..., Any]) -> None:
    async with serving(engine()) as bus:
        pieces = []
        async with bus.stream(ENGINE, generate(max_tokens=30)) as reply:
            async for piece in reply:
                pieces.append(piece["text"])
        assert "".join(pieces) == reply.result["text"]


async def test_observed_words_are_read_ahead(engine: Callable[..., Any]) -> None:
    async with serving(engine()) as bus:
        memory = MemoryRef(agent="villager/ann")
        heard = (ChatMessage("user", "The mill burns and everybody runs."),)
        observed = await bus.ask(ENGINE, Observe(memory=memory, messages=heard), returns=Observed)
        request = Generate(
            memory=memory,
            messages=(*heard, ChatMessage("user", "What now?")),
            sampling=SamplingParams(max_tokens=2),
        )
        reply = await bus.ask(ENGINE, request, returns=Generated)
        assert observed.tokens >= 30
        assert reply.usage.reused_tokens >= observed.tokens - 1


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (generate(sampling=SamplingParams(max_tokens=0)), InvalidRequest, "max_tokens=0"),
        (generate(sampling=SamplingParams(temperature=-1)), InvalidRequest, "temperature=-1"),
        (generate(sampling=SamplingParams(top_p=float("nan"))), InvalidRequest, "top_p=nan"),
        (generate(sampling=SamplingParams(stop=("",))), InvalidRequest, "stop=''"),
        (generate(max_tokens=100_000), ContextTooLarge, "100000"),
        (generate(text=" \n"), InvalidRequest, "empty prompt"),
        (Generate(memory=MemoryRef(agent="v/a"), messages=()), InvalidRequest, "no messages"),
        (generate(agent="no-slash"), InvalidAddress, "no-slash"),
        (generate(agent="v/" + "x" * 10_000), InvalidAddress, "key"),
        (generate(transcript=b"abc"), InvalidRequest, "3 bytes"),
        (generate(transcript=b"\xff\xff\xff\xff"), InvalidRequest, "4294967295"),
        (Forget(agent="../x"), InvalidAddress, "x"),
    ],
    ids=lambda value: "" if isinstance(value, type | Generate | Forget) else str(value),
)
async def test_a_bad_request_is_refused_by_name_and_costs_nobody_anything(
    engine: Callable[..., Any], request_: Any, error: type[OffbookError], words: str
) -> None:
    harness = engine()
    async with serving(harness) as bus:
        with pytest.raises(error, match=words):
            await bus.ask(ENGINE, request_)
        assert harness.counters.get("prefilled_tokens", 0) == 0
        assert (await bus.ask(ENGINE, generate(), returns=Generated)).usage.generated_tokens == 6


@pytest.mark.parametrize("agent", ["user/user@example.com", "v/../../x", "v/" + "ü" * 200, "v/a b/c:d?*"])
async def test_any_legal_name_is_safe(engine: Callable[..., Any], tmp_path: Path, agent: str) -> None:
    harness = engine("llama", tmp_path / "store")
    async with serving(harness) as bus:
        first = await bus.ask(ENGINE, generate(agent, "x" * 300), returns=Generated)
        harness.evict(agent)
        again = generate(agent, transcript=first.appended)
        assert (await bus.ask(ENGINE, again, returns=Generated)).usage.source == "warm"
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


async def test_a_message_of_no_known_type_is_refused(engine: Callable[..., Any]) -> None:
    async with serving(engine()) as bus:
        with pytest.raises(OffbookError, match="Sing"):
            await bus.ask(ENGINE, {"type": "Sing", "song": "la"})


async def test_a_client_that_goes_away_frees_its_row(engine: Callable[..., Any], gate: Any) -> None:
    harness = engine()
    async with serving(harness) as bus:
        held = gate(harness, "decode")
        with anyio.move_on_after(30) as scope:
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    await bus.ask(ENGINE, generate(max_tokens=2000))

                tasks.start_soon(ask)
                await anyio.to_thread.run_sync(held.wait)
                tasks.cancel_scope.cancel()
        assert not scope.cancelled_caught
        held.open()
        with anyio.fail_after(30):
            while not await anyio.to_thread.run_sync(
                lambda: harness.call(lambda: harness.loop.scheduler.idle)
            ):
                await anyio.sleep(0.01)
        assert harness.counters["ended_early"] == 1


async def test_a_full_context_keeps_the_persona_and_the_recent_half(engine: Callable[..., Any]) -> None:
    harness = engine(context_limit=600)
    async with serving(harness) as bus:
        transcript = b""
        truncated = 0
        for turn in range(8):
            request = generate(text=f"Turn {turn}. " + "word " * 20, transcript=transcript)
            reply = await bus.ask(ENGINE, request, returns=Generated)
            transcript = transcript[: reply.kept * 4] + reply.appended
            truncated += reply.usage.truncated_tokens
            assert len(transcript) // 4 <= 600
        text = harness.loaded.tokenizer.decode(np.frombuffer(transcript, "<u4"))
        assert truncated > 0
        assert "You bake bread." in text
        assert "Turn 7." in text
        assert "Turn 0." not in text
        request = generate(text="word " * 60, transcript=transcript, on_context_full="refuse")
        with pytest.raises(ContextTooLarge):
            await bus.ask(ENGINE, request)


async def test_prefetch_locate_forget_stats_and_resizing(engine: Callable[..., Any], tmp_path: Path) -> None:
    harness = engine("llama", tmp_path)
    async with serving(harness) as bus:
        first = await bus.ask(ENGINE, generate(text="x" * 300), returns=Generated)
        memory = MemoryRef(agent="villager/ann", transcript=first.appended)
        harness.evict("villager/ann")
        where = await bus.ask(ENGINE, Locate(memory=memory), returns=StateHandle)
        assert (where.where, where.chain) == ("warm", first.handle.chain)
        await bus.tell(ENGINE, Prefetch(memory=memory))
        with anyio.fail_after(30):
            while (await bus.ask(ENGINE, Locate(memory=memory), returns=StateHandle)).where != "hot":
                await anyio.sleep(0.01)
        with pytest.raises(InvalidConfig, match=r"this machine has|control group"):
            await bus.ask(ENGINE, SetMemory(budget_bytes=1 << 59))
        stats = await bus.ask(ENGINE, SetMemory(budget_bytes=110 << 20), returns=EngineStats)
        assert stats.budget_bytes == 110 << 20
        assert await bus.ask(ENGINE, Forget(agent="villager/ann")) is True
        harness.loop.store.flush(30)
        assert (await bus.ask(ENGINE, Locate(memory=memory), returns=StateHandle)).where == "cold"


async def test_shutting_down_answers_once_all_is_on_disk(engine: Callable[..., Any], tmp_path: Path) -> None:
    harness = engine("llama", tmp_path)
    async with serving(harness) as bus:
        first = await bus.ask(ENGINE, generate(text="x" * 300), returns=Generated)
        assert await bus.ask(ENGINE, Shutdown()) is True
        again = engine("llama", tmp_path)
        usage = again.run("villager/ann", np.frombuffer(first.appended + b"\x41\0\0\0", "<u4")).usage
        assert (usage.source, usage.reused_tokens) == ("warm", first.handle.tokens - 1)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sampling", {"temperature": "hot"}, r"sampling\.temperature"),
        ("sampling", {"max_tokens": 2.5}, r"sampling\.max_tokens"),
        ("priority", "first", "priority"),
        ("messages", [{"role": "villain", "content": "x"}], r"role|villain"),
    ],
)
async def test_values_of_the_wrong_type_are_refused_by_name(
    engine: Callable[..., Any], field: str, value: Any, says: str
) -> None:
    harness = engine()
    body = {"memory": {"agent": "v/a"}, "messages": [{"role": "user", "content": "Hi"}], field: value}
    async with serving(harness) as bus:
        with pytest.raises(BadMessage, match=says):
            await bus.ask(ENGINE, {"type": "Generate", **body})
        assert harness.counters.get("prefilled_tokens", 0) == 0


async def test_the_deadline_of_an_ask_frees_its_row(engine: Callable[..., Any], gate: Any) -> None:
    harness = engine()
    async with serving(harness) as bus:
        held = gate(harness, "decode")
        with pytest.raises(DeadlineExceeded):
            await bus.ask(ENGINE, generate(max_tokens=2000), timeout=0.5)
        await anyio.to_thread.run_sync(held.wait)
        held.open()
        with anyio.fail_after(30):
            while not await anyio.to_thread.run_sync(
                lambda: harness.call(lambda: harness.loop.scheduler.idle)
            ):
                await anyio.sleep(0.01)
        assert harness.counters["ended_early"] == 1
