"""A cancellation that nobody asked for: a handler awaited something that was cancelled.

To asyncio it looks like the end of the task itself, so it would end the whole team. It is an error of the
handler like any other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class StrayCancellation(RuntimeError):
    """Something that was awaited had been cancelled, and not by whoever runs the code."""


@contextmanager
def own_errors() -> Iterator[None]:
    """Run someone else's code: what leaves it is its own error.

    A ``CancelledError``, while no scope around it was cancelled, becomes a ``StrayCancellation``.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if anyio.current_effective_deadline() == -math.inf:  # a scope around this was cancelled
            raise
        task = asyncio.current_task()
        while task is not None and task.cancelling():  # it cancelled itself
            task.uncancel()
        raise StrayCancellation(
            "a CancelledError left the handler, though nobody had cancelled its turn: something that it "
            "awaited was cancelled; catch asyncio.CancelledError where that is expected"
        ) from error
