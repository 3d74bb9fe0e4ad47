"""The broker: one ROUTER socket through which all messages pass.

Owns the connections: who is there, under which name, and what becomes of those who break the rules or
fall silent. Requests go on to the switchboard, publications to the topic hub. It never looks into
bodies and never waits for a peer. The rules on the wire are in PROTOCOL.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec

from offbook.bus import control
from offbook.bus.address import check_name
from offbook.bus.courier import Courier
from offbook.bus.credit import Window
from offbook.bus.curve import ServerKeys
from offbook.bus.envelope import Envelope, Kind, decode_header
from offbook.bus.errors import (
    ConnectionLost,
    OffbookError,
    ProtocolError,
)
from offbook.bus.listener import Listener
from offbook.bus.peer import Peer
from offbook.bus.statistics import BrokerStatistics
from offbook.bus.switchboard import Switchboard
from offbook.bus.topic_hub import TopicHub
from offbook.bus.topics import MemoryTopicStore, TopicStore

HEARTBEAT = 2.0
"""Seconds between signs of life."""

PATIENCE = 10.0
"""Seconds of silence after which a peer is taken for lost: five heartbeats, so that a peer whose event
loop is busy for a few seconds is not."""

QUEUE_BYTES = 64 * 1024 * 1024
"""Bodies queued for one serving peer that gives no credit; above it senders get ``MailboxFull``."""

MALFORMED_LIMIT = 8
"""Malformed messages after which a peer is disconnected."""

CONTROL_LIMIT = 20_000
"""Messages other than requests and answers that a peer may send per heartbeat."""

BROKER_ADDRESS = "broker/main"
"""Where the broker itself answers asks of any type with its statistics."""

LAST_WORDS = 0.1
"""Seconds between telling a peer why it is disconnected and doing it."""

BURST_PAIRS = 256
"""Envelopes handled before others get their turn (about 3 ms)."""


class Broker:
    """Routes messages between peers.

    Runs inside the caller's event loop: ``async with Broker(endpoint) as broker`` or ``await broker.run()``.

    Args:
        endpoint: a runtime's name, ``ipc://PATH`` or ``tcp://HOST:PORT``; several may be given.
        topic_store: where topics are retained; in memory by default.
        keys: for ``tcp://``, and required by it: see :class:`offbook.bus.ServerKeys`.
        heartbeat, patience: seconds; see :data:`HEARTBEAT` and :data:`PATIENCE`.

    Raises (on start):
        EndpointInUse: another broker listens there.
        ProtocolError: the socket's folder belongs to somebody else.
    """

    def __init__(
        self,
        *endpoints: str,
        topic_store: TopicStore | None = None,
        keys: ServerKeys | None = None,
        heartbeat: float = HEARTBEAT,
        patience: float = PATIENCE,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._listener = Listener(endpoints, keys)
        self._heartbeat = heartbeat
        self._patience = patience
        self._peers: dict[bytes, Peer] = {}
        self._names: dict[str, Peer] = {}
        self._banned: set[bytes] = set()  # dropped for good, and about to be cut off
        self._tasks: anyio.abc.TaskGroup | None = None
        self._count = BrokerStatistics()
        self._out = Courier(self._listener, self._count, self._on_unreachable)
        self._board = Switchboard(self._out, self._count, queue_bytes)
        self._hub = TopicHub(topic_store or MemoryTopicStore(), self._out)
        self._handlers: dict[Kind, Callable[[Peer, Envelope, bytes, bytes], None]] = {
            Kind.PING: self._on_ping,
            Kind.BYE: self._on_bye,
            Kind.TELL: self._board.request,
            Kind.ASK: self._on_ask,
            Kind.STREAM: self._board.request,
            Kind.ACCEPT: self._board.answer,
            Kind.REPLY: self._board.answer,
            Kind.FAIL: self._board.answer,
            Kind.PROGRESS: self._board.progress,
            Kind.CANCEL: self._on_cancel,
            Kind.SERVE: self._on_serve,
            Kind.UNSERVE: self._on_unserve,
            Kind.CREDIT: self._on_credit,
            Kind.PUBLISH: self._on_publish,
            Kind.SUBSCRIBE: self._on_subscribe,
            Kind.UNSUBSCRIBE: self._on_unsubscribe,
        }
        self._runner: contextlib.AbstractAsyncContextManager[None] | None = None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints it listens on, with ports filled in."""
        return self._listener.endpoints

    def statistics(self) -> BrokerStatistics:
        """A snapshot of the counters."""
        count = self._count
        count.peers = len(self._names)
        count.patterns = self._board.patterns
        count.pending = self._board.pending
        count.kinds = self._board.kinds
        count.queued = sum(len(peer.queue) for peer in self._names.values())
        count.subscriptions = self._hub.subscriptions
        count.published = self._hub.published
        count.repeated_publications = self._hub.repeated
        count.events = self._hub.events
        count.refused = self._listener.refused
        return msgspec.structs.replace(count)

    # Life

    async def __aenter__(self) -> Broker:
        self._runner = self._running()
        await self._runner.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.__aexit__(None, None, None)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        with self._listener:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._hub.run)  # before the first message can come
                tasks.start_soon(self._own_socket)
                tasks.start_soon(self._listener.watch)
                tasks.start_soon(self._listener.admit)
                tasks.start_soon(self._keep_time)
                try:
                    yield
                finally:
                    for peer in list(self._names.values()):
                        self._out.send(peer, _goodbye(ConnectionLost("the broker stopped")), _STOPPED)
                    self._out.flush()
                    tasks.cancel_scope.cancel()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen and route until cancelled."""
        async with self:
            task_status.started()
            await anyio.sleep_forever()

    async def _own_socket(self) -> None:
        """The task that owns the ROUTER."""
        listener = self._listener
        while True:
            pairs = 0
            idle = False
            while pairs < BURST_PAIRS:
                message = listener.receive_nowait(self._peers)
                if message is None:
                    idle = True
                    break
                pairs += self._on_message(*message)
            if idle:
                # Only now: what a peer sent before its connection ended has been read.
                for route in listener.take_ended():
                    self._banned.discard(route)
                    peer = self._peers.get(route)
                    if peer is not None:
                        self._on_unreachable(peer)
            self._out.flush()
            if pairs:
                await anyio.lowlevel.checkpoint()
            else:
                await listener.wait()

    async def _keep_time(self) -> None:
        """Drop silent peers, and requests whose asker forgot them."""
        last = anyio.current_time()
        while True:
            await anyio.sleep(self._heartbeat)
            now = anyio.current_time()
            # If this very loop was held up, silence is ours: give everybody a fresh start.
            held_up = now - last > 2 * self._heartbeat
            last = now
            for peer in list(self._peers.values()):
                peer.controls = 0
                if held_up:
                    peer.seen = now
                elif now - peer.seen > self._patience:
                    self._count.lost += 1
                    self._drop(
                        peer, f"peer {peer.name!r} was silent for {self._patience:g} s", disconnect=True
                    )
            self._board.expire(time.time() - self._patience)
            self._listener.wake()

    # Receiving

    def _on_message(self, route: bytes, frames: list[bytes]) -> int:
        """Handle one multipart message of a connection; returns how many envelopes it held."""
        peer = self._peers.get(route)
        if peer is None:
            if route in self._banned:
                return 1
            peer = self._peers[route] = Peer(route)
        peer.seen = anyio.current_time()
        if not frames or len(frames) % 2:
            self._malformed(peer, ProtocolError(f"a message of {len(frames)} frames; expected pairs"))
            return 1
        for index in range(0, len(frames), 2):
            self._count.received += 1
            header = frames[index]
            try:
                envelope = decode_header(header)
                if not peer.name:
                    self._on_hello(peer, envelope, frames[index + 1])
                else:
                    handler = self._handlers.get(envelope.kind)
                    if handler is None:
                        raise ProtocolError(f"a {envelope.kind.name} is not for brokers")
                    handler(peer, envelope, header, frames[index + 1])
            except ProtocolError as exc:
                self._malformed(peer, exc)
            if peer.gone:
                break
        return len(frames) // 2

    def _malformed(self, peer: Peer, exc: ProtocolError) -> None:
        self._count.malformed += 1
        peer.malformed += 1
        if peer.malformed >= MALFORMED_LIMIT:
            self._count.disconnected += 1
            self._out.send(peer, _goodbye(exc), control.pack_error(exc))
            self._out.flush()
            self._drop(peer, f"peer {peer.name!r} broke the protocol: {exc}", disconnect=True)

    def _on_hello(self, peer: Peer, envelope: Envelope, body: bytes) -> None:
        if envelope.kind is not Kind.HELLO:
            # Also the way in which a client learns that its session is gone.
            error = ProtocolError(f"{envelope.kind.name} from a connection that did not say HELLO")
            self._out.send(peer, _goodbye(error), control.pack_error(error))
            raise error
        try:
            hello = control.unpack_hello(body)
            check_name(hello.name, "peer name")
        except OffbookError as exc:
            self._out.fail(peer, envelope.id, exc)
            raise ProtocolError(exc.message) from exc
        other = self._names.get(hello.name)
        if other is not None:
            if other.instance != hello.instance or not hello.instance:
                error = ProtocolError(
                    f"a peer named {hello.name!r} is connected already; choose another name"
                )
                self._out.fail(peer, envelope.id, error)
                raise error
            self._drop(other, f"peer {hello.name!r} connected anew", disconnect=True)
        peer.name, peer.instance = hello.name, hello.instance
        peer.window = Window(hello.window, hello.window_bytes)
        self._names[hello.name] = peer
        welcome = control.Welcome(heartbeat=self._heartbeat, patience=self._patience)
        self._out.send(peer, Envelope(kind=Kind.WELCOME, correlation=envelope.id), control.pack(welcome))

    def _control(self, peer: Peer) -> None:
        peer.controls += 1
        if peer.controls > CONTROL_LIMIT:
            raise ProtocolError(f"more than {CONTROL_LIMIT} control messages in one heartbeat")

    def _on_ping(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        self._out.send(peer, Envelope(kind=Kind.PONG, correlation=envelope.id), b"")

    def _on_bye(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._drop(peer, f"peer {peer.name!r} left")

    # Requests and registrations

    def _on_ask(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        if envelope.to != BROKER_ADDRESS:
            self._board.request(peer, envelope, header, body)
            return
        kind = envelope.to.partition("/")[0]
        if not peer.take_request(kind, len(body)):
            raise ProtocolError(f"a request to {kind!r} without credit")
        self._out.return_credit(peer, kind, len(body))
        reply = Envelope(kind=Kind.REPLY, correlation=envelope.id, type=BrokerStatistics.__name__)
        self._out.send(peer, reply, control.pack(self.statistics()))

    def _on_cancel(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        self._board.cancel(peer, envelope.correlation)

    def _on_serve(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        try:
            if envelope.to.partition("/")[0] == BROKER_ADDRESS.partition("/")[0]:
                raise ProtocolError(f"{envelope.to!r} is the broker's own")
            self._board.serve(peer, envelope.to)
        except OffbookError as exc:
            self._out.fail(peer, envelope.id, exc)
        else:
            self._out.send(peer, Envelope(kind=Kind.REPLY, correlation=envelope.id), b"")

    def _on_unserve(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        self._board.unserve(peer, envelope.to)
        self._out.send(peer, Envelope(kind=Kind.REPLY, correlation=envelope.id), b"")

    def _on_credit(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        size = control.unpack_bytes_credit(body)
        if not envelope.correlation:
            self._board.credit(peer, envelope.seq, size)
        elif not self._board.stream_credit(peer, envelope, header, body):
            self._hub.credit(peer, envelope.correlation, envelope.seq, size)

    # Topics

    def _on_publish(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._hub.publish(peer, envelope, body)

    def _on_subscribe(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        self._hub.subscribe(peer, envelope)

    def _on_unsubscribe(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        self._hub.unsubscribe(peer, envelope.correlation)

    # Endings

    def _on_unreachable(self, peer: Peer) -> None:
        self._drop(peer, f"peer {peer.name!r} disconnected")

    def _drop(self, peer: Peer, reason: str, *, disconnect: bool = False) -> None:
        """Forget a peer: fail who waits for it, cancel what it waits for."""
        if peer.gone:
            return
        peer.gone = True
        del self._peers[peer.route]
        if self._names.get(peer.name) is peer:
            del self._names[peer.name]
        self._hub.unsubscribe_all(peer.subscriptions, peer)
        self._board.drop(peer, reason)
        if disconnect and self._tasks is not None:
            self._banned.add(peer.route)
            self._tasks.start_soon(self._cut, peer.route)

    async def _cut(self, route: bytes) -> None:
        """End a connection whose peer was dropped, after a moment in which our last words reach it."""
        await anyio.sleep(LAST_WORDS)
        self._listener.disconnect(route)


def _goodbye(exc: OffbookError) -> Envelope:
    return Envelope(kind=Kind.BYE, type=exc.code)


_STOPPED = control.pack_error(ConnectionLost("the broker stopped"))
