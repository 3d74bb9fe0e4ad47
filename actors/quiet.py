"""Quiet: whether anything is left to do now.

Owns the count of things in progress. Virtual time may jump, and ``idle()`` returns, only when it is zero.
Whoever hands work on takes a hold for the next before giving up its own, so the count has no false zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel


class Quiet:
    """Counts holds and wakes those who wait for none."""

    def __init__(self) -> None:
        self._holds = 0
        self._zero = anyio.Event()
        self._zero.set()

    @property
    def holds(self) -> int:
        """Things in progress."""
        return self._holds

    def take(self) -> None:
        """Something begins."""
        if self._holds == 0:
            self._zero = anyio.Event()
        self._holds += 1

    def give(self) -> None:
        """Something has ended."""
        assert self._holds > 0, "more ends than beginnings"
        self._holds -= 1
        if self._holds == 0:
            self._zero.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Something is in progress inside the block."""
        self.take()
        try:
            yield
        finally:
            self.give()

    async def wait(self) -> None:
        """Return once nothing is in progress, and nothing began while this task was being woken."""
        while True:
            await self._zero.wait()
            await anyio.lowlevel.checkpoint()
            if self._holds == 0:
                return
