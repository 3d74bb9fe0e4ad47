"""Ingress: messages from the bus on their way into mailboxes.

Owns admission. What can be refused is refused here, before any work: unknown kinds and types, bodies that do
not decode, cycles, full mailboxes. The rest is stored, in order of arrival, and acknowledged when it is.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio

from offbook.bus.address import parse_address
from offbook.bus.envelope import Kind
from offbook.bus.errors import (
    ActorStopped,
    CycleError,
    MailboxFull,
    NoSuchActor,
    OffbookError,
    UnknownMessageType,
)
from offbook.bus.suggest import hint

from . import statements
from .actor import ActorSpec, unknown_type
from .journal import Journal
from .message import decode, names
from .quiet import Quiet
from .records import Accepted, Birth, Inbound, Mode
from .stage import Stage

if TYPE_CHECKING:
    from offbook.bus.delivery import Delivery

_STORING = 1024
"""Messages on their way into the journal; above, the bus keeps further ones and their senders wait."""

_ATTACH_TRIES = 8
"""A repeated question may find its first copy gone from the inbox just now; looking again settles it."""


class IngressPort(Protocol):
    """What the ingress needs of its host."""

    name: str
    stopping: bool
    stage: Stage
    journal: Journal
    mailbox_limit: int

    def spec(self, kind: str) -> ActorSpec | None: ...

    def kinds(self) -> list[str]: ...

    def birth(self, spec: ActorSpec) -> Birth | None: ...

    def control(self, delivery: Delivery) -> bool: ...

    def created(self, spec: ActorSpec) -> None: ...


class Ingress:
    """Admits deliveries. :meth:`admit` is called for each, :meth:`run` works off what they wait for."""

    def __init__(self, port: IngressPort, quiet: Quiet) -> None:
        self._port = port
        self._quiet = quiet
        self._storing: deque[tuple[asyncio.Future[Accepted], Delivery, Inbound, ActorSpec]] = deque()
        self._queued = anyio.Event()
        self._progress = anyio.Event()
        self._on_the_way: Counter[str] = Counter()

    async def admit(self, delivery: Delivery) -> None:
        """Refuse a delivery, or start storing it."""
        if self._port.control(delivery):
            return
        while len(self._storing) >= _STORING:
            await self._progress.wait()
        try:
            spec = self._check(delivery)
        except OffbookError as exc:
            await delivery.fail(exc)
            return
        envelope = delivery.envelope
        mode = Mode.TELL if envelope.kind is Kind.TELL else Mode.ASK
        message = Inbound(
            id=envelope.id,
            actor=envelope.to,
            type=envelope.type,
            body=delivery.body,
            mode=mode,
            sender=envelope.sender,
            # A tell's deadline is for its acceptance; once stored, it will be handled.
            deadline=envelope.deadline if mode is Mode.ASK else 0.0,
            chain=envelope.chain,
            traceparent=envelope.traceparent,
            # An idle actor begins at once: its try is counted as the message is stored.
            tries=0 if self._depth(envelope.to) else 1,
        )
        self._store(delivery, message, spec)

    def _check(self, delivery: Delivery) -> ActorSpec:
        """Everything that can be known without the journal."""
        envelope = delivery.envelope
        if self._port.stopping:
            raise ActorStopped(f"the host {self._port.name} stops", actor=envelope.to)
        kind = parse_address(envelope.to).kind
        spec = self._port.spec(kind)
        if spec is None:
            raise NoSuchActor(
                f"no actor of kind {kind!r} here; {hint(kind, tuple(self._port.kinds()))}", actor=envelope.to
            )
        if envelope.kind is not Kind.TELL and envelope.to in envelope.chain:
            path = (*envelope.chain, envelope.to)
            raise CycleError(f"this question would wait for itself: {' -> '.join(path)}", chain=list(path))
        handler = spec.handlers.get(envelope.type)
        if handler is None:
            raise UnknownMessageType(unknown_type(spec, envelope.type), type=envelope.type)
        decode(delivery.body, handler.message, tag=envelope.type)
        cell = self._port.stage.find(envelope.to)
        if cell is not None and cell.stopped:
            raise ActorStopped(f"{envelope.to} was stopped: {cell.stopped}", actor=envelope.to)
        depth = self._depth(envelope.to)
        if depth >= self._port.mailbox_limit:
            raise MailboxFull(
                f"{envelope.to} has {depth} messages waiting; its limit is {self._port.mailbox_limit}",
                actor=envelope.to,
                limit=self._port.mailbox_limit,
            )
        return spec

    def _depth(self, actor: str) -> int:
        cell = self._port.stage.find(actor)
        return (len(cell.mailbox) if cell else 0) + self._on_the_way[actor]

    def _store(self, delivery: Delivery, message: Inbound, spec: ActorSpec) -> None:
        birth = self._port.birth(spec)
        self._on_the_way[message.actor] += 1
        self._quiet.take()
        future = self._port.journal.submit(
            "accept", lambda db: statements.accept(db, message, birth, time.time()), admits=True
        )
        self._storing.append((future, delivery, message, spec))
        self._queued.set()

    def take_back_tries(self) -> None:
        """The host stops in order: tries that were counted ahead, of messages on their way, do not count."""
        for _, _, message, _ in self._storing:
            if message.tries:  # by then it is stored, or has no place
                self._port.journal.post("try", partial(statements.begin_try, message=message, tries=0))

    async def run(self) -> None:
        """Acknowledge what has been stored, in order, until cancelled."""
        while True:
            await self._queued.wait()
            self._queued = anyio.Event()
            while self._storing:
                future, delivery, message, spec = self._storing[0]
                try:
                    await self._stored(await future, delivery, message, spec)
                except OffbookError as exc:
                    await delivery.fail(exc)
                finally:
                    self._storing.popleft()
                    self._on_the_way[message.actor] -= 1
                    if not self._on_the_way[message.actor]:
                        del self._on_the_way[message.actor]
                    self._quiet.give()
                    self._progress.set()
                    self._progress = anyio.Event()

    async def _stored(
        self, accepted: Accepted, delivery: Delivery, message: Inbound, spec: ActorSpec
    ) -> None:
        """Put a message into its mailbox and acknowledge it."""
        ask = message.mode is Mode.ASK
        for _ in range(_ATTACH_TRIES):
            if accepted.status != "pending" or not ask:
                break
            if self._port.stage.cell(spec, message.actor).wait_for(message.id, delivery):
                return
            # The turn that handled the first copy has just ended.
            again = partial(statements.accept, message=message, birth=self._port.birth(spec), now=time.time())
            accepted = await self._port.journal.do("accept", again)
        if accepted.status == "absent":
            missing = names(spec.schema.required)
            await delivery.fail(
                NoSuchActor(
                    f"there is no {message.actor}: it was never spawned and needs {missing} to begin",
                    actor=message.actor,
                    host=self._port.name,
                )
            )
            return
        if accepted.created:
            self._port.created(spec)
        cell = self._port.stage.cell(spec, message.actor)
        for stored in accepted.messages:
            cell.put(stored, delivery if stored.id == message.id and ask else None)
        if cell.asleep:  # a repetition: it brings nobody into memory
            self._port.stage.drop(cell.id)
        if cell.stopped and accepted.status == "new" and ask:
            await delivery.fail(ActorStopped(f"{message.actor} was stopped: {cell.stopped}", actor=cell.id))
        if accepted.status == "done" and ask:
            await delivery.reply(accepted.reply or b"\xc0")
        elif accepted.status == "pending" and ask:
            await delivery.fail(
                ActorStopped(f"{message.actor} does not take questions now", actor=message.actor)
            )
        else:
            await delivery.accept()
