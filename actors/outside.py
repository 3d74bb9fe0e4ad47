"""From outside: what a script says to the actors of its host.

Owns the script's verbs and their ``once=``. While one of them is under way, things are not quiet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from offbook.bus.errors import InvalidRequest

from .journal import Journal
from .message import Request, T, decode, encode, reply_type
from .once import Once
from .quiet import Quiet

if TYPE_CHECKING:
    from offbook.bus.client import Bus
    from offbook.bus.streams import ReplyStream


def check_message(message: Any) -> None:
    """Refuse what has no message type.

    Raises:
        InvalidRequest: it is neither a message nor a dict with a type.
    """
    if isinstance(message, dict) and isinstance(message.get("type"), str) and message["type"]:
        return
    if not isinstance(message, msgspec.Struct):
        raise InvalidRequest(
            f"{message!r:.100} is not a message: give an object of a class derived from Message, "
            'or a dict with a "type"'
        )


class Outside:
    """The verbs of a script; :class:`Host` has them."""

    bus: Bus
    journal: Journal
    quiet: Quiet

    def expect(self, topic: str, seq: int) -> None:
        """Event ``seq`` of a topic was published here."""
        raise NotImplementedError

    async def tell(
        self,
        to: str,
        message: msgspec.Struct | dict[str, Any],
        *,
        once: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Send a message from outside the actors; returns once it is stored.

        Args:
            once: a name for this send: however often the script runs, it happens once.
        """
        with self.quiet.held():
            act = Once(self.journal, "tell", once)
            if await act.seen() is None:
                check_message(message)
                await self.bus.tell(to, message, id=act.id, timeout=timeout)
                await act.note()

    async def ask(self, to: str, request: Request[T], *, once: str | None = None, timeout: float = 60.0) -> T:
        """Ask an actor from outside; ``once`` as in :meth:`tell` (the first answer is kept)."""
        returns = reply_type(type(request))
        with self.quiet.held():
            act = Once(self.journal, "ask", once)
            seen = await act.seen()
            if seen is not None:
                kept: T = decode(seen[0] or b"\xc0", returns)
                return kept
            wanted = None if returns is Any else returns
            reply: T = await self.bus.ask(to, request, id=act.id, timeout=timeout, returns=wanted)
            await act.note(encode(reply))
            return reply

    def stream(
        self, to: str, request: msgspec.Struct | dict[str, Any], *, timeout: float = 60.0
    ) -> ReplyStream:
        """Ask and read the answer's progress; see ``Bus.stream``."""
        return self.bus.stream(to, request, timeout=timeout)

    async def publish(
        self, topic: str, message: msgspec.Struct | dict[str, Any], *, once: str | None = None
    ) -> int:
        """Publish from outside; returns the sequence number. ``once`` as in :meth:`tell`."""
        with self.quiet.held():
            act = Once(self.journal, "publish", once)
            seen = await act.seen()
            if seen is not None:
                return int(decode(seen[0] or b"\x00", int))
            check_message(message)
            seq = await self.bus.publish(topic, message, id=act.id)
            self.expect(topic, seq)
            await act.note(encode(seq))
            return seq
