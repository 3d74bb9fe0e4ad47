"""What the broker knows about one connected peer, and about one request in flight.

Plain records: the rules that connect them are in broker.py.
"""

from __future__ import annotations

from collections import OrderedDict

from offbook.bus.credit import Returns, Window
from offbook.bus.envelope import Envelope


class Pending:
    """A request (tell, ask or stream) that was routed and is not answered yet."""

    __slots__ = ("asker", "body", "deadline", "forwarded", "header", "id", "kind", "server", "target", "to")

    def __init__(self, envelope: Envelope, header: bytes, body: bytes, asker: Peer, server: Peer) -> None:
        self.id = envelope.id
        self.kind = envelope.kind
        self.to = envelope.to
        self.target = envelope.to.partition("/")[0]
        self.deadline = envelope.deadline
        self.asker = asker
        self.server = server
        self.header = header
        self.body = body
        self.forwarded = False


class Peer:
    """One connection that said ``HELLO``.

    Attributes:
        route: the ROUTER's name for the connection.
        gone: it was dropped; nothing is sent to it any more.
        outbox: frames (header, body, header, body, ...) to send at the end of this burst.
        queue: requests for this peer that wait for its credit; bounded by the senders' windows and
            ``queue_bytes``.
        window: this peer's credit for deliveries.
        asked, answering: requests in flight that it waits for, and that it was given.
        requests: per target kind (``""`` for publications), the credit it has for requests.
    """

    __slots__ = (
        "answering",
        "asked",
        "controls",
        "gone",
        "instance",
        "malformed",
        "name",
        "outbox",
        "patterns",
        "queue",
        "queue_bytes",
        "requests",
        "returns",
        "route",
        "seen",
        "subscriptions",
        "window",
    )

    def __init__(self, route: bytes) -> None:
        self.route = route
        self.gone = False
        self.name = ""
        self.instance = ""
        self.seen = 0.0
        self.malformed = 0
        self.controls = 0
        self.outbox: list[bytes] = []
        self.patterns: set[str] = set()
        self.queue: OrderedDict[str, Pending] = OrderedDict()
        self.queue_bytes = 0
        self.window = Window()
        self.asked: dict[str, Pending] = {}
        self.answering: dict[str, Pending] = {}
        self.requests: dict[str, Window] = {}
        self.returns: dict[str, Returns] = {}
        self.subscriptions: set[str] = set()

    @property
    def greeted(self) -> bool:
        """True once it said a ``HELLO`` that was accepted."""
        return bool(self.name)

    def take_request(self, kind: str, size: int) -> bool:
        """Count a request against the peer's credit; False if it had none (it breaks the rules)."""
        window = self.requests.get(kind)
        if window is None:
            if len(self.requests) >= MAX_KINDS:
                return False
            window = self.requests[kind] = Window()
            self.returns[kind] = Returns()
        if not window.open:
            return False
        window.take(size)
        return True

    def return_request(self, kind: str, size: int) -> tuple[int, int] | None:
        """A request left the broker; returns the credit to give back if it is worth a message."""
        returns = self.returns.get(kind)
        due = returns.consumed(size) if returns is not None else None
        if due is not None:
            self.requests[kind].give(*due)
        return due


MAX_KINDS = 4096
"""Kinds of target that one peer may address: each has a window of its own."""

PUBLISH_CREDIT = ""
"""The kind under which publications are counted in :attr:`Peer.requests`."""
