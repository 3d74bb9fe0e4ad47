"""What every next message begins with is read before it comes, and no reply shows it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.actors.lm import ChatMessage
from offbook.bus.errors import EngineFailed
from offbook.runtime.engine.dialogue import Dialogue
from offbook.runtime.engine.openings import MAX_DUE, Openings
from offbook.runtime.kv import native
from offbook.runtime.kv.kernel import NativeAttention
from tests.runtime.engine.harness import END, Characters, Harness
from tests.runtime.engine.replies import Engine, greedy

OPENING = 4
"""Ids of "end of turn, <u>"."""

KERNEL = ("llama", "gemma-300", "gemma-96")
"""Architectures whose forward is the kernel's."""


def reads_ahead(one: Harness) -> Harness:
    if not one.loop.openings.possible:
        pytest.skip("this processor's kernel does not read prompts of any length")
    return one


@pytest.fixture
def one(engine: Engine, tmp_path: Path) -> Harness:
    return reads_ahead(engine("llama", tmp_path, read_ahead=True))


def opening_of(one: Harness, agent: str) -> int:
    """How long an agent's opening is that has been read."""
    return int(one.call(lambda: one.loop.memory.tables[agent, ""].opening))


def read(one: Harness, count: int) -> None:
    """Wait until so many openings have been read."""
    while one.counters.get("openings", 0) < count:
        time.sleep(0.05)  # asking keeps the engine from reading


def talk(one: Harness, texts: list[str], **options: Any) -> list[Any]:
    replies = []
    for number, text in enumerate(texts):
        replies.append(one.say("a", text, sampling=greedy(9), **options))
        if one.loop.openings.possible:
            read(one, number + 1)
    return replies


def same(mine: Any, theirs: Any) -> None:
    assert mine.appended == theirs.appended
    assert mine.logprobs == theirs.logprobs


@pytest.mark.parametrize("architecture", KERNEL)
def test_replies_have_the_same_bits_with_openings_read_and_without(engine: Engine, architecture: str) -> None:
    texts = ["x" * 140, "yes", "z" * 30, "what? " * 14, "q" * 200, "!"]
    one = reads_ahead(engine(architecture, read_ahead=True))
    # Openings that a seal or a chunk's end falls into are not read; these lengths are elsewhere.
    ahead, plain = talk(one, texts), talk(engine(architecture), texts)
    for mine, theirs in zip(ahead, plain, strict=True):
        same(mine, theirs)
    for mine, theirs in zip(ahead[1:], plain[1:], strict=True):
        assert mine.usage.reused_tokens == theirs.usage.reused_tokens + OPENING + 1
        assert mine.usage.prefilled_tokens == theirs.usage.prefilled_tokens - OPENING - 1


@pytest.mark.parametrize("architecture", KERNEL)
def test_an_opening_is_saved_and_restored_with_the_rest(
    engine: Engine, tmp_path: Path, architecture: str
) -> None:
    texts = ["x" * 290, "yes"]
    one = reads_ahead(engine(architecture, tmp_path, read_ahead=True))
    first = one.say("a", texts[0], sampling=greedy(9))
    read(one, 1)
    one.evict("a")
    one.call(lambda: [group.forget_free() for group in one.loop.pool.groups])
    second = one.say("a", texts[1], sampling=greedy(9))
    assert second.usage.source == "warm"
    assert second.usage.reused_tokens == first.usage.context_tokens + OPENING
    for mine, theirs in zip((first, second), talk(engine(architecture), texts), strict=True):
        same(mine, theirs)


@pytest.mark.parametrize("text", ["  (whispers)", "\n\n", "\n1"])
def test_white_space_that_changes_the_openings_tokens_is_read_as_ever(
    engine: Engine, smollm2: Any, text: str
) -> None:
    one, other = (engine(loaded=smollm2, read_ahead=ahead, budget=1 << 30) for ahead in (True, False))
    mine, theirs = (talk(each, ["Good morning.", text + "."]) for each in (reads_ahead(one), other))
    for got, want in zip(mine, theirs, strict=True):
        same(got, want)


