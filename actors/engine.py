"""The engine as agents see it: a service on the bus that may die and come back.

Owns waiting and retrying. A call whose engine is lost waits for the next engine and is sent again, within
its time; what was already streamed is not shown twice. Hints (prefetch, forget) are sent without waiting
and may be lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio

from offbook.bus.errors import (
    ConnectionLost,
    DeadlineExceeded,
    EngineBusy,
    EngineFailed,
    NoSuchActor,
    OffbookError,
)

from .lm import ENGINE_ADDRESS, Delta, Forget, Generated, Locate, MemoryRef, Prefetch, StateHandle

if TYPE_CHECKING:
    from offbook.bus.client import Bus

log = logging.getLogger("offbook.actors.engine")

PATIENCE = 600.0
"""Seconds a call waits for an engine that is not there. Loading a large model takes minutes."""

LONGEST_CALL = 3600.0
"""Seconds for one call of a turn that has no deadline."""

_FAILURES = 3
"""Tries of a call that the engine itself fails at, before the turn gets the error."""

_DELAY = (0.05, 1.0)

Emit = Callable[[str], Awaitable[None]]


class Engine:
    """Calls to the engine at ``engine/main``.

    Args:
        bus: the connected client.
        patience: see :data:`PATIENCE`.
    """

    def __init__(self, bus: Bus, *, patience: float = PATIENCE) -> None:
        self._bus = bus
        self._patience = patience
        self._back = anyio.Event()
        self.retries = 0

    async def generate(
        self,
        body: bytes,
        *,
        sender: str,
        traceparent: str,
        seconds: float,
        patient: bool,
        emit: Emit | None,
    ) -> Generated:
        """Send an encoded ``Generate`` and wait for the result.

        Args:
            seconds: how long to wait, engine restarts included.
            patient: nobody waits for this turn's answer, so wait while the engine is busy.
            emit: called with each piece of text, in order and once.

        Raises:
            DeadlineExceeded, EngineFailed, EngineBusy, ContextTooLarge, InvalidRequest, ModelError.
        """
        start = time.monotonic()
        missing_since: float | None = None
        failures = 0
        delay, longest = _DELAY
        shown = _Shown(emit)
        while True:
            left = start + seconds - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"no text for {sender} within {seconds:.0f} s")
            try:
                return await self._once(body, sender, traceparent, left, shown)
            except (ConnectionLost, NoSuchActor) as exc:
                missing_since = missing_since or time.monotonic()
                if time.monotonic() - missing_since > self._patience:
                    raise EngineFailed(
                        f"no engine serves {ENGINE_ADDRESS} since {self._patience:.0f} s: {exc}; start one"
                    ) from exc
                log.info("%s waits for the engine: %s", sender, exc)
            except EngineBusy as exc:
                if not patient:
                    raise
                log.info("%s waits for its turn: %s", sender, exc)
            except EngineFailed as exc:
                failures += 1
                if failures >= _FAILURES:
                    raise
                log.warning("the engine failed for %s, trying again: %s", sender, exc)
            self.retries += 1
            await anyio.sleep(min(delay, max(0.0, start + seconds - time.monotonic())))
            delay = min(delay * 2, longest)

    async def _once(self, body: bytes, sender: str, trace: str, left: float, shown: _Shown) -> Generated:
        generated: Generated
        if shown.emit is None:
            generated = await self._bus.ask(
                ENGINE_ADDRESS,
                body,
                type="Generate",
                returns=Generated,
                sender=sender,
                traceparent=trace,
                timeout=left,
            )
            return generated
        shown.restart()
        async with self._bus.stream(
            ENGINE_ADDRESS,
            body,
            type="Generate",
            returns=Generated,
            yields=Delta,
            sender=sender,
            traceparent=trace,
            timeout=left,
        ) as reply:
            async for piece in reply:
                await shown.add(piece.text)
            generated = reply.result
        await shown.finish(generated.text)
        return generated

    async def locate(self, memory: MemoryRef, *, seconds: float) -> StateHandle:
        """Where the KV of a transcript is now. Waits ``seconds`` at most for an engine that is away.

        Raises:
            DeadlineExceeded, EngineFailed, NoSuchActor: there is none.
        """
        end = time.monotonic() + min(seconds, self._patience)
        delay, longest = _DELAY
        while True:
            try:
                handle: StateHandle = await self._bus.ask(
                    ENGINE_ADDRESS, Locate(memory=memory), timeout=min(seconds, 60.0), returns=StateHandle
                )
                return handle
            except (ConnectionLost, NoSuchActor):
                if time.monotonic() + delay > end:
                    raise
            self.retries += 1
            await anyio.sleep(delay)
            delay = min(delay * 2, longest)

    async def hint(self, message: Prefetch | Forget) -> None:
        """Send a hint; an absent engine needs none."""
        try:
            await self._bus.tell(ENGINE_ADDRESS, message, timeout=10.0)
        except OffbookError as exc:
            log.debug("a hint was lost: %s", exc)


class _Shown:
    """What of a text was emitted, over all tries of a call."""

    def __init__(self, emit: Emit | None) -> None:
        self.emit = emit
        self._shown = ""
        self._now = ""

    def restart(self) -> None:
        """A new try begins: its text repeats what was shown, as calls are seeded."""
        self._now = ""

    async def add(self, piece: str) -> None:
        self._now += piece
        await self._show()

    async def finish(self, text: str) -> None:
        self._now = text
        await self._show()

    async def _show(self) -> None:
        if self._shown.startswith(self._now):
            return  # still repeating what was shown
        # A different text (another model came back) goes on where it is; nothing can be unsaid.
        new, self._shown = self._now[len(self._shown) :], self._now
        if new and self.emit is not None:
            await self.emit(new)
