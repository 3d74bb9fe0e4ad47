"""Questions between actors: who waits for whom.

Owns the graph of waiting actors. A question that would close a circle is refused at once, whether the
circle lies in one chain of calls or was closed by actors that asked each other independently.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from offbook.bus.errors import ConnectionLost, CycleError, NoSuchActor

if TYPE_CHECKING:
    from offbook.bus.client import Bus

_RETRY = 0.05
"""Seconds between tries to reach a receiver that is coming back."""


class Questions:
    """Asks on behalf of actors."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waits: dict[str, Counter[str]] = {}

    async def ask(
        self,
        to: str,
        type: str,
        body: bytes,
        *,
        id: str,
        sender: str,
        chain: tuple[str, ...],
        deadline: float,
        patient: bool,
        returns: Any,
    ) -> Any:
        """Ask and wait.

        Args:
            id: the same for every try of the same question; the receiver answers it once.
            chain: the actors that wait, ``sender`` included.
            deadline: Unix seconds.
            patient: the turn goes on after a restart, so the asked kind may be about to be registered.
            returns: the declared type of the answer, or Any.

        Raises:
            CycleError: the actors would wait for each other.
            OffbookError: as the receiver or the bus says.
        """
        with self._waiting(sender, to):
            while True:
                try:
                    return await self._bus.ask(
                        to,
                        body,
                        type=type,
                        id=id,
                        sender=sender,
                        chain=chain,
                        deadline=deadline,
                        timeout=max(deadline - time.time(), 0.001),
                        returns=None if returns is Any else returns,
                    )
                except (ConnectionLost, NoSuchActor) as exc:
                    gone = isinstance(exc, NoSuchActor) and (not patient or "host" in exc.details)
                    if gone or time.time() >= deadline:
                        raise
                    await anyio.sleep(_RETRY)

    @contextmanager
    def _waiting(self, sender: str, to: str) -> Iterator[None]:
        """``sender`` waits for ``to`` inside the block."""
        path = self._path(to, sender)
        if path:
            circle = [sender, *path]
            raise CycleError(f"these actors would wait for each other: {' -> '.join(circle)}", chain=circle)
        waits = self._waits.setdefault(sender, Counter())
        waits[to] += 1
        try:
            yield
        finally:
            waits[to] -= 1
            if not waits[to]:
                del waits[to]
            if not waits:
                self._waits.pop(sender, None)

    def _path(self, start: str, goal: str) -> list[str]:
        """A path from one actor to another along who waits for whom; empty if there is none."""
        trail: dict[str, str] = {start: ""}
        front = [start]
        while front:
            here = front.pop()
            if here == goal:
                path = []
                while here:
                    path.append(here)
                    here = trail[here]
                return path[::-1]
            for there in self._waits.get(here, ()):
                if there not in trail:
                    trail[there] = here
                    front.append(there)
        return []
