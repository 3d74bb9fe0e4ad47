"""Restored equals live, bit for bit: whatever way an agent's memory went and came back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WINDOWS = {"gemma-300": 300, "gemma-96": 96}


def boundaries(architecture: str, native: bool) -> list[int]:
    """Lengths just below, at and just above every group, tail, block and window boundary."""
    edges = {64, 128, 192, 256, 320, 384, 448, 640}
    window = WINDOWS.get(architecture)
    if window is not None:
        edges |= {window, window + 128, window + 256, window + 384}
    if not native:  # the same tables; one boundary of each kind is enough
        edges = {128, 192, 384} | ({window + 256} if window is not None else set())
    return sorted({edge + by for edge in edges for by in (-1, 0, 1)})


EVERY = sorted({edge for name in ("llama", *WINDOWS) for edge in boundaries(name, True)})


def lengths(*few: int) -> Any:
    """These lengths; with OFFBOOK_ALL_LENGTHS=1 those around every boundary of any kind."""
    return pytest.mark.parametrize("length", EVERY if os.environ.get("OFFBOOK_ALL_LENGTHS") else few)


def go_on(rig: Any, agent: str, ids: Any, length: int, **how: Any) -> tuple[list[Any], Any]:
    """Bring an agent of ``length`` tokens back, read three more in one chunk and two one by one."""
    first, plan = rig.say(agent, ids[: length + 3], **how)
    return [first, *(rig.decode([agent], [ids[length + 3 + i]])[0] for i in range(2))], plan


def live(rig: Any, agent: str, ids: Any, length: int) -> list[Any]:
    """The same of an agent that was never away."""
    rig.say(agent, ids[:length])
    out, plan = go_on(rig, agent, ids, length)
    assert (plan.source, plan.tokens) == ("hot", length)
    rig.lose(agent)
    return out


def same(a: list[Any], b: list[Any]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_evicted_agent_goes_on_with_the_same_bits_at_every_boundary(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path, native_kernel: bool
) -> None:
    one = rig(architecture, native=native_kernel)
    other = rig(architecture, native=native_kernel, folder=tmp_path)
    lengths = boundaries(architecture, native_kernel)
    for length in lengths:
        other.say(f"a{length}", ids(length, length))
        other.memory.evict((f"a{length}", ""))
        assert other.used == (0,) * len(other.used)
    other.evict()
    for length in lengths:
        text = np.concatenate([ids(length, length), ids(5)])
        got, plan = go_on(other, f"a{length}", text, length)
        assert (plan.source, plan.tokens) == ("warm", length)
        assert same(got, live(one, "a", text, length)), f"{length} tokens"
        other.lose(f"a{length}")


@lengths(200, 700)
def test_a_new_process_goes_on_with_the_same_bits(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path, length: int
) -> None:
    text = ids(length + 5, length)
    before = rig(architecture, folder=tmp_path)
    before.say("a", text[:length])
    before.memory.save(before.table("a"))
    before.close()
    after = rig(architecture, folder=tmp_path)
    got, plan = go_on(after, "a", text, length)
    assert (plan.source, plan.tokens) == ("warm", length)
    assert same(got, live(rig(architecture), "a", text, length))


def test_an_agent_evicted_in_the_middle_of_an_answer_goes_on_with_the_same_bits(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path
) -> None:
    text = ids(340, 3)

    def speak(one: Any) -> None:
        one.say("a", text[:250])
        for token in text[250:330]:
            one.decode(["a"], [token])

    one, other = rig(architecture), rig(architecture, folder=tmp_path)
    speak(one)
    expected, _ = go_on(one, "a", text, 330)
    speak(other)
    other.evict("a")
    got, plan = go_on(other, "a", text, 330)
    assert (plan.source, plan.tokens) == ("warm", 330)
    assert same(got, expected)


@pytest.mark.parametrize("bits", [8, None])
def test_other_bits_are_restored_as_they_were(
    rig: Callable[..., Any], ids: Any, tmp_path: Path, bits: int | None
) -> None:
    text = ids(605, 3)
    other = rig("gemma-300", bits=bits, folder=tmp_path)
    other.say("a", text[:600])
    other.evict("a")
    got, plan = go_on(other, "a", text, 600)
    assert plan.source == "warm"
    assert same(got, live(rig("gemma-300", bits=bits), "a", text, 600))


@lengths(127, 450)
def test_a_fork_in_memory_goes_on_with_the_same_bits(
    architecture: str, rig: Callable[..., Any], ids: Any, length: int
) -> None:
    text = ids(length + 5, length)
    one = rig(architecture)
    one.say("parent", text[:length])
    got, plan = go_on(one, "child", text, length)
    assert (plan.source, plan.tokens) == ("clone", length)
    expected, plan = go_on(one, "parent", text, length)
    assert (plan.source, plan.tokens) == ("hot", length)
    assert same(got, expected)


def test_a_fork_and_its_parent_go_different_ways_without_touching_each_other(
    architecture: str, rig: Callable[..., Any], ids: Any
) -> None:
    length = 450
    one, two = rig(architecture), rig(architecture)
    mine, yours = (np.concatenate([ids(length), ids(90, seed)]) for seed in (1, 2))
    one.say("parent", mine[:length])
    got = {}
    for agent, text in (("child", yours), ("parent", mine)):
        one.say(agent, text[: length + 80])  # past the next sealing
        got[agent] = [one.decode([agent], [token])[0] for token in text[length + 80 :]]
    for agent, text in (("child", yours), ("parent", mine)):
        two.say(agent, text[:length])
        two.say(agent, text[: length + 80])
        expected = [two.decode([agent], [token])[0] for token in text[length + 80 :]]
        assert same(got[agent], expected), agent
        two.lose(agent)


@lengths(200, 450)
def test_a_fork_of_an_evicted_agent_comes_from_its_files(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path, length: int
) -> None:
    text = ids(length + 5, length)
    other = rig(architecture, folder=tmp_path)
    other.say("parent", text[:length])
    other.evict("parent")
    got, plan = go_on(other, "child", text, length, origin="parent")
    assert (plan.source, plan.tokens) == ("warm", length)
    assert same(got, live(rig(architecture), "child", text, length))


@lengths(150, 300)
def test_rewinding_to_a_saved_turn_goes_on_with_the_same_bits(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path, length: int
) -> None:
    early, late = length, 180 if length < 180 else 900
    text = ids(late, 5)
    other = rig(architecture, folder=tmp_path)
    for tokens in (early, late):
        other.say("a", text[:tokens])
        other.memory.save(other.table("a"))
    other.evict("a")
    again = np.concatenate([text[:early], ids(5, 6)])
    got, plan = go_on(other, "a", again, early)
    assert (plan.source, plan.tokens) == ("warm", early)
    assert same(got, live(rig(architecture), "a", again, early))


def test_rewinding_to_any_turn_is_right_whether_its_tail_is_kept_or_not(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path
) -> None:
    """The latest tails are kept; an older turn comes back by its blocks and a prefill of the rest."""
    turns = (90, 200, 330, 420, 530, 650, 800)
    text = ids(800, 5)
    one = rig(architecture, bits=None, folder=tmp_path)
    for length in turns:
        one.say("a", text[:length])
        one.memory.save(one.table("a"))
    one.evict("a")
    kept = [info.tokens for info in one.store.tails("a")]
    assert kept == list(turns[-4:])
    for length in turns:
        again = np.concatenate([text[:length], ids(5, 6)])
        got, plan = go_on(one, "b", again, length, origin="a")  # as "a" rewound, which would lose later tails
        assert plan.tokens == length or length not in kept
        for logits, expected in zip(got, live(rig(architecture, bits=None), "a", again, length), strict=True):
            np.testing.assert_allclose(logits, expected, atol=1e-3)
        one.lose("b")
    got, plan = go_on(one, "a", np.concatenate([text[:200], ids(5, 6)]), 200)  # and "a" itself
    expected = live(rig(architecture, bits=None), "a", np.concatenate([text[:200], ids(5, 6)]), 200)
    for logits, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(logits, wanted, atol=1e-3)


def test_a_live_agent_rewound_behind_its_window_equals_a_cold_run(
    rig: Callable[..., Any], ids: Any, tmp_path: Path
) -> None:
    text = ids(900, 5)
    one = rig("gemma-300", bits=None, folder=tmp_path)
    one.say("a", text)
    again = np.concatenate([text[:400], ids(50, 6)])
    got, _ = one.say("a", again)
    expected, _ = rig("gemma-300", bits=None).say("a", again)
    np.testing.assert_allclose(got, expected, atol=2e-2)


@lengths(300, 450)
def test_an_exported_agent_goes_on_elsewhere_with_the_same_bits(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path, length: int
) -> None:
    text = ids(length + 5, 9)
    here, there = (rig(architecture, folder=tmp_path / name) for name in ("here", "there"))
    here.say("a", text[:length])
    here.evict("a")
    assert here.store.export_agent("a", tmp_path / "a.offbook", text[:length]).ok
    assert there.store.import_agent(tmp_path / "a.offbook").ok
    got, plan = go_on(there, "a", text, length)
    assert (plan.source, plan.tokens) == ("warm", length)
    assert same(got, live(rig(architecture), "a", text, length))


def test_memory_that_is_not_written_through_views_is_restored_just_so(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path
) -> None:
    length = 450
    text = ids(length + 5, 9)
    other = rig(architecture, host=False, folder=tmp_path)
    other.say("a", text[:length])
    other.evict("a")
    got, plan = go_on(other, "a", text, length)
    assert plan.source == "warm"
    assert same(got, live(rig(architecture), "a", text, length))
