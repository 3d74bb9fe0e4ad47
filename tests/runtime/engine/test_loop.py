"""The engine's loop: who is served when, that everything is given back, and that failures stay alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from offbook.actors.lm import SamplingParams
from offbook.bus.errors import Cancelled, ContextTooLarge, DeadlineExceeded, EngineBusy, EngineFailed
from offbook.runtime.kv.scheme import KVScheme

Engine = Callable[..., Any]


def tokens(reply: Any, prompt: Any) -> list[int]:
    """The generated ids of a reply to ``prompt``, of which the engine was told nothing before."""
    return np.frombuffer(reply.appended, "<u4")[len(prompt) :].tolist()


def alone(engine: Engine, prompt: Any, architecture: str = "llama", **options: Any) -> list[int]:
    """What a fresh engine generates for ``prompt`` by itself."""
    return tokens(engine(architecture).run("alone", prompt, **options), prompt)


TOPS = 8


def greedy(count: int) -> SamplingParams:
    """Greedy, with log-probabilities: tiny models choose the same words for many a history."""
    return SamplingParams(max_tokens=count, logprobs=TOPS)


CLOSE = 0.05
"""Log-probabilities that differ by less are the same: chunks end elsewhere when others run, so sums differ
in their last bits, and one that crosses a step of the 4-bit codes moves a prediction by some hundredths."""


def assert_same(reply: Any, expected: Any) -> None:
    """Both replies to one prompt have the same ids, drawn from the same distributions.

    Where the two likeliest ids are a near-tie either may be drawn, and what follows is another text.
    """
    assert len(reply.logprobs) > 0
    mine, theirs = (np.frombuffer(r.appended, "<u4")[-len(r.logprobs) :] for r in (reply, expected))
    for step, (got, wanted) in enumerate(zip(reply.logprobs, expected.logprobs, strict=False)):
        near = [abs(value - wanted[name]) for name, value in got.items() if name in wanted]
        assert len(near) >= TOPS - 3  # some at the end may change places
        assert max(near) < CLOSE
        if mine[step] != theirs[step]:
            first, second = sorted(wanted.values())[-1:-3:-1]
            assert first - second < CLOSE
            return
    assert len(reply.logprobs) == len(expected.logprobs)


# ---- a turn


def test_a_turn_appends_its_prompt_and_what_was_generated(engine: Engine, ids: Any) -> None:
    prompt = ids(40)
    reply = engine().run("a", prompt, max_tokens=5)
    appended = np.frombuffer(reply.appended, "<u4")
    assert np.array_equal(appended[:40], prompt)
    assert len(appended) == 45
    assert (reply.finish_reason, reply.usage.generated_tokens, reply.usage.context_tokens) == (
        "length",
        5,
        45,
    )


def test_the_streamed_pieces_are_the_text(engine: Engine, ids: Any) -> None:
    turn = engine().start("a", ids(40), max_tokens=30)
    reply = turn.wait()
    assert "".join(turn.pieces) == reply.text


def test_usage_says_where_the_memory_came_from(engine: Engine, ids: Any, tmp_path: Path) -> None:
    one, text = engine("llama", tmp_path), ids(600)
    usages = [one.run("a", text[:500], max_tokens=1).usage, one.run("a", text[:550], max_tokens=1).usage]
    one.evict("a")
    usages.append(one.run("a", text[:600], max_tokens=1).usage)
    assert [(u.source, u.reused_tokens, u.prefilled_tokens) for u in usages] == [
        ("cold", 0, 500),
        ("hot", 500, 50),
        ("warm", 550, 50),
    ]


def test_the_end_of_a_turn_stops_it_and_is_kept(engine: Engine, ids: Any) -> None:
    one, prompt = engine(), ids(40)
    first = tokens(one.run("a", prompt, max_tokens=6), prompt)
    stopping = engine(eos_token_ids=frozenset({first[2]}))
    reply = stopping.run("a", prompt, max_tokens=6, ignore_end=False)
    end = first.index(first[2]) + 1
    assert reply.finish_reason == "stop"
    assert tokens(reply, prompt) == first[:end]


# ---- batching


@pytest.mark.parametrize("architecture", ["llama", "gemma-96", "lfm2", "latent"])
def test_turns_of_any_length_together_say_what_each_says_alone(
    architecture: str, engine: Engine, ids: Any
) -> None:
    one = engine(architecture)
    prompts = [ids(length, length) for length in (3, 30, 90, 97, 200, 700)]
    turns = [one.job(f"a{i}", prompt, sampling=greedy(4 + i)) for i, prompt in enumerate(prompts)]
    one.submit(*turns)
    two = engine(architecture)
    for i, prompt in enumerate(prompts):
        assert_same(turns[i].wait(), two.run("alone", prompt, sampling=greedy(4 + i)))
    assert one.counters["decode_rows"] > one.counters["decode_steps"]


def test_reading_ahead_in_the_same_batch_does_not_mix_up_the_rows(engine: Engine, ids: Any) -> None:
    one, prompt = engine(), ids(40, 1)
    reading = one.job("reader", ids(30, 2), observe=True)
    speaking = one.job("speaker", prompt, sampling=greedy(4), priority=-1)
    one.submit(reading, speaking)
    reading.wait()
    assert_same(speaking.wait(), engine().run("alone", prompt, sampling=greedy(4)))


def test_what_was_read_ahead_is_hot(engine: Engine, ids: Any) -> None:
    one, text = engine(), ids(120)
    assert one.observe("a", text[:100], kept=20).tokens == 80
    usage = one.run("a", text, max_tokens=1).usage
    assert (usage.source, usage.reused_tokens) == ("hot", 100)


def test_new_work_is_admitted_while_others_decode(engine: Engine, gate: Any, ids: Any) -> None:
    one = engine()
    held = gate(one, "decode")
    long = one.start("long", ids(40), max_tokens=40)
    held.wait()
    short = one.start("short", ids(40, 2), max_tokens=2)
    held.open()
    short.wait()
    long.wait()
    assert short.order < long.order


def test_two_turns_of_one_agent_are_served_one_after_the_other_as_they_came(
    engine: Engine, gate: Any, ids: Any
) -> None:
    one = engine()
    held = gate(one, "prefill")
    other = one.start("other", ids(20, 3))
    held.wait()
    text = ids(80)
    first = one.job("a", text[:50], max_tokens=3)
    second = one.job("a", text, max_tokens=3, priority=5, deadline=time.monotonic() + 100)
    one.submit(first, second)
    held.open()
    replies = [turn.wait() for turn in (first, second, other)]
    assert first.order < second.order
    assert replies[1].usage.source == "hot"
    assert tokens(replies[1], text) == alone(engine, text, max_tokens=3)


def test_the_next_turn_of_an_agent_begins_as_soon_as_the_last_has_ended(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No idle wait in between: the loop never blocks while a queued turn could begin."""
    one = engine()
    waits: list[int] = []
    drain = one.loop._drain

    def watched(*, block: bool) -> None:
        if block and one.loop.scheduler.queue:
            waits.append(len(one.loop.scheduler.queue))
        drain(block=block)

    monkeypatch.setattr(one.loop, "_drain", watched)
    turns = [one.job("a", ids(20), max_tokens=2) for _ in range(4)]
    one.submit(*turns)
    for turn in turns:
        turn.wait()
    assert waits == []


