"""The broker: one ROUTER socket through which all messages pass.

Owns routing: who is connected, who serves what, which requests are in flight, and that each of them
gets exactly one answer, from whoever serves it or, when that peer goes, from the broker at once. It
never looks into bodies and never waits for a peer. The rules on the wire are in PROTOCOL.md.
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
from offbook.bus.address import WILDCARD, check_name, check_topic, parse_address, parse_pattern
from offbook.bus.body import check_size
from offbook.bus.credit import Window
from offbook.bus.envelope import MAX_BODY, Envelope, Kind, decode_header, encode_header
from offbook.bus.errors import (
    ConnectionLost,
    CycleError,
    DeadlineExceeded,
    InvalidAddress,
    InvalidRequest,
    MailboxFull,
    NoSuchActor,
    OffbookError,
    ProtocolError,
)
from offbook.bus.listener import Listener
from offbook.bus.peer import PUBLISH_CREDIT, REQUESTS, Peer, Pending
from offbook.bus.topic_hub import Publication, TopicHub
from offbook.bus.topics import MemoryTopicStore, Record, TopicStore

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

BURST_PAIRS = 256
"""Envelopes handled before others get their turn (about 3 ms)."""

BATCH_FRAMES = 128
"""Frames per multipart message to a peer."""


class BrokerStatistics(msgspec.Struct, kw_only=True):
    """Counters since the broker started, and what is there now."""

    peers: int = 0
    patterns: int = 0
    pending: int = 0
    queued: int = 0
    subscriptions: int = 0
    received: int = 0
    requests: int = 0
    delivered: int = 0
    answers: int = 0
    progress: int = 0
    late_replies: int = 0
    failed: int = 0
    cancelled: int = 0
    published: int = 0
    repeated_publications: int = 0
    events: int = 0
    malformed: int = 0
    refused: int = 0
    disconnected: int = 0
    lost: int = 0


class Broker:
    """Routes messages between peers.

    Runs inside the caller's event loop: ``async with Broker(endpoint) as broker`` or ``await broker.run()``.

    Args:
        endpoint: a runtime's name, ``ipc://PATH`` or ``tcp://HOST:PORT``; several may be given.
        topic_store: where topics are retained; in memory by default.
        heartbeat, patience: seconds; see :data:`HEARTBEAT` and :data:`PATIENCE`.

    Raises (on start):
        EndpointInUse: another broker listens there.
        ProtocolError: the socket's folder belongs to somebody else.
    """

    def __init__(
        self,
        *endpoints: str,
        topic_store: TopicStore | None = None,
        heartbeat: float = HEARTBEAT,
        patience: float = PATIENCE,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._listener = Listener(endpoints)
        self._heartbeat = heartbeat
        self._patience = patience
        self._queue_bytes = queue_bytes
        self._peers: dict[bytes, Peer] = {}
        self._names: dict[str, Peer] = {}
        self._exact: dict[str, Peer] = {}
        self._kinds: dict[str, Peer] = {}
        self._pending: dict[str, Pending] = {}
        self._dirty: list[Peer] = []
        self._count = BrokerStatistics()
        self._hub = TopicHub(topic_store or MemoryTopicStore(), self._send, self._fail, self._written)
        self._handlers: dict[Kind, Callable[[Peer, Envelope, bytes, bytes], None]] = {
            Kind.PING: self._on_ping,
            Kind.BYE: self._on_bye,
            Kind.TELL: self._on_request,
            Kind.ASK: self._on_request,
            Kind.STREAM: self._on_request,
            Kind.ACCEPT: self._on_answer,
            Kind.REPLY: self._on_answer,
            Kind.FAIL: self._on_answer,
            Kind.PROGRESS: self._on_progress,
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
        count.patterns = len(self._exact) + len(self._kinds)
        count.pending = len(self._pending)
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
                tasks.start_soon(self._own_socket)
                tasks.start_soon(self._listener.watch)
                tasks.start_soon(self._keep_time)
                tasks.start_soon(self._hub.run)
                try:
                    yield
                finally:
                    for peer in list(self._names.values()):
                        self._send(peer, _goodbye(ConnectionLost("the broker stopped")), _STOPPED)
                    self._flush()
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
                    peer = self._peers.get(route)
                    if peer is not None:
                        self._drop(peer, f"peer {peer.name!r} disconnected")
            self._flush()
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
            wall = time.time()
            for pending in [
                p for p in self._pending.values() if p.deadline and p.deadline + self._patience < wall
            ]:
                self._expire(pending)
            self._listener.wake()

    # Sending

    def _send(self, peer: Peer, envelope: Envelope, body: bytes) -> None:
        self._post(peer, encode_header(envelope), body)

    def _post(self, peer: Peer, header: bytes, body: bytes) -> None:
        """Leave a pair in the peer's outbox; the owner sends it at the end of its burst."""
        if not peer.outbox:
            if not self._dirty:
                self._listener.wake()
            self._dirty.append(peer)
        peer.outbox.append(header)
        peer.outbox.append(body)

    def _fail(self, peer: Peer, correlation: str, exc: BaseException) -> None:
        self._count.failed += 1
        self._send(peer, Envelope(kind=Kind.FAIL, correlation=correlation), control.pack_error(exc))

    def _flush(self) -> None:
        while self._dirty:  # dropping a peer leaves messages for others
            peer = self._dirty.pop()
            frames, peer.outbox = peer.outbox, []
            if peer.gone:
                continue
            for start in range(0, len(frames), BATCH_FRAMES):
                if not self._listener.send(peer.route, frames[start : start + BATCH_FRAMES]):
                    self._drop(peer, f"peer {peer.name!r} disconnected")
                    break

    # Receiving

    def _on_message(self, route: bytes, frames: list[bytes]) -> int:
        """Handle one multipart message of a connection; returns how many envelopes it held."""
        peer = self._peers.get(route)
        if peer is None:
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
            self._send(peer, _goodbye(exc), control.pack_error(exc))
            self._flush()
            self._drop(peer, f"peer {peer.name!r} broke the protocol: {exc}", disconnect=True)

    def _on_hello(self, peer: Peer, envelope: Envelope, body: bytes) -> None:
        if envelope.kind is not Kind.HELLO:
            # Also the way in which a client learns that its session is gone.
            error = ProtocolError(f"{envelope.kind.name} from a connection that did not say HELLO")
            self._send(peer, _goodbye(error), control.pack_error(error))
            raise error
        hello = control.unpack_hello(body)
        try:
            check_name(hello.name, "peer name")
        except InvalidAddress as exc:
            self._fail(peer, envelope.id, exc)
            raise ProtocolError(exc.message) from exc
        other = self._names.get(hello.name)
        if other is not None:
            if other.instance != hello.instance or not hello.instance:
                error = ProtocolError(
                    f"a peer named {hello.name!r} is connected already; choose another name"
                )
                self._fail(peer, envelope.id, error)
                raise error
            self._drop(other, f"peer {hello.name!r} connected anew", disconnect=True)
        peer.name, peer.instance = hello.name, hello.instance
        peer.window = Window(hello.window, hello.window_bytes)
        self._names[hello.name] = peer
        welcome = control.Welcome(heartbeat=self._heartbeat, patience=self._patience)
        self._send(peer, Envelope(kind=Kind.WELCOME, correlation=envelope.id), control.pack(welcome))

    def _control(self, peer: Peer) -> None:
        peer.controls += 1
        if peer.controls > CONTROL_LIMIT:
            raise ProtocolError(f"more than {CONTROL_LIMIT} control messages in one heartbeat")

    def _on_ping(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        self._send(peer, Envelope(kind=Kind.PONG, correlation=envelope.id), b"")

    def _on_bye(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._drop(peer, f"peer {peer.name!r} left")

    # Requests and answers

    def _on_request(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._count.requests += 1
        kind = envelope.to.partition("/")[0]
        if not peer.take_request(kind, len(body)):
            raise ProtocolError(f"a request to {kind!r} without credit")
        try:
            server = self._route(peer, envelope, kind, body)
        except OffbookError as exc:
            self._fail(peer, envelope.id, exc)
            self._return_credit(peer, kind, len(body))
            return
        pending = Pending(envelope, header, body, peer, server)
        self._pending[pending.id] = pending
        peer.asked[pending.id] = pending
        server.answering[pending.id] = pending
        if server.window.open and not server.queue:
            self._forward(pending)
        else:
            server.queue[pending.id] = pending
            server.queue_bytes += len(body)

    def _route(self, peer: Peer, envelope: Envelope, kind: str, body: bytes) -> Peer:
        """Who serves this request; raises what is wrong with it."""
        to = envelope.to
        parse_address(to)
        check_size(len(body))
        if not envelope.id:
            raise InvalidRequest(f"a request to {to} without an id")
        if envelope.deadline and envelope.deadline <= time.time():
            raise DeadlineExceeded(f"the deadline of a request to {to} had passed when it came to the broker")
        if envelope.kind is not Kind.TELL and to in envelope.chain:
            raise cycle_error(envelope.chain, to)
        if envelope.id in self._pending:
            raise InvalidRequest(f"a request with id {envelope.id!r} is in flight already", id=envelope.id)
        server = self._exact.get(to) or self._kinds.get(kind)
        if server is None:
            raise NoSuchActor(f"nobody serves {to!r}; is its host running?", address=to)
        if server.queue_bytes + len(body) > self._queue_bytes:
            raise MailboxFull(f"{server.queue_bytes} bytes wait for the peer that serves {to!r}", address=to)
        return server

    def _forward(self, pending: Pending) -> None:
        server = pending.server
        size = len(pending.body)
        server.window.take(size)
        pending.forwarded = True
        self._count.delivered += 1
        self._post(server, pending.header, pending.body)
        self._return_credit(pending.asker, pending.to.partition("/")[0], size)
        pending.header = pending.body = b""

    def _drain(self, server: Peer) -> None:
        """The server gave credit: forward what waits for it."""
        now = time.time()
        while server.queue and server.window.open:
            _, pending = server.queue.popitem(last=False)
            size = len(pending.body)
            server.queue_bytes -= size
            if pending.deadline and pending.deadline <= now:
                self._return_credit(pending.asker, pending.to.partition("/")[0], size)
                self._settle(pending)
                self._fail(pending.asker, pending.id, _too_late(pending))
                continue
            self._forward(pending)

    def _settle(self, pending: Pending) -> None:
        """Forget a request: it is answered, or nobody waits for it."""
        self._pending.pop(pending.id, None)
        pending.asker.asked.pop(pending.id, None)
        pending.server.answering.pop(pending.id, None)

    def _on_answer(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        pending = peer.answering.get(envelope.correlation)
        if pending is None or not pending.forwarded:
            self._count.late_replies += 1  # cancelled, timed out, or never asked
            return
        if envelope.kind is Kind.ACCEPT and pending.kind is not Kind.TELL:
            raise ProtocolError(f"an ACCEPT for {pending.kind.name} {pending.id!r}; only a TELL is accepted")
        self._settle(pending)
        self._count.answers += 1
        if len(body) > MAX_BODY:
            error = ProtocolError(f"a reply of {len(body)} bytes, above the limit of {MAX_BODY}")
            self._fail(pending.asker, pending.id, error)
            raise error
        self._post(pending.asker, header, body)

    def _on_progress(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        pending = peer.answering.get(envelope.correlation)
        if pending is None or pending.kind is not Kind.STREAM:
            self._count.late_replies += 1
            return
        check_progress(body)
        self._count.progress += 1
        self._post(pending.asker, header, body)

    def _on_cancel(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        pending = peer.asked.get(envelope.correlation)
        if pending is not None:
            self._cancel(pending)

    def _cancel(self, pending: Pending) -> None:
        self._count.cancelled += 1
        self._settle(pending)
        if pending.forwarded:
            self._send(pending.server, Envelope(kind=Kind.CANCEL, correlation=pending.id, to=pending.to), b"")
        else:
            size = len(pending.body)
            del pending.server.queue[pending.id]
            pending.server.queue_bytes -= size
            self._return_credit(pending.asker, pending.to.partition("/")[0], size)

    def _expire(self, pending: Pending) -> None:
        self._cancel(pending)
        self._fail(pending.asker, pending.id, _too_late(pending))

    # Serving and credit

    def _on_serve(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        try:
            pattern = parse_pattern(envelope.to)
        except InvalidAddress as exc:
            self._fail(peer, envelope.id, exc)
            return
        table, key = (self._kinds, pattern.kind) if pattern.key == WILDCARD else (self._exact, envelope.to)
        holder = table.get(key)
        if holder is not None and holder is not peer:
            error = ProtocolError(f"{envelope.to!r} is served by peer {holder.name!r} already")
            self._fail(peer, envelope.id, error)
            return
        table[key] = peer
        peer.patterns.add(envelope.to)
        self._send(peer, Envelope(kind=Kind.REPLY, correlation=envelope.id), b"")

    def _on_unserve(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._unserve(peer, envelope.to)
        self._send(peer, Envelope(kind=Kind.REPLY, correlation=envelope.id), b"")

    def _unserve(self, peer: Peer, pattern: str) -> None:
        if pattern in peer.patterns:
            peer.patterns.discard(pattern)
            kind, _, key = pattern.partition("/")
            if key == WILDCARD:
                self._kinds.pop(kind, None)
            else:
                self._exact.pop(pattern, None)

    def _on_credit(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        size = control.unpack_bytes_credit(body)
        if not envelope.correlation:  # deliveries
            peer.window.give(envelope.seq, size)
            self._drain(peer)
            return
        pending = peer.asked.get(envelope.correlation)
        if pending is None:
            self._hub.credit(peer, envelope.correlation, envelope.seq, size)
        elif pending.forwarded:  # a stream: its server counts
            self._post(pending.server, header, body)

    def _return_credit(self, peer: Peer, kind: str, size: int) -> None:
        due = peer.return_request(kind, size)
        if due is not None:
            self._send(peer, Envelope(kind=Kind.CREDIT, to=kind, seq=due[0]), control.pack(due[1]))

    # Topics

    def _on_publish(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        if not peer.take_request(PUBLISH_CREDIT, len(body)):
            raise ProtocolError("a publication without credit")
        try:
            check_topic(envelope.to)
            check_size(len(body))
            if not envelope.id:
                raise InvalidRequest(f"a publication to {envelope.to!r} without an id")
        except OffbookError as exc:
            self._fail(peer, envelope.id, exc)
            self._return_credit(peer, PUBLISH_CREDIT, len(body))
            return
        record = Record(
            id=envelope.correlation or envelope.id,
            body=body,
            type=envelope.type,
            sender=envelope.sender,
            traceparent=envelope.traceparent,
        )
        self._hub.publish(Publication(peer, envelope.id, envelope.to, record))

    def _written(self, publication: Publication) -> None:
        self._return_credit(publication.peer, PUBLISH_CREDIT, len(publication.record.body))

    def _on_subscribe(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        try:
            check_topic(envelope.to)
            if not envelope.id or not self._hub.subscribe(
                peer, envelope.id, envelope.to, envelope.seq, Window()
            ):
                raise InvalidRequest(f"a subscription with id {envelope.id!r} is active already")
        except OffbookError as exc:
            self._fail(peer, envelope.id, exc)

    def _on_unsubscribe(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        self._control(peer)
        self._hub.unsubscribe(peer, envelope.correlation)

    # Endings

    def _drop(self, peer: Peer, reason: str, *, disconnect: bool = False) -> None:
        """Forget a peer: fail who waits for it, cancel what it waits for."""
        if peer.gone:
            return
        peer.gone = True
        del self._peers[peer.route]
        if self._names.get(peer.name) is peer:
            del self._names[peer.name]
        for pattern in list(peer.patterns):
            self._unserve(peer, pattern)
        self._hub.unsubscribe_all(peer.subscriptions, peer)
        for pending in list(peer.asked.values()):
            self._cancel(pending)
        error = ConnectionLost(f"{reason}; whether it handled the message is unknown", peer=peer.name)
        for pending in list(peer.answering.values()):
            if not pending.forwarded:
                self._return_credit(pending.asker, pending.to.partition("/")[0], len(pending.body))
            self._settle(pending)
            if pending.asker is not peer:
                self._fail(pending.asker, pending.id, error)
        peer.queue.clear()
        peer.queue_bytes = 0
        if disconnect:
            self._listener.disconnect(peer.route)


def cycle_error(chain: tuple[str, ...], to: str) -> CycleError:
    """The error for an ask to an address that waits in ``chain`` already."""
    whole = [*chain, to]
    return CycleError(f"an ask that would wait for itself: {' -> '.join(whole)}", chain=whole)


def check_progress(body: bytes) -> None:
    """Raise ``ProtocolError`` for a piece above the limit."""
    if len(body) > MAX_BODY:
        raise ProtocolError(f"a piece of {len(body)} bytes, above the limit of {MAX_BODY}")


def _too_late(pending: Pending) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer from {pending.to} before its deadline", address=pending.to)


def _goodbye(exc: OffbookError) -> Envelope:
    return Envelope(kind=Kind.BYE, type=exc.code)


_STOPPED = control.pack_error(ConnectionLost("the broker stopped"))

__all__ = ["HEARTBEAT", "PATIENCE", "REQUESTS", "Broker", "BrokerStatistics"]
