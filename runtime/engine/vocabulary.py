"""A model's vocabulary as constrained decoding needs it: bytes to ids, and the fewest ids for some bytes."""

from __future__ import annotations

import threading
from typing import Any

import llguidance
import llguidance.hf
import numpy as np

from offbook.bus.errors import InvalidRequest

LONGEST = 16
"""Tokens of more bytes are not looked for when bytes are put into few tokens."""

_LOCK = threading.Lock()
_KNOWN: dict[int, tuple[Any, Vocabulary]] = {}
"""By the model's id: the model, held so that its id is not another's, and its vocabulary."""


class Vocabulary:
    """llguidance's form of a tokenizer, and which bytes each token stands for.

    Attributes:
        tokenizer: for making matchers. eos: an id that ends a reply. size: ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos = int(tokenizer.eos_token)
        self.size = int(tokenizer.vocab_size)
        self._ends = frozenset(tokenizer.eos_tokens)
        self._ids: dict[bytes, int] = {}
        for token in range(self.size):
            if token in self._ends or tokenizer.is_special_token(token):
                continue
            spelling = tokenizer.decode_bytes([token])
            if 0 < len(spelling) <= LONGEST:
                self._ids.setdefault(spelling, token)
        singles = np.array([self._ids.get(bytes([byte]), -1) for byte in range(256)])
        self._known = singles >= 0
        self._word, self._bit = np.maximum(singles, 0) >> 3, (np.maximum(singles, 0) & 7).astype(np.uint8)
        self._singles: list[int] = singles.tolist()

    def allowed_bytes(self, mask: bytes) -> list[int]:
        """The bytes that may come next, by a matcher's mask (one bit a token)."""
        bits = (np.frombuffer(mask, np.uint8)[self._word] >> self._bit) & 1
        found: list[int] = np.flatnonzero(bits.astype(np.bool_) & self._known).tolist()
        return found

    def byte(self, value: int) -> int:
        """The token of one byte that ``allowed_bytes`` gave."""
        return self._singles[value]

    def spelling(self, token: int) -> bytes:
        """The bytes of a token; none of one that ends a reply."""
        return b"" if token in self._ends else bytes(self.tokenizer.decode_bytes([token]))

    def spelled(self, text: bytes) -> list[int]:
        """Tokens of ``text``, a byte each where there is one for it."""
        ids = [self._singles[byte] for byte in text]
        return ids if min(ids, default=0) >= 0 else list(self.tokenizer.tokenize_bytes(text))

    def fewest(self, text: bytes) -> list[int]:
        """As few tokens as make up ``text``."""
        ids, size = self._ids, len(text)
        best: list[tuple[int, int, int]] = [(0, 0, 0)]  # tokens so far, where the last began, its id
        for end in range(1, size + 1):
            choice = (size + 1, 0, -1)
            for start in range(max(0, end - LONGEST), end):
                count = best[start][0] + 1
                if count < choice[0] and (token := ids.get(text[start:end])) is not None:
                    choice = (count, start, token)
            best.append(choice)
        if best[size][0] > size:
            return list(self.tokenizer.tokenize_bytes(text))
        out: list[int] = []
        while size:
            _, size, token = best[size]
            out.append(token)
        return out[::-1]


def vocabulary_of(loaded: Any) -> Vocabulary:
    """The model's vocabulary; made once, it takes about a second.

    Raises:
        InvalidRequest: the tokenizer is not one llguidance can use.
    """
    with _LOCK:
        held = _KNOWN.get(id(loaded))
        if held is None:
            inner = getattr(loaded.tokenizer, "_tokenizer", loaded.tokenizer)
            try:
                tokenizer = llguidance.hf.from_tokenizer(inner, eos_token=sorted(loaded.eos_token_ids))
            except ValueError as error:
                raise InvalidRequest(f"typed replies need a fast tokenizer: {error}") from error
            held = _KNOWN[id(loaded)] = (loaded, Vocabulary(tokenizer))
        return held[1]
