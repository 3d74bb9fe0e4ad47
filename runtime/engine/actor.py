"""``EngineActor``: the engine as an actor on the bus, at ``engine/main``.

Owns the way from a delivery to a job and back: decoding, validation before any work, rendering of
messages (in worker threads), cancellation, and handing pieces of text to the asker. Runs on the event
loop and never touches MLX; the step thread does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

from offbook.actors.lm import (
    ENGINE_ADDRESS,
    ChatMessage,
    Delta,
    Forget,
    Generate,
    Generated,
    Locate,
    MemoryRef,
    Observe,
    Observed,
    Prefetch,
    SamplingParams,
    SetMemory,
    Shutdown,
    Stats,
)
from offbook.bus import Bus, Delivery, parse_address
from offbook.bus.errors import InvalidRequest, OffbookError

from ..config import check_budget
from ..kv.memory import Key
from ..kv.table import Ids
from . import constrain
from .context import fit
from .dialogue import Dialogue, check
from .job import Job
from .loop import EngineLoop
from .reports import with_disk
from .sampling import Sampler, validate
from .text import TextStream

log = logging.getLogger("offbook.engine")

REQUESTS = (Generate, Observe, Prefetch, Forget, Locate, Stats, SetMemory, Shutdown)

Event = str | Generated | Observed | OffbookError


class Outbox:
    """Carries events from the step thread to the event loop: one wake-up for all events of a step."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._scheduled = False

    def put(self, target: asyncio.Queue[Event], event: Event) -> None:
        """From the step thread."""
        self._events.append((target, event))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop has ended; nobody listens any more
                log.debug("event after the end of the loop")

    def _deliver(self) -> None:
        self._scheduled = False
        while self._events:
            target, event = self._events.popleft()
            target.put_nowait(event)


