"""From generated ids to text as it becomes certain, and stop strings.

A stop string may be split over tokens, so text that could be its beginning is held back; neither a
stop string nor a part of one reaches the stream.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What of everything so far may be shown now. Sets ``stopped`` at a stop string."""
        self.held += text
        hits = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if hits:
            self.stopped = True
            shown, self.held = self.held[: min(hits)], ""
            return shown
        keep = max((overlap(self.held, stop) for stop in self.stops), default=0)
        shown = self.held[: len(self.held) - keep]
        self.held = self.held[len(shown) :]
        return shown

    def pass_over(self, text: str) -> str:
        """Text that is not shown, but at which a stop string may end it all; else as ``push``."""
        hits = [at for stop in self.stops if (at := (self.held + text).find(stop)) >= 0]
        if not hits:
            return ""
        self.stopped = True
        shown, self.held = self.held[: min(hits)], ""
        return shown

    def finish(self) -> str:
        """The text still held back, at the end of generation."""
        rest, self.held = self.held, ""
        return rest


class BytesDetokenizer:
    """mlx-lm's streaming protocol over bytes: a typed reply's text is byte for byte what the grammar took.

    Args:
        spelling: the bytes of an id.
    """

    def __init__(self, spelling: Callable[[int], bytes]) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._new = ""

    def add_token(self, token: int) -> None:
        self._new += self._decoder.decode(self._spelling(token))

    def finalize(self) -> None:
        self._new += self._decoder.decode(b"", final=True)

    @property
    def last_segment(self) -> str:
        new, self._new = self._new, ""
        return new


class TextStream:
    """One row's text: ids in, certain text out.

    Args:
        detokenizer: an mlx-lm streaming detokenizer of this row's own.
        special: spellings of ids that are no text (``Dialogue.special``): a model may draw one in mid-reply.
    """

    def __init__(
        self, detokenizer: Any, stops: Sequence[str], special: Mapping[int, str] | None = None
    ) -> None:
        self.detokenizer = detokenizer
        self.special = special or {}
        self.matcher = StopMatcher(stops)
        self.text = ""

    @property
    def stopped(self) -> bool:
        return self.matcher.stopped

    def push(self, token: int) -> str:
        spelling = self.special.get(token)
        if spelling is not None:
            return self._show(self.matcher.pass_over(spelling))
        self.detokenizer.add_token(token)
        return self._show(self.matcher.push(self.detokenizer.last_segment))

    def finish(self) -> str:
        if self.stopped:
            return ""
        self.detokenizer.finalize()
        shown = self.matcher.push(self.detokenizer.last_segment)
        return self._show(shown + ("" if self.stopped else self.matcher.finish()))

    def _show(self, piece: str) -> str:
        self.text += piece
        return piece
