"""The trained DeepSeek-V2 checkpoint is what its log says, and the latent form predicts as well."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from offbook.runtime.models.blas import preload_blas

preload_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_lm.models import deepseek_v2  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from offbook.runtime.models.deepseek_v2 import LatentModel  # noqa: E402
from offbook.runtime.models.load import LoadedModel, load  # noqa: E402

FOLDER = Path(__file__).parents[2] / "data" / "deepseek_tiny"
WINDOW = 2048


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(str(FOLDER))


@pytest.fixture(scope="module")
def windows(loaded: LoadedModel) -> list[mx.array]:
    """The first windows of the held-out text, cut as the training script cuts it."""
    ids = loaded.tokenizer.encode((FOLDER / "heldout.txt").read_text(encoding="utf-8"))
    return [mx.array(ids[i * WINDOW : (i + 1) * WINDOW + 1])[None] for i in range(2)]


def logged(what: str) -> float:
    match = re.search(rf"^{re.escape(what)}: ([0-9.]+)$", (FOLDER / "train.log").read_text(), re.MULTILINE)
    assert match is not None, what
    return float(match[1])


def test_it_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000


def test_it_predicts_text_it_has_not_seen() -> None:
    unigram = logged("unigram perplexity, held out")
    assert logged("held-out perplexity (30 windows of 2048)") < unigram / 10


def test_the_latent_form_has_the_perplexity_of_the_log(loaded: LoadedModel, windows: list[mx.array]) -> None:
    ids = windows[0]
    loss = nn.losses.cross_entropy(loaded.model(ids[:, :-1]), ids[:, 1:]).mean().item()
    assert math.exp(loss) == pytest.approx(logged("held-out perplexity, first window"), rel=1e-3)


def test_its_latent_logits_equal_mlx_lms(loaded: LoadedModel, windows: list[mx.array]) -> None:
    """In one pass without a cache against chunks and decode steps with one."""
    plain, _ = load_model(FOLDER)
    plain.set_dtype(mx.float32)
    assert type(plain) is deepseek_v2.Model
    assert isinstance(loaded.model, LatentModel)
    ids = windows[1][:, :600]
    expected = plain(ids)
    caches = make_prompt_cache(loaded.model)
    cuts = [0, 256, 500, 596, 597, 598, 599, 600]
    actual = mx.concatenate([loaded.model(ids[:, a:b], caches) for a, b in itertools.pairwise(cuts)], axis=1)
    assert mx.allclose(actual, expected, rtol=1e-4, atol=2e-4).item()
    assert mx.array_equal(actual.argmax(-1), expected.argmax(-1)).item()


def test_every_text_survives_the_tokenizer(loaded: LoadedModel) -> None:
    for text in ("plain words", "  spaces\n\n\ttabs ", "Grüße, 東京 🦜", "\x00\x7f"):
        ids = loaded.tokenizer.encode(text, add_special_tokens=False)
        assert loaded.tokenizer.decode(ids) == text


def test_the_chat_template_begins_once_and_asks_the_assistant(loaded: LoadedModel) -> None:
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "What is csv?"}]
    text = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|system|>Short.<|end|><|user|>What is csv?<|end|><|assistant|>"
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids.count(loaded.tokenizer.bos_token_id) == 1
    assert loaded.eos_token_ids == {1}
