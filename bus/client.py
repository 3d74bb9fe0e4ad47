"""The client: how any process, of whatever kind, talks over the bus.

Owns the public verbs (ask, tell, stream, publish, subscribe, serve) and what must survive a lost
connection: the registrations and subscriptions, made again on each new link. It knows nothing of
actors; an address is a text.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import anyio
import anyio.abc

from offbook.bus import control
from offbook.bus.address import check_name, check_topic, parse_address, parse_pattern
from offbook.bus.body import encode_body
from offbook.bus.credit import Gate, Returns
from offbook.bus.delivery import Delivery
from offbook.bus.envelope import MAX_CHAIN, Envelope, Kind, new_id
from offbook.bus.errors import (
    ConnectionLost,
    CycleError,
    DeadlineExceeded,
    InvalidRequest,
    MailboxFull,
    OffbookError,
    ProtocolError,
    from_wire,
)
from offbook.bus.inbox import Inbox
from offbook.bus.link import Link
from offbook.bus.request import Request
from offbook.bus.security import resolve_endpoint
from offbook.bus.streams import Deliveries, ReplyStream, Subscription

T = TypeVar("T")

TIMEOUT = 60.0
"""Default seconds to wait for an answer."""

MAX_TIMEOUT = 30 * 86400.0

_RETRY_FIRST = 0.02
_RETRY_MOST = 1.0
"""Seconds between attempts to reconnect: doubling from the first to the most."""


@contextlib.asynccontextmanager
async def connect(target: str, *, name: str | None = None, timeout: float = 5.0) -> AsyncIterator[Bus]:
    """Connect to a broker: ``async with connect("village") as bus: ...``.

    Args:
        target: a runtime's name, ``ipc://PATH`` or ``tcp://HOST:PORT``.
        name: how this peer is called, unique among those connected; made up by default.
        timeout: seconds to wait for the first connection.

    Raises:
        ConnectionLost: no broker answered in time.
        ProtocolError: the broker refused us, e.g. the name is in use.
        InvalidAddress, InvalidRequest: ``target`` or ``name`` is not legal.
    """
    bus = Bus(resolve_endpoint(target), name)
    failure: BaseException | None = None
    # A task group would wrap what the caller's block raises into a group; hand it over outside.
    async with anyio.create_task_group() as tasks:
        try:
            tasks.start_soon(bus._keep_connected)
            await bus._first_link(timeout)
            yield bus
        except Exception as exc:
            failure = exc
        finally:
            bus._close()
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Bus:
    """A connected client, as :func:`connect` gives it. All methods belong to the event loop's thread.

    Attributes:
        name: this peer's name.
        late_replies: answers that came after nobody waited for them any more; they were discarded.
        reconnects: how often the connection was made anew.
    """

    def __init__(self, endpoint: str, name: str | None) -> None:
        self.name = check_name(name, "peer name") if name is not None else f"peer-{new_id()[-12:]}"
        self.endpoint = endpoint
        self.late_replies = 0
        self.reconnects = 0
        self._instance = os.urandom(16).hex()
        self._sender = f"peer/{self.name}"
        self._link: Link | None = None
        self._up = anyio.Event()
        self._down = anyio.Event()
        self._refused: OffbookError | None = None
        self._closed = False
        self._failure: OffbookError | None = None  # why the last attempt to connect failed
        self._gates: dict[str, Gate] = {}
        self._requests: dict[str, Request] = {}
        self._patterns: list[str] = []
        self._subscriptions: dict[str, Subscription] = {}
        self._inbox: Inbox[Delivery] = Inbox()
        self._open: dict[str, Delivery] = {}
        self._credit = Returns()

    # Asking

    async def tell(
        self,
        to: str,
        body: Any,
        *,
        timeout: float = TIMEOUT,
        id: str | None = None,
        sender: str | None = None,
        correlation: str = "",
        deadline: float | None = None,
        chain: tuple[str, ...] = (),
        traceparent: str = "",
        type: str | None = None,
    ) -> None:
        """Send a message; returns when the receiver's host has accepted it.

        Args:
            to: address, ``kind/key``.
            body: a dict with a ``"type"``, a msgspec Struct, or packed ``bytes`` with ``type=``.
            timeout: seconds to wait at most; ``deadline`` (unix time) may end it earlier.
            id: message id; repeat it to retry the same message.
            chain: addresses that wait for the sender's current work, the sender included.

        Raises:
            InvalidAddress, InvalidRequest, MessageTooLarge: before anything is sent.
            NoSuchActor: nobody serves ``to``.
            MailboxFull, DeadlineExceeded: it was not accepted in time.
            ConnectionLost: it may or may not have been accepted; retry with the same ``id``.
            OffbookError: whatever the receiver answers.
        """
        request = self._make(
            Kind.TELL, to, body, timeout, id, sender, correlation, deadline, chain, traceparent, type
        )
        await self._exchange(request)
        request.result(None)

    async def ask(
        self,
        to: str,
        body: Any,
        *,
        timeout: float = TIMEOUT,
        returns: type[Any] | None = None,
        id: str | None = None,
        sender: str | None = None,
        correlation: str = "",
        deadline: float | None = None,
        chain: tuple[str, ...] = (),
        traceparent: str = "",
        type: str | None = None,
    ) -> Any:
        """Send a message and wait for its reply: plain objects, or an instance of ``returns``.

        Cancelling the call cancels the work at the receiver. Arguments and errors as for :meth:`tell`, and

        Raises:
            CycleError: ``to`` is in ``chain``: it would wait for itself.
            BadMessage: the reply does not decode as ``returns``.
        """
        request = self._make(
            Kind.ASK, to, body, timeout, id, sender, correlation, deadline, chain, traceparent, type
        )
        await self._exchange(request)
        return request.result(returns)

    def stream(
        self,
        to: str,
        body: Any,
        *,
        timeout: float = TIMEOUT,
        returns: type[Any] | None = None,
        yields: type[Any] | None = None,
        id: str | None = None,
        sender: str | None = None,
        correlation: str = "",
        deadline: float | None = None,
        chain: tuple[str, ...] = (),
        traceparent: str = "",
        type: str | None = None,
    ) -> ReplyStream:
        """An ask whose progress is read while it goes on; see :class:`ReplyStream`.

        Pieces decode to plain objects, or to ``yields``; the result as in :meth:`ask`, whose arguments and
        errors it shares.
        """
        pieces: Inbox[bytes] = Inbox()
        request = self._make(
            Kind.STREAM,
            to,
            body,
            timeout,
            id,
            sender,
            correlation,
            deadline,
            chain,
            traceparent,
            type,
            pieces,
        )
        return ReplyStream(self, request, pieces, returns, yields)

    # Topics

    async def publish(
        self,
        topic: str,
        body: Any,
        *,
        id: str | None = None,
        timeout: float = TIMEOUT,
        sender: str | None = None,
        traceparent: str = "",
        type: str | None = None,
    ) -> int:
        """Publish an event; returns its sequence number once it is retained.

        ``id`` (1 to 128 characters) identifies the publication: the same id published twice has one
        effect and gives the same number. A lost connection is retried until ``timeout``.

        Raises:
            InvalidAddress, InvalidRequest, MessageTooLarge: before anything is sent.
            DeadlineExceeded, ConnectionLost: not confirmed in time.
        """
        check_topic(topic)
        name, data = encode_body(body, type)
        deadline = time.time() + _check_timeout(timeout)
        publication = new_id() if id is None else _check_id(id)
        while True:
            envelope = Envelope(
                kind=Kind.PUBLISH,
                id=new_id(),
                to=topic,
                sender=self._sender if sender is None else sender,
                correlation=publication,
                deadline=deadline,
                traceparent=traceparent,
                type=name,
            )
            request = Request(envelope, data)
            try:
                await self._exchange(request)
                request.result(None)
            except ConnectionLost:
                if self._closed or time.time() >= deadline:
                    raise
                continue
            assert request.reply is not None
            return request.reply.seq

    def subscribe(self, topic: str, *, after: int | None = None) -> Subscription:
        """Read a topic's events, from now on or, with ``after``, all retained ones beyond that number.

        Use as ``async with``; see :class:`Subscription`.

        Raises:
            InvalidAddress, InvalidRequest: the topic or ``after`` is not legal.
        """
        check_topic(topic)
        if after is not None and (not isinstance(after, int) or after < 0):
            raise InvalidRequest(f"after={after!r}: a sequence number of 0 or more")
        return Subscription(self, new_id(), topic, after)

    # Serving

    async def serve(self, pattern: str, *, timeout: float = TIMEOUT) -> None:
        """Receive what is sent to ``pattern``: one address, or ``kind/*``. Read :meth:`deliveries`.

        An exact address goes before ``kind/*``. Stays in force across reconnections.

        Raises:
            InvalidAddress: not a pattern.
            ProtocolError: another peer serves it already.
        """
        parse_pattern(pattern)
        request = Request(
            Envelope(
                kind=Kind.SERVE, id=new_id(), to=pattern, deadline=time.time() + _check_timeout(timeout)
            ),
            b"",
        )
        await self._exchange(request)
        request.result(None)
        if pattern not in self._patterns:
            self._patterns.append(pattern)

    async def unserve(self, pattern: str, *, timeout: float = TIMEOUT) -> None:
        """Stop receiving for ``pattern``; what was delivered already is still to be answered."""
        if pattern in self._patterns:
            self._patterns.remove(pattern)
        request = Request(
            Envelope(
                kind=Kind.UNSERVE, id=new_id(), to=pattern, deadline=time.time() + _check_timeout(timeout)
            ),
            b"",
        )
        await self._exchange(request)
        request.result(None)

    def deliveries(self) -> Deliveries:
        """An iterator over what arrives for the served patterns; ends when the client is closed.

        Bounded: at most 256 messages wait here, further ones stay at the broker and their senders wait.
        Cancelling a step loses nothing; several tasks may share the work.
        """
        return Deliveries(self)

    # Connection

    @property
    def connected(self) -> bool:
        """True while the broker is there."""
        return self._link is not None

    async def wait_lost(self, grace: float = 0.0) -> None:
        """Return once the broker has been away for ``grace`` seconds without a break."""
        while True:
            await self._down.wait()
            with anyio.move_on_after(grace):
                await self._up.wait()
                continue
            return

    async def _first_link(self, timeout: float) -> None:
        with anyio.move_on_after(timeout):
            await self._up.wait()
        if self._refused is not None:
            raise self._refused
        if self._link is None:
            reason = f" ({self._failure})" if self._failure is not None else ""
            raise ConnectionLost(
                f"no broker answered at {self.endpoint} within {timeout:g} s{reason}; is it running?",
                endpoint=self.endpoint,
            )

    async def _keep_connected(self) -> None:
        pause = _RETRY_FIRST
        while not self._closed:
            hello = control.Hello(name=self.name, instance=self._instance)
            link = Link(self.endpoint, hello, self._on_up, self._on_message)
            try:
                self._failure = reason = await link.run()
            finally:
                if self._link is link:
                    self._on_lost(link)
            if link.welcome is not None:
                pause = _RETRY_FIRST
                self.reconnects += 1
            elif isinstance(reason, ProtocolError) and not self.reconnects:
                self._refused = reason
                self._up.set()
                return
            await anyio.sleep(pause)
            pause = min(2 * pause, _RETRY_MOST)

    def _on_up(self, link: Link) -> None:
        """Welcomed: make registrations and subscriptions again, then let requests through.

        The broker handles them in this order, so nothing need be awaited.
        """
        self._link = link
        for pattern in self._patterns:
            request = Request(Envelope(kind=Kind.SERVE, id=new_id(), to=pattern), b"")
            self._post_request(link, request)
        for subscription in self._subscriptions.values():
            self._post_subscribe(link, subscription)
        for gate in self._gates.values():
            gate.reset()
        self._credit = Returns()
        self._down = anyio.Event()
        self._up.set()

    def _on_lost(self, link: Link) -> None:
        self._link = None
        self._up = anyio.Event()
        self._down.set()
        reason = self._failure or ConnectionLost("the client was closed")
        error = ConnectionLost(f"{reason}; whether the message took effect is unknown")
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.fail(error)
        self._inbox.items.clear()  # their senders have been told that they failed
        opened, self._open = self._open, {}
        for delivery in opened.values():
            delivery.cancelled.set()

    def _close(self) -> None:
        self._closed = True
        link = self._link
        if link is not None:
            link.say_goodbye()
            self._on_lost(link)
        self._up.set()  # whoever waits for a connection learns that there will be none
        self._inbox.close()
        for subscription in self._subscriptions.values():
            subscription.close(None)

    # Requests

    def _make(
        self,
        kind: Kind,
        to: str,
        body: Any,
        timeout: float,
        id: str | None,
        sender: str | None,
        correlation: str,
        deadline: float | None,
        chain: tuple[str, ...],
        traceparent: str,
        type: str | None,
        pieces: Inbox[bytes] | None = None,
    ) -> Request:
        """Check everything that can be checked here, before anything is sent."""
        parse_address(to)
        name, data = encode_body(body, type)
        latest = time.time() + _check_timeout(timeout)
        if deadline is not None:
            latest = min(latest, deadline)
        if chain:
            chain = tuple(chain)
            if kind is not Kind.TELL and to in chain:
                raise CycleError.closing(chain, to)
            if len(chain) > MAX_CHAIN:
                raise InvalidRequest(f"a chain of {len(chain)} calls is longer than {MAX_CHAIN}")
        envelope = Envelope(
            kind=kind,
            id=new_id() if id is None else _check_id(id),
            to=to,
            sender=self._sender if sender is None else sender,
            correlation=correlation,
            deadline=latest,
            chain=chain,
            traceparent=traceparent,
            type=name,
        )
        return Request(envelope, data, pieces)

    async def _exchange(self, request: Request) -> None:
        """Send a request and wait until it is answered, one way or the other."""
        try:
            await self._within_deadline(request, self._send_and_wait(request))
        finally:
            self._forget(request)

    async def _send_and_wait(self, request: Request) -> None:
        await self._send_request(request)
        await request.done.wait()

    async def _within_deadline(self, request: Request, work: Awaitable[T]) -> T:
        with anyio.move_on_after(request.envelope.deadline - time.time()):
            return await work
        envelope = request.envelope
        if request.link is None:
            if self._link is None:
                raise ConnectionLost(f"no broker at {self.endpoint} to take a message for {envelope.to}")
            raise MailboxFull(
                f"the receiver of {envelope.to} takes no more messages; none got through in time"
            )
        raise DeadlineExceeded(f"no answer from {envelope.to} before the deadline", address=envelope.to)

    async def _send_request(self, request: Request) -> None:
        envelope = request.envelope
        size = len(request.data)
        gate = None
        if envelope.kind not in (Kind.SERVE, Kind.UNSERVE, Kind.SUBSCRIBE):
            kind = "" if envelope.kind is Kind.PUBLISH else envelope.to.partition("/")[0]
            gate = self._gates.get(kind)
            if gate is None:
                gate = self._gates[kind] = Gate()
        while True:
            while (link := self._link) is None:
                if self._closed:
                    raise ConnectionLost("this client is closed")
                await self._up.wait()
            if gate is None or gate.try_take(size):
                break
            generation = await gate.take(size)
            if self._link is not None and generation == gate.generation:
                link = self._link
                break
        if envelope.id in self._requests:
            if gate is not None:
                gate.give(1, size)
            raise InvalidRequest(f"a request with id {envelope.id!r} is in flight already", id=envelope.id)
        self._post_request(link, request)

    def _post_request(self, link: Link, request: Request) -> None:
        request.link = link
        self._requests[request.envelope.id] = request
        link.post(request.envelope, request.data)

    def _forget(self, request: Request) -> None:
        """Nobody waits for it any more; if it was not answered, it is cancelled at the receiver."""
        known = self._requests.get(request.envelope.id)
        if known is request:
            del self._requests[request.envelope.id]
            if not request.done.is_set() and request.link is not None:
                request.link.post(Envelope(kind=Kind.CANCEL, correlation=request.envelope.id), b"")

    def _give_credit(self, link: Link | None, correlation: str, messages: int, size: int) -> None:
        link = link or self._link
        if link is not None:
            envelope = Envelope(kind=Kind.CREDIT, correlation=correlation, seq=messages)
            link.post(envelope, control.pack(size))

    async def _next_delivery(self) -> Delivery:
        delivery = await self._inbox.get()
        due = self._credit.consumed(len(delivery.body))
        if due is not None:
            self._give_credit(None, "", *due)
        return delivery

    # Subscriptions

    async def _start_subscription(self, subscription: Subscription) -> None:
        deadline = time.time() + TIMEOUT
        envelope = self._subscribe_envelope(subscription, deadline)
        request = Request(envelope, b"")
        self._subscriptions[subscription.id] = subscription
        try:
            await self._exchange(request)
            request.result(None)
        except BaseException:
            self._end_subscription(subscription)
            raise

    def _subscribe_envelope(self, subscription: Subscription, deadline: float = 0.0) -> Envelope:
        return Envelope(
            kind=Kind.SUBSCRIBE,
            id=subscription.id,
            to=subscription.topic,
            seq=subscription.position,
            deadline=deadline,
        )

    def _post_subscribe(self, link: Link, subscription: Subscription) -> None:
        if subscription.id not in self._requests:
            self._post_request(link, Request(self._subscribe_envelope(subscription), b""))

    def _end_subscription(self, subscription: Subscription) -> None:
        if self._subscriptions.pop(subscription.id, None) is not None and self._link is not None:
            self._link.post(Envelope(kind=Kind.UNSUBSCRIBE, correlation=subscription.id), b"")
        subscription.close(None)

    # Receiving

    def _on_message(self, link: Link, envelope: Envelope, body: bytes) -> None:
        kind = envelope.kind
        correlation = envelope.correlation
        if kind is Kind.REPLY or kind is Kind.ACCEPT or kind is Kind.FAIL:
            self._on_answer(envelope, body)
        elif kind is Kind.TELL or kind is Kind.ASK or kind is Kind.STREAM:
            delivery = Delivery(link, envelope, body, self._open)
            self._open[envelope.id] = delivery
            self._inbox.put(delivery)
        elif kind is Kind.PROGRESS:
            request = self._requests.get(correlation)
            if request is not None and request.pieces is not None:
                request.pieces.put(body)
        elif kind is Kind.EVENT:
            subscription = self._subscriptions.get(correlation)
            if subscription is not None:
                subscription.add(envelope, body)
        elif kind is Kind.CREDIT:
            size = control.unpack_bytes_credit(body)
            if correlation:
                opened = self._open.get(correlation)
                if opened is not None:
                    opened.give(envelope.seq, size)
            elif envelope.to in self._gates:
                self._gates[envelope.to].give(envelope.seq, size)
        elif kind is Kind.CANCEL:
            cancelled = self._open.pop(correlation, None)
            if cancelled is not None:
                cancelled.cancelled.set()
                with contextlib.suppress(ValueError):
                    self._inbox.items.remove(cancelled)  # nobody has looked at it: nobody need
        else:
            raise ProtocolError(f"a {kind.name} from the broker")

    def _on_answer(self, envelope: Envelope, body: bytes) -> None:
        request = self._requests.pop(envelope.correlation, None)
        if request is None:
            self.late_replies += 1
            return
        kind = request.envelope.kind
        error = from_wire(body) if envelope.kind is Kind.FAIL else None
        if kind is Kind.SUBSCRIBE:
            subscription = self._subscriptions.get(request.envelope.id)
            if subscription is not None:
                if error is None:
                    subscription.started(envelope.seq)
                else:
                    subscription.close(error)
        elif kind is Kind.SERVE and error is not None and request.envelope.to in self._patterns:
            # Lost to another peer while we were away: whoever reads deliveries must know.
            self._inbox.close(error)
        if error is None:
            request.answer(envelope, body)
        else:
            request.fail(error)


def _check_timeout(timeout: float) -> float:
    if not isinstance(timeout, (int, float)) or not math.isfinite(timeout) or not 0 < timeout <= MAX_TIMEOUT:
        raise InvalidRequest(f"timeout={timeout!r}: seconds above 0, at most {MAX_TIMEOUT:g}")
    return timeout


def _check_id(id: str) -> str:
    if not isinstance(id, str) or not 0 < len(id) <= 128 or not id.isprintable():
        raise InvalidRequest(f"id={id!r}: 1 to 128 printable characters")
    return id
