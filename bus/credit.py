"""Credit-based flow control: who may still send how much.

Owns the counting on both ends. A receiver starts with a known window; the sender takes from it, and the
receiver gives back what it has consumed, a quarter of the window at a time. A sender that finds the
window closed waits, so what is in transit is bounded in messages and, up to one message, in bytes.
"""

from __future__ import annotations

from collections import deque

import anyio
import anyio.lowlevel

MESSAGES = 256
"""Messages in one window: enough that a round trip over a local socket never runs dry."""

BYTES = 32 * 1024 * 1024
"""Bytes in one window: two messages of the largest size."""


class Window:
    """The sender's end, for senders that queue by themselves."""

    __slots__ = ("bytes", "limit_bytes", "limit_messages", "messages")

    def __init__(self, messages: int = MESSAGES, bytes: int = BYTES) -> None:
        self.limit_messages = self.messages = messages
        self.limit_bytes = self.bytes = bytes

    @property
    def open(self) -> bool:
        """True if one more message may be sent, of any legal size."""
        return self.messages > 0 and self.bytes > 0

    def take(self, size: int) -> None:
        """Count a message of ``size`` bytes as sent."""
        self.messages -= 1
        self.bytes -= size

    def give(self, messages: int, bytes: int) -> None:
        """Take back credit; never above the window's size, whatever the peer claims."""
        self.messages = min(self.limit_messages, self.messages + max(0, messages))
        self.bytes = min(self.limit_bytes, self.bytes + max(0, bytes))


class Returns:
    """The receiver's end: collects what was consumed until it is worth a message."""

    __slots__ = ("_bytes", "_due_bytes", "_due_messages", "_messages")

    def __init__(self, messages: int = MESSAGES, bytes: int = BYTES) -> None:
        self._due_messages = max(1, messages // 4)
        self._due_bytes = max(1, bytes // 4)
        self._messages = 0
        self._bytes = 0

    def consumed(self, size: int) -> tuple[int, int] | None:
        """Count a consumed message; returns ``(messages, bytes)`` to give back when a quarter is reached."""
        self._messages += 1
        self._bytes += size
        if self._messages < self._due_messages and self._bytes < self._due_bytes:
            return None
        due = (self._messages, self._bytes)
        self._messages = self._bytes = 0
        return due


class _Waiter:
    __slots__ = ("admitted", "generation", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.admitted = anyio.Event()
        self.generation = -1


class Gate:
    """The sender's end, for many tasks that send through one window: waits in order of arrival.

    Attributes:
        generation: how often it was reset; credit taken in an earlier generation is void.
    """

    def __init__(self, messages: int = MESSAGES, bytes: int = BYTES) -> None:
        self._window = Window(messages, bytes)
        self._waiters: deque[_Waiter] = deque()
        self.generation = 0

    def try_take(self, size: int) -> bool:
        """Take credit for one message if nobody waits and the window is open."""
        if self._waiters or not self._window.open:
            return False
        self._window.take(size)
        return True

    async def take(self, size: int) -> int:
        """Wait for credit for one message; returns its generation. When cancelled, none was taken."""
        if self.try_take(size):
            return self.generation
        waiter = _Waiter(size)
        self._waiters.append(waiter)
        try:
            await waiter.admitted.wait()
        except BaseException:
            if waiter.generation < 0:
                self._waiters.remove(waiter)
            elif waiter.generation == self.generation:  # credit came at the same moment: pass it on
                self._window.give(1, size)
            self._admit()
            raise
        return waiter.generation

    def give(self, messages: int, bytes: int) -> None:
        """Credit came back."""
        self._window.give(messages, bytes)
        self._admit()

    def reset(self, messages: int = MESSAGES, bytes: int = BYTES) -> None:
        """Start anew on a new connection: what was in transit is gone. Waiters keep waiting."""
        self.generation += 1
        self._window = Window(messages, bytes)
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self._window.open:
            waiter = self._waiters.popleft()
            self._window.take(waiter.size)
            waiter.generation = self.generation
            waiter.admitted.set()
