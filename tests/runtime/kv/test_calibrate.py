"""Calibration: what is measured, which schemes are worth measuring, and which one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest

from offbook.bus.errors import InvalidRequest
from offbook.runtime.kv import calibrate
from offbook.runtime.kv.calibrate import Loss, Measured, choose, compare, contexts, measure, sensitivities
from offbook.runtime.kv.candidates import (
    bytes_per_token,
    candidates,
    every_scheme,
    sharpened,
    target_bytes,
)
from offbook.runtime.kv.probe import derive
from offbook.runtime.kv.profile import default_scheme
from offbook.runtime.kv.scheme import KVScheme, LayerScheme
from offbook.runtime.kv.spec import LayerSpec, ModelCacheSpec
from offbook.runtime.models.load import LoadedModel, load

TINY = Path(__file__).parents[2] / "data" / "deepseek_tiny"

DENSE = ModelCacheSpec(tuple(LayerSpec(index, "full", 3, 64, 64) for index in range(4)))
WINDOWED = ModelCacheSpec(
    tuple(LayerSpec(i, "window" if i % 3 else "full", 1, 256, 256, 512 if i % 3 else None) for i in range(6))
)
LATENT = ModelCacheSpec(tuple(LayerSpec(index, "latent", 1, 192, 128) for index in range(4)))
SHARP = LayerScheme(key_bits=8)
SPECS = {"dense": DENSE, "windowed": WINDOWED, "latent": LATENT}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(str(TINY))


# ---- measuring


def test_more_bits_move_the_predictions_less(model: nn.Module, ids: Callable[..., Any]) -> None:
    schemes = [KVScheme.uniform(bits) for bits in (None, 8, 4)]
    raw, eight, four = measure(model, derive(model), schemes, [ids(640)])
    assert abs(raw.divergence) < eight.divergence < four.divergence
    assert abs(raw.perplexity_pct) < 0.1
    assert raw.loss.tokens == raw.reference.tokens == 160


def test_figures_are_of_all_contexts_together(
    tiny: Callable[..., nn.Module], ids: Callable[..., Any]
) -> None:
    model, done = tiny("llama"), []
    windows = [ids(512, seed) for seed in range(2)]
    spec = derive(model)
    apart = [measure(model, spec, [KVScheme()], [window])[0] for window in windows]
    (both,) = measure(model, spec, [KVScheme()], windows, progress=lambda *at: done.append(at))
    assert both.loss == apart[0].loss + apart[1].loss
    assert done == [(1, 2), (2, 2)]


def test_the_tokens_of_the_last_quarter_are_scored_by_what_precedes_them() -> None:
    fed: list[int] = []

    def feed(part: Any, logits: bool) -> mx.array | None:
        fed.extend(part.tolist())
        # Sure of the number that follows.
        return mx.log(mx.eye(128)[mx.array(part) + 1] + 1e-9) if logits else None

    (loss,) = compare(np.arange(100, dtype=np.uint32), [feed])
    assert loss.tokens == 25
    assert loss.nll == pytest.approx(0, abs=1e-4)
    assert fed == list(range(99))


def test_divergence_is_from_the_first_feed() -> None:
    def even(part: Any, logits: bool) -> mx.array | None:
        return mx.zeros((len(part), 2)) if logits else None

    def biased(part: Any, logits: bool) -> mx.array | None:
        return mx.log(mx.array([[0.25, 0.75]] * len(part))) if logits else None

    losses = compare(np.zeros(64, np.uint32), [even, biased])
    assert losses[0].divergence == pytest.approx(0, abs=1e-6)
    assert losses[1].divergence / losses[1].tokens == pytest.approx(0.5 * np.log(4 / 3), rel=1e-4)
    assert losses[1].perplexity == pytest.approx(4)


def test_contexts_begin_as_the_tokenizer_begins_a_text(loaded: LoadedModel) -> None:
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")
    begins = loaded.tokenizer.encode("")
    windows = contexts(loaded.tokenizer, text, 3, length=600)
    assert [len(window) for window in windows] == [600] * 3
    assert all(list(window[: len(begins)]) == begins for window in windows)
    shifted = contexts(loaded.tokenizer, text, 3, length=600, shift=0.5)
    assert not any(np.array_equal(a[1:], b[1:]) for a in windows for b in shifted)


def test_a_text_too_short_for_one_context_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="holds no context of 2048"):
        contexts(loaded.tokenizer, "short", 1)


# ---- candidates and targets


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_schemes_differ_in_what_they_store(spec: ModelCacheSpec) -> None:
    stored = [(s.tail, str([group.tensors(s) for group in spec.groups])) for s in every_scheme(spec)]
    assert len(set(stored)) == len(stored)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("room", [1.0, 1.1, 1.5, 3.0])
def test_candidates_fit_and_no_other_is_better_in_everything(spec: ModelCacheSpec, room: float) -> None:
    default = default_scheme(spec)
    target = bytes_per_token(spec, default) * room
    found = candidates(spec, target)
    assert default in found
    better = LayerScheme(key_bits=8, value_bits=8, value_group=32)
    everything = KVScheme(full=better, window=better, tail=128)
    for scheme in found:
        assert bytes_per_token(spec, scheme) <= target
        if scheme != default:
            # With room for it, the one that is best in everything is the only one left.
            assert bytes_per_token(spec, everything) > target or scheme.full.key_bits == 8


def test_bits_of_window_layers_are_chosen_apart() -> None:
    found = candidates(WINDOWED, bytes_per_token(WINDOWED, KVScheme()) * 1.1)
    assert any(scheme.window.key_bits == 8 and scheme.full.key_bits == 4 for scheme in found)


def test_a_target_is_bytes_a_ratio_or_what_the_default_takes() -> None:
    full = DENSE.fp16_bytes(4096) / 4096
    assert target_bytes(DENSE) == bytes_per_token(DENSE, default_scheme(DENSE))
    assert target_bytes(DENSE, ratio=0.5) == full / 2
    assert target_bytes(DENSE, per_token=950) == 950


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"per_token": 900, "ratio": 0.3}, "not both"),
        ({"ratio": 0}, "ratio to 16-bit KV 0: give a number above 0"),
        ({"ratio": float("nan")}, "nan: give a number above 0"),
        ({"per_token": -5.0}, "bytes per token -5.0"),
        ({"per_token": 10}, "no scheme takes 10 bytes a token .* the smallest takes 912"),
    ],
)
def test_a_target_that_cannot_be_is_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        target_bytes(DENSE, **wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"windows": 0}, "0 contexts"), ({"context": 300}, "contexts of 300 tokens: at least 512")],
)
def test_contexts_that_cannot_tell_are_refused(loaded: LoadedModel, wrong: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        calibrate.calibrate(loaded, **wrong)  # type: ignore[arg-type]


def test_the_least_divergence_that_fits_is_chosen() -> None:
    def measured(nbytes: float, divergence: float) -> Measured:
        return Measured(KVScheme(), nbytes, Loss(10, 20.0, divergence), Loss(10, 20.0))

    small, fits, large = measured(5, 3.0), measured(8, 1.0), measured(20, 0.1)
    assert choose([small, fits, large], 10) is fits
    assert choose([small, fits, large], 7) is small


def test_what_is_left_of_a_target_goes_to_the_layers_that_gain_most() -> None:
    base = KVScheme(tail=64)
    one = bytes_per_token(DENSE, msgspec.structs.replace(base, sharp=(0,))) - bytes_per_token(DENSE, base)
    target = bytes_per_token(DENSE, base) + 2.5 * one
    found = sharpened(DENSE, target, {0: 0.1, 1: 0.9, 2: -0.1, 3: 0.5})
    assert msgspec.structs.replace(base, sharp=(1, 3)) in found
    assert all(bytes_per_token(DENSE, scheme) <= target for scheme in found)
    assert sharpened(DENSE, target, dict.fromkeys(range(4), -0.1)) == []
    assert sharpened(DENSE, bytes_per_token(DENSE, base), {0: 1.0}) == []


def test_the_gain_of_a_layer_is_what_its_8_bit_keys_save(
    tiny: Callable[..., nn.Module], ids: Callable[..., Any]
) -> None:
    model, windows = tiny("llama"), [ids(512)]
    spec = derive(model)
    gains = sensitivities(model, spec, windows)
    schemes = [KVScheme(tail=64), KVScheme(tail=64, sharp=(0, 1)), KVScheme(full=SHARP, tail=64)]
    plain, both, alike = measure(model, spec, schemes, windows)
    assert both.loss == alike.loss
    assert sorted(gains) == [0, 1]
    assert sum(gains.values()) == pytest.approx(plain.divergence - both.divergence, rel=0.5)


def test_calibration_finds_the_better_scheme_of_a_trained_model(loaded: LoadedModel) -> None:
    """With room for 8-bit latents, 4-bit ones and mixtures are measured beside them."""
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")
    told: list[tuple[int, int]] = []
    found = calibrate.calibrate(
        loaded, ratio=0.7, windows=1, context=768, text=text, progress=lambda *at: told.append(at)
    )
    assert found.chosen.scheme.full.key_bits == 8 or found.chosen.scheme.sharp == (0, 1, 2, 3)
    assert found.chosen.bytes_per_token <= found.target == 0.7 * found.fp16_bytes_per_token
    default = next(one for one in found.measured if one.scheme == KVScheme())
    assert found.chosen.divergence < default.divergence / 2
    assert told == [(1, 2), (2, 2)]