@pytest.mark.parametrize("evicted", [False, True])
def test_what_goes_on_otherwise_has_the_opening_cut_off(
    engine: Engine, one: Harness, evicted: bool, ids: Any
) -> None:
    one.say("a", "x" * 290, sampling=greedy(9))
    read(one, 1)
    if evicted:
        one.evict("a")
        one.call(lambda: [group.forget_free() for group in one.loop.pool.groups])
    past = one.transcripts["a"]
    more = np.concatenate([past, ids(30, 3)])
    got = one.run("a", more, kept=len(past), sampling=greedy(9))
    assert got.usage.source == ("warm" if evicted else "hot")
    assert got.usage.reused_tokens == len(past)
    plain = engine("llama")
    plain.say("a", "x" * 290, sampling=greedy(9))
    want = plain.run("a", more, kept=len(past), sampling=greedy(9))
    same(got, want)


def test_a_fork_of_an_agent_with_an_opening_is_right(engine: Engine, one: Harness) -> None:
    one.say("a", "x" * 290, sampling=greedy(9))
    read(one, 1)
    past = one.transcripts["b"] = one.transcripts["a"]
    forked = one.say("b", "and you?", sampling=greedy(9), origin="a")
    assert forked.usage.reused_tokens == len(past) + OPENING
    same(forked, talk(engine("llama"), ["x" * 290, "and you?"])[1])
    assert opening_of(one, "a") == OPENING


def test_a_fork_that_goes_on_otherwise_is_a_copy_all_the_same(engine: Engine, ids: Any) -> None:
    one, plain = reads_ahead(engine("llama", read_ahead=True)), engine("llama")
    replies = []
    for each in (one, plain):
        each.say("a", "x" * 290, sampling=greedy(9))
        if each is one:
            read(one, 1)
        past = each.transcripts["a"]
        more = np.concatenate([past, ids(30, 3)])
        replies.append(each.run("b", more, kept=len(past), sampling=greedy(9), origin="a"))
    same(*replies)
    assert (replies[0].usage.source, replies[0].usage.reused_tokens) == ("hot", len(past))


def test_a_message_that_waits_brings_the_opening_back_too(one: Harness) -> None:
    one.say("a", "x" * 290, sampling=greedy(9))
    read(one, 1)
    one.evict("a")
    one.call(lambda: [group.forget_free() for group in one.loop.pool.groups])
    past = one.transcripts["a"]
    one.call(lambda: one.loop.prefetch(("a", ""), past))
    while one.call(lambda: bool(one.loop.memory.loading)):
        pass
    assert opening_of(one, "a") == OPENING
    reply = one.say("a", "yes", sampling=greedy(9))
    assert (reply.usage.source, reply.usage.reused_tokens) == ("warm", len(past) + OPENING)


