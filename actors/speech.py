"""Speaking: one language-model call, from what an agent says to what it hears back.

Owns building the request, replaying a call that an earlier try of the turn finished, the policy for a full
context, and the two ways to get the text: whole (:class:`Reply`) or in pieces (:class:`Speech`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from offbook.bus.errors import ContextTooLarge, InvalidRequest, ModelError

from .engine import LONGEST_CALL, Emit
from .lm import (
    ChatMessage,
    FinishReason,
    Generate,
    Generated,
    SamplingParams,
    StateHandle,
    Usage,
)
from .memory import AgentMemory, FullContext, growth_between
from .message import derive_id, encode
from .records import Mode

if TYPE_CHECKING:
    from .agent import Agent
    from .turn import Turn

Policy = Callable[[FullContext], Awaitable[bytes]]

Prompt = str | ChatMessage | Iterable["ChatMessage | dict[str, str]"]

_SHORTENINGS = 8
"""How often ``on_context_full`` may shorten one call's context: halving eight times leaves 0.4 %."""


@dataclass(frozen=True)
class Reply:
    """What the model said, and what it cost.

    Attributes:
        text: without stop strings and special tokens.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        usage: tokens and times; ``usage.source`` says where the memory was.
        handle: the agent's memory after this call.
        logprobs: per token, if asked for.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    handle: StateHandle
    logprobs: tuple[dict[str, float], ...] = ()


def chat(prompt: Prompt) -> tuple[ChatMessage, ...]:
    """A prompt as chat messages; text is one message of the user.

    Raises:
        InvalidRequest: the prompt is empty, or a message is not one.
    """
    if isinstance(prompt, str):
        messages: tuple[ChatMessage, ...] = (ChatMessage("user", prompt),) if prompt else ()
    elif isinstance(prompt, ChatMessage):
        messages = (prompt,)
    else:
        try:
            messages = tuple(
                one if isinstance(one, ChatMessage) else msgspec.convert(one, ChatMessage) for one in prompt
            )
        except (TypeError, msgspec.ValidationError) as exc:
            raise InvalidRequest(f"a prompt is text or messages with role and content: {exc}") from exc
    for message in messages:
        if not isinstance(message.content, str) or not message.content.strip():
            raise InvalidRequest(f"a {message.role} message is empty: give it some text")
        try:
            message.content.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(f"a prompt holds characters that UTF-8 cannot encode: {exc}") from exc
    return messages


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse impossible sampling values before anything is sent.

    Raises:
        InvalidRequest: names the value and the range.
    """
    s = sampling
    checks: Sequence[tuple[str, Any, bool, str]] = (
        ("max_tokens", s.max_tokens, _whole(s.max_tokens) and s.max_tokens >= 1, "a whole number from 1"),
        ("temperature", s.temperature, _real(s.temperature) and s.temperature >= 0, "zero (greedy) or more"),
        ("top_p", s.top_p, _real(s.top_p) and 0 < s.top_p <= 1, "above 0, at most 1"),
        ("top_k", s.top_k, _whole(s.top_k) and s.top_k >= 0, "a whole number, 0 for all"),
        ("min_p", s.min_p, _real(s.min_p) and 0 <= s.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", s.repetition_penalty, _real(s.repetition_penalty) and s.repetition_penalty > 0,
         "above 0"),
        ("logprobs", s.logprobs, _whole(s.logprobs) and s.logprobs >= 0, "a whole number, 0 for none"),
        ("seed", s.seed, s.seed is None or _whole(s.seed), "a whole number or None"),
        ("stop", s.stop, all(isinstance(one, str) and one for one in s.stop), "texts that are not empty"),
    )  # fmt: skip
    for name, value, good, wanted in checks:
        if not good:
            raise InvalidRequest(f"{name} must be {wanted}, got {value!r}", field=name)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Plan:
    """One call before it is made. ``policy`` is the agent's own one for full contexts, if it has one."""

    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    json_schema: dict[str, Any] | None
    priority: int
    policy: Policy | None


def persona_of(agent: Agent) -> str:
    """What the agent's ``persona`` returns.

    Raises:
        InvalidRequest: it is no text, or none that UTF-8 can encode.
    """
    text: Any = agent.persona()
    where = f"{type(agent).__name__}.persona()"
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} must return text, empty for none, got {text!r:.100}", field="persona")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            f"{where} returns characters that UTF-8 cannot encode: {exc}", field="persona"
        ) from exc
    return text


async def perform(agent: Agent, turn: Turn, plan: Plan, emit: Emit | None) -> Reply:
    """Make one call on the agent's own memory. Calls of one turn are made one after another."""
    memory = turn.memory
    assert memory is not None, "agents have a memory"
    async with turn.speaking:
        number = turn.next_call()
        messages = (*memory.record.pending, *plan.messages)
        if not messages:
            raise InvalidRequest("the prompt is empty and nothing was observed: there is nothing to answer")
        sampling = plan.sampling
        if sampling.seed is None and sampling.temperature > 0:
            # The same words again if this turn is tried again, also on another engine.
            seed = int(derive_id("seed", turn.actor, turn.message.id, number)[:8], 16)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        request = Generate(
            memory=memory.reference(turn.actor, persona_of(agent), pinned=agent.pinned),
            messages=messages,
            sampling=sampling,
            json_schema=plan.json_schema,
            priority=plan.priority,
            on_context_full="keep_recent" if plan.policy is None else "refuse",
        )
        body = encode(request)
        result = turn.finished_call(number, body)
        if result is not None:
            generated = msgspec.msgpack.decode(result, type=Generated)
            if emit is not None:
                await emit(generated.text)
        else:
            with turn.waiting_for_engine():
                generated = await _generate(turn, plan, request, body, emit)
            await turn.keep_call(number, body, encode(generated))
        memory.absorb(request.memory.transcript, generated)
    return Reply(
        generated.text, generated.finish_reason, generated.usage, generated.handle, generated.logprobs
    )


