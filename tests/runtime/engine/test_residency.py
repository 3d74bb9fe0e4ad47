"""Memory comes and goes: eviction, loads, prefetches, forks, budgets, and ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from offbook.bus.errors import Cancelled, ContextTooLarge, EngineFailed
from offbook.runtime.kv.scheme import KVScheme
from tests.runtime.engine.replies import Engine, assert_same, cancel, greedy, tokens


def test_agents_that_take_turns_in_a_small_pool_say_what_they_say_in_a_large_one(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    def speak(one: Any) -> list[Any]:
        transcripts, replies = [np.zeros(0, np.uint32) for _ in range(5)], []
        for turn in range(3):
            for i, past in enumerate(transcripts):
                ids_now = np.concatenate([past, ids(300, 10 * turn + i)])
                replies.append(one.run(f"a{i}", ids_now, kept=len(past), sampling=greedy(4)))
                new = np.frombuffer(replies[-1].appended, "<u4").astype(np.uint32)
                transcripts[i] = np.concatenate([past, new])
        return replies

    small = engine("gemma-300", tmp_path, slots=12, pages=9)
    replies = speak(small)
    assert [reply.usage.source for reply in replies] == ["cold"] * 5 + ["warm"] * 10
    for reply, expected in zip(replies, speak(engine("gemma-300", slots=60, pages=40)), strict=True):
        assert_same(reply, expected)


def test_an_agent_asked_for_right_after_its_eviction_is_warm(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    """Its tail is on its way to the disk at that moment; the turn waits for it and not for a prefill."""
    one, text = engine("llama", tmp_path), ids(420)
    for length in range(400, 408):
        one.run("a", text[:length], max_tokens=1)
        one.evict("a", wait=False)
    assert one.run("a", text, max_tokens=1).usage.reused_tokens == 407


def test_a_fork_that_does_not_fit_beside_its_origin_is_served_all_the_same(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    one, text = engine("llama", tmp_path, slots=6, pages=4), ids(1100)
    one.run("origin", text[:1050], max_tokens=1)
    reply = one.run("fork", text, max_tokens=2, origin="origin")
    assert (reply.usage.source, reply.usage.reused_tokens) == ("warm", 1050)
    assert len(tokens(reply, text)) == 2


def test_idle_agents_that_share_their_blocks_make_room_together(engine: Engine, ids: Any) -> None:
    """None of them frees a slot by leaving alone."""
    one, text = engine("llama", slots=4, pages=12), ids(1000)
    one.run("a", text[:900], max_tokens=1)
    one.run("b", text[:905], max_tokens=1)  # shares all full blocks with a
    other = ids(900, 3)
    assert_same(one.run("c", other, sampling=greedy(2)), engine().run("c", other, sampling=greedy(2)))


def test_an_agent_cut_back_into_a_shared_block_in_a_full_pool_is_served(engine: Engine, ids: Any) -> None:
    one, text = engine("llama", slots=5, pages=12), ids(1130)
    one.run("a", text[:1100], max_tokens=1)
    one.run("b", text[:1110], max_tokens=1)
    assert one.used()[0] == 5
    other = np.concatenate([text[:600], ids(500, 3)])
    got = tokens(one.run("b", other, max_tokens=2), other)
    assert len(got) == 2
    one.call(one.loop.pool.check)


@pytest.mark.parametrize("stored", [False, True])
def test_an_agent_cut_back_to_where_a_block_is_in_the_window_again_is_served(
    engine: Engine, ids: Any, tmp_path: Path, stored: bool
) -> None:
    """Nothing was sealed in between, but the block has left the window and its slot has been given back."""
    one, two = engine("gemma-300", tmp_path if stored else None), engine("gemma-300")
    first, other = ids(565, 1), ids(30, 2)
    one.run("a", first, max_tokens=1)
    table = one.loop.memory.tables["a", ""]
    assert table.sealed == table.scheme.sealed(517)
    prompt = np.concatenate([first[:517], other])
    reply = one.run("a", prompt, sampling=greedy(4))
    assert_same(reply, two.run("a", prompt, sampling=greedy(4)))
    assert reply.usage.source == "warm"
    one.check()


def test_a_prefetched_agent_is_in_memory_when_its_message_comes(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    one, text = engine("llama", tmp_path), ids(620)
    one.run("a", text[:600], max_tokens=1)
    one.evict("a")
    one.call(lambda: one.loop.prefetch(("a", ""), text[:600]))
    while one.call(lambda: one.loop.memory.loading):
        time.sleep(0.002)
    assert one.counters["prefetches"] == 1
    assert one.counters["restores"] == 1
    usage = one.run("a", text, max_tokens=1).usage
    assert (usage.source, usage.reused_tokens) == ("warm", 600)  # it came from disk, ahead of the turn
    assert one.counters["restores"] == 1


def test_a_corrupt_block_is_one_miss_and_the_right_answer(engine: Engine, ids: Any, tmp_path: Path) -> None:
    one, text, other = engine("llama", tmp_path), ids(620), ids(620, 2)
    one.run("a", text[:600], max_tokens=1)
    one.run("b", other[:600], max_tokens=1)
    name = one.call(lambda: one.loop.memory.tables["a", ""].chain[0])
    one.evict()
    for group in one.loop.pool.groups:
        one.call(group.forget_content)
    [path] = (tmp_path / "blocks").rglob(f"{name.hex()}*")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    reply = one.run("a", text, sampling=greedy(4))
    assert reply.usage.source == "cold"
    assert_same(reply, engine().run("a", text, sampling=greedy(4)))
    assert one.counters["load_failures"] == 1
    assert one.run("b", other, max_tokens=1).usage.source == "warm"


def test_hundreds_of_short_turns_with_aborts_leave_memory_where_it_was(engine: Engine, ids: Any) -> None:
    one = engine("llama", slots=16, pages=24)

    def round_of(seed: int) -> None:
        turns = [one.job(f"t{seed}-{i}", ids(5 + i % 40, seed * 100 + i), max_tokens=4) for i in range(50)]
        one.submit(*turns)
        for turn in turns[::3]:
            cancel(one, turn)
        for i, turn in enumerate(turns):
            if i % 3:
                turn.wait()
            else:
                with pytest.raises(Cancelled):
                    turn.wait()

    round_of(0)
    one.evict()
    flat = one.call(mx.get_active_memory)
    for seed in range(1, 8):
        round_of(seed)
    one.evict()
    assert one.used() == (0, 0)
    assert one.call(mx.get_active_memory) <= flat + (1 << 20)


def test_a_change_of_the_budget_keeps_every_agent(engine: Engine, ids: Any, tmp_path: Path) -> None:
    one, texts = engine("llama", tmp_path, budget=112 << 20), [ids(420, seed) for seed in range(3)]
    before = one.stats.pool_bytes
    for i, text in enumerate(texts):
        one.run(f"a{i}", text[:400], max_tokens=1)
    for budget, larger in ((104 << 20, False), (120 << 20, True)):
        one.loop.resize(budget).result(60)
        assert (one.stats.pool_bytes > before) is larger
        assert one.stats.budget_bytes == budget
    for i, text in enumerate(texts):
        usage = one.run(f"a{i}", text, max_tokens=1).usage
        assert (usage.source, usage.reused_tokens) == ("warm", 400)


def test_a_budget_too_small_is_refused_and_the_old_one_stays(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    one, text = engine("llama", tmp_path), ids(420)
    one.run("a", text[:400], max_tokens=1)
    with pytest.raises(ContextTooLarge):
        one.loop.resize(90 << 20).result(60)
    assert one.run("a", text, max_tokens=1).usage.source == "warm"


def test_accounted_and_real_bytes_agree(engine: Engine, ids: Any) -> None:
    one = engine("latent")
    one.run("a", ids(600), max_tokens=1)
    stats = one.stats
    assert stats.pool_bytes == one.loop.arrays.nbytes
    assert stats.pool_used_bytes == stats.agents[0].resident_bytes
    assert stats.used_bytes >= stats.pool_bytes


def test_everything_is_on_disk_after_a_clean_end(engine: Engine, ids: Any, tmp_path: Path) -> None:
    one, text = engine("llama", tmp_path), ids(620)
    one.run("a", text[:600], max_tokens=1)
    one.stop()
    usage = engine("llama", tmp_path).run("a", text, max_tokens=1).usage
    assert (usage.source, usage.reused_tokens) == ("warm", 600)


def test_stopping_ends_turns_at_work_with_an_error_that_asks_for_another_try(
    engine: Engine, gate: Any, ids: Any
) -> None:
    one = engine()
    held = gate(one, "decode")
    turn = one.start("a", ids(40), max_tokens=50)
    held.wait()
    done = one.loop.stop()
    held.open()
    with pytest.raises(EngineFailed, match="shutting down"):
        turn.wait()
    done.result(60)


def test_a_forgotten_agent_is_cold(engine: Engine, ids: Any, tmp_path: Path) -> None:
    one, text = engine("llama", tmp_path), ids(620)
    one.run("a", text[:600], max_tokens=1)
    one.call(lambda: one.loop.forget_agent("a"))
    one.loop.store.flush(30)
    for group in one.loop.pool.groups:
        one.call(group.forget_content)
    assert one.run("a", text, max_tokens=1).usage.source == "cold"


def test_locating_says_hot_warm_and_cold(engine: Engine, ids: Any, tmp_path: Path) -> None:
    one, text = engine("llama", tmp_path), ids(600)
    one.run("a", text, max_tokens=1)

    def where(agent: str, salt: str = "") -> str:
        return str(one.call(lambda: one.loop.locate((agent, salt), text)).where)

    assert where("a") == "hot"
    one.evict("a")
    assert where("a") == "warm"
    assert where("a", "another tenant") == "cold"


def test_agents_that_share_a_history_take_its_blocks_once(engine: Engine, ids: Any) -> None:
    """Admission counts what is new: ten agents with one persona fit where ten histories would not."""
    one, persona = engine("llama", slots=5, pages=40), ids(1140)
    for i in range(10):
        one.run(f"a{i}", np.concatenate([persona, ids(20, i)]), max_tokens=1)
    assert "evictions" not in one.counters
    assert one.used()[0] == 4


def test_a_fork_is_hot_and_evicts_nobody_when_there_is_room_for_what_is_new(engine: Engine, ids: Any) -> None:
    one, text = engine("llama", slots=5, pages=12), ids(1120)
    one.run("a", text[:1100], max_tokens=1)
    usage = one.run("b", text, max_tokens=1).usage
    assert (usage.source, usage.reused_tokens, usage.evictions) == ("hot", 1100, 0)


# ---- memory of another kind is never used


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"fingerprint": "other weights, tokenizer or template"}, id="model"),
        pytest.param({"scheme": KVScheme.uniform(8)}, id="bits"),
        pytest.param({"scheme": KVScheme(tail=64)}, id="tail"),
    ],
)
def test_memory_of_another_model_or_scheme_is_a_miss(
    engine: Engine, ids: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    text = ids(620)
    before = engine("llama", tmp_path)
    before.run("a", text[:600], max_tokens=1)
    before.stop()
    after = engine("llama", tmp_path, **change)
    reply = after.run("a", text, sampling=greedy(4))
    assert (reply.usage.source, reply.usage.reused_tokens) == ("cold", 0)
    assert_same(reply, engine("llama", **change).run("a", text, sampling=greedy(4)))


@pytest.mark.parametrize("cap", [0, 100_000])
def test_a_disk_with_no_room_slows_agents_down_and_stops_nobody(
    engine: Engine, ids: Any, tmp_path: Path, cap: int
) -> None:
    one = engine("llama", tmp_path, slots=6, pages=6, cap=cap)
    for length in (600, 620):
        for i in range(4):
            assert one.run(f"a{i}", ids(700, i)[:length], max_tokens=2).usage.generated_tokens == 2
    assert one.loop.store.flush(30)
    assert sum(path.stat().st_size for path in (tmp_path / "blocks").rglob("*") if path.is_file()) <= cap
