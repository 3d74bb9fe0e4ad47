"""The switchboard: who serves what, and which requests are in flight.

Owns the promise that each routed request gets exactly one answer: from whoever serves it or, when that
peer goes, from here at once. Answers that nobody waits for are discarded by their correlation id.
"""

from __future__ import annotations

import time

from offbook.bus.address import WILDCARD, parse_address, parse_pattern
from offbook.bus.body import check_size
from offbook.bus.courier import Courier
from offbook.bus.envelope import MAX_BODY, Envelope, Kind
from offbook.bus.errors import (
    ConnectionLost,
    CycleError,
    DeadlineExceeded,
    InvalidRequest,
    MailboxFull,
    NoSuchActor,
    OffbookError,
    ProtocolError,
)
from offbook.bus.peer import Peer, Pending
from offbook.bus.statistics import BrokerStatistics
from offbook.bus.suggest import hint


class Switchboard:
    """Routes requests to peers and answers back. ``queue_bytes`` bounds what waits for one peer."""

    def __init__(self, out: Courier, count: BrokerStatistics, queue_bytes: int) -> None:
        self._out = out
        self._count = count
        self._queue_bytes = queue_bytes
        self._exact: dict[str, Peer] = {}
        self._kinds: dict[str, Peer] = {}
        self._served: tuple[str, ...] | None = None
        self._pending: dict[str, Pending] = {}

    @property
    def patterns(self) -> int:
        return len(self._exact) + len(self._kinds)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all addresses that are served, in order."""
        if self._served is None:
            self._served = tuple(sorted({*self._kinds, *(to.partition("/")[0] for to in self._exact)}))
        return self._served

    @property
    def pending(self) -> int:
        return len(self._pending)

    # Registrations

    def serve(self, peer: Peer, pattern: str) -> None:
        """From now on requests for ``pattern`` go to ``peer``; raises if another peer has it."""
        parsed = parse_pattern(pattern)
        table, key = (self._kinds, parsed.kind) if parsed.key == WILDCARD else (self._exact, pattern)
        holder = table.get(key)
        if holder is not None and holder is not peer:
            raise ProtocolError(f"{pattern!r} is served by peer {holder.name!r} already")
        table[key] = peer
        self._served = None
        peer.patterns.add(pattern)

    def unserve(self, peer: Peer, pattern: str) -> None:
        """End a registration; unknown ones are ignored."""
        if pattern in peer.patterns:
            peer.patterns.discard(pattern)
            self._served = None
            kind, _, key = pattern.partition("/")
            if key == WILDCARD:
                self._kinds.pop(kind, None)
            else:
                self._exact.pop(pattern, None)

    # Requests and answers

    def request(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        """Take in a tell, ask or stream."""
        self._count.requests += 1
        kind = envelope.to.partition("/")[0]
        if not peer.take_request(kind, len(body)):
            raise ProtocolError(f"a request to {kind!r} without credit")
        try:
            server = self._route(peer, envelope, kind, body)
        except OffbookError as exc:
            self._out.fail(peer, envelope.id, exc)
            self._out.return_credit(peer, kind, len(body))
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
            raise CycleError.closing(envelope.chain, to)
        if envelope.id in self._pending:
            raise InvalidRequest(f"a request with id {envelope.id!r} is in flight already", id=envelope.id)
        server = self._exact.get(to) or self._kinds.get(kind)
        if server is None:
            known = "is its host running?" if kind in self.kinds else hint(kind, self.kinds)
            raise NoSuchActor(f"nobody serves {to!r}; {known}", address=to)
        if server.queue_bytes + len(body) > self._queue_bytes:
            raise MailboxFull(f"{server.queue_bytes} bytes wait for the peer that serves {to!r}", address=to)
        return server

    def _forward(self, pending: Pending) -> None:
        server = pending.server
        size = len(pending.body)
        server.window.take(size)
        pending.forwarded = True
        self._count.delivered += 1
        self._out.post(server, pending.header, pending.body)
        self._out.return_credit(pending.asker, pending.target, size)
        pending.header = pending.body = b""

    def _drain(self, server: Peer) -> None:
        """The server gave credit: forward what waits for it."""
        now = time.time()
        while server.queue and server.window.open:
            _, pending = server.queue.popitem(last=False)
            size = len(pending.body)
            server.queue_bytes -= size
            if pending.deadline and pending.deadline <= now:
                self._out.return_credit(pending.asker, pending.target, size)
                self._settle(pending)
                self._out.fail(pending.asker, pending.id, _too_late(pending))
                continue
            self._forward(pending)

    def _settle(self, pending: Pending) -> None:
        """Forget a request: it is answered, or nobody waits for it."""
        self._pending.pop(pending.id, None)
        pending.asker.asked.pop(pending.id, None)
        pending.server.answering.pop(pending.id, None)

    def answer(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        """Take in an accept, reply or failure from who serves the request."""
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
            self._out.fail(pending.asker, pending.id, error)
            raise error
        self._out.post(pending.asker, header, body)

    def progress(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> None:
        """Take in a piece of a streamed reply."""
        pending = peer.answering.get(envelope.correlation)
        if pending is None or pending.kind is not Kind.STREAM:
            self._count.late_replies += 1
            return
        if len(body) > MAX_BODY:
            raise ProtocolError(f"a piece of {len(body)} bytes, above the limit of {MAX_BODY}")
        self._count.progress += 1
        self._out.post(pending.asker, header, body)

    def cancel(self, peer: Peer, correlation: str) -> None:
        """The asker gave up; unknown ids are ignored, the answer may have crossed it."""
        pending = peer.asked.get(correlation)
        if pending is not None:
            self._cancel(pending)

    def _cancel(self, pending: Pending) -> None:
        self._count.cancelled += 1
        self._settle(pending)
        if pending.forwarded:
            self._out.send(
                pending.server, Envelope(kind=Kind.CANCEL, correlation=pending.id, to=pending.to), b""
            )
        else:
            size = len(pending.body)
            del pending.server.queue[pending.id]
            pending.server.queue_bytes -= size
            self._out.return_credit(pending.asker, pending.target, size)

    def expire(self, before: float) -> None:
        """Fail what is in flight with a deadline (unix seconds) earlier than ``before``."""
        late = [p for p in self._pending.values() if p.deadline and p.deadline < before]
        for pending in late:
            self._cancel(pending)
            self._out.fail(pending.asker, pending.id, _too_late(pending))

    def credit(self, peer: Peer, messages: int, size: int) -> None:
        """The peer takes more deliveries: forward what waits for it."""
        peer.window.give(messages, size)
        self._drain(peer)

    def stream_credit(self, peer: Peer, envelope: Envelope, header: bytes, body: bytes) -> bool:
        """The asker read pieces; its server counts. False if this is no request in flight."""
        pending = peer.asked.get(envelope.correlation)
        if pending is None:
            return False
        if pending.forwarded:
            self._out.post(pending.server, header, body)
        return True

    def drop(self, peer: Peer, reason: str) -> None:
        """A peer has gone: cancel what it waits for, fail who waits for it."""
        for pattern in list(peer.patterns):
            self.unserve(peer, pattern)
        for pending in list(peer.asked.values()):
            self._cancel(pending)
        error = ConnectionLost(f"{reason}; whether it handled the message is unknown", peer=peer.name)
        for pending in list(peer.answering.values()):
            if not pending.forwarded:
                self._out.return_credit(pending.asker, pending.target, len(pending.body))
            self._settle(pending)
            self._out.fail(pending.asker, pending.id, error)
        peer.queue.clear()
        peer.queue_bytes = 0


def _too_late(pending: Pending) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer from {pending.to} before its deadline", address=pending.to)