async def _generate(turn: Turn, plan: Plan, request: Generate, body: bytes, emit: Emit | None) -> Generated:
    """Send a request; when its context does not fit, let the agent's own policy shorten it."""
    original = request.memory.transcript
    for _ in range(_SHORTENINGS):
        try:
            generated = await turn.port.engine.generate(
                body,
                sender=turn.actor,
                traceparent=turn.message.traceparent,
                seconds=turn.time_left(LONGEST_CALL),
                patient=turn.message.mode is not Mode.ASK,
                emit=emit,
            )
        except ContextTooLarge as exc:
            transcript = request.memory.transcript
            if plan.policy is None or not transcript:
                raise  # the engine's own policy could not help
            full = FullContext(
                transcript=transcript,
                limit=_count(exc, "limit"),
                needed=_count(exc, "needed"),
                persona_tokens=min(_count(exc, "system_tokens"), len(transcript) // 4),
                error=exc,
            )
            shorter = await plan.policy(full)
            if len(shorter) >= len(transcript) or len(shorter) % 4:
                raise InvalidRequest("on_context_full must return a shorter run of whole token ids") from exc
            request = msgspec.structs.replace(
                request, memory=msgspec.structs.replace(request.memory, transcript=shorter)
            )
            body = encode(request)
            continue
        return _rebase(original, request.memory.transcript, generated)
    raise ContextTooLarge(f"{turn.actor}: the context does not fit after {_SHORTENINGS} shortenings")


def _count(exc: ContextTooLarge, name: str) -> int:
    value = exc.details.get(name, 0)
    return value if isinstance(value, int) and value > 0 else 0


def _rebase(original: bytes, sent: bytes, generated: Generated) -> Generated:
    """Express a result for a shortened transcript as a change of the original one."""
    if sent == original:
        return generated
    final = sent[: generated.kept * 4] + generated.appended
    growth = growth_between(original, final)
    assert growth is not None, "a call always appends"
    usage = msgspec.structs.replace(
        generated.usage, truncated_tokens=generated.usage.truncated_tokens + (len(original) - len(sent)) // 4
    )
    return msgspec.structs.replace(generated, kept=growth.kept, appended=growth.tokens, usage=usage)


def parse_typed(reply: Reply, returns: type[Any]) -> Any:
    """The reply as a value of a type.

    Raises:
        ModelError: the text is not one, usually because ``max_tokens`` cut it.
    """
    try:
        return msgspec.json.decode(reply.text, type=returns)
    except msgspec.MsgspecError as exc:
        hint = "; raise max_tokens" if reply.finish_reason == "length" else ""
        name = getattr(returns, "__name__", str(returns))
        raise ModelError(
            f"the model's reply is not a {name} ({exc}){hint}", text=reply.text, finish=reply.finish_reason
        ) from exc


class Speech:
    """A reply that comes in pieces::

        async with self.speak("Plans?") as turn:
            async for piece in turn:
                ...
        turn.text   # the whole reply, once the block has ended

    Leaving the block early waits for the rest, as the reply becomes part of the memory; leaving it by an
    exception cancels the call.
    """

    def __init__(self, agent: Agent, turn: Turn, plan: Plan) -> None:
        self._agent = agent
        self._turn = turn
        self._plan = plan
        self._send: MemoryObjectSendStream[str] | None = None
        self._receive: MemoryObjectReceiveStream[str] | None = None
        self._ended = anyio.Event()
        self._scope = anyio.CancelScope()
        self._reply: Reply | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> Speech:
        tasks = self._turn.tasks
        if tasks is None or self._turn.closed:
            raise InvalidRequest("speak() works only inside a handler")
        self._send, self._receive = anyio.create_memory_object_stream[str](256)
        tasks.start_soon(self._work, self._send)
        return self

    async def _work(self, send: MemoryObjectSendStream[str]) -> None:
        """Make the call in the turn's task group, so that the reader may use any cancel scopes."""
        try:
            with self._scope, send:
                self._reply = await perform(self._agent, self._turn, self._plan, self._emit)
        except Exception as exc:
            self._error = exc
        finally:
            self._ended.set()

    async def _emit(self, piece: str) -> None:
        if self._send is not None:
            with contextlib.suppress(anyio.BrokenResourceError):  # the reader left; the text is still wanted
                await self._send.send(piece)

    async def __aiter__(self) -> AsyncIterator[str]:
        if self._receive is None:
            raise InvalidRequest("read the pieces inside: async with self.speak(...) as turn")
        async for piece in self._receive:
            yield piece
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._receive is not None:
            self._receive.close()
        if exc is not None:
            self._scope.cancel()
        with anyio.CancelScope(shield=exc is not None):
            await self._ended.wait()
        if exc is None and self._error is not None:
            raise self._error

    @property
    def reply(self) -> Reply:
        """The whole reply.

        Raises:
            InvalidRequest: the block has not ended yet.
        """
        if self._reply is None:
            raise InvalidRequest("the reply is complete only after the async with block of speak()")
        return self._reply

    @property
    def text(self) -> str:
        """The whole text."""
        return self.reply.text

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended: ``stop``, ``length`` or ``cancelled``."""
        return self.reply.finish_reason

    @property
    def usage(self) -> Usage:
        """What it cost."""
        return self.reply.usage


def new_memory(salt: str) -> bytes:
    """The stored record of an agent that has read nothing."""
    memory = AgentMemory()
    memory.set_salt(salt)
    return memory.packed()
