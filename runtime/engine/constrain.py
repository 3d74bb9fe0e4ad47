"""Typed replies: decoding constrained to a JSON schema, with llguidance.

Owns the compiling of schemas (off the step thread, cached by the tokenizer) and one matcher per row.
Constrained rows decode in the same batch as the others: only their logits are masked.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy as ll_numpy
import mlx.core as mx
import numpy as np

from offbook.bus.errors import InvalidRequest

_LOCK = threading.Lock()
_TOKENIZERS: dict[int, tuple[Any, Any]] = {}
"""By the model's id: the model, held so that its id is not another's, and llguidance's tokenizer."""


def tokenizer_for(loaded: Any) -> Any:
    """llguidance's form of the model's tokenizer; made once, it takes about a second.

    Raises:
        InvalidRequest: the tokenizer is not one llguidance can use.
    """
    with _LOCK:
        held = _TOKENIZERS.get(id(loaded))
        known = held[1] if held is not None else None
        if known is None:
            inner = getattr(loaded.tokenizer, "_tokenizer", loaded.tokenizer)
            try:
                known = llguidance.hf.from_tokenizer(inner, eos_token=sorted(loaded.eos_token_ids))
            except ValueError as error:
                raise InvalidRequest(f"typed replies need a fast tokenizer: {error}") from error
            _TOKENIZERS[id(loaded)] = (loaded, known)
        return known


def compile_schema(schema: dict[str, Any], loaded: Any) -> Constraint:
    """A constraint for one reply.

    Raises:
        InvalidRequest: the schema uses something that cannot be enforced; the message says what.
    """
    tokenizer = tokenizer_for(loaded)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    error = matcher.get_error()
    if error:
        raise InvalidRequest(f"the reply's JSON schema cannot be enforced: {error}")
    return Constraint(matcher, tokenizer.vocab_size)


class Constraint:
    """Which tokens may come next in one row."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._mask = ll_numpy.allocate_token_bitmask(1, vocabulary)

    @property
    def finished(self) -> bool:
        """Whether the reply is complete."""
        return bool(self._matcher.is_stopped())

    def masked(self, logits: mx.array) -> mx.array:
        """Logits [vocabulary] with impossible tokens at minus infinity."""
        ll_numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)
        bits = np.unpackbits(self._mask[0].view(np.uint8), bitorder="little")[: logits.shape[-1]]
        allowed = np.zeros(logits.shape[-1], np.bool_)
        allowed[: len(bits)] = bits.astype(np.bool_)
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def accept(self, token: int) -> None:
        """The row drew this token."""
        self._matcher.consume_token(token)
