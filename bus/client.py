"""The client: how any process, of whatever kind, talks over the bus.

Owns the public verbs (ask, tell, stream, publish, subscribe, serve) and the checks of their arguments;
all that can be refused is refused here, before anything is sent. It knows nothing of actors; an
address is a text.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import zmq

from offbook.bus.address import check_name, check_topic, parse_address, parse_pattern
from offbook.bus.body import encode_body
from offbook.bus.curve import KeyPair, arm_client, check_key, client_keys
from offbook.bus.envelope import MAX_CHAIN, Envelope, Kind, new_id
from offbook.bus.errors import (
    ConnectionLost,
    CycleError,
    DeadlineExceeded,
    InvalidRequest,
)
from offbook.bus.exchange import Exchange
from offbook.bus.inbox import Inbox
from offbook.bus.request import Request
from offbook.bus.security import resolve_endpoint, running
from offbook.bus.streams import Deliveries, ReplyStream, Subscription

TIMEOUT = 60.0
"""Default seconds to wait for an answer."""

MAX_TIMEOUT = 30 * 86400.0


@contextlib.asynccontextmanager
async def connect(
    target: str,
    *,
    name: str | None = None,
    timeout: float = 5.0,
    server_key: str | None = None,
    keys: KeyPair | None = None,
) -> AsyncIterator[Bus]:
    """Connect to a broker: ``async with connect("village") as bus: ...``.

    Args:
        target: a runtime's name, ``ipc://PATH`` or ``tcp://HOST:PORT``.
        name: how this peer is called, unique among those connected; made up by default.
        timeout: seconds to wait for the first connection.
        server_key: for ``tcp://``, and required by it: the broker's public key.
        keys: for ``tcp://``: our own keys; by default this user's, made on first use. The broker must
            have the public one in its list.

    Raises:
        ConnectionLost: no broker answered in time.
        ProtocolError: the broker refused us, e.g. the name is in use.
        InvalidAddress, InvalidRequest: ``target`` or ``name`` is not legal.
    """
    endpoint = resolve_endpoint(target)
    arm = None
    if endpoint.startswith("tcp://"):
        if server_key is None:
            raise InvalidRequest(
                f"{target}: plaintext TCP is refused; give the broker's public key as server_key"
            )
        check_key(server_key, "server_key")
        arm = partial(arm_client, pair=keys or client_keys(), server_key=server_key)
    bus = Bus(endpoint, name, arm)
    failure: BaseException | None = None
    # A task group would wrap what the caller's block raises into a group; hand it over outside.
    async with anyio.create_task_group() as tasks:
        try:
            tasks.start_soon(bus._exchange.keep_connected)
            try:
                await bus._exchange.first_link(timeout)
            except ConnectionLost as exc:
                if "://" in target:
                    raise
                others = [other for other in running() if other != target]
                there = f"running are: {', '.join(others)}" if others else "no other is running"
                raise ConnectionLost(f"runtime {target!r}: {exc.message}; {there}", **exc.details) from exc
            yield bus
        except Exception as exc:
            failure = exc
        finally:
            bus._exchange.close()
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Bus:
    """A connected client, as :func:`connect` gives it. All methods belong to the event loop's thread.

    Attributes:
        name: this peer's name.
        endpoint: where its broker is.
    """

    def __init__(
        self, endpoint: str, name: str | None, arm: Callable[[zmq.Socket[bytes]], None] | None = None
    ) -> None:
        self.name = check_name(name, "peer name") if name is not None else f"peer-{new_id()[-12:]}"
        self.endpoint = endpoint
        self._exchange = Exchange(endpoint, self.name, arm)
        self._sender = f"peer/{self.name}"

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
        await self._exchange.exchange(request)
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
        await self._exchange.exchange(request)
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
        return ReplyStream(self._exchange, request, pieces, returns, yields)

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

        def make() -> Request:
            return Request(
                Envelope(
                    kind=Kind.PUBLISH,
                    id=new_id(),
                    to=topic,
                    sender=self._sender if sender is None else sender,
                    correlation=publication,
                    deadline=deadline,
                    traceparent=traceparent,
                    type=name,
                ),
                data,
            )

        request = await self._exchange.persist(make)
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
        return Subscription(self._exchange, new_id(), topic, after)

    # Serving

    async def serve(self, pattern: str, *, timeout: float = TIMEOUT) -> None:
        """Receive what is sent to ``pattern``: one address, or ``kind/*``. Read :meth:`deliveries`.

        An exact address goes before ``kind/*``. Stays in force across reconnections.

        Raises:
            InvalidAddress: not a pattern.
            ProtocolError: another peer serves it already.
        """
        parse_pattern(pattern)
        await self._register(Kind.SERVE, pattern, timeout)
        if pattern not in self._exchange.patterns:
            self._exchange.patterns.append(pattern)

    async def unserve(self, pattern: str, *, timeout: float = TIMEOUT) -> None:
        """Stop receiving for ``pattern``; what was delivered already is still to be answered."""
        if pattern in self._exchange.patterns:
            self._exchange.patterns.remove(pattern)
        await self._register(Kind.UNSERVE, pattern, timeout)

    async def _register(self, kind: Kind, pattern: str, timeout: float) -> None:
        deadline = time.time() + _check_timeout(timeout)
        await self._exchange.persist(
            lambda: Request(Envelope(kind=kind, id=new_id(), to=pattern, deadline=deadline), b"")
        )

    def deliveries(self) -> Deliveries:
        """An iterator over what arrives for the served patterns; ends when the client is closed.

        Bounded: at most 256 messages wait here, further ones stay at the broker and their senders wait.
        Cancelling a step loses nothing; several tasks may share the work.
        """
        return Deliveries(self._exchange)

    # Connection

    @property
    def connected(self) -> bool:
        """True while the broker is there."""
        return self._exchange.connected

    @property
    def late_replies(self) -> int:
        """Answers that came after nobody waited for them any more; they were discarded."""
        return self._exchange.late_replies

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and made anew."""
        return self._exchange.reconnects

    async def wait_lost(self, grace: float = 0.0) -> None:
        """Return once the broker has been away for ``grace`` seconds without a break."""
        await self._exchange.wait_lost(grace)

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
            if latest <= time.time():
                raise DeadlineExceeded(f"the deadline of a message to {to} has passed already", address=to)
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


def _check_timeout(timeout: float) -> float:
    if not isinstance(timeout, (int, float)) or not math.isfinite(timeout) or not 0 < timeout <= MAX_TIMEOUT:
        raise InvalidRequest(f"timeout={timeout!r}: seconds above 0, at most {MAX_TIMEOUT:g}")
    return timeout


def _check_id(id: str) -> str:
    if not isinstance(id, str) or not 0 < len(id) <= 128 or not id.isprintable():
        raise InvalidRequest(f"id={id!r}: 1 to 128 printable characters")
    return id