def test_a_turn_that_comes_meanwhile_is_not_kept_waiting(
    one: Harness, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening's forward is given up between two layers, and the table is as it was."""
    one.say("a", "x" * 100, sampling=greedy(9))
    held = gate(one, "prefill")
    held.wait()  # before the opening is read
    tokens = one.loop.memory.tables["a", ""].tokens
    other = one.start("b", np.arange(40, 60))
    held.step()
    held.wait()  # before b's prompt is
    assert one.loop.memory.tables["a", ""].tokens == tokens
    held.open()
    other.wait()
    read(one, 2)
    assert opening_of(one, "a") == OPENING


def test_nothing_is_read_that_a_seal_falls_into(one: Harness) -> None:
    seal = 128 + 64  # the first group is sealed at this length
    prompt = np.arange(3, 3 + seal - 11).astype(np.uint32) % 100 + 20
    reply = one.run("a", prompt, sampling=greedy(9))
    one.transcripts["a"] = np.concatenate([prompt, np.frombuffer(reply.appended, "<u4")[len(prompt) :]])
    while one.call(one.loop.openings.seconds) < float("inf"):
        time.sleep(0.05)
    assert one.counters.get("openings", 0) == 0
    assert opening_of(one, "a") == 0


def test_a_turn_is_written_once_with_its_opening(one: Harness) -> None:
    one.say("a", "x" * 290, sampling=greedy(9))
    read(one, 1)
    one.call(lambda: None)
    one.loop.store.flush()
    past = len(one.transcripts["a"])
    assert [tail.tokens for tail in one.loop.store.tails("a")] == [past + OPENING]
    one.evict("a")
    assert [tail.tokens for tail in one.loop.store.tails("a")] == [past + OPENING]


def test_an_agent_moves_with_its_opening(engine: Engine, one: Harness, tmp_path: Path) -> None:
    first = one.say("a", "x" * 290, sampling=greedy(9))
    read(one, 1)
    one.evict("a")
    past = one.transcripts["a"]
    exported = one.loop.store.export_agent("a", tmp_path / "a.agent", past)
    assert (exported.ok, exported.tokens) == (True, len(past))
    there = reads_ahead(engine("llama", tmp_path / "there", read_ahead=True))
    assert there.loop.store.import_agent(tmp_path / "a.agent").tail
    there.transcripts["a"] = past
    reply = there.say("a", "yes", sampling=greedy(9))
    assert reply.usage.source == "warm"
    assert reply.usage.reused_tokens == first.usage.context_tokens + OPENING


def test_a_failed_turn_has_no_opening(one: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[Any] = []
    real = Openings.expect
    monkeypatch.setattr(Openings, "expect", lambda self, job: (expected.append(job), real(self, job)))
    monkeypatch.setattr(one.loop.batch, "decode", lambda *_: 1 / 0)
    with pytest.raises(EngineFailed):
        one.run("a", np.arange(40, 60), max_tokens=4)
    assert expected == []


class Plain(Characters):
    """Without a template: an opening is the blank line between messages."""

    chat_template = ""
    has_chat_template = False


@pytest.mark.parametrize("length", [300, 320, 400])
@pytest.mark.parametrize("beside", [False, True])
def test_a_message_of_one_token_behind_an_opening_is_read_as_part_of_a_prompt(
    engine: Engine, length: int, beside: bool
) -> None:
    replies = []
    for ahead in (True, False):
        each = engine("llama", read_ahead=ahead, tokenizer=Plain())
        each.say("a", "x" * length, sampling=greedy(9))
        if ahead:
            read(reads_ahead(each), 1)
        past = each.transcripts["a"]
        prompt = each.dialogue.prompt(None, past, [ChatMessage("user", "y")])
        mine = each.job("a", np.concatenate([past, prompt]), kept=len(past), sampling=greedy(5))
        others = [each.job("b", np.arange(40, 60))] if beside and ahead else []
        replies.append(each.submit(mine, *others).wait())
        for other in others:
            other.wait()
    same(*replies)
    assert replies[0].usage.prefilled_tokens == 1


@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("matching", [0, 2])
def test_how_a_prompt_is_cut_does_not_depend_on_an_opening_that_was_cut_off(
    engine: Engine, ids: Any, fork: bool, matching: int
) -> None:
    for count in (93, 94, 95, 96, 97, 98):
        replies = []
        for ahead in (True, False):
            each = engine("llama", read_ahead=ahead)
            each.say("a", "x" * 200, sampling=greedy(9))
            if ahead:
                read(reads_ahead(each), 1)
            past = each.transcripts["a"]
            begins = each.dialogue.openings()[0][:matching]
            more = np.concatenate([past, begins, ids(count, 3)])
            who = {"agent": "f", "origin": "a"} if fork else {"agent": "a"}
            replies.append(each.run(ids=more, kept=len(past), sampling=greedy(4), **who))
        same(*replies)


def test_a_fork_keeps_its_memory_when_its_origin_is_forgotten_at_once(engine: Engine, tmp_path: Path) -> None:
    one = reads_ahead(engine("gemma-300", tmp_path, read_ahead=True))
    one.say("a", "x" * 1100, sampling=greedy(9))
    one.transcripts["b"] = one.transcripts["a"]
    one.say("b", "and you?", sampling=greedy(9), origin="a")
    removal = one.call(lambda: one.loop.forget_agent("a"))
    removal.result(30)
    one.evict("b")
    one.call(lambda: [group.forget_free() for group in one.loop.pool.groups])
    reply = one.say("b", "yes", sampling=greedy(9))
    assert reply.usage.source == "warm"
    assert reply.usage.prefilled_tokens < 20


def test_an_engine_that_does_not_read_ahead_cuts_off_what_another_has_saved(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    one = reads_ahead(engine("llama", tmp_path, read_ahead=True))
    one.say("a", "x" * 500, sampling=greedy(9))
    read(one, 1)
    past = one.transcripts["a"]
    one.stop()
    other = engine("llama", tmp_path)
    more = np.concatenate([past, ids(30, 3)])
    reply = other.run("a", more, kept=len(past), sampling=greedy(9))
    assert (reply.usage.source, reply.usage.reused_tokens) == ("warm", len(past))


@pytest.mark.parametrize("fork", [False, True])
def test_going_on_from_just_the_transcript_reads_its_last_id_again(
    engine: Engine, one: Harness, fork: bool
) -> None:
    plain = engine("llama")
    replies = []
    for each in (one, plain):
        each.say("a", "x" * 290, sampling=greedy(9))
        past = each.transcripts["a"]
        if each is one:
            read(one, 1)
            if not fork:
                one.evict("a")
                one.call(lambda: [group.forget_free() for group in one.loop.pool.groups])
        who = {"agent": "f", "origin": "a"} if fork else {"agent": "a"}
        replies.append(each.run(ids=past, kept=len(past), sampling=greedy(5), **who))
        assert replies[-1].usage.reused_tokens == len(past) - 1
    same(*replies)


def test_what_an_agent_is_due_is_forgotten_with_it_and_never_much(one: Harness) -> None:
    due = one.loop.openings._due
    one.say("a", "x" * 100, sampling=greedy(2))
    one.call(lambda: one.loop.forget_agent("a"))
    assert not due
    busy = one.start("busy", np.arange(40, 60), max_tokens=2000)  # the engine is not idle
    for number in range(70):
        one.run(f"a{number}", np.arange(40, 60), max_tokens=1)
    one.call(lambda: one.loop.cancel(busy.job))
    assert len(due) <= MAX_DUE


def test_openings_that_cannot_be_read_harm_nobody(one: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [f"a{number}" for number in range(7)]
    monkeypatch.setattr(one.loop.batch.decoder, "forward", broken := Broken(one.loop.batch.decoder.forward))
    turns = one.call(lambda: [one.job(agent, np.arange(40, 80), sampling=greedy(9)) for agent in agents])
    one.submit(*turns)
    for turn in turns:
        turn.wait()
    broken.on = True
    while one.call(one.loop.openings.seconds) < float("inf"):
        time.sleep(0.05)
    broken.on = False
    assert one.counters["failed_openings"] == broken.met > 0
    assert one.counters.get("failed_turns", 0) == 0
    assert not one.loop.died
    assert one.run("a0", np.arange(40, 90), sampling=greedy(9)).text


class Broken:
    """A function that raises for a while."""

    def __init__(self, real: Any) -> None:
        self.real, self.on, self.met = real, False, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.on:
            self.met += 1
            raise ArithmeticError("out of order")
        return self.real(*args, **options)


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
@pytest.mark.parametrize("architecture", ["lfm2", "latent"])
def test_where_the_forward_is_not_the_kernels_nothing_is_read(engine: Engine, architecture: str) -> None:
    one = engine(architecture, read_ahead=True)
    assert isinstance(one.loop.batch.native, NativeAttention)
    assert not one.loop.openings.possible


def test_openings_are_what_nearly_any_prompt_begins_with(smollm2: Any, characters: Any) -> None:
    for tokenizer, eos in ((characters(), (END,)), (smollm2.tokenizer, smollm2.eos_token_ids)):
        dialogue = Dialogue(tokenizer, sorted(eos))
        for last, opening in zip((40, min(eos)), dialogue.openings(), strict=True):
            assert len(opening) > 2
            for system in (None, "You sing."):
                for text in ("Go on.", "123", "<|im_end|>", "\u00e9"):
                    prompt = dialogue.prompt(system, np.array([7, last]), [ChatMessage("user", text)])
                    np.testing.assert_array_equal(prompt[: len(opening)], opening)
