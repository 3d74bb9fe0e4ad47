"""An agent's memory: the transcript, what was observed and not read yet, and the state handle.

Owns how transcripts are stored and changed. A transcript is a run of token ids (little-endian uint32). It is
stored as *growths*: each turn keeps so many tokens of the old transcript and appends new ones. That makes
a turn cost its own tokens, and every earlier turn's transcript stays readable (``rewind``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from offbook.bus.errors import ContextTooLarge

from .lm import ChatMessage, Generated, MemoryRef, StateHandle
from .records import Growth

TOKEN_BYTES = 4


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of an agent's memory that is rewritten with each turn that changes it. Stored.

    Attributes:
        tokens: length of the transcript.
        pending: observed messages that the next call will read.
        handle: what the engine said last.
        salt: the tenant's salt.
        origin: the agent that this one was forked from, until its own first call.
    """

    tokens: int = 0
    pending: tuple[ChatMessage, ...] = ()
    handle: StateHandle | None = None
    salt: str = ""
    origin: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(MemoryRecord)


def unpack(raw: bytes | None) -> MemoryRecord:
    """A stored record; an empty memory for None."""
    return MemoryRecord() if raw is None else _decoder.decode(raw)


def fold(segments: Iterable[Growth]) -> bytes:
    """The transcript that a series of growths leads to."""
    whole = bytearray()
    for growth in segments:
        del whole[growth.kept * TOKEN_BYTES :]
        whole += growth.tokens
    return bytes(whole)


def growth_between(old: bytes, new: bytes) -> Growth | None:
    """The growth that leads from one transcript to another; None if they are equal."""
    if old == new:
        return None
    if new.startswith(old):
        return Growth(len(old) // TOKEN_BYTES, new[len(old) :])
    low, high = 0, min(len(old), len(new)) // TOKEN_BYTES
    while low < high:  # the longest common prefix, by bisection
        middle = (low + high + 1) // 2
        if old[: middle * TOKEN_BYTES] == new[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return Growth(low, new[low * TOKEN_BYTES :])


@dataclass
class AgentMemory:
    """An agent's memory as one turn sees and changes it; the cell keeps the committed one."""

    transcript: bytes = b""
    record: MemoryRecord = field(default_factory=MemoryRecord)
    committed: bytes = b""
    committed_record: MemoryRecord = field(default_factory=MemoryRecord)

    @classmethod
    def load(cls, raw: bytes | None, segments: Iterable[Growth]) -> AgentMemory:
        """From the journal."""
        transcript, record = fold(segments), unpack(raw)
        return cls(transcript, record, transcript, record)

    def copy(self) -> AgentMemory:
        """A working copy for a turn."""
        return AgentMemory(self.transcript, self.record, self.transcript, self.record)

    @property
    def tokens(self) -> int:
        """Length of the transcript in tokens."""
        return len(self.transcript) // TOKEN_BYTES

    def observe(self, messages: Iterable[ChatMessage]) -> None:
        """Add messages for the next call to read."""
        self.record = msgspec.structs.replace(self.record, pending=(*self.record.pending, *messages))

    def absorb(self, sent: bytes, generated: Generated) -> None:
        """Take over what a call read and said. ``sent`` is the transcript that the request carried."""
        self.set_transcript(sent[: generated.kept * TOKEN_BYTES] + generated.appended, generated.handle)
        self.record = msgspec.structs.replace(self.record, pending=(), origin="")

    def set_transcript(self, transcript: bytes, handle: StateHandle | None) -> None:
        """Replace the transcript (``rewind``, ``forget``)."""
        self.transcript = transcript
        self.record = msgspec.structs.replace(self.record, tokens=self.tokens, handle=handle)

    def set_salt(self, salt: str) -> None:
        """Whose KV blocks may be shared with this agent's."""
        if salt != self.record.salt:
            self.record = msgspec.structs.replace(self.record, salt=salt)

    def reference(self, agent: str, persona: str, *, pinned: bool = False) -> MemoryRef:
        """This memory for a request to the engine."""
        return MemoryRef(
            agent=agent,
            salt=self.record.salt,
            system=persona or None,
            transcript=self.transcript,
            origin=self.record.origin,
            pinned=pinned,
        )

    def forked(self, origin: str) -> bytes:
        """The stored record of a copy."""
        return _encode(msgspec.structs.replace(self.record, handle=None, origin=origin))

    def packed(self) -> bytes:
        """The stored form of the record."""
        return _encode(self.record)

    def changes(self) -> tuple[bytes | None, Growth | None]:
        """What the commit must write: the record if it changed, and the transcript's growth."""
        record = self.packed() if self.record != self.committed_record else None
        return record, growth_between(self.committed, self.transcript)


@dataclass(frozen=True)
class FullContext:
    """What ``on_context_full`` gets: a call that does not fit into the model's context.

    Attributes:
        transcript: the token ids so far, little-endian uint32.
        limit: the most tokens that a context may hold, or 0 if the engine did not say.
        needed: how many tokens the call would have needed, or 0.
        persona_tokens: how many tokens at the start are the system prompt, or 0 if unknown.
    """

    transcript: bytes
    limit: int
    needed: int
    persona_tokens: int
    error: ContextTooLarge

    @property
    def tokens(self) -> int:
        """Length of the transcript in tokens."""
        return len(self.transcript) // TOKEN_BYTES

    def keep_recent(self, share: float = 0.5) -> bytes:
        """The persona and the most recent ``share`` of everything after it.

        Raises:
            ContextTooLarge: the call's own messages do not fit, so no shorter past would help.
        """
        rest = self.tokens - self.persona_tokens
        keep = int(rest * share)
        if rest <= 0 or keep >= rest:
            raise self.error
        start = (self.tokens - keep) * TOKEN_BYTES
        return self.transcript[: self.persona_tokens * TOKEN_BYTES] + self.transcript[start:]
