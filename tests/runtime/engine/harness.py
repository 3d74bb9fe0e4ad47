"""What the engine's tests share: an engine loop over a tiny model, driven as the engine's actor drives it.

Characters are the tokens. Also how replies are compared.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from offbook.actors.lm import ChatMessage, Generated, Observed, SamplingParams
from offbook.bus.errors import OffbookError
from offbook.runtime.engine.dialogue import Dialogue
from offbook.runtime.engine.job import Job
from offbook.runtime.engine.loop import EngineLoop
from offbook.runtime.engine.sampling import Sampler
from offbook.runtime.engine.text import TextStream
from offbook.runtime.kv import native, native_read
from offbook.runtime.kv.kernel import NativeAttention
from offbook.runtime.kv.scheme import BLOCK, GROUP, KVScheme
from offbook.runtime.models.fingerprint import combine
from offbook.runtime.store import BlockStore, TensorSpec

MIB = 1 << 20
BOS, END = 1, 2


class Characters:
    """A tokenizer whose ids are code points; 1 begins a text, 2 ends a turn."""

    chat_template = "{{ messages }}"
    has_chat_template = True
    bos_token_id = BOS

    def __init__(self, *, adds_bos: bool = False) -> None:
        self.adds_bos = adds_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(c) for c in text]
        return [BOS, *ids] if self.adds_bos and add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool = False, add_generation_prompt: bool = True
    ) -> str:
        text = "".join(f"<{m['role'][0]}>{m['content']}\2" for m in messages)
        return text + ("<a>" if add_generation_prompt else "")

    @property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer()


class Detokenizer:
    """mlx-lm's streaming protocol."""

    def __init__(self) -> None:
        self._new = ""

    def add_token(self, token: int) -> None:
        self._new += chr(token) if token >= 32 else ""

    def finalize(self) -> None: ...

    @property
    def last_segment(self) -> str:
        new, self._new = self._new, ""
        return new


@dataclass(frozen=True)
class Loaded:
    """What ``models.load`` gives, of a model in memory."""

    model: Any
    tokenizer: Any = field(default_factory=Characters)
    fingerprint: str = "tiny"
    ref: str = "tiny"
    context_limit: int = 4096
    eos_token_ids: frozenset[int] = frozenset({END})

    @property
    def weights_bytes(self) -> int:
        return sum(int(array.nbytes) for _, array in tree_flatten(self.model.parameters()))

    def fingerprint_for(self, kv_scheme: str) -> str:
        return combine(self.fingerprint, kv_scheme)


@dataclass
class Turn:
    """A submitted job and what it has sent."""

    job: Job
    events: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    pieces: list[str] = field(default_factory=list)
    result: Any = None
    order: int = 0

    def wait(self, timeout: float = 60.0) -> Any:
        """The reply. Raises the error it ended with."""
        while self.result is None:
            event = self.events.get(timeout=timeout)
            if isinstance(event, str):
                self.pieces.append(event)
            else:
                self.order, self.result = event
        if isinstance(self.result, OffbookError):
            raise self.result
        return self.result

    def first_piece(self, timeout: float = 60.0) -> str:
        """Wait until the first text has been shown."""
        event = self.events.get(timeout=timeout)
        assert isinstance(event, str), event
        self.pieces.append(event)
        return event


