"""What somebody may have meant by a kind that is not there.

Owns the words after "nobody serves ...": the closest known kind, and which are known.
"""

from __future__ import annotations

import difflib
from functools import lru_cache

MOST = 64
"""Kinds compared and named at most: an error is a line, and looking for one must stay cheap."""

CLOSE = 0.75
"""How alike two words are that differ by a slip; 'vilager' and 'villager' have 0.93."""


@lru_cache(maxsize=1024)
def closest(kind: str, known: tuple[str, ...]) -> str | None:
    """The known kind that ``kind`` is most likely a slip of; None if it is like none of them."""
    by_case = {one.lower(): one for one in known[:MOST]}
    found = difflib.get_close_matches(kind.lower(), by_case, n=1, cutoff=CLOSE)
    return by_case[found[0]] if found else None


def hint(kind: str, known: tuple[str, ...]) -> str:
    """``did you mean 'villager'? Known kinds: 'baker', 'villager'``, for the end of an error message."""
    shown = ", ".join(repr(one) for one in known[:MOST]) + (", ..." if len(known) > MOST else "")
    there = f"known kinds: {shown}" if known else "no kinds are known"
    close = closest(kind, known)
    return there if close is None else f"did you mean {close!r}? K{there[1:]}"
