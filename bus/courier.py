"""How the broker sends: outboxes that collect during a burst and leave in one piece.

Owns what is written to peers. Handlers leave messages here without waiting; the socket's owner flushes.
"""

from __future__ import annotations

from collections.abc import Callable

from offbook.bus import control
from offbook.bus.envelope import Envelope, Kind, encode_header
from offbook.bus.listener import Listener
from offbook.bus.peer import Peer
from offbook.bus.statistics import BrokerStatistics

BATCH_FRAMES = 128
"""Frames per multipart message to a peer."""


class Courier:
    """Collects messages for peers; ``unreachable`` is called for a peer that has gone meanwhile."""

    def __init__(
        self, listener: Listener, count: BrokerStatistics, unreachable: Callable[[Peer], None]
    ) -> None:
        self._listener = listener
        self._count = count
        self._unreachable = unreachable
        self._dirty: list[Peer] = []

    def post(self, peer: Peer, header: bytes, body: bytes) -> None:
        """Leave an encoded pair in the peer's outbox."""
        if not peer.outbox:
            if not self._dirty:
                self._listener.wake()
            self._dirty.append(peer)
        peer.outbox.append(header)
        peer.outbox.append(body)

    def send(self, peer: Peer, envelope: Envelope, body: bytes) -> None:
        """Leave a message in the peer's outbox."""
        self.post(peer, encode_header(envelope), body)

    def fail(self, peer: Peer, correlation: str, exc: BaseException) -> None:
        """Answer a request with an error."""
        self._count.failed += 1
        self.send(peer, Envelope(kind=Kind.FAIL, correlation=correlation), control.pack_error(exc))

    def return_credit(self, peer: Peer, kind: str, size: int) -> None:
        """A request of ``peer`` to ``kind`` left the broker: it may send another."""
        due = peer.return_request(kind, size)
        if due is not None:
            self.send(peer, Envelope(kind=Kind.CREDIT, to=kind, seq=due[0]), control.pack(due[1]))

    def flush(self) -> None:
        """Send everything. Only for the socket's owner."""
        while self._dirty:  # a peer that turns out to have gone leaves messages for others
            peer = self._dirty.pop()
            frames, peer.outbox = peer.outbox, []
            if peer.gone:
                continue
            for start in range(0, len(frames), BATCH_FRAMES):
                if not self._listener.send(peer.route, frames[start : start + BATCH_FRAMES]):
                    self._unreachable(peer)
                    break
