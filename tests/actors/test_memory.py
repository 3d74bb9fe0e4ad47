"""Transcripts as growths: whatever changes, the journal leads to the same tokens."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from offbook.actors.memory import AgentMemory, fold, growth_between
from offbook.actors.records import Growth

tokens = st.lists(st.integers(0, 3), max_size=12).map(lambda ids: array("I", ids).tobytes())


@given(st.lists(tokens, max_size=8))
def test_growths_lead_from_each_transcript_to_the_next(history: list[bytes]) -> None:
    segments: list[Growth] = []
    now = b""
    for transcript in history:
        growth = growth_between(now, transcript)
        if growth is not None:
            segments.append(growth)
        now = transcript
        assert fold(segments) == now


@given(tokens, tokens)
def test_a_growth_keeps_the_longest_common_prefix(old: bytes, new: bytes) -> None:
    growth = growth_between(old, new)
    if growth is None:
        assert old == new
        return
    kept = growth.kept * 4
    assert old[:kept] == new[:kept]
    assert new == old[:kept] + growth.tokens
    assert old[kept : kept + 4] != new[kept : kept + 4]


@given(tokens, tokens)
def test_an_extension_costs_its_own_tokens(old: bytes, more: bytes) -> None:
    growth = growth_between(old, old + more)
    assert (growth.tokens if growth else b"") == more


def test_an_unchanged_memory_writes_nothing() -> None:
    memory = AgentMemory.load(None, [Growth(0, b"abcd")])
    assert memory.copy().changes() == (None, None)
    assert memory.tokens == 1
