"""A client's connection to the broker, from ``HELLO`` to its end.

Owns one DEALER socket and the task that works it. A link is never mended: when it ends, the client
makes a new one, with a new identity, so nothing of an old session can leak into the next.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import zmq

from offbook.bus import control
from offbook.bus.envelope import Envelope, Kind, decode_header, encode_header, new_id
from offbook.bus.errors import ConnectionLost, OffbookError, ProtocolError, from_wire
from offbook.bus.monitor import ENDED, NOT_CONNECTED, REFUSED, Monitor
from offbook.bus.socket import BURST, MessageSocket

BATCH_FRAMES = 128
"""Frames per multipart message: what waits together leaves together."""

HANDSHAKE = 5.0
"""Seconds for the broker to answer ``HELLO``."""

_LINGER_MS = 500


class Link:
    """One session with a broker.

    Args:
        endpoint: ``ipc://`` or ``tcp://``.
        hello: how to introduce ourselves.
        up: called once, when the broker has welcomed us.
        receive: called with each envelope and body that is not the link's own business. Both are
            called by the link's task and must not block.
        arm: sets the socket's encryption, if any.
    """

    def __init__(
        self,
        endpoint: str,
        hello: control.Hello,
        up: Callable[[Link], None],
        receive: Callable[[Link, Envelope, bytes], None],
        arm: Callable[[zmq.Socket[bytes]], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.welcome: control.Welcome | None = None
        self._hello = hello
        self._hello_id = new_id()
        self._up = up
        self._receive = receive
        self._outbox: list[bytes] = []
        self._end: OffbookError | None = None
        self._seen = 0.0
        self._closed = False
        self._welcomed = anyio.Event()
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)  # a new session is a new socket
        dealer.setsockopt(zmq.LINGER, _LINGER_MS)
        if arm is not None:
            arm(dealer)
        self._socket = MessageSocket(dealer)

    # Sending

    def post(self, envelope: Envelope, body: bytes) -> None:
        """Leave a message with the link's task. Dropped silently once the link has ended."""
        if self._end is not None:
            return
        if not self._outbox:
            self._socket.wake()
        self._outbox.append(encode_header(envelope))
        self._outbox.append(body)

    def _flush(self) -> None:
        frames = self._outbox
        if not frames:
            return
        if len(frames) <= BATCH_FRAMES:
            if self._socket.send_nowait(frames):
                self._outbox = []
            return
        sent = 0
        while sent < len(frames) and self._socket.send_nowait(frames[sent : sent + BATCH_FRAMES]):
            sent += BATCH_FRAMES
        self._outbox = frames[sent:]

    # Life

    async def run(self) -> OffbookError:
        """Connect and work until the session ends; returns why. Cancelling ends it without a word."""
        monitor = Monitor(self._socket.socket, ENDED | REFUSED | NOT_CONNECTED)
        try:
            self._socket.socket.connect(self.endpoint)
            self.post(Envelope(kind=Kind.HELLO, id=self._hello_id), control.pack(self._hello))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, monitor)
                tasks.start_soon(self._beat)
                await self._own_socket()
                tasks.cancel_scope.cancel()
            return self._end or ConnectionLost("the connection ended")
        except zmq.ZMQError as exc:
            return ConnectionLost(f"cannot connect to {self.endpoint}: {exc}")
        finally:
            self._closed = True
            self._end = self._end or ConnectionLost("the connection was closed")
            monitor.close()
            self._socket.close(_LINGER_MS)

    def say_goodbye(self) -> None:
        """Send what is left and ``BYE``; call it right before cancelling :meth:`run`."""
        if self.welcome is not None and not self._closed:
            self.post(Envelope(kind=Kind.BYE), b"")
            self._flush()

    def end(self, reason: OffbookError) -> None:
        """Make :meth:`run` return ``reason``, once what has arrived is handled."""
        if self._end is None:
            self._end = reason
            self._socket.wake()

    def _told(self, reason: OffbookError) -> None:
        """The broker said why: also when the connection's end was heard of before that was read."""
        self._end = None
        self.end(reason)

    async def _own_socket(self) -> None:
        while True:
            handled = 0
            idle = False
            while handled < BURST:
                frames = self._socket.receive_nowait()
                if frames is None:
                    idle = True
                    break
                handled += self._on_message(frames)
            if idle and self._end is not None:
                return
            self._flush()
            if handled:
                await anyio.lowlevel.checkpoint()
            else:
                await self._socket.wait()

    async def _watch(self, monitor: Monitor) -> None:
        while True:
            event, _ = await monitor.next()
            if event & ENDED:
                self.end(ConnectionLost(f"the broker at {self.endpoint} closed the connection"))
            elif event & REFUSED:
                self.end(
                    ConnectionLost(f"{self.endpoint} refused the connection: not a broker, or wrong keys")
                )
            elif event & NOT_CONNECTED:
                self.end(ConnectionLost(f"no broker listens at {self.endpoint}"))

    async def _beat(self) -> None:
        with anyio.move_on_after(HANDSHAKE):
            await self._welcomed.wait()
        if self.welcome is None:
            self.end(ConnectionLost(f"the broker at {self.endpoint} did not answer within {HANDSHAKE:g} s"))
            return
        last = anyio.current_time()
        while True:
            await anyio.sleep(self.welcome.heartbeat)
            now = anyio.current_time()
            if now - last > 2 * self.welcome.heartbeat:
                self._seen = now  # this very loop was held up: the silence is ours
            last = now
            if now - self._seen > self.welcome.patience:
                self.end(ConnectionLost(f"the broker was silent for {self.welcome.patience:g} s"))
                return
            self.post(Envelope(kind=Kind.PING), b"")

    # Receiving

    def _on_message(self, frames: list[bytes]) -> int:
        self._seen = anyio.current_time()
        try:
            if len(frames) % 2:
                raise ProtocolError(f"a message of {len(frames)} frames; expected pairs")
            for index in range(0, len(frames), 2):
                self._on_envelope(decode_header(frames[index]), frames[index + 1])
        except ProtocolError as exc:
            self.end(exc)
        return max(1, len(frames) // 2)

    def _on_envelope(self, envelope: Envelope, body: bytes) -> None:
        kind = envelope.kind
        if kind is Kind.PONG:
            return
        if kind is Kind.BYE:
            self._told(from_wire(body))
        elif kind is Kind.WELCOME:
            if self.welcome is None:
                self.welcome = control.unpack_welcome(body)
                self._welcomed.set()
                self._up(self)
        elif self.welcome is None:
            if kind is Kind.FAIL and envelope.correlation == self._hello_id:
                self._told(from_wire(body))
        else:
            self._receive(self, envelope, body)