def test_a_turn_with_higher_priority_goes_first(engine: Engine, gate: Any, ids: Any) -> None:
    one = engine()
    held = gate(one, "prefill")
    blocker = one.start("blocker", ids(600, 9), max_tokens=1)
    held.wait()
    low = one.job("low", ids(600, 1), max_tokens=1)
    high = one.job("high", ids(600, 2), max_tokens=1, priority=1)
    one.submit(low, high)
    held.open()
    for turn in (blocker, low, high):
        turn.wait()
    assert high.order < low.order


# ---- sampling


def test_a_seed_gives_the_same_words_whatever_the_neighbours(engine: Engine, ids: Any) -> None:
    prompt = ids(40)
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    one = engine()
    expected = tokens(one.run("a", prompt, sampling=sampling), prompt)
    mine = one.job("b", prompt, sampling=sampling)
    others = [
        one.job(f"o{i}", ids(20 + i, i), sampling=SamplingParams(max_tokens=20, temperature=1.5, seed=i))
        for i in range(3)
    ]
    one.submit(*others, mine)
    assert tokens(mine.wait(), prompt) == expected
    for other in others:
        other.wait()


def test_turns_without_a_seed_differ(engine: Engine, ids: Any) -> None:
    one, prompt = engine(), ids(40)
    sampling = SamplingParams(max_tokens=24, temperature=2.0)
    assert len({one.run(f"a{i}", prompt, sampling=sampling).text for i in range(4)}) > 1


def test_a_stop_string_split_over_tokens_never_reaches_the_stream(engine: Engine, ids: Any) -> None:
    one, prompt = engine(), ids(40)
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
    text = one.run("a", prompt, sampling=sampling).text
    stop = text[20:24]
    turn = one.start(
        "b", prompt, sampling=SamplingParams(max_tokens=60, temperature=1.0, seed=3, stop=(stop, "never"))
    )
    reply = turn.wait()
    assert reply.finish_reason == "stop"
    assert reply.text == text[: text.index(stop)]
    assert "".join(turn.pieces) == reply.text


