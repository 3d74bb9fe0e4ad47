"""A team of agents on one engine in this process: what the engine benchmarks drive.

The bus is left out, so that the figures are the engine's own; turns are submitted to the step thread
and answered through futures, as the engine's actor does.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks import common

import mlx.core as mx  # isort: skip
import numpy as np

from offbook.actors.lm import ChatMessage, EngineStats, Generated, SamplingParams
from offbook.bus.errors import OffbookError
from offbook.runtime.engine.dialogue import Dialogue
from offbook.runtime.engine.job import Job
from offbook.runtime.engine.loop import EngineLoop
from offbook.runtime.engine.openings import PAUSE_SECONDS
from offbook.runtime.engine.sampling import Sampler
from offbook.runtime.engine.text import TextStream
from offbook.runtime.kv import native_read
from offbook.runtime.kv.kernel import NativeAttention, supported
from offbook.runtime.kv.profile import scheme_for
from offbook.runtime.kv.scheme import BLOCK, KVScheme
from offbook.runtime.kv.spec import ModelCacheSpec
from offbook.runtime.models.load import LoadedModel, load
from offbook.runtime.store.layout import TensorSpec
from offbook.runtime.store.store import BlockStore

QUESTION = "\n\nWhat is this text about? One sentence."
SYSTEM = "You are a reader who answers briefly."


class Stamped(list[int]):
    """A job's generated ids, each with the time it was drawn: a token need not show as a piece of text."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, token: int) -> None:
        super().append(token)
        self.times.append(time.perf_counter())


@dataclass
class Turn:
    """One turn under way or done. Times are ``time.perf_counter()`` seconds.

    Attributes:
        ended: ``time.monotonic()`` of the reply or the error, as the job's own times; 0 until then.
    """

    agent: str
    job: Job | None = None
    tokens: Stamped = field(default_factory=Stamped)
    reply: Future[Generated] = field(default_factory=Future)
    ended: float = 0.0

    @property
    def times(self) -> list[float]:
        """When each token was drawn."""
        return self.tokens.times

    @property
    def ttft_ms(self) -> float:
        return self.reply.result().usage.ttft_ms

    @property
    def waited(self) -> float:
        """Seconds in the queue, however the turn ended."""
        assert self.job is not None
        return (self.job.admitted or self.ended or time.monotonic()) - self.job.arrived


