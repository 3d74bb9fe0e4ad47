"""Engines over tiny models, and gates that hold their step thread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offbook.runtime.engine.job import Phase
from offbook.runtime.supervisor import PoolSizes
from tests.runtime.engine.harness import Characters, Gate, Harness, Loaded


@pytest.fixture
def engine(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Harness]]:
    """Starts engines: ``engine("llama", tmp_path, slots=4, pages=6)``. At the end nothing may be leaked.

    With ``slots`` and ``pages`` the pool has just these, whatever the budget.
    """
    made: list[Harness] = []

    def start(
        model: Any = "llama",
        folder: Path | None = None,
        *,
        slots: int | None = None,
        pages: int = 12,
        **options: Any,
    ) -> Harness:
        if slots is not None:

            def sizes(spec: Any, scheme: Any, nbytes: int) -> PoolSizes:
                return PoolSizes((slots,) * len(spec.groups), pages, nbytes)

            monkeypatch.setattr("offbook.runtime.engine.assembly.pool_sizes", sizes)
        # A copy: an engine on the CPU changes the layers of its model, and the tiny ones are shared.
        own = copy.deepcopy(tiny(model) if isinstance(model, str) else model)
        harness = Harness(own, folder, **options)
        made.append(harness)
        return harness

    yield start
    for harness in made:
        if not harness.loop.died:
            harness.stop()
        pool, memory = harness.loop.pool, harness.loop.memory
        assert not harness.loop.scheduler.running
        assert not harness.loop.scheduler.queue
        pool.check()
        for key in [key for key in memory.tables if key not in memory.loading]:
            memory.drop(key)
        if not memory.loading:
            assert [group.used for group in pool.groups] == [0] * len(pool.groups)
            assert pool.pages.used == 0


WORDS = (
    "th",
    "he",
    "the",
    "aa",
    "aaaa",
    "00",
    "99",
    "9999",
    '""',
    '":',
    '","',
    '"}',
    "}}",
    "]]",
    "]}",
    "[[",
    "{}",
)
"""Tokens of some bytes, such as a reply's punctuation is made of."""


@pytest.fixture(scope="session")
def bytes_model(tiny: Callable[..., Any]) -> Loaded:
    """A tiny model whose tokens are bytes and ``WORDS``, with a tokenizer of the usual kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(word[:at], word[at:]) for word, at in _merges(WORDS)]
    vocabulary = {text: i for i, text in enumerate([*alphabet, *dict.fromkeys(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    end = fast.convert_tokens_to_ids("<end>")
    return Loaded(
        tiny("llama", vocab_size=300),
        tokenizer=TokenizerWrapper(fast, eos_token_ids=[end]),
        eos_token_ids=frozenset({end}),
    )


def _merges(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """How each word is put together: letter by letter, or from two halves that are words."""
    for word in words:
        half = len(word) // 2
        if word[:half] in words and word[half:] in words:
            yield word, half
        else:
            for size in range(2, len(word) + 1):
                yield word[:size], size - 1


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The embedded model."""
    from offbook.runtime.models.load import load

    return load("wheel:smollm2-135m-instruct")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gate]:
    """``gate(harness, "decode")`` holds the step thread before a kind of step, until released."""

    def make(harness: Harness, step: str) -> Gate:
        held = Gate()
        real = getattr(harness.loop.batch, step)

        def gated(*args: Any, **kwargs: Any) -> Any:
            held.pass_through()
            return real(*args, **kwargs)

        monkeypatch.setattr(harness.loop.batch, step, gated)
        gates.append(held)
        return held

    gates: list[Gate] = []
    return make


@pytest.fixture(scope="session")
def phase() -> type[Phase]:
    return Phase


@pytest.fixture(scope="session")
def characters() -> type[Characters]:
    return Characters


@pytest.fixture(scope="session")
def loaded_like() -> type[Loaded]:
    return Loaded