class Harness:
    """One running ``EngineLoop`` and the transcripts of its agents.

    Attributes:
        loop: the loop. transcripts: ids of each agent's committed turns.
    """

    def __init__(
        self,
        model: Any,
        folder: Path | None,
        *,
        budget: int = 128 * MIB,
        scheme: KVScheme | None = None,
        use_native: bool = True,
        host: bool = True,
        cap: int | None = None,
        before: Callable[[EngineLoop], None] | None = None,
        loaded: Any = None,
        trace: Path | None = None,
        read_ahead: bool = False,
        **options: Any,
    ) -> None:
        self.folder, self.cap = folder, cap
        self.loaded = loaded or Loaded(model, **options)
        self.transcripts: dict[str, Any] = {}
        self._finished = itertools.count()
        self.dialogue = Dialogue(self.loaded.tokenizer, sorted(self.loaded.eos_token_ids))
        front = NativeAttention if use_native and native.available() else None
        self.loop = EngineLoop(
            lambda: self.loaded,
            self._open_store,
            scheme=scheme or KVScheme(),
            budget_bytes=budget,
            host=host,
            native=front if host else None,
            trace=trace,
            read_ahead=read_ahead,
        )
        if before is not None:
            before(self.loop)
        self.loop.start()
        self.loop.ready.result(60)

    def _open_store(self, fingerprint: str, spec: Any, scheme: Any) -> Any:
        if self.folder is None:
            return None
        layout = [
            TensorSpec(tensor.name, tensor.dtype, tensor.shape)
            for group in spec.groups
            for tensor in group.tensors(scheme)
        ]
        return BlockStore(
            self.folder,
            fingerprint=fingerprint,
            layout=layout,
            lock_seconds=1.0,
            cap_bytes=self.cap,
            reader=native_read.reader(),
        )

    # ---- turns

    def job(
        self,
        agent: str,
        ids: Any,
        *,
        max_tokens: int = 8,
        salt: str = "",
        kept: int = 0,
        observe: bool = False,
        constraint: Any = None,
        ignore_end: bool = True,
        sampling: SamplingParams | None = None,
        **more: Any,
    ) -> Turn:
        sampling = sampling or SamplingParams(max_tokens=max_tokens)
        detokenizer = self.loaded.tokenizer.detokenizer if constraint is None else constraint.detokenizer()
        turn: Turn
        job = Job(
            key=(agent, salt),
            ids=np.asarray(ids, np.uint32),
            appended_from=kept,
            kept=kept,
            max_tokens=0 if observe else sampling.max_tokens,
            sampler=Sampler(sampling),
            text=None if observe else TextStream(detokenizer, sampling.stop),
            emit=lambda _, event: turn.events.put(
                event if isinstance(event, str) else (next(self._finished), event)
            ),
            logprobs=sampling.logprobs,
            constraint=constraint,
            ignore_end=ignore_end,
            **more,
        )
        turn = Turn(job)
        return turn

    def submit(self, *turns: Turn) -> Turn:
        """Queue turns together, between two steps. Returns the first."""

        def act() -> None:
            for turn in turns:
                self.loop.submit(turn.job)

        self.loop.post(act)
        return turns[0]

    def start(self, agent: str, ids: Any, **options: Any) -> Turn:
        return self.submit(self.job(agent, ids, **options))

    def run(self, agent: str, ids: Any, **options: Any) -> Generated:
        reply = self.start(agent, ids, **options).wait()
        assert isinstance(reply, Generated)
        return reply

    def observe(self, agent: str, ids: Any, **options: Any) -> Observed:
        reply = self.start(agent, ids, observe=True, **options).wait()
        assert isinstance(reply, Observed)
        return reply

    def say(self, agent: str, text: str, *, system: str | None = None, **options: Any) -> Generated:
        """One turn of a conversation; the transcript grows by it."""
        past = self.transcripts.get(agent, np.zeros(0, np.uint32))
        prompt = self.dialogue.prompt(system, past, [ChatMessage("user", text)])
        reply = self.run(agent, np.concatenate([past, prompt]), kept=len(past), **options)
        new = np.frombuffer(reply.appended, "<u4").astype(np.uint32)
        self.transcripts[agent] = np.concatenate([past[: reply.kept], new])
        return reply

    # ---- looking in

    def call(self, action: Callable[[], Any]) -> Any:
        """Run something on the step thread."""
        return self.loop.call(action).result(60)

    @property
    def stats(self) -> Any:
        return self.call(self.loop.stats)

    @property
    def counters(self) -> dict[str, float]:
        return dict(self.stats.counters)

    def used(self) -> tuple[int, ...]:
        """Slots of each group and pages in use."""
        pool = self.loop.pool
        return self.call(lambda: (*(group.used for group in pool.groups), pool.pages.used))

    def evict(self, *agents: str, salt: str = "", wait: bool = True) -> None:
        """Evict agents (all without names) and wait until they are on disk."""

        def act() -> None:
            for key in [(agent, salt) for agent in agents] or list(self.loop.memory.tables):
                self.loop.memory.evict(key)

        self.call(act)
        if wait and self.loop.store is not None:
            assert self.loop.store.flush(30)

    def check(self) -> None:
        """Every slot and page is held just as often as tables say, and each table is well formed."""

        def act() -> None:
            pool, memory = self.loop.pool, self.loop.memory
            pool.check()
            assert not memory.loading
            tables = memory.tables.values()
            for index, allocator in enumerate(pool.groups):
                held = Counter(slot for table in tables for slot in table.slots[index] if slot >= 0)
                assert {slot: allocator.refs(slot) for slot in held} == held
                assert allocator.used == len(held)
            pages = Counter(page for table in tables for page in table.pages)
            assert set(pages.values()) <= {1}
            assert pool.pages.used == len(pages)
            for table in tables:
                assert 0 <= table.sealed <= table.tokens <= table.sealed + len(table.pages) * GROUP
                assert len(table.chain) == table.sealed // BLOCK

        self.call(act)

    def stop(self) -> None:
        self.loop.stop().result(60)


class Gate:
    """Stops the step thread until told to go on, one step or for good."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._open = False

    def pass_through(self) -> None:
        if not self._open:
            self.reached.release()
            assert self._go.acquire(timeout=60)

    def wait(self) -> None:
        """Until the step thread stands before the gate."""
        assert self.reached.acquire(timeout=60)

    def step(self) -> None:
        self._go.release()

    def open(self) -> None:
        self._open = True
        self._go.release()