class Team:
    """Agents, their transcripts, and the engine they share.

    Args:
        loaded: a model; its loading is no part of a measurement.
        budget_bytes: of the engine.
        persistent: whether evicted agents go to disk (a folder that is removed at the end).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        budget_bytes: int,
        *,
        persistent: bool = True,
        scheme: KVScheme | None = None,
        native: bool = True,
        trace: Path | None = None,
    ) -> None:
        self.loaded = loaded
        self.folder = Path(tempfile.mkdtemp(prefix="offbook-bench-")) if persistent else None
        self.transcripts: dict[str, np.ndarray] = {}
        self.dialogue = Dialogue(loaded.tokenizer, sorted(loaded.eos_token_ids))
        self.loop = EngineLoop(
            lambda: loaded,
            self._open_store,
            scheme=scheme or scheme_for,
            budget_bytes=budget_bytes,
            host=mx.default_device() == mx.Device(mx.cpu),
            native=lambda arrays: NativeAttention(arrays) if native and supported(arrays) else None,
            trace=trace,
        )
        self.loop.start()
        self.loop.ready.result()

    def _open_store(self, fingerprint: str, spec: ModelCacheSpec, scheme: KVScheme) -> BlockStore | None:
        if self.folder is None:
            return None
        layout = [
            TensorSpec(tensor.name, tensor.dtype, tensor.shape)
            for group in spec.groups
            for tensor in group.tensors(scheme)
        ]
        return BlockStore(self.folder, fingerprint=fingerprint, layout=layout, reader=native_read.reader())

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.stop().result()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- turns

    def ask(self, agent: str, text: str, *, max_tokens: int = 1, **how: Any) -> Turn:
        """Submit a turn; for ``how`` see ``ask_ids``."""
        transcript = self.transcripts.get(agent, np.zeros(0, np.uint32))
        prompt = self.dialogue.prompt(SYSTEM, transcript, [ChatMessage("user", text)])
        return self.ask_ids(agent, prompt, max_tokens=max_tokens, **how)

    def ask_ids(
        self,
        agent: str,
        prompt: np.ndarray,
        *,
        max_tokens: int,
        ignore_end: bool = False,
        priority: int = 0,
        within: float = float("inf"),
    ) -> Turn:
        """Submit a turn.

        Args:
            ignore_end: generate exactly ``max_tokens`` tokens.
            within: seconds from now to the turn's deadline.
        """
        transcript = self.transcripts.get(agent, np.zeros(0, np.uint32))
        turn = Turn(agent)

        def emit(job: Job, event: Any) -> None:
            if isinstance(event, str):
                return
            turn.ended = time.monotonic()
            if isinstance(event, OffbookError):
                turn.reply.set_exception(event)
            else:
                new = np.frombuffer(event.appended, "<u4").astype(np.uint32)
                self.transcripts[agent] = np.concatenate([transcript, new])
                turn.reply.set_result(event)

        sampling = SamplingParams(max_tokens=max_tokens)
        turn.job = Job(
            key=(agent, ""),
            ids=np.concatenate([transcript, prompt]),
            appended_from=len(transcript),
            kept=len(transcript),
            max_tokens=max_tokens,
            sampler=Sampler(sampling),
            text=TextStream(self.loaded.tokenizer.detokenizer, ()),
            emit=emit,
            priority=priority,
            deadline=time.monotonic() + within,
            ignore_end=ignore_end,
            generated=turn.tokens,
        )
        job = turn.job
        self.loop.post(lambda: self.loop.submit(job))
        return turn

    def say(self, agent: str, text: str, **how: Any) -> Turn:
        """A turn, waited for."""
        turn = self.ask(agent, text, **how)
        turn.reply.result()
        return turn

    # ---- the engine

    def evict(self, *agents: str) -> None:
        """To disk, and out of memory.

        Waits until all is written, then has the pool forget what free slots still hold, by which the agents
        would be found without a file being read. (Files stay in the machine's page cache.)
        """

        def evict() -> None:
            for agent in agents:
                self.loop.memory.evict((agent, ""))

        self.loop.call(evict).result()
        self.flush()
        self.loop.call(self.forget_free).result()

    def forget_free(self) -> None:
        """On the step thread: what no agent in memory holds can be had from disk only."""
        for group in self.loop.pool.groups:
            group.forget_free()

    def settle(self) -> None:
        """Wait until what follows the last turn is done, so that it does not fall into the next turn's time:
        its agent's opening read, its memory saved."""
        # Asking disturbs the reading.
        while self.loop.call(self.loop.openings.seconds).result() < float("inf"):
            time.sleep(2 * PAUSE_SECONDS)
        # The step thread saves an idle engine's agents before it looks for anything new to do.
        self.loop.call(lambda: None).result()
        self.flush()

    def loaded_blocks(self) -> int:
        """Full blocks read from files so far."""
        store = self.loop.store
        return int(store.stats().counters.get("blocks_loaded", 0)) if store is not None else 0

    def full_blocks(self, agent: str) -> int:
        """Full blocks of an agent's memory: what bringing it back must read."""
        # The last generated token has no KV yet.
        return self.loop.scheme.sealed(len(self.transcripts[agent]) - 1) // BLOCK

    def flush(self) -> None:
        store = self.loop.store
        if store is not None:
            store.flush()

    def prefetch(self, agent: str) -> None:
        ids = self.transcripts[agent]
        self.loop.post(lambda: self.loop.prefetch((agent, ""), ids))

    def stats(self) -> EngineStats:
        return self.loop.call(self.loop.stats).result()


class Reader:
    """Fresh slices of prose: a text is never given twice."""

    def __init__(self, loaded: LoadedModel, seed: int = 0) -> None:
        self.tokenizer = loaded.tokenizer
        self.ids = self.tokenizer.encode(common.prose(), add_special_tokens=False)
        self.at = random.Random(seed).randrange(len(self.ids) // 2)
        self.serial = 0

    def text(self, tokens: int) -> str:
        """About ``tokens`` tokens of text, different at its first word from all before."""
        if self.at + tokens > len(self.ids):
            self.at = 0
        part = self.ids[self.at : self.at + tokens]
        self.at += tokens
        self.serial += 1
        return f"Text {self.serial}. " + str(self.tokenizer.decode(part))


def load_embedded(*, plain: bool = False) -> LoadedModel:
    """The embedded model as the engine loads it, or ``plain`` as mlx-lm does."""
    return load(common.EMBEDDED, compact=not plain)


def budget_for(loaded: LoadedModel, *, agents: int, tokens: int, spare: float = 0.5) -> int:
    """A budget whose pool holds ``agents`` agents of ``tokens`` tokens, and ``spare`` of one more."""
    from offbook.runtime.kv.probe import derive
    from offbook.runtime.supervisor import TYPICAL_CONTEXT, workspace_bytes

    spec = derive(loaded.model)
    scheme = scheme_for(loaded, spec)
    # Blocks and pages are divided for agents of typical length; count the scarcer of the two.
    pages = scheme.pages * spec.page_bytes
    block = spec.block_bytes(scheme)
    typical = TYPICAL_CONTEXT // BLOCK * block + pages
    by_blocks = (-(-tokens // BLOCK) + 1) / (TYPICAL_CONTEXT // BLOCK)
    per_agent = typical * max(1.0, by_blocks)
    fixed = loaded.weights_bytes + workspace_bytes(spec, loaded.weights_bytes)
    return int(fixed + (agents + spare) * per_agent)
