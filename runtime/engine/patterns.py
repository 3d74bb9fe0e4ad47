"""Short texts that match a pattern.

Hints for the search for a reply's end: what is proposed here is checked against the grammar before it is
used, so a pattern that is not understood costs nothing but a longer search.
"""

from __future__ import annotations

import json
import re
from typing import Any

MOST = 256
"""Characters of an example at most."""

_CATEGORIES = {"CATEGORY_DIGIT": "0", "CATEGORY_WORD": "a", "CATEGORY_SPACE": " ", "CATEGORY_NOT_DIGIT": "a"}


def example(pattern: str) -> bytes | None:
    """A short text of the pattern, as it stands inside of a JSON string; None if none was found."""
    try:
        from re import _parser  # type: ignore[attr-defined]  # what `re` itself parses with

        text = _shortest(_parser.parse(pattern))
    except (ImportError, AttributeError, TypeError, ValueError, RecursionError, re.error):
        return None
    if text is None or len(text) > MOST or not re.search(pattern, text):
        return None
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()


def patterns_in(schema: Any) -> list[str]:
    """Every pattern of a schema, those of keys included."""
    if isinstance(schema, list):
        return [pattern for item in schema for pattern in patterns_in(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    keys = schema.get("patternProperties")
    own += list(keys) if isinstance(keys, dict) else []
    return own + [pattern for value in schema.values() for pattern in patterns_in(value)]


def _shortest(parts: Any) -> str | None:
    """The shortest text of a parsed pattern; None if a part of it is of an unknown kind."""
    out = ""
    for kind, value in parts:
        text = _of(str(kind), value)
        if text is None or len(out) > MOST:
            return None
        out += text
    return out


def _of(kind: str, value: Any) -> str | None:
    match kind:
        case "LITERAL":
            return chr(value)
        case "ANY":
            return "a"
        case "NOT_LITERAL":
            return "a" if value != ord("a") else "b"
        case "AT":
            return ""
        case "CATEGORY":
            return _CATEGORIES.get(str(value), "-")
        case "IN":
            return _member(value)
        case "SUBPATTERN":
            return _shortest(value[-1])
        case "ATOMIC_GROUP":
            return _shortest(value)
        case "BRANCH":
            ways = [way for branch in value[1] if (way := _shortest(branch)) is not None]
            return min(ways, key=len, default=None)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            once = _shortest(value[2]) if value[0] else ""
            return None if once is None else once * min(value[0], MOST + 1)
    return None


def _member(items: Any) -> str | None:
    """A character of a set."""
    if str(items[0][0]) == "NEGATE":
        excluded = re.compile("[^" + "".join(map(_as_written, items[1:])) + "]")
        return next((char for char in "a0A -_.,!" if excluded.fullmatch(char)), None)
    kind, value = str(items[0][0]), items[0][1]
    return chr(value[0]) if kind == "RANGE" else _of(kind, value)


def _as_written(item: Any) -> str:
    kind, value = str(item[0]), item[1]
    if kind == "RANGE":
        return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
    if kind == "CATEGORY":
        return {"CATEGORY_DIGIT": r"\d", "CATEGORY_WORD": r"\w", "CATEGORY_SPACE": r"\s"}.get(str(value), "")
    return re.escape(chr(value))
