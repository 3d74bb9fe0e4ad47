"""The broker's end of the transport: a bound ROUTER, its endpoints, and the ends of its connections.

Owns the mapping between ZeroMQ's routing ids and the operating system's descriptors. ZeroMQ itself
tells a ROUTER neither that a peer has gone nor how to get rid of one. It does tell, in its monitor,
which descriptor ended, and on each message, which descriptor it came from.
"""

from __future__ import annotations

import contextlib
import os
import socket as os_socket
import threading
from collections.abc import Container, Sequence
from pathlib import Path
from types import TracebackType

import zmq

from offbook.bus.curve import Doorkeeper, ServerKeys
from offbook.bus.envelope import MAX_BODY
from offbook.bus.errors import EndpointInUse, InvalidRequest
from offbook.bus.monitor import ENDED, REFUSED, Monitor
from offbook.bus.security import EndpointLock, check_private, resolve_endpoint
from offbook.bus.socket import MessageSocket

_FRAME_LIMIT = MAX_BODY + 64 * 1024
"""ZeroMQ drops a connection that announces a larger frame, before any memory is taken."""

_LINGER_MS = 500

_NOBLOCK = int(zmq.NOBLOCK)
_RCVMORE = int(zmq.RCVMORE)


class Listener:
    """A ROUTER on one or more endpoints. Use as a context manager; then as :class:`MessageSocket`."""

    def __init__(self, targets: Sequence[str], keys: ServerKeys | None = None) -> None:
        if not targets:
            raise InvalidRequest("a broker needs an endpoint: a runtime's name, or ipc://PATH")
        self._targets = [resolve_endpoint(target) for target in targets]
        # Options hold for what is bound after they are set, so the encrypted endpoints come last.
        self._targets.sort(key=lambda endpoint: endpoint.startswith("tcp://"))
        if keys is None and self._targets[-1].startswith("tcp://"):
            raise InvalidRequest(
                f"endpoint {self._targets[-1]!r}: plaintext TCP is refused; give the broker keys="
                "ServerKeys.of_runtime(NAME)"
            )
        self._keys = keys
        self._doorkeeper: Doorkeeper | None = None
        self._exit = contextlib.ExitStack()
        self._routes: dict[int, bytes] = {}  # live connections: descriptor to routing id
        self._ended: list[bytes] = []
        self.endpoints: tuple[str, ...] = tuple(self._targets)
        self.refused = 0

    def __enter__(self) -> Listener:
        with contextlib.ExitStack() as stack:
            # ZeroMQ asks one doorkeeper per context, so a broker with keys has its own.
            context = zmq.Context.instance() if self._keys is None else zmq.Context()
            if self._keys is not None:
                # Ending a context waits for what is still being sent; the event loop must not.
                stack.callback(lambda: threading.Thread(target=context.term, daemon=True).start())
                self._doorkeeper = Doorkeeper(context, self._keys)
                stack.callback(self._doorkeeper.close)
            router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
            stack.callback(router.close, linger=_LINGER_MS)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that has gone is an error
            router.setsockopt(zmq.ROUTER_HANDOVER, 0)  # a second peer cannot take over an identity
            # What is in transit is bounded by credit, per peer and by bytes. ZeroMQ's own limit would
            # make one slow peer's messages fail among others'.
            router.setsockopt(zmq.SNDHWM, 0)
            router.setsockopt(zmq.RCVHWM, 1000)
            router.setsockopt(zmq.MAXMSGSIZE, _FRAME_LIMIT)
            router.setsockopt(zmq.LINGER, _LINGER_MS)
            self._monitor = Monitor(router, ENDED | REFUSED)
            stack.callback(self._monitor.close)
            self.endpoints = tuple(self._bind(router, endpoint, stack) for endpoint in self._targets)
            self._socket = MessageSocket(router)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def _bind(self, router: zmq.Socket[bytes], endpoint: str, stack: contextlib.ExitStack) -> str:
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            if not path.parent.is_dir():
                raise InvalidRequest(f"endpoint {endpoint!r}: there is no folder {path.parent}")
            check_private(path.parent)
            stack.enter_context(EndpointLock(path))
            router.bind(endpoint)
            stack.callback(path.unlink, missing_ok=True)  # ZeroMQ leaves it
            stack.callback(router.unbind, endpoint)
            path.chmod(0o600)
            return endpoint
        assert self._doorkeeper is not None
        self._doorkeeper.arm(router)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EADDRINUSE:
                raise EndpointInUse(f"{endpoint} is in use by another program") from exc
            raise InvalidRequest(f"endpoint {endpoint!r}: {exc}; use tcp://ADDRESS:PORT") from exc
        return bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()  # the port, if it was *

    # Messages

    def receive_nowait(self, known: Container[bytes]) -> tuple[bytes, list[bytes]] | None:
        """The next message as ``(route, frames)``; a route that is not in ``known`` is a new connection."""
        router = self._socket.socket
        try:
            route = router.recv(_NOBLOCK)
        except zmq.Again:
            return None
        frames: list[bytes] = []
        if route in known:
            while router.getsockopt(_RCVMORE):
                frames.append(router.recv(_NOBLOCK))
            return route, frames
        # A new connection. The descriptor is in the metadata of its frames. Descriptors are used
        # again, so the ends of earlier connections must be heard of first; ZeroMQ's I/O thread
        # reported them before it accepted this one.
        self._hear()
        while router.getsockopt(_RCVMORE):
            frame = router.recv(_NOBLOCK, copy=False)
            with contextlib.suppress(zmq.ZMQError):
                self._routes[int(frame.get(zmq.SRCFD))] = route
            frames.append(frame.bytes)
        return route, frames

    def send(self, route: bytes, frames: list[bytes]) -> bool:
        """Send frames to a connection; False if it has gone."""
        try:
            self._socket.send_nowait([route, *frames])
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    async def wait(self) -> None:
        """See :meth:`MessageSocket.wait`."""
        await self._socket.wait()

    def wake(self) -> None:
        """See :meth:`MessageSocket.wake`."""
        self._socket.wake()

    # Ends of connections

    async def admit(self) -> None:
        """Decide who may connect over ``tcp://``, until cancelled."""
        if self._doorkeeper is not None:
            await self._doorkeeper.run()

    async def watch(self) -> None:
        """Wake the owner whenever a connection ends."""
        while True:
            self._note(*await self._monitor.next())
            self._hear()
            self._socket.wake()

    def _hear(self) -> None:
        while (event := self._monitor.next_nowait()) is not None:
            self._note(*event)

    def _note(self, event: int, value: int) -> None:
        if event & ENDED:
            route = self._routes.pop(value, None)
            if route is not None:
                self._ended.append(route)
        elif event & REFUSED:
            self.refused += 1

    def take_ended(self) -> list[bytes]:
        """Routes of connections that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def disconnect(self, route: bytes) -> None:
        """Cut a live connection. Nothing happens if it has ended already."""
        self._hear()
        fd = next((fd for fd, its_route in self._routes.items() if its_route == route), None)
        if fd is None:
            return
        with contextlib.suppress(OSError):
            copy = os_socket.socket(fileno=os.dup(fd))
            with copy:
                copy.shutdown(os_socket.SHUT_RDWR)
