"""What one turn gives back: its tokens, its text, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.engine.replies import Engine, tokens


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
