"""The base class of agents: actors with a memory that a language model reads and extends.

Owns what users call: ``say``, ``speak``, ``observe``, ``fork``, ``rewind``, ``forget`` and ``memory``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar, overload

import msgspec

from offbook.bus.errors import InvalidRequest

from . import statements
from .actor import Actor, address_of, spec_of
from .engine import LONGEST_CALL
from .lm import SamplingParams, StateHandle
from .memory import AgentMemory, FullContext, fold
from .records import Birth, Fork
from .speech import Plan, Prompt, Reply, Speech, chat, check_sampling, parse_typed, perform, persona_of
from .typed import schema_of

S = TypeVar("S")


class Agent(Actor):
    """An actor with a language model's memory of its own.

    Class attributes:
        salt: agents of equal salts may share KV blocks of equal prompts; give tenants different ones.
        pinned: memory of agents of this class stays hot between turns, unless nothing else could give way.
    """

    salt: ClassVar[str] = ""
    pinned: ClassVar[bool] = False

    @classmethod
    def _check_class(cls) -> None:
        super()._check_class()
        name, persona = cls.__name__, cls.persona
        if not callable(persona) or inspect.iscoroutinefunction(persona):
            given = "async" if callable(persona) else repr(persona)[:100]
            raise TypeError(
                f"{name}.persona is {given}: it must be a plain method that returns text, "
                "def persona(self) -> str"
            )
        if not isinstance(cls.salt, str):
            raise TypeError(f"{name}.salt is {cls.salt!r}: it must be text")
        if not isinstance(cls.pinned, bool):
            raise TypeError(f"{name}.pinned is {cls.pinned!r}: it must be True or False")

    def persona(self) -> str:
        """The system prompt, read once at the start of the transcript; empty for none."""
        return ""

    async def on_context_full(self, full: FullContext) -> bytes:
        """Shorten a transcript that has outgrown the model's context; returns the token ids to keep.

        Override it to choose, or raise ``full.error`` to refuse. The default keeps the persona and the most
        recent half; the engine does that itself, cutting between turns, and ``usage.truncated_tokens``
        says how much was left out.
        """
        return full.keep_recent()

    # -- speaking -----------------------------------------------------------------------------------------

    @overload
    async def say(
        self,
        prompt: Prompt = ...,
        *,
        max_tokens: int = ...,
        temperature: float = ...,
        top_p: float = ...,
        top_k: int = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        stop: Iterable[str] | str = ...,
        seed: int | None = ...,
        logprobs: int = ...,
        priority: int = ...,
    ) -> Reply: ...

    @overload
    async def say(
        self,
        prompt: Prompt = ...,
        *,
        returns: type[S],
        max_tokens: int = ...,
        temperature: float = ...,
        top_p: float = ...,
        top_k: int = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        stop: Iterable[str] | str = ...,
        seed: int | None = ...,
        logprobs: int = ...,
        priority: int = ...,
    ) -> S: ...

    async def say(self, prompt: Prompt = (), *, returns: Any = None, **options: Any) -> Any:
        """Read a prompt, answer it, and remember both.

        Args:
            prompt: text of the user, or chat messages. May be empty after ``observe``.
            max_tokens: most tokens to generate (256).
            temperature: 0 is greedy, the default.
            top_p, top_k, min_p, repetition_penalty: as usual.
            stop: texts that end the reply; they are not part of it.
            seed: for temperatures above 0; by default one that a repeated turn uses again.
            logprobs: alternatives per token to report.
            priority: higher goes first in the engine.
            returns: a msgspec Struct (or any type msgspec knows): decoding is constrained to its JSON schema,
                and a value of it is returned instead of a :class:`Reply`.

        Raises:
            InvalidRequest: an empty prompt or an impossible value, before any work; also a type that a reply
                cannot be held to (named), or fewer ``max_tokens`` than its shortest reply takes (``needed``).
            ContextTooLarge: it can never fit.
            EngineBusy, EngineFailed, DeadlineExceeded: as the names say.
            ModelError: the reply does not decode as ``returns`` (its own checks, such as ``__post_init__``).
        """
        turn = self._now_turn()
        reply = await perform(self, turn, self._plan(prompt, returns, options), None)
        return reply if returns is None else parse_typed(reply, returns)

    def speak(
        self,
        prompt: Prompt = (),
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Iterable[str] | str = (),
        seed: int | None = None,
        logprobs: int = 0,
        priority: int = 0,
    ) -> Speech:
        """Like :meth:`say`, in pieces; see :class:`Speech`.

        Pieces that the asker was shown stay shown even if the turn fails later.
        """
        options = {
            "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
            "min_p": min_p, "repetition_penalty": repetition_penalty, "stop": stop, "seed": seed,
            "logprobs": logprobs, "priority": priority,
        }  # fmt: skip
        return Speech(self, self._now_turn(), self._plan(prompt, None, options))

    async def observe(self, prompt: Prompt) -> None:
        """Add to the memory without answering. It is read together with the next prompt.

        Raises:
            InvalidRequest: there is nothing in the prompt.
        """
        messages = chat(prompt)
        if not messages:
            raise InvalidRequest("there is nothing to observe: the prompt is empty")
        self._memory().observe(messages)

    # -- the memory itself --------------------------------------------------------------------------------

    @property
    def memory(self) -> StateHandle:
        """The state handle: how many tokens, of which model, and where they were after the last call."""
        memory = self._memory()
        if memory.record.handle is not None:
            return memory.record.handle
        return StateHandle(agent=self.id, fingerprint="", tokens=memory.tokens, chain="", where="cold")

    async def locate(self) -> StateHandle:
        """Ask the engine where the memory is now."""
        turn, memory = self._now_turn(), self._memory()
        reference = memory.reference(self.id, persona_of(self), pinned=self.pinned)
        with turn.waiting_for_engine():
            return await turn.port.engine.locate(reference, seconds=turn.time_left(LONGEST_CALL))

    async def fork(self, key: str, **changes: Any) -> str:
        """Make a new agent of this class that remembers everything this one does. Returns its address.

        It begins when this turn commits, with a copy of the state, changed as given, and shares KV blocks.

        Raises:
            InvalidAddress: the key is not legal.
            InvalidRequest: such an agent exists, or a change does not fit the class.
        """
        turn, memory = self._now_turn(), self._memory()
        spec = spec_of(type(self))
        address = address_of(spec, key)
        taken = await turn.port.journal.do("exists", lambda db: statements.exists(db, address))
        if taken or any(fork.actor == address for fork in turn.forks):
            raise InvalidRequest(f"{address} exists already; fork to another key")
        values = {name: getattr(self, name) for name in spec.schema.names}
        for topic in spec.topics:
            await turn.port.ensure_topic(topic)
        birth = Birth(
            kind=spec.kind,
            version=spec.schema.version,
            state=spec.schema.initial({**values, **changes}, like=self),
            topics=spec.topics,
            ticks=tuple(spec.ticks.items()),
            first_turn=spec.has_first_turn,
            memory=memory.forked(self.id),
        )
        turn.forks.append(Fork(address, birth, memory.transcript))
        return address

    async def rewind(self, turn: int) -> None:
        """Go back to the memory as it was after turn number ``turn`` (see ``turns``); 0 is an empty one.

        Only the memory goes back; the state fields stay. What was observed and not read is dropped.

        Raises:
            InvalidRequest: there is no such turn yet.
        """
        now, memory = self._now_turn(), self._memory()
        if not isinstance(turn, int) or not 0 <= turn <= self.turns:
            raise InvalidRequest(
                f"{self.id} has {self.turns} turns; rewind to one from 0 to {self.turns}, not {turn!r}"
            )
        actor = self.id
        segments = await now.port.journal.do(
            "segments", lambda db: statements.segments_until(db, actor, turn)
        )
        memory.set_transcript(fold(segments), None)
        memory.record = msgspec.structs.replace(memory.record, pending=())

    async def forget(self) -> None:
        """Empty the memory; the engine drops its KV when this turn has committed."""
        turn, memory = self._now_turn(), self._memory()
        memory.set_transcript(b"", None)
        memory.record = msgspec.structs.replace(memory.record, pending=())
        turn.forgotten = True

    def _memory(self) -> AgentMemory:
        memory = self._now_turn().memory
        assert memory is not None, "the cell gives agents a memory"
        return memory

    def _plan(self, prompt: Prompt, returns: Any, options: dict[str, Any]) -> Plan:
        messages = chat(prompt)
        priority = options.pop("priority", 0)
        stop = options.pop("stop", ())
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidRequest(f"priority must be a whole number, got {priority!r}", field="priority")
        try:
            stop = (stop,) if isinstance(stop, str) else tuple(stop)
        except TypeError:
            raise InvalidRequest(f"stop must be a text or several, got {stop!r}", field="stop") from None
        try:
            sampling = SamplingParams(stop=stop, **options)
        except TypeError as exc:
            raise InvalidRequest(f"say() has no such option: {exc}") from exc
        check_sampling(sampling)
        schema = None
        if returns is not None:
            schema = schema_of(returns)
            if stop:
                raise InvalidRequest("stop texts would cut a typed reply: leave them out", field="stop")
        own = type(self).on_context_full is not Agent.on_context_full
        return Plan(messages, sampling, schema, priority, self.on_context_full if own else None)
