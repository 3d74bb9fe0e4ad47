"""A queue between the task that receives and the tasks that consume.

Owns waiting for items. Taking an item involves no await after it left the queue, so a cancelled wait
loses nothing. The producer never waits: credit bounds what it can put in.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from offbook.bus.socket import BURST

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items in order of arrival; ends with an error, or quietly, after the last one was taken."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._changed = anyio.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._taken = 0

    def put(self, item: T) -> None:
        """Add an item; ignored once closed."""
        if not self._closed:
            self.items.append(item)
            self._notify()

    def close(self, error: BaseException | None = None) -> None:
        """No more items will come: consumers get what is there, then ``error`` or the end."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._notify()

    def _notify(self) -> None:
        if not self._changed.is_set():
            self._changed.set()

    async def get(self) -> T:
        """The next item.

        Raises:
            StopAsyncIteration: closed and empty.
        """
        self._taken += 1
        if self._taken % BURST == 0:
            await anyio.lowlevel.checkpoint()
        while not self.items:
            if self._closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()
        return self.items.popleft()
