"""Typed replies: decoding constrained to a JSON schema, with llguidance, and complete within ``max_tokens``.

Owns the compiling of schemas (off the step thread, the latest ones kept) and one ``Constraint`` per row.
A constraint always knows tokens that complete the reply, and takes no token after which none fit what is
left of ``max_tokens``: whatever a model would say, and wherever it would ramble on, the reply is whole.
Constrained rows decode in the same batch as the others: only their logits are masked.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from offbook.bus.errors import InvalidRequest

from .closing import Closer, completes
from .patterns import example, patterns_in
from .sampling import Logits, Sampler
from .schema import enforceable
from .text import BytesDetokenizer
from .vocabulary import Vocabulary, vocabulary_of

KEPT = 64
"""Compiled schemas that are kept."""

THOROUGH, QUICK = 4000, 300
"""Places that are looked at for the shortest reply of a schema, and for the end of a begun one."""

DRAWS = 4
"""Tokens that are tried at one place before the shortest way to the end is taken."""

_LOCK = threading.Lock()


@dataclass(frozen=True)
class Compiled:
    """A schema, made ready: its matcher at the beginning, and its shortest reply."""

    vocabulary: Vocabulary
    matcher: Any
    closer: Closer
    shortest: list[int]


_COMPILED: OrderedDict[tuple[int, str], Compiled] = OrderedDict()


def compile_schema(schema: dict[str, Any], loaded: Any, max_tokens: int) -> Constraint:
    """A constraint for one reply of at most ``max_tokens``.

    Raises:
        InvalidRequest: the schema uses something that cannot be enforced, or its shortest reply does not fit
            (``details["needed"]`` says how many tokens it takes).
    """
    vocabulary = vocabulary_of(loaded)
    key = (id(vocabulary), json.dumps(schema))
    with _LOCK:
        known = _COMPILED.pop(key, None)
    if known is None:
        known = _compile(schema, vocabulary)
    with _LOCK:
        _COMPILED[key] = known
        while len(_COMPILED) > KEPT:
            _COMPILED.popitem(last=False)
        matcher = known.matcher.deep_copy()
    needed = len(known.shortest)
    if needed > max_tokens:
        raise InvalidRequest(
            f"max_tokens={max_tokens}: the shortest reply of this JSON schema takes {needed} tokens; "
            f"give at least {needed}",
            needed=needed,
        )
    return Constraint(known, matcher)


def _compile(schema: dict[str, Any], vocabulary: Vocabulary) -> Compiled:
    enforced = enforceable(schema)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(enforced), overrides={"whitespace_flexible": False}
    )
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
    error = " ".join(matcher.get_error().split())
    if error:
        raise InvalidRequest(f"the reply's JSON schema cannot be enforced: {error[:500]}")
    examples = [text for pattern in patterns_in(enforced) if (text := example(pattern)) is not None]
    closer = Closer(vocabulary, examples)
    shortest = closer.closing(matcher, limit=1 << 20, effort=THOROUGH)
    if shortest is None:
        raise InvalidRequest("the reply's JSON schema cannot be enforced: no text was found that is of it")
    return Compiled(vocabulary, matcher, closer, shortest)


class Constraint:
    """Which tokens may come next in one row, and how the reply ends in time."""

    def __init__(self, compiled: Compiled, matcher: Any) -> None:
        self._matcher, self._vocabulary, self._closer = matcher, compiled.vocabulary, compiled.closer
        self._closing = compiled.shortest
        self._ended = self._looked = False
        self._lost = False
        """The matcher has hit a limit of its own: what is known to complete the reply is all there is."""

    @property
    def finished(self) -> bool:
        """Whether nothing can be added to the reply."""
        return self._ended or (not self._closing and (self._lost or bool(self._matcher.is_stopped())))

    @property
    def complete(self) -> bool:
        """Whether the reply may end here."""
        return not self._closing

    def detokenizer(self) -> BytesDetokenizer:
        """For the reply's text."""
        return BytesDetokenizer(self._vocabulary.spelling)

    def draw(self, sampler: Sampler, logits: Logits, history: Sequence[int], left: int) -> int:
        """The row's next token.

        Args:
            logits: [vocabulary]. history: the ids before. left: tokens there may still be, this one included.
        """
        if self._closing and len(self._closing) >= left:
            self._look_for_shorter()
        if self._lost or (self._closing and len(self._closing) >= left):
            return self._close()
        allowed = self._allowed(logits.shape[-1])
        for _ in range(DRAWS):
            if not allowed.any():
                break
            token = sampler.draw(np.where(allowed, logits, np.float32(-np.inf)), history)
            if allowed[token] and self._take(token, left - 1):
                return token
            allowed[token] = False
        return self._close()

    def _allowed(self, width: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens the grammar allows now."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.zeros(width, np.bool_)
        count = min(width, len(bits))
        allowed[:count] = bits[:count]
        if self._matcher.is_error():
            self._lost = True
            allowed[:] = False
        return allowed

    def _take(self, token: int, left: int) -> bool:
        """Accept a token, if the reply can be completed within ``left`` more."""
        if self._closing and token == self._closing[0]:
            rest: list[int] | None = self._closing[1:]
            looked = self._looked
        else:
            after = self._matcher.deep_copy()
            if after.validate_tokens([token]) != 1 or not after.consume_token(token):
                return False
            rest = self._rest(after, left)
            looked = False
        if rest is None or len(rest) > left:
            return False
        self._consume(token)
        self._closing, self._looked = rest, looked
        return True

    def _rest(self, after: Any, left: int) -> list[int] | None:
        """Tokens that complete the reply from there."""
        if after.is_accepting():
            return []
        # Inside of a string, or behind what was part of it, the known end is still the end.
        for skip in range(min(3, len(self._closing))):
            rest = self._closing[skip:]
            if len(rest) <= left and completes(after, rest):
                return rest
        return self._closer.closing(after, limit=left)

    def _look_for_shorter(self) -> None:
        """The known end may have been found where the reply was not so far."""
        if not self._lost and not self._looked:
            shorter = self._closer.closing(self._matcher, limit=len(self._closing) - 1, effort=QUICK)
            self._closing = shorter if shorter is not None else self._closing
            self._looked = True

    def _close(self) -> int:
        """The next token of the known end; the end of the turn if the reply is complete."""
        if not self._closing:
            self._ended = True
            return self._vocabulary.eos
        token, *self._closing = self._closing
        self._consume(token)
        return token

    def _consume(self, token: int) -> None:
        if not self._lost and not self._matcher.consume_token(token):
            self._lost = True
