"""A ZeroMQ socket on an anyio event loop.

Owns the one subtle thing about ZeroMQ and event loops: the socket's file descriptor is edge-triggered.
It turns readable when *something* happened, once, and any call on the socket may consume that signal.
So one task owns a socket for both directions, and whoever wants to send leaves the message with the
owner and calls :meth:`MessageSocket.wake`. The owner tries without blocking, re-checks ``EVENTS``, and
only then waits for the descriptor. Nothing is awaited between taking a message out of ZeroMQ and
handing it over, so a cancelled receive loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import zmq

BURST = 64
"""Messages an owner handles before it lets others run: long enough to amortise a pass of the event
loop (3 µs each), short enough that nobody waits more than about a millisecond."""

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)


class MessageSocket:
    """One ZeroMQ socket, owned by one task.

    The ``*_nowait`` methods hold the logic; :meth:`receive` and :meth:`send` only add waiting. All
    methods must be called from the event loop's thread, and only one task may wait at a time.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._woken = False
        self._parked: anyio.CancelScope | None = None
        self._blocked = False  # a send found no room: writability is of interest
        self._since_checkpoint = 0

    def receive_nowait(self) -> list[bytes] | None:
        """The next whole message as frames, or None if there is none now."""
        socket = self.socket
        try:
            frames = [socket.recv(_NOBLOCK)]
        except zmq.Again:
            return None
        while socket.getsockopt(_RCVMORE):
            frames.append(socket.recv(_NOBLOCK))
        return frames

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """Send a whole message, or return False (and send nothing) if there is no room now.

        Raises:
            zmq.ZMQError: e.g. ``EHOSTUNREACH`` for a ROUTER whose peer has gone.
        """
        send = self.socket.send
        last = len(frames) - 1
        try:
            # The first frame decides: ZeroMQ counts room in whole messages.
            for frame in frames[:last]:
                send(frame, _MORE)
            send(frames[last], _NOBLOCK)
        except zmq.Again:
            self._blocked = True
            return False
        self._blocked = False
        return True

    def wake(self) -> None:
        """Make the owner's current or next :meth:`wait` return."""
        if not self._woken:
            self._woken = True
            if self._parked is not None:
                self._parked.cancel()

    async def wait(self) -> None:
        """Wait until there may be something to receive, room for a send that had none, or a wake.

        May return early; the owner tries again and waits again.
        """
        if self._parked is not None:
            raise RuntimeError("two tasks wait on one socket; leave messages with its owner instead")
        if not self._woken:
            # Asking for EVENTS handles what the descriptor's signal stood for, so it comes after every
            # attempt to send or receive and right before waiting for the next signal.
            wanted = _POLLIN | _POLLOUT if self._blocked else _POLLIN
            if not int(self.socket.getsockopt(_EVENTS)) & wanted:
                with anyio.CancelScope() as scope:
                    self._parked = scope
                    try:
                        await anyio.wait_readable(self._fd)
                    finally:
                        self._parked = None
        self._woken = False

    async def breathe(self) -> None:
        """Let other tasks run, every ``BURST`` calls."""
        self._since_checkpoint += 1
        if self._since_checkpoint >= BURST:
            self._since_checkpoint = 0
            await anyio.lowlevel.checkpoint()

    async def receive(self) -> list[bytes]:
        """Wait for the next message. Cancelling loses nothing."""
        await self.breathe()
        while (frames := self.receive_nowait()) is None:
            await self.wait()
        return frames

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send a message, waiting for room. When cancelled, the message was not sent."""
        await self.breathe()
        while not self.send_nowait(frames):
            await self.wait()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; unsent messages get ``linger_ms`` milliseconds to leave in the background."""
        if not self.socket.closed:
            self.socket.close(linger=linger_ms)
