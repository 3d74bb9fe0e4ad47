"""What happens when a transcript outgrows the model's context.

The default keeps the persona and the most recent half, cut at the end of a turn where there is one.
The shortened history is prefilled again: its tokens stand at other positions now.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from offbook.bus.errors import ContextTooLarge

from ..kv.table import Ids


@dataclass(frozen=True)
class Fitted:
    """A request that fits: ``ids`` are everything, ``kept`` leading ids are the caller's own prefix,
    ``truncated`` ids of the transcript were left out."""

    ids: Ids
    kept: int
    truncated: int


def fit(
    agent: str,
    transcript: Ids,
    prompt: Ids,
    *,
    max_tokens: int,
    limit: int,
    persona: int,
    turn_ends: Collection[int],
    refuse: bool,
    of: str = "the model's context",
) -> Fitted:
    """Transcript and prompt within ``limit`` tokens, ``max_tokens`` of answer included.

    Args:
        persona: leading ids of the transcript that render the system prompt.
        turn_ends: ids that end a turn; the cut is moved behind one.
        refuse: raise instead of leaving anything out.
        of: what has the limit, for the error.

    Raises:
        ContextTooLarge: persona, prompt and answer alone do not fit, or ``refuse`` is set.
    """
    total = len(transcript) + len(prompt) + max_tokens
    if total <= limit:
        return Fitted(np.concatenate([transcript, prompt]), len(transcript), 0)
    least = min(persona, len(transcript)) + len(prompt) + max_tokens
    if refuse or least > limit:
        raise ContextTooLarge(
            f"{agent}: a history of {len(transcript)} tokens, a prompt of {len(prompt)} and max_tokens="
            f"{max_tokens} make {total}, more than {of} of {limit}; "
            + ("shorten one of them" if least > limit else "forget, rewind or allow keep_recent"),
            limit=limit,
            needed=total,
            system_tokens=persona,
        )
    ends = np.flatnonzero(np.isin(transcript, list(turn_ends)))
    inside = ends[ends < persona]
    head = int(inside[-1]) + 1 if len(inside) else persona
    recent = min((len(transcript) - head) // 2, limit - max_tokens - len(prompt) - head)
    start = len(transcript) - recent
    later = ends[(ends >= start - 1) & (ends < len(transcript) - 1)]
    if len(later):
        start = int(later[0]) + 1
    ids = np.concatenate([transcript[:head], transcript[start:], prompt])
    return Fitted(ids, head, start - head)
