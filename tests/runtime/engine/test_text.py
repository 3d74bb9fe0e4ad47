"""Stop strings never leak, whatever pieces the text arrives in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.runtime.engine.dialogue import special_tokens
from offbook.runtime.engine.text import StopMatcher, TextStream, overlap

SMALL = st.text("ab\n", max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_what_is_shown_is_the_text_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    matcher, shown, seen = StopMatcher(stops), "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        assert seen.startswith(shown)
        assert not any(stop in shown for stop in stops)
        if matcher.stopped:
            break
    hits = [at for stop in stops if (at := seen.find(stop)) >= 0]
    assert matcher.stopped is bool(hits)
    if hits:
        assert shown == seen[: min(hits)]
    else:
        assert shown + matcher.finish() == whole


def test_what_cannot_become_a_stop_string_is_shown_at_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("dge") == "Edge"


@given(SMALL, st.text("ab\n", min_size=1, max_size=4))
def test_the_overlap_is_the_longest_end_that_begins_the_stop_string(text: str, stop: str) -> None:
    length = overlap(text, stop)
    assert stop.startswith(text[len(text) - length :])
    assert not any(
        stop.startswith(text[-longer:]) for longer in range(length + 1, min(len(text), len(stop) - 1) + 1)
    )


def test_special_tokens_are_not_shown_but_may_end_the_text() -> None:
    texts, special = ["Hello", "<s>", " you", "<s>", "."], {1: "<s>", 3: "<s>"}
    stream = TextStream(Words(texts), (), special)
    shown = "".join(stream.push(token) for token in range(5)) + stream.finish()
    assert shown == stream.text == "Hello you."
    stream = TextStream(Words(texts), ("o<s>",), special)
    assert "".join(stream.push(token) for token in range(2)) + stream.finish() in ("Hell", "Hello")
    stream = TextStream(Words(texts), ("<s>",), special)
    shown = stream.push(0) + stream.push(1)
    assert stream.stopped
    assert "<" not in shown + stream.finish()


def test_what_the_embedded_model_draws_is_shown_without_its_special_tokens(smollm2: Any) -> None:
    special = special_tokens(smollm2.tokenizer)
    assert "<|im_start|>" in special.values()
    ids = smollm2.tokenizer.encode(
        "<|im_start|>assistant\nYes, caf\u00e9.<|im_end|>", add_special_tokens=False
    )
    stream = TextStream(smollm2.tokenizer.detokenizer, (), special)
    shown = "".join(map(stream.push, ids)) + stream.finish()
    assert shown == "assistant\nYes, caf\u00e9."


class Words:
    """A detokenizer that shows a token's text only with the next one, as byte-pair ones do."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.held, self.new = texts, "", ""

    def add_token(self, token: int) -> None:
        self.new, self.held = self.held, self.texts[token]

    def finalize(self) -> None:
        self.new, self.held = self.held, ""

    @property
    def last_segment(self) -> str:
        new, self.new = self.new, ""
        return new


@pytest.mark.parametrize(
    ("texts", "stops", "expected", "stopped"),
    [
        (["Hel", "lo ", "wor", "ld"], (), "Hello world", False),
        (["Hel", "lo ", "wor", "ld"], ("o w",), "Hell", True),
        (["one", " ST", "OP", " two"], ("STOP",), "one ", True),
        (["one", " ST", "O"], ("STOP",), "one STO", False),
        (["one ", "STOP"], ("STOP",), "one ", True),
    ],
)
def test_a_stream_shows_its_text_and_nothing_of_a_stop_string(
    texts: list[str], stops: Any, expected: str, stopped: bool
) -> None:
    stream, shown = TextStream(Words(texts), stops), ""
    for token in range(len(texts)):
        shown += stream.push(token)
        if stream.stopped:
            break
    shown += stream.finish()
    assert shown == stream.text == expected
    assert stream.stopped is stopped
