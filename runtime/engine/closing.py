"""The shortest way to the end of a reply that a grammar has begun.

Searches over bytes with copies of a matcher: copying one and asking it for its mask take microseconds.
What it finds is a way that the matcher allows; that it is the shortest one is likely, not certain.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

from .vocabulary import LONGEST, Vocabulary

MANY = 24
"""Of more bytes than this at one place, inside of strings, only some stand for all."""

_QUOTE = ord('"')
_CLOSERS = b'}]",:'
_ORDER = {byte: i for i, byte in enumerate(b'}]",:0123456789ntfaeiou.e+-[{')}
_STANDING_FOR_ALL = b"a0A .-@/:_"

PATIENCE = 512
"""After so many bytes the quick search does not always choose the same."""

MAX_BYTES = 32_768
"""A closing of more bytes is not looked for."""

MAX_DEPTH = 200
"""Nesting: readers of JSON have a limit too."""


class Closer:
    """Finds closings for the replies of one schema.

    Args:
        examples: JSON-escaped texts that match the schema's patterns; their ends end begun ones.
    """

    def __init__(self, vocabulary: Vocabulary, examples: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary
        ends = {text[at:] for text in examples for at in range(len(text))}
        self._ends = sorted(ends, key=lambda end: (len(end), end))

    def closing(self, matcher: Any, *, limit: int, effort: int = 0) -> list[int] | None:
        """Tokens, as few as were found, that complete the reply; None if over ``limit``.

        Args:
            limit: tokens that may be used.
            effort: places that are looked at for a shorter way than the first one found.
        """
        text = self._straight(matcher, min(MAX_BYTES, limit * LONGEST))
        found = self._checked(matcher, text)
        if effort:
            ways = [self._cheapest(matcher, effort)]
            if text is not None:
                # The same letter many times is fewer tokens than different ones.
                ways.append(self._straight(matcher, len(text), same=True))
            others = [other for way in ways if (other := self._checked(matcher, way)) is not None]
            found = min([*others, *([found] if found is not None else [])], key=len, default=None)
        return found if found is not None and len(found) <= limit else None

    def _checked(self, matcher: Any, text: bytes | None) -> list[int] | None:
        """The text in tokens that the matcher takes, and that complete the reply."""
        if text is None or text.count(b"}") + text.count(b"]") > MAX_DEPTH:
            return None
        for tokens in (self._vocabulary.fewest(text), self._vocabulary.spelled(text)):
            if completes(matcher, tokens):
                return tokens
        return None

    def _straight(self, matcher: Any, most: int, *, same: bool = False) -> bytes | None:
        """Always what closes the most: quick, and mostly the shortest. None if over ``most`` bytes.

        Args:
            same: fill texts that cannot be closed yet with one letter.
        """
        matcher, text = matcher.deep_copy(), b""
        while len(text) <= most:
            if matcher.is_accepting():
                return text
            more = matcher.compute_ff_bytes()
            if not more:
                allowed = self._vocabulary.allowed_bytes(matcher.compute_bitmask())
                if not allowed:
                    return None
                more = self._next(matcher, allowed, 0 if same else len(text))
            if not self._feed(matcher, more):
                return None
            text += more
        return None

    def _next(self, matcher: Any, allowed: list[int], turn: int) -> bytes:
        if _QUOTE not in allowed and (end := self._known_end(matcher)) is not None:
            return end
        tried = _worth_trying(allowed)
        # A text that stays open waits for something: a digit that its pattern asks for.
        if len(allowed) <= MANY:
            tried.sort(key=lambda byte: _ORDER.get(byte, 256 + byte))
            turn = 0 if tried[0] in _CLOSERS else max(0, turn - PATIENCE)
        return bytes([tried[turn % len(tried)]])

    def _known_end(self, matcher: Any) -> bytes | None:
        """The shortest end of an example that ends the string the matcher is in."""
        for end in self._ends:
            tokens = self._vocabulary.spelled(end + b'"')
            if matcher.validate_tokens(tokens) == len(tokens):
                return end + b'"'
        return None

    def _cheapest(self, matcher: Any, effort: int) -> bytes | None:
        """The fewest bytes. States that allow the same tokens after as many bytes are taken to be one."""
        order = itertools.count()
        heap: list[tuple[int, int, Any, bytes]] = [(0, next(order), matcher.deep_copy(), b"")]
        seen: set[tuple[int, bytes]] = set()
        while heap and effort > 0:
            size, _, state, text = heapq.heappop(heap)
            effort -= 1
            if state.is_accepting():
                return text
            if size > MAX_BYTES:
                continue
            steps: list[bytes] = [state.compute_ff_bytes()]
            if not steps[0]:
                mask = state.compute_bitmask()
                if (size, mask) in seen:
                    continue
                seen.add((size, mask))
                allowed = self._vocabulary.allowed_bytes(mask)
                steps = [bytes([byte]) for byte in _worth_trying(allowed)]
                if _QUOTE not in allowed and (end := self._known_end(state)) is not None:
                    steps.append(end)
            for step in steps:
                after = state.deep_copy()
                if self._feed(after, step):
                    heapq.heappush(heap, (size + len(step), next(order), after, text + step))
        return None

    def _feed(self, matcher: Any, text: bytes) -> bool:
        tokens = self._vocabulary.spelled(text)
        return matcher.validate_tokens(tokens) == len(tokens) and bool(matcher.consume_tokens(tokens))


def _worth_trying(allowed: list[int]) -> list[int]:
    if len(allowed) <= MANY:
        return allowed
    if _QUOTE in allowed:
        return [_QUOTE]
    return [byte for byte in _STANDING_FOR_ALL if byte in allowed] or allowed[:1]


def completes(matcher: Any, tokens: list[int]) -> bool:
    """Whether a reply is complete after these tokens."""
    if matcher.validate_tokens(tokens) != len(tokens):
        return False
    after = matcher.deep_copy()
    return bool(after.consume_tokens(tokens) and after.is_accepting())
