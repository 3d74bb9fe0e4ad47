"""The client's engine room: requests, deliveries and subscriptions over one link after another.

Owns what must survive a lost connection (registrations and subscriptions, made again on each new
link) and what must not (requests in flight, which fail at once).
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import zmq

from offbook.bus import control, credit
from offbook.bus.credit import Gate, Returns
from offbook.bus.delivery import Delivery
from offbook.bus.envelope import Envelope, Kind, new_id
from offbook.bus.errors import (
    ConnectionLost,
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
from offbook.bus.streams import Subscription

T = TypeVar("T")

SUBSCRIBE_TIMEOUT = 60.0

_RETRY_FIRST = 0.02
_RETRY_MOST = 1.0
"""Seconds between attempts to reconnect: doubling from the first to the most."""

_UNCOUNTED = (Kind.SERVE, Kind.UNSERVE, Kind.SUBSCRIBE)
"""Requests that need no credit: the broker answers them by itself, at once."""


class Exchange:
    """Everything of a client but its public verbs; see :class:`Bus` for what the names mean."""

    def __init__(
        self, endpoint: str, name: str, arm: Callable[[zmq.Socket[bytes]], None] | None = None
    ) -> None:
        self._arm = arm
        self.name = name
        self.endpoint = endpoint
        self.late_replies = 0
        self.reconnects = 0
        self.patterns: list[str] = []
        self.closed = False
        self._instance = os.urandom(16).hex()
        self._link: Link | None = None
        self._up = anyio.Event()
        self._down = anyio.Event()
        self._refused: OffbookError | None = None
        self._failure: OffbookError | None = None  # why the last attempt to connect failed
        self._gates: dict[str, Gate] = {}
        self._requests: dict[str, Request] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._inbox: Inbox[Delivery] = Inbox()
        self._open: dict[str, Delivery] = {}
        self._credit = Returns()
        self._window = (credit.MESSAGES, credit.BYTES)  # what the broker grants, for each kind of target

    @property
    def connected(self) -> bool:
        return self._link is not None

    async def wait_lost(self, grace: float) -> None:
        """See :meth:`Bus.wait_lost`."""
        while True:
            await self._down.wait()
            with anyio.move_on_after(grace):
                await self._up.wait()
            if self._link is None:
                return

    async def first_link(self, timeout: float) -> None:
        """Wait for the first connection; raises if there is none in time, or we are refused."""
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

    async def keep_connected(self) -> None:
        """Make one link after the other until cancelled or refused."""
        pause = _RETRY_FIRST
        while not self.closed:
            hello = control.Hello(name=self.name, instance=self._instance)
            link = Link(self.endpoint, hello, self._on_up, self._on_message, self._arm)
            try:
                self._failure = reason = await link.run()
            finally:
                if self._link is link:
                    self._on_lost(self._failure)
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
        assert link.welcome is not None
        self._window = (link.welcome.window, link.welcome.window_bytes)
        for pattern in self.patterns:
            request = Request(Envelope(kind=Kind.SERVE, id=new_id(), to=pattern), b"")
            self._post_request(link, request)
        for subscription in self._subscriptions.values():
            if subscription.active:  # others are about to be sent by whoever waits for them
                self._post_request(link, Request(self._subscribe_envelope(subscription), b""))
        for gate in self._gates.values():
            gate.reset(*self._window)
        self._credit = Returns()
        self._down = anyio.Event()
        self._up.set()

    def _on_lost(self, reason: OffbookError | None) -> None:
        self._link = None
        self._up = anyio.Event()
        self._down.set()
        error = ConnectionLost(
            f"{reason or 'this client was closed'}; whether the message took effect is unknown"
        )
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.fail(error)
        self._inbox.items.clear()  # their senders have been told that they failed
        opened, self._open = self._open, {}
        for delivery in opened.values():
            delivery.cancelled.set()

    def close(self) -> None:
        """Take leave of the broker; everything that waits fails or ends."""
        self.closed = True
        link = self._link
        if link is not None:
            link.say_goodbye()
            self._on_lost(None)
        self._up.set()  # whoever waits for a connection learns that there will be none
        self._inbox.close()
        for subscription in self._subscriptions.values():
            subscription.close(None)

    async def exchange(self, request: Request) -> None:
        """Send a request and wait until it is answered, one way or the other."""
        try:
            await self.within_deadline(request, self._send_and_wait(request))
        finally:
            self.forget(request)

    async def persist(self, make: Callable[[], Request]) -> Request:
        """Exchange a request that may be repeated until it is answered; ``make`` gives it each time.

        Raises:
            ConnectionLost: the last of its connections was lost, and its deadline has passed.
        """
        while True:
            request = make()
            try:
                await self.exchange(request)
                request.result(None)
                return request
            except ConnectionLost:
                if self.closed or time.time() >= request.envelope.deadline:
                    raise

    async def _send_and_wait(self, request: Request) -> None:
        await self.send(request)
        await request.done.wait()

    async def within_deadline(self, request: Request, work: Awaitable[T]) -> T:
        """Await ``work`` for as long as ``request`` may take; then raise what held it up."""
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

    async def send(self, request: Request) -> None:
        """Send a request as soon as there is a connection and credit for it."""
        envelope = request.envelope
        size = len(request.data)
        gate = None
        if envelope.kind not in _UNCOUNTED:
            kind = "" if envelope.kind is Kind.PUBLISH else envelope.to.partition("/")[0]
            gate = self._gates.get(kind)
            if gate is None:
                gate = self._gates[kind] = Gate(*self._window)
        while True:
            while (link := self._link) is None:
                if self.closed:
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

    def forget(self, request: Request) -> None:
        """Nobody waits for it any more; if it was not answered, it is cancelled at the receiver."""
        known = self._requests.get(request.envelope.id)
        if known is request:
            del self._requests[request.envelope.id]
            if not request.done.is_set() and request.link is not None:
                request.link.post(Envelope(kind=Kind.CANCEL, correlation=request.envelope.id), b"")

    def give_credit(self, link: Link | None, correlation: str, messages: int, size: int) -> None:
        """Tell the broker what was consumed: of deliveries, of a subscription, or of a stream."""
        link = link or self._link
        if link is not None:
            envelope = Envelope(kind=Kind.CREDIT, correlation=correlation, seq=messages)
            link.post(envelope, control.pack(size))

    async def next_delivery(self) -> Delivery:
        """Wait for the next delivery. Cancelling loses nothing."""
        delivery = await self._inbox.get()
        self._consumed(delivery)
        return delivery

    def _consumed(self, delivery: Delivery) -> None:
        due = self._credit.consumed(len(delivery.body))
        if due is not None:
            self.give_credit(None, "", *due)

    # Subscriptions

    async def start_subscription(self, subscription: Subscription) -> None:
        """Make it active; it stays so across connections."""
        deadline = time.time() + SUBSCRIBE_TIMEOUT
        self._subscriptions[subscription.id] = subscription
        try:
            await self.persist(lambda: Request(self._subscribe_envelope(subscription, deadline), b""))
        except BaseException:
            self.end_subscription(subscription)
            raise

    def _subscribe_envelope(self, subscription: Subscription, deadline: float = 0.0) -> Envelope:
        return Envelope(
            kind=Kind.SUBSCRIBE,
            id=subscription.id,
            to=subscription.topic,
            seq=subscription.position,
            deadline=deadline,
        )

    def end_subscription(self, subscription: Subscription) -> None:
        """End it here and at the broker."""
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
                if cancelled in self._inbox.items:  # nobody has looked at it: nobody need
                    self._inbox.items.remove(cancelled)
                    self._consumed(cancelled)
        else:
            raise ProtocolError(f"a {kind.name} from the broker")

    def _on_answer(self, envelope: Envelope, body: bytes) -> None:
        request = self._requests.pop(envelope.correlation, None)
        if request is None:
            failed = self._subscriptions.pop(envelope.correlation, None)
            if failed is None:
                self.late_replies += 1
            else:  # its store failed in mid-course
                failed.close(from_wire(body))
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
        elif kind is Kind.SERVE and error is not None and request.envelope.to in self.patterns:
            # Lost to another peer while we were away: whoever reads deliveries must know.
            self._inbox.close(error)
        if error is None:
            request.answer(envelope, body)
        else:
            request.fail(error)
