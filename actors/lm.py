"""The language-model port: the messages an agent exchanges with an engine.

Owns the wire types of the engine's interface and nothing else. They live beside the actors, not in
the runtime, so that a process which hosts actors (or a client in another process) can talk to an
engine without importing MLX. The engine is an actor at the address ``engine/main``.

Token ids travel as ``bytes``: little-endian unsigned 32-bit integers, 4 bytes a token. The transcript
is the truth about an agent and lives with the caller; the engine keeps KV only as a cache of it, so
every request carries the whole transcript (16 KB at 4K tokens).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ENGINE_ADDRESS = "engine/main"

Where = Literal["hot", "warm", "cold"]
"""Where the KV of a transcript is: ``hot`` in memory, ``warm`` on disk, ``cold`` tokens only."""

FinishReason = Literal["stop", "length", "cancelled"]


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation, as chat templates name it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens. ``temperature=0`` is greedy. Validated by the engine before any work."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 64
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int = 0


class MemoryRef(msgspec.Struct, frozen=True, kw_only=True):
    """Whose memory a request is about, and everything needed to rebuild it.

    Attributes:
        agent: the agent's actor id, ``kind/key``; used for accounting and the tail file, never alone
            to decide reuse.
        salt: tenant salt; KV blocks are shared only between equal salts.
        system: the system prompt (persona), or None. Rendered once, at the first message.
        transcript: token ids read and produced so far (little-endian uint32).
        origin: agent this one was forked from, or empty; its saved memory stands for the same ids.
        pinned: stays in memory between turns, unless nothing else is left that could give way.
    """

    agent: str
    salt: str = ""
    system: str | None = None
    transcript: bytes = b""
    origin: str = ""
    pinned: bool = False


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one call cost. Times in milliseconds, sizes in tokens."""

    source: Where = "cold"
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    context_tokens: int = 0
    queue_ms: float = 0.0
    load_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    ttft_ms: float = 0.0
    evictions: int = 0
    truncated_tokens: int = 0


class StateHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A name for an agent's memory at one point: which model, how many tokens, which tokens, where."""

    agent: str
    fingerprint: str
    tokens: int
    chain: str
    where: Where


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Append ``messages`` to the memory and generate. Progress: ``Delta``. Reply: ``Generated``.

    Attributes:
        json_schema: constrain the text to JSON of this schema, or None.
        priority: higher is served first.
        on_context_full: when transcript, messages and ``max_tokens`` exceed the model's context:
            ``keep_recent`` keeps the persona and the most recent half of the transcript (said in
            ``Usage.truncated_tokens``), ``refuse`` fails with ``ContextTooLarge``.
    """

    memory: MemoryRef
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams = SamplingParams()
    json_schema: dict[str, Any] | None = None
    priority: int = 0
    on_context_full: Literal["keep_recent", "refuse"] = "keep_recent"


class Delta(msgspec.Struct, frozen=True, tag=True):
    """A piece of generated text, as soon as it is certain. Ephemeral."""

    text: str


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply to ``Generate``. The new transcript is ``transcript[:kept] + appended``.

    Attributes:
        text: the generated text, without stop strings and special tokens.
        appended: ids to append to the transcript: rendered prompt, then generated ids as sampled.
        kept: how many tokens of the sent transcript remain (all of them, except after
            ``on_context_full`` shortened it; then ``appended`` starts with what was kept elsewhere).
        finish_reason: ``stop`` (end of turn or stop string), ``length`` or ``cancelled``.
    """

    text: str
    appended: bytes
    kept: int
    finish_reason: FinishReason
    usage: Usage
    handle: StateHandle
    logprobs: tuple[dict[str, float], ...] = ()


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read ahead: prefill ``messages`` that a later ``Generate`` will start with. Changes no truth."""

    memory: MemoryRef
    messages: tuple[ChatMessage, ...]


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply to ``Observe``: how many tokens are now prefilled beyond the transcript."""

    tokens: int
    handle: StateHandle


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message waits for this agent: start loading its memory now. No reply is sent."""

    memory: MemoryRef


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop all KV of an agent from memory and disk (shared blocks stay while others use them)."""

    agent: str


class Locate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where is this memory now? Reply: ``StateHandle``."""

    memory: MemoryRef


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the engine's counters. Reply: ``EngineStats``."""


class AgentStats(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's memory as the engine sees it."""

    agent: str
    where: Where
    tokens: int
    resident_bytes: int
    disk_bytes: int
    busy: bool


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Counters since the engine started, sizes in bytes.

    Attributes:
        decisions: the supervisor's latest decisions in words (who was evicted for what).
        waiting: per agent whose turn waits, what it waits for.
        degraded: why memory is not kept on disk, or empty.
    """

    model: str
    fingerprint: str
    device: str
    pid: int
    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    weights_bytes: int
    pool_bytes: int
    pool_used_bytes: int
    disk_bytes: int
    context_limit: int
    agents: tuple[AgentStats, ...] = ()
    counters: dict[str, float] = {}
    decisions: tuple[str, ...] = ()
    waiting: dict[str, str] = {}
    degraded: str = ""


class SetMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change the memory budget at run time. Reply: ``EngineStats``."""

    budget_bytes: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Flush dirty memory and end. Reply: True, once everything is on disk."""


EngineRequest = Generate | Observe | Prefetch | Forget | Locate | Stats | SetMemory | Shutdown
EngineReply = Generated | Observed | StateHandle | EngineStats | bool