class EngineActor:
    """Serves ``engine/main`` on a bus.

    Attributes:
        ended: set once ``Shutdown`` was asked for and everything is on disk.
    """

    def __init__(self, bus: Bus, loop: EngineLoop) -> None:
        self.bus, self.loop = bus, loop
        loaded = loop.loaded
        self.context_limit: int = loaded.context_limit
        self.dialogue = Dialogue(loaded.tokenizer, sorted(loaded.eos_token_ids))
        self.ended = anyio.Event()
        self._outbox = Outbox()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        await self.bus.serve(ENGINE_ADDRESS)
        task_status.started()
        async with anyio.create_task_group() as tasks:
            async for delivery in self.bus.deliveries():
                tasks.start_soon(self._handle, delivery)

    async def _handle(self, delivery: Delivery) -> None:
        try:
            request = delivery.decode(*REQUESTS)
            await delivery.reply(await self._answer(request, delivery))
        except OffbookError as error:
            await delivery.fail(error)
        except Exception as error:
            log.exception("request %s failed", delivery.envelope.type)
            await delivery.fail(error)

    async def _answer(self, request: Any, delivery: Delivery) -> Any:
        match request:
            case Generate():
                return await self._generate(request, delivery)
            case Observe():
                return await self._observe(request, delivery)
            case Prefetch(memory=memory):
                await delivery.accept()
                key, ids = self._memory(memory)
                if len(ids):
                    self.loop.post(lambda: self.loop.prefetch(key, ids, memory.origin))
                return None
            case Locate(memory=memory):
                key, ids = self._memory(memory)
                return await self._on_step_thread(lambda: self.loop.locate(key, ids))
            case Forget(agent=agent):
                check_agent(agent)
                removal = await self._on_step_thread(lambda: self.loop.forget_agent(agent))
                if removal is not None:
                    await asyncio.wrap_future(removal)
                return True
            case Stats():
                stats = await self._on_step_thread(self.loop.stats)
                return await anyio.to_thread.run_sync(with_disk, stats, self.loop)
            case SetMemory(budget_bytes=budget):
                return await self._resize(budget)
            case Shutdown():
                await asyncio.wrap_future(self.loop.stop())
                self.ended.set()
                return True
        raise InvalidRequest(f"no such request: {type(request).__name__}")

    async def _on_step_thread(self, action: Any) -> Any:
        return await asyncio.wrap_future(self.loop.call(action))

    async def _resize(self, budget: int) -> Any:
        check_budget(budget)  # here: whoever asks may be under other limits than this process
        await asyncio.wrap_future(self.loop.resize(budget))
        return await self._on_step_thread(self.loop.stats)

    # ---- jobs

    def _limit(self) -> int:
        """Tokens that one agent can have: what the model reads, and what the memory budget holds."""
        return min(self.context_limit, self.loop.longest)

    def _limit_of(self) -> str:
        return (
            "the model's context" if self.context_limit <= self.loop.longest else "the memory budget's room"
        )

    async def _generate(self, request: Generate, delivery: Delivery) -> Generated:
        validate(request.sampling)
        check(request.messages)
        key, transcript = self._memory(request.memory)
        constraint = None
        if request.json_schema is not None:
            if request.sampling.stop:
                raise InvalidRequest("stop: stop strings would cut a typed reply; leave them out")
            constraint = await anyio.to_thread.run_sync(
                constrain.compile_schema, request.json_schema, self.loop.loaded, request.sampling.max_tokens
            )
        system, messages, sampling = request.memory.system, request.messages, request.sampling
        prompt, persona = await anyio.to_thread.run_sync(self._render, system, transcript, messages)
        fitted = fit(
            key[0],
            transcript,
            prompt,
            max_tokens=sampling.max_tokens,
            limit=self._limit(),
            of=self._limit_of(),
            persona=persona,
            turn_ends=self.dialogue.eos,
            refuse=request.on_context_full == "refuse",
        )
        job = Job(
            key=key,
            ids=fitted.ids,
            appended_from=fitted.kept,
            kept=fitted.kept,
            max_tokens=sampling.max_tokens,
            sampler=Sampler(sampling),
            text=TextStream(
                self.loop.loaded.tokenizer.detokenizer if constraint is None else constraint.detokenizer(),
                sampling.stop,
                self.dialogue.special,
            ),
            emit=lambda job, event: None,
            origin=request.memory.origin,
            pinned=request.memory.pinned,
            priority=request.priority,
            deadline=monotonic_deadline(delivery.envelope.deadline),
            truncated=fitted.truncated,
            logprobs=sampling.logprobs,
            constraint=constraint,
        )
        reply = await self._run(job, delivery)
        assert isinstance(reply, Generated)
        return reply

    def _render(
        self, system: str | None, transcript: Ids, messages: tuple[ChatMessage, ...]
    ) -> tuple[Ids, int]:
        """In a worker thread: the prompt's ids, and how much of the transcript is the persona."""
        prompt = self.dialogue.prompt(system, transcript, messages)
        # The persona's length matters only near the context's end; rendering it costs a template.
        near = len(transcript) and len(transcript) + len(prompt) > self._limit() // 2
        return prompt, self.dialogue.persona_length(system, transcript) if near else 0

    async def _observe(self, request: Observe, delivery: Delivery) -> Observed:
        check(request.messages)
        key, transcript = self._memory(request.memory)
        ahead = await anyio.to_thread.run_sync(
            self.dialogue.ahead, request.memory.system, transcript, request.messages
        )
        # One id stays unprefilled in every plan, so one more is asked for.
        ids = np.concatenate([transcript, ahead])
        fit(
            key[0],
            transcript,
            ahead,
            max_tokens=1,
            limit=self._limit(),
            of=self._limit_of(),
            persona=0,
            turn_ends=(),
            refuse=True,
        )
        job = Job(
            key=key,
            ids=ids,
            appended_from=len(transcript),
            kept=len(transcript),
            max_tokens=0,
            sampler=Sampler(SamplingParams()),
            text=None,
            emit=lambda job, event: None,
            origin=request.memory.origin,
            pinned=request.memory.pinned,
            priority=-1,
            deadline=monotonic_deadline(delivery.envelope.deadline),
        )
        reply = await self._run(job, delivery)
        assert isinstance(reply, Observed)
        return reply

    async def _run(self, job: Job, delivery: Delivery) -> Generated | Observed:
        """Submit a job; pass its pieces on; return its reply or raise its error."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        job.emit = lambda _job, event: self._outbox.put(events, event)
        self.loop.post(lambda: self.loop.submit(job))
        async with anyio.create_task_group() as tasks:

            async def cancel_when_gone() -> None:
                await delivery.cancelled.wait()
                self.loop.post(lambda: self.loop.cancel(job))

            tasks.start_soon(cancel_when_gone)
            try:
                while True:
                    event = await events.get()
                    if isinstance(event, str):
                        await delivery.progress(Delta(event))
                    elif isinstance(event, OffbookError):
                        raise event
                    else:
                        tasks.cancel_scope.cancel()
                        return event
            except OffbookError as error:
                failure = error
                tasks.cancel_scope.cancel()
        raise failure

    def _memory(self, memory: MemoryRef) -> tuple[Key, Ids]:
        """Key and transcript of a request, checked."""
        check_agent(memory.agent)
        if len(memory.transcript) % 4:
            raise InvalidRequest(
                f"transcript of {memory.agent}: {len(memory.transcript)} bytes are not whole 4-byte token ids"
            )
        ids = np.frombuffer(memory.transcript, "<u4").astype(np.uint32)
        size = int(self.loop.vocabulary)
        if len(ids) and int(ids.max()) >= size:
            raise InvalidRequest(
                f"transcript of {memory.agent} holds token id {int(ids.max())}, beyond the model's {size}: "
                "it was made with another model; forget the agent's memory or use that model"
            )
        return (memory.agent, memory.salt), ids


def check_agent(agent: str) -> None:
    """Refuse an invalid actor id before any work (``InvalidAddress``)."""
    parse_address(agent)


def monotonic_deadline(unix: float | None) -> float:
    """A wall-clock deadline of an envelope on this process's monotonic clock; infinity if there is none."""
    return float("inf") if not unix else time.monotonic() + (unix - time.time())