def test_logprobs_come_with_every_token(engine: Engine, ids: Any) -> None:
    reply = engine().run("a", ids(40), sampling=SamplingParams(max_tokens=3, logprobs=4))
    assert [len(tops) for tops in reply.logprobs] == [4, 4, 4]
    assert all(list(tops.values()) == sorted(tops.values(), reverse=True) for tops in reply.logprobs)


# ---- cancelled, late, too much


def idle(one: Any) -> bool:
    return bool(one.call(lambda: one.loop.scheduler.idle))


def cancel(one: Any, turn: Any) -> None:
    one.loop.post(lambda: one.loop.cancel(turn.job))


def test_a_turn_cancelled_in_the_queue_never_begins(engine: Engine, ids: Any) -> None:
    one = engine()
    turn = one.job("a", ids(40))
    one.call(lambda: (one.loop.submit(turn.job), one.loop.cancel(turn.job)))
    with pytest.raises(Cancelled):
        turn.wait()
    assert idle(one)
    assert one.used() == (0, 0)


def test_a_turn_cancelled_while_it_loads_gives_its_slots_back(
    engine: Engine, ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, text = engine("llama", tmp_path), ids(620)
    one.run("a", text[:600], max_tokens=1)
    one.evict("a")
    load = one.loop.store.load_tail
    pending: list[Any] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        done = load(*args, **kwargs)
        later = type(done)()
        pending.append((done, later))
        return later

    monkeypatch.setattr(one.loop.store, "load_tail", slow)
    turn = one.start("a", text)
    while not pending:
        one.call(lambda: None)
    cancel(one, turn)
    with pytest.raises(Cancelled):
        turn.wait()
    assert idle(one)
    done, later = pending[0]
    later.set_result(done.result(30))
    one.call(lambda: None)
    assert one.used() == (0, 0)
    monkeypatch.undo()
    assert one.run("a", text, max_tokens=1).usage.source == "warm"


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_a_turn_cancelled_at_work_is_over_within_a_step(
    engine: Engine, gate: Any, ids: Any, step: str
) -> None:
    one, prompt = engine(), ids(1500)
    held = gate(one, step)
    turn = one.start("a", prompt, max_tokens=50)
    held.wait()
    held.step()
    held.wait()
    cancel(one, turn)
    held.open()
    with pytest.raises(Cancelled):
        turn.wait()
    assert idle(one)
    one.evict("a")
    assert one.used() == (0, 0)


def test_a_cancelled_turn_leaves_nothing_of_itself_in_the_next(engine: Engine, ids: Any) -> None:
    def exact() -> Any:
        return engine(scheme=KVScheme.uniform(None))

    one, text = exact(), ids(300)
    one.run("a", text[:200], max_tokens=1)
    turn = one.start("a", text, max_tokens=400)
    turn.first_piece()
    cancel(one, turn)
    with pytest.raises(Cancelled):
        turn.wait()
    other = np.concatenate([text[:250], ids(20, 5)])
    assert_same(one.run("a", other, sampling=greedy(4)), exact().run("b", other, sampling=greedy(4)))


def test_cancelling_at_the_last_token_is_harmless(engine: Engine, ids: Any) -> None:
    one = engine()
    turn = one.start("a", ids(20), max_tokens=1)
    assert turn.wait().finish_reason == "length"
    cancel(one, turn)
    assert idle(one)
    assert one.run("a", ids(30), max_tokens=1).usage.generated_tokens == 1


def test_a_passed_deadline_ends_a_turn_in_the_queue_and_at_work(engine: Engine, gate: Any, ids: Any) -> None:
    one = engine()
    held = gate(one, "decode")
    working = one.start("a", ids(40), max_tokens=50)
    held.wait()
    queued = one.start("b", ids(40, 2), deadline=time.monotonic() - 1)
    one.loop.post(lambda: setattr(working.job, "deadline", 0.0))
    held.open()
    for turn in (queued, working):
        with pytest.raises(DeadlineExceeded):
            turn.wait()
    assert idle(one)


def test_a_full_queue_refuses_at_once(
    engine: Engine, gate: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbook.runtime.engine.scheduler.MAX_QUEUE", 3)
    one = engine()
    held = gate(one, "prefill")
    turns = [one.job(f"a{i}", ids(20, i), max_tokens=1) for i in range(5)]
    one.submit(*turns)
    refused = turns[3:]
    for turn in refused:
        with pytest.raises(EngineBusy, match="3 turns wait"):
            turn.wait()
    held.open()
    for turn in turns[:3]:
        turn.wait()


def test_a_turn_that_can_never_fit_is_refused_at_once_and_evicts_nobody(engine: Engine, ids: Any) -> None:
    one = engine("llama", slots=4, pages=12)
    one.run("small", ids(100), max_tokens=1)
    with pytest.raises(ContextTooLarge, match=r"1153|at most"):
        one.run("large", ids(1200), max_tokens=300)
    assert one.run("small", ids(100), max_tokens=1).usage.source == "hot"


def test_a_budget_that_leaves_nothing_is_refused_with_what_it_takes(engine: Engine) -> None:
    with pytest.raises(ContextTooLarge, match="give at least"):
        engine(budget=96 << 20)


# ---- failures stay alone


def test_a_row_whose_forward_fails_fails_alone(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    prompts = {name: ids(40, i) for i, name in enumerate(("x", "bad", "y"))}
    decode = one.loop.batch.decode
    calls: list[int] = []

    def failing(tables: Any, row_tokens: Any) -> Any:
        calls.append(len(tables))
        if len(calls) > 4 and any(table.agent == "bad" for table in tables):
            raise RuntimeError("no such expert")
        return decode(tables, row_tokens)

    monkeypatch.setattr(one.loop.batch, "decode", failing)
    turns = {name: one.job(name, prompt, sampling=greedy(12)) for name, prompt in prompts.items()}
    one.submit(*turns.values())
    with pytest.raises(EngineFailed, match=r"bad.*no such expert"):
        turns["bad"].wait()
    two = engine()
    for name in ("x", "y"):
        assert_same(turns[name].wait(), two.run(name, prompts[name], sampling=greedy(12)))
    monkeypatch.undo()
    again, expected = (each.run("bad", prompts["bad"], sampling=greedy(12)) for each in (one, two))
    assert_same(again, expected)


def test_a_prefill_that_fails_for_one_fails_for_one(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    prompts = {name: ids(40, i) for i, name in enumerate(("x", "bad", "y"))}
    prefill = one.loop.batch.prefill

    def failing(tables: Any, chunks: Any, *, logits: bool) -> Any:
        if any(table.agent == "bad" for table in tables):
            raise RuntimeError("no such expert")
        return prefill(tables, chunks, logits=logits)

    monkeypatch.setattr(one.loop.batch, "prefill", failing)
    turns = {name: one.job(name, prompt, sampling=greedy(4)) for name, prompt in prompts.items()}
    one.submit(*turns.values())
    with pytest.raises(EngineFailed):
        turns["bad"].wait()
    two = engine()
    for name in ("x", "y"):
        assert_same(turns[name].wait(), two.run(name, prompts[name], sampling=greedy(4)))


def test_a_row_that_cannot_draw_fails_alone_and_costs_the_others_nothing(engine: Engine, ids: Any) -> None:
    """The step has been taken when drawing fails: nobody's token may be read twice."""
    one = engine()
    prompts = {name: ids(40, i) for i, name in enumerate(("x", "bad", "y"))}
    sampling = SamplingParams(max_tokens=12, temperature=0.5, seed=1, logprobs=TOPS)
    turns = {name: one.job(name, prompt, sampling=sampling) for name, prompt in prompts.items()}
    sampler = turns["bad"].job.sampler
    draw = sampler.draw

    def failing(logits: Any, history: Any) -> int:
        if len(turns["bad"].job.generated) == 4:
            raise ValueError("impossible value")
        return int(draw(logits, history))

    sampler.draw = failing
    one.submit(*turns.values())
    with pytest.raises(EngineFailed, match="impossible value"):
        turns["bad"].wait()
    two = engine()
    for name in ("x", "y"):
        assert_same(turns[name].wait(), two.run(name, prompts[name], sampling=sampling))


def test_an_action_that_raises_does_not_end_the_engine(engine: Engine, ids: Any) -> None:
    one = engine()

    def broken() -> None:
        raise RuntimeError("not mine")

    one.loop.post(broken)
    assert one.run("a", ids(20), max_tokens=1).usage.generated_tokens == 1
    assert one.counters["failed_actions"] == 1


def test_a_failing_turn_of_the_loop_ends_its_jobs_and_the_engine_goes_on(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug in planning")

    monkeypatch.setattr(one.loop.memory, "plan", broken)
    with pytest.raises(EngineFailed, match="a bug in planning"):
        one.run("a", ids(20))
    monkeypatch.undo()
    assert one.run("a", ids(20), max_tokens=1).usage.generated_tokens == 1
    assert not one.loop.died


def test_an_engine_that_cannot_go_on_says_so(
    engine: Engine, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()

    def broken() -> None:
        raise RuntimeError("for ever")

    monkeypatch.setattr(one.loop, "_expire", broken)
    one.start("a", ids(20))
    one.loop._done.result(60)
    assert one.loop.died


# ---- memory comes and goes


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
