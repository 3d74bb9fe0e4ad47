"""Help for tests of actors and agents: an engine without a model, and a whole team in one process.

Owns :class:`FakeEngine`, which serves ``engine/main`` on a real bus with replies that a function makes, and
:func:`team`, which starts a broker, a host and a fake engine. One token is one character, so a transcript
can be read: ``engine.text(transcript)``.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec

from offbook.bus import Broker, Bus, Delivery, connect
from offbook.bus.errors import ContextTooLarge, NoSuchActor, OffbookError, UnknownMessageType

from . import statements
from .clock import Clock
from .host import Host
from .journal import Fault, Journal
from .lm import (
    AgentStats,
    ChatMessage,
    Delta,
    EngineStats,
    Forget,
    Generate,
    Generated,
    Locate,
    MemoryRef,
    Observe,
    Observed,
    Prefetch,
    SetMemory,
    Shutdown,
    StateHandle,
    Stats,
    Usage,
)
from .memory import fold
from .topicstore import JournalTopicStore

Answer = Callable[[Generate], str]
"""Makes the text of a reply from a request."""


def tokens_of(text: str) -> bytes:
    """The fake tokenizer: one token per character."""
    return array("I", [ord(one) for one in text]).tobytes()


def text_of(transcript: bytes) -> str:
    """The text of a transcript of fake tokens."""
    return "".join(chr(token) for token in array("I", transcript))


def render(messages: tuple[ChatMessage, ...]) -> str:
    """The fake chat template: ``[user]text`` for each message, then ``[assistant]``."""
    return "".join(f"[{one.role}]{one.content}" for one in messages) + "[assistant]"


def echo(request: Generate) -> str:
    """The default answer: what was said last."""
    return f"You said: {request.messages[-1].content}"


class FakeEngine:
    """An engine without a model.

    Args:
        endpoint: the broker.
        answer: makes replies; by default :func:`echo`.
        limit: most tokens of a context, to test full ones.

    Attributes:
        requests: every ``Generate`` that came, in order.
        hints: every ``Prefetch`` and ``Forget``.
        errors: raised for the next requests, one each.
        gate: replies wait for this event; set at first.
        started: set when a request is being worked on.
        pieces: pieces sent before an error from ``errors`` is raised.
    """

    def __init__(self, endpoint: str, *, answer: Answer = echo, limit: int = 0) -> None:
        self.endpoint = endpoint
        self.answer = answer
        self.limit = limit
        self.requests: list[Generate] = []
        self.hints: list[Prefetch | Forget] = []
        self.errors: deque[BaseException] = deque()
        self.pieces = 0
        self.cancelled = 0
        self.gate = anyio.Event()
        self.gate.set()
        self.started = anyio.Event()
        self._scope = anyio.CancelScope()

    def hold(self) -> None:
        """Let the next replies wait until ``gate.set()``."""
        self.gate = anyio.Event()
        self.started = anyio.Event()

    def kill(self) -> None:
        """Vanish from the bus in the middle of whatever is going on."""
        self._scope.cancel()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until killed or cancelled. May be run again after :meth:`kill`."""
        self._scope = anyio.CancelScope()
        with self._scope:
            async with connect(self.endpoint) as bus, anyio.create_task_group() as tasks:
                await bus.serve("engine/main")
                task_status.started()
                async for delivery in bus.deliveries():
                    tasks.start_soon(self._handle, bus, delivery)

    async def _handle(self, bus: Bus, delivery: Delivery) -> None:
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                await delivery.cancelled.wait()
                self.cancelled += 1
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            try:
                await self._answer(delivery)
            except OffbookError as exc:
                await delivery.fail(exc)
            tasks.cancel_scope.cancel()

    async def _answer(self, delivery: Delivery) -> None:
        request = delivery.decode(Generate, Observe, Prefetch, Forget, Locate, Stats, SetMemory, Shutdown)
        if isinstance(request, Prefetch | Forget):
            self.hints.append(request)
            await delivery.accept()
        elif isinstance(request, Generate):
            await self._generate(request, delivery)
        elif isinstance(request, Observe):
            tokens = len(render(request.messages))
            await delivery.reply(Observed(tokens=tokens, handle=self.handle(request.memory)))
        elif isinstance(request, Locate):
            await delivery.reply(self.handle(request.memory))
        elif isinstance(request, Stats | SetMemory):
            await delivery.reply(self.stats())
        else:
            raise UnknownMessageType(f"the fake engine takes no {delivery.envelope.type}")

    async def _generate(self, request: Generate, delivery: Delivery) -> None:
        self.requests.append(request)
        self.started.set()
        error = self.errors.popleft() if self.errors else None
        text = self.answer(request)
        words = [word + " " for word in text.split(" ")]
        words[-1] = words[-1][:-1]
        if error is not None:
            for word in words[: self.pieces]:
                await delivery.progress(Delta(word))
            raise error
        await self.gate.wait()
        transcript = request.memory.transcript
        system = f"[system]{request.memory.system}" if request.memory.system else ""
        prompt = ("" if transcript else system) + render(request.messages)
        needed = (len(transcript) // 4) + len(prompt) + request.sampling.max_tokens
        kept = len(transcript) // 4
        if self.limit and needed > self.limit and transcript and request.on_context_full == "keep_recent":
            kept = len(system)
            half = (len(transcript) // 4 - kept) // 2
            transcript = transcript[: kept * 4] + transcript[len(transcript) - half * 4 :]
            needed = len(transcript) // 4 + len(prompt) + request.sampling.max_tokens
        if self.limit and needed > self.limit:
            raise ContextTooLarge(
                f"{needed} tokens do not fit into {self.limit}",
                limit=self.limit,
                needed=needed,
                system_tokens=len(system),
            )
        for word in words:
            await delivery.progress(Delta(word))
        appended = transcript[kept * 4 :] + tokens_of(prompt + text)
        memory = msgspec.structs.replace(request.memory, transcript=transcript[: kept * 4] + appended)
        await delivery.reply(
            Generated(
                text=text,
                appended=appended,
                kept=kept,
                finish_reason="stop",
                usage=Usage(
                    source="hot" if transcript else "cold",
                    reused_tokens=len(transcript) // 4,
                    prefilled_tokens=len(prompt),
                    generated_tokens=len(text),
                    context_tokens=len(memory.transcript) // 4,
                    truncated_tokens=(len(request.memory.transcript) - len(transcript)) // 4,
                ),
                handle=self.handle(memory),
            )
        )

    def handle(self, memory: MemoryRef) -> StateHandle:
        """A state handle for a transcript."""
        return StateHandle(
            agent=memory.agent,
            fingerprint="fake",
            tokens=len(memory.transcript) // 4,
            chain=blake2b(memory.transcript, digest_size=8).hexdigest(),
            where="hot",
        )

    def stats(self) -> EngineStats:
        """Counters."""
        names = {request.memory.agent for request in self.requests}
        return EngineStats(
            model="fake", fingerprint="fake", device="none", pid=0, budget_bytes=0, used_bytes=0,
            peak_bytes=0, weights_bytes=0, pool_bytes=0, pool_used_bytes=0, disk_bytes=0,
            context_limit=self.limit,
            agents=tuple(
                AgentStats(agent=name, where="hot", tokens=0, resident_bytes=0, disk_bytes=0, busy=False)
                for name in sorted(names)
            ),
            counters={"requests": float(len(self.requests))},
        )  # fmt: skip


async def stored_state(host: Host, actor: str) -> dict[str, Any]:
    """The state fields of an actor as they are in the journal now."""
    snapshot = await host.journal.do("load", lambda db: statements.load(db, actor))
    if snapshot is None:
        raise NoSuchActor(f"there is no {actor}", actor=actor)
    state: dict[str, Any] = msgspec.msgpack.decode(snapshot.state)
    return state


async def stored_transcript(host: Host, actor: str) -> str:
    """The text of an agent's transcript of fake tokens as it is in the journal now."""
    snapshot = await host.journal.do("load", lambda db: statements.load(db, actor))
    return text_of(fold(snapshot.segments)) if snapshot is not None else ""


@asynccontextmanager
async def team(
    folder: Path,
    *,
    name: str = "team",
    clock: Clock | None = None,
    engine: bool = True,
    answer: Answer = echo,
    limit: int = 0,
    fault: Fault | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Host, FakeEngine]]:
    """A broker, a host and a fake engine in this process, with their journal in ``folder``.

    Leaving the block stops them; entering one with the same folder again is a restart.
    """
    endpoint = f"ipc://{folder}/{name}.sock"
    journal = await Journal.open(folder / f"{name}.journal", fault=fault)
    try:
        async with Broker(endpoint, topic_store=JournalTopicStore(journal)):
            fake = FakeEngine(endpoint, answer=answer, limit=limit)
            async with anyio.create_task_group() as tasks:
                if engine:
                    await tasks.start(fake.run)
                failure: BaseException | None = None
                try:
                    async with Host(name, journal=journal, endpoint=endpoint, clock=clock, **options) as host:
                        yield host, fake
                except Exception as exc:  # not to be wrapped into a group
                    failure = exc
                tasks.cancel_scope.cancel()
            if failure is not None:
                raise failure
    finally:
        await journal.close()
