"""The shortest way to the end of a reply that a grammar has begun.

Searches over bytes with copies of a matcher: copying one and asking it for its mask take microseconds.
What it finds is a way that the matcher allows; that it is the shortest one is likely, not certain.
"""

from __future__ import annotations

import heapq
import itertools
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


def closing(matcher: Any, vocabulary: Vocabulary, *, limit: int, effort: int) -> list[int] | None:
    """Tokens, as few as were found, that take a matcher to a complete reply; None if over ``limit``.

    Args:
        limit: tokens that may be used.
        effort: places that may be looked at for a shorter way if the first one found is over ``limit``;
            negative to look for the shortest in any case.
    """
    text = _straight(matcher, vocabulary, min(MAX_BYTES, limit * LONGEST))
    found = _checked(matcher, vocabulary, text)
    if text is not None and found is not None and (len(found) > limit or effort < 0):
        # The same letter many times is fewer tokens than different ones.
        same = _checked(matcher, vocabulary, _straight(matcher, vocabulary, len(text), same=True))
        found = min(found, same or found, key=len)
    if found is None or len(found) > limit or effort < 0:
        other = _checked(matcher, vocabulary, _cheapest(matcher, vocabulary, abs(effort)))
        if other is not None and (found is None or len(other) < len(found)):
            found = other
    return found if found is not None and len(found) <= limit else None


def _checked(matcher: Any, vocabulary: Vocabulary, text: bytes | None) -> list[int] | None:
    """The text in tokens that the matcher takes, and that complete the reply."""
    if text is None or text.count(b"}") + text.count(b"]") > MAX_DEPTH:
        return None
    for tokens in (vocabulary.fewest(text), vocabulary.spelled(text)):
        if completes(matcher, tokens):
            return tokens
    return None


def completes(matcher: Any, tokens: list[int]) -> bool:
    """Whether a reply is complete after these tokens."""
    if matcher.validate_tokens(tokens) != len(tokens):
        return False
    after = matcher.deep_copy()
    return bool(after.consume_tokens(tokens) and after.is_accepting())


def _straight(matcher: Any, vocabulary: Vocabulary, most: int, *, same: bool = False) -> bytes | None:
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
            allowed = vocabulary.allowed_bytes(matcher.compute_bitmask())
            if not allowed:
                return None
            tried = _worth_trying(allowed)
            # A text that stays open waits for something: a digit that its pattern asks for.
            turn = 0 if same else len(text)
            if len(allowed) <= MANY:
                tried.sort(key=lambda byte: _ORDER.get(byte, 256 + byte))
                turn = 0 if tried[0] in _CLOSERS else max(0, len(text) - PATIENCE)
            more = bytes([tried[turn % len(tried)]])
        if not _feed(matcher, vocabulary, more):
            return None
        text += more
    return None


def _cheapest(matcher: Any, vocabulary: Vocabulary, effort: int) -> bytes | None:
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
        more = state.compute_ff_bytes()
        if more:
            if _feed(state, vocabulary, more):
                heapq.heappush(heap, (size + len(more), next(order), state, text + more))
            continue
        mask = state.compute_bitmask()
        if (size, mask) in seen:
            continue
        seen.add((size, mask))
        for byte in _worth_trying(vocabulary.allowed_bytes(mask)):
            after = state.deep_copy()
            if _feed(after, vocabulary, bytes([byte])):
                heapq.heappush(heap, (size + 1, next(order), after, text + bytes([byte])))
    return None


def _worth_trying(allowed: list[int]) -> list[int]:
    if len(allowed) <= MANY:
        return allowed
    if _QUOTE in allowed:
        return [_QUOTE]
    return [byte for byte in _STANDING_FOR_ALL if byte in allowed] or allowed[:1]


def _feed(matcher: Any, vocabulary: Vocabulary, text: bytes) -> bool:
    tokens = vocabulary.spelled(text)
    return matcher.validate_tokens(tokens) == len(tokens) and bool(matcher.consume_tokens(tokens))
