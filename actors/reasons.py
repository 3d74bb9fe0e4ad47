"""Reasons: an exception in words, for logs, dead letters and askers."""

from __future__ import annotations

from collections.abc import Iterator

from offbook.bus.errors import in_words

_NAMED = 5
"""Errors of a group that are named; the rest are counted."""


def reason_of(exc: BaseException) -> str:
    """``"ValueError: what was wrong"``; for a group of errors also each error in it.

    A group's own text is only "unhandled errors in a TaskGroup (1 sub-exception)".
    """
    text = in_words(exc)
    if not isinstance(exc, BaseExceptionGroup):
        return text
    leaves = [in_words(leaf) for leaf in _leaves(exc)]
    more = f"; and {len(leaves) - _NAMED} more" if len(leaves) > _NAMED else ""
    return f"{text}: {'; '.join(leaves[:_NAMED])}{more}"


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for exc in group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            yield from _leaves(exc)
        else:
            yield exc
