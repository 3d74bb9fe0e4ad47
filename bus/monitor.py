"""What happens to a socket's connections, as ZeroMQ tells it.

Owns the monitor socket. A broker learns here at once, and not by a missed heartbeat, that a connection
ended; a client likewise, and whether its connection came up at all.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message

from offbook.bus.socket import MessageSocket

ENDED = int(zmq.EVENT_DISCONNECTED)
REFUSED = int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
NOT_CONNECTED = int(zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED)
READY = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)


class Monitor:
    """The stream of connection events of one socket; ``close()`` before the socket itself."""

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        self._watched = socket
        self._pair = MessageSocket(socket.get_monitor_socket(events))

    def next_nowait(self) -> tuple[int, int] | None:
        """The next ``(event, value)``; the value of ``ENDED`` is the connection's descriptor."""
        frames = self._pair.receive_nowait()
        return None if frames is None else _parse(frames)

    async def next(self) -> tuple[int, int]:
        """Wait for the next event."""
        return _parse(await self._pair.receive())

    def close(self) -> None:
        """Stop watching."""
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._pair.close()


def _parse(frames: list[bytes]) -> tuple[int, int]:
    message = parse_monitor_message(frames)
    return int(message["event"]), int(message["value"])
