"""A turn: handling one message, and everything it will commit.

Owns the effects of a handler until they are committed: sends, timers, subscriptions, the memory's changes,
finished language-model calls. Nothing leaves before the commit except questions (``ask``) and pieces of an
answer (``progress``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc
import msgspec

from offbook.bus.address import check_topic, parse_address
from offbook.bus.body import check_size
from offbook.bus.errors import CycleError, DeadlineExceeded, InvalidRequest, MailboxFull

from . import statements
from .message import derive_id, encode, reply_type, tag_of
from .records import Fork, Inbound, Outgoing, Timer

if TYPE_CHECKING:
    from .clock import Clock
    from .directory import Directory
    from .engine import Engine
    from .journal import Journal
    from .memory import AgentMemory
    from .questions import Questions

MAX_UNSENT = 10_000
"""Messages of one actor that may be on their way: what it sent and no receiver has stored yet."""

current_turn: ContextVar[Turn | None] = ContextVar("offbook_turn", default=None)
"""The turn whose handler runs in this task."""


class TurnPort(Protocol):
    """What a turn needs of its host."""

    clock: Clock
    journal: Journal
    engine: Engine
    questions: Questions

    directory: Directory

    async def ensure_topic(self, topic: str) -> None: ...

    def unsent(self, actor: str) -> int: ...

    def engine_wait(self, message: Inbound, waits: bool) -> None: ...


class Turn:
    """The effects of one try to handle one message.

    Attributes:
        message: the message, as it lies in the mailbox.
        memory: the agent's memory as this turn changes it; None for actors without one.
        tasks: a task group that ends with the handler.
        closed: the handler is over; nothing may be added.
    """

    def __init__(
        self,
        port: TurnPort,
        message: Inbound,
        *,
        random: Random,
        memory: AgentMemory | None,
        calls: dict[int, tuple[bytes, bytes]],
        progress: Callable[[Any], Awaitable[None]],
    ) -> None:
        self.port = port
        self.message = message
        self.random = random
        self.memory = memory
        self.closed = False
        self.tasks: anyio.abc.TaskGroup | None = None
        self.speaking = anyio.Lock()
        self.outbox: list[Outgoing] = []
        self.timers: dict[str, Timer] = {}
        self.cancelled: set[str] = set()
        self.subscriptions: dict[str, bool] = {}
        self.forks: list[Fork] = []
        self.forgotten = False
        self._finished_calls = calls
        self._calls = 0
        self._asks = 0
        self._progress = progress

    @property
    def actor(self) -> str:
        """The address of the actor."""
        return self.message.actor

    def now(self) -> float:
        """The host's clock."""
        return self.port.clock.now()

    def time_left(self, most: float) -> float:
        """Real seconds until the asker's deadline, at most ``most``.

        Raises:
            DeadlineExceeded: it has passed.
        """
        if not self.message.deadline:
            return most
        left = self.message.deadline - time.time()
        if left <= 0:
            raise DeadlineExceeded(f"the deadline of the question to {self.actor} has passed")
        return min(left, most)

    # -- effects ----------------------------------------------------------------------------------------

    def _send(self, target: str, message: msgspec.Struct, *, topic: bool) -> None:
        if not isinstance(message, msgspec.Struct):
            raise InvalidRequest(f"{message!r} is not a message; derive its class from Message")
        body = encode(message)
        check_size(len(body))
        if self.port.unsent(self.actor) + len(self.outbox) >= MAX_UNSENT:
            raise MailboxFull(
                f"{self.actor} has {MAX_UNSENT} messages on their way that nobody took yet; then {target}",
                limit=MAX_UNSENT,
            )
        self.outbox.append(
            Outgoing(
                id=derive_id("sent", self.actor, self.message.id, len(self.outbox)),
                sender=self.actor,
                target=target,
                type=tag_of(message),
                body=body,
                topic=topic,
                traceparent=self.message.traceparent,
            )
        )

    async def tell(self, to: str, message: msgspec.Struct) -> None:
        """Record a send."""
        parse_address(to)
        await self.port.directory.check(to)
        self._send(to, message, topic=False)

    def publish(self, topic: str, message: msgspec.Struct) -> None:
        """Record a publication."""
        check_topic(topic)
        self._send(topic, message, topic=True)

    async def subscribe(self, topic: str) -> None:
        """Record a subscription; the host listens to the topic before this returns."""
        check_topic(topic)
        await self.port.ensure_topic(topic)
        self.subscriptions[topic] = True

    def unsubscribe(self, topic: str) -> None:
        """Record the end of a subscription."""
        self.subscriptions[check_topic(topic)] = False

    def after(self, delay: float, message: msgspec.Struct, name: str | None) -> str:
        """Record a timer."""
        if name is None:
            name = f"#{derive_id(self.message.id, len(self.timers))[:16]}"
        elif not name or name[0] in "@#":
            raise InvalidRequest(f"{name!r} cannot name a timer: it must not be empty or start with @ or #")
        body = encode(message)
        check_size(len(body))
        self.timers[name] = Timer(self.actor, name, self.now() + delay, 0.0, tag_of(message), body)
        self.cancelled.discard(name)
        return name

    def cancel(self, name: str) -> None:
        """Record the end of a timer."""
        self.timers.pop(name, None)
        self.cancelled.add(name)

    # -- questions and answers ----------------------------------------------------------------------------

    async def ask(self, to: str, request: msgspec.Struct, *, timeout: float) -> Any:
        """Ask now, within the turn."""
        parse_address(to)
        if not timeout > 0:
            raise InvalidRequest(f"a timeout must be a positive number of seconds, got {timeout}")
        body = encode(request)
        check_size(len(body))
        chain = (*self.message.chain, self.actor)
        if to in chain:
            path = (*chain, to)
            raise CycleError(f"this question would wait for itself: {' -> '.join(path)}", chain=list(path))
        type_ = tag_of(request)
        self._asks += 1
        id_ = derive_id("ask", self.actor, self.message.id, self._asks, to, type_, _digest(body).hex())
        return await self.port.questions.ask(
            to,
            type_,
            body,
            id=id_,
            sender=self.actor,
            chain=chain,
            deadline=time.time() + self.time_left(timeout),
            patient=self.message.recovered,
            returns=reply_type(type(request)),
        )

    async def progress(self, piece: Any) -> None:
        """A piece of the answer for the asker."""
        await self._progress(piece)

    # -- language-model calls -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting_for_engine(self) -> Iterator[None]:
        """For calls to the engine: a process that ends within this block has not used up a try."""
        self.port.engine_wait(self.message, True)
        try:
            yield
        finally:
            self.port.engine_wait(self.message, False)

    def next_call(self) -> int:
        """The number of the next call in this turn; the same in every try that does the same."""
        self._calls += 1
        return self._calls

    def finished_call(self, number: int, request: bytes) -> bytes | None:
        """The result of this call if an earlier try of the turn got one for the same request."""
        digest, result = self._finished_calls.get(number, (b"", b""))
        return result if digest == _digest(request) else None

    async def keep_call(self, number: int, request: bytes, result: bytes) -> None:
        """Make a finished call durable before the turn goes on."""
        digest = _digest(request)
        await self.port.journal.do(
            "call", lambda db: statements.put_call(db, self.message, number, digest, result)
        )


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
