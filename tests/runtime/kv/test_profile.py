"""A model's profile: kept whole or not at all, and what an engine does with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import msgspec
import pytest

from offbook.bus.errors import ModelError
from offbook.runtime import cli, cli_calibrate
from offbook.runtime.config import EngineConfig
from offbook.runtime.engine.loop import EngineLoop
from offbook.runtime.engine.process import build_loop
from offbook.runtime.kv import calibrate, profile
from offbook.runtime.kv.profile import Profile, default_scheme, find, forget, profile_path, save, scheme_for
from offbook.runtime.kv.scheme import KVScheme, LayerScheme
from offbook.runtime.kv.spec import LayerSpec, ModelCacheSpec
from offbook.runtime.models.fingerprint import combine
from offbook.runtime.models.load import load
from tests.runtime.engine.harness import Characters

TINY = Path(__file__).parents[2] / "data" / "deepseek_tiny"

OTHER = KVScheme(full=LayerScheme(key_bits=8), tail=64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFBOOK_CACHE", str(tmp_path))
    return tmp_path


SMALL = ModelCacheSpec((LayerSpec(0, "full", 3, 64, 64),))


def made(model: str, scheme: KVScheme = OTHER) -> Profile:
    return Profile(
        model=model,
        ref="some/model",
        scheme=scheme,
        bytes_per_token=864.0,
        perplexity_pct=0.1,
        divergence=0.0004,
        scored=1024,
    )


def test_a_profile_comes_back_as_it_was(cache: Path) -> None:
    path = save(made("abc"))
    assert path == profile_path("abc") == cache / "profiles" / "abc.json"
    assert find("abc") == made("abc")
    assert [file.name for file in path.parent.iterdir()] == ["abc.json"]


def test_a_newer_profile_takes_the_place_of_the_older() -> None:
    save(made("abc"))
    save(made("abc", KVScheme(tail=192)))
    found = find("abc")
    assert found is not None
    assert found.scheme.tail == 192


def test_a_model_without_a_profile_has_the_default(caplog: pytest.LogCaptureFixture) -> None:
    assert find("abc") is None
    assert scheme_for(SimpleNamespace(fingerprint="abc", ref="some/model"), SMALL) == KVScheme()
    assert not caplog.records


COMPACT = LayerScheme(value_group=128)
BY_SHAPE = {
    "wide": ([LayerSpec(0, "full", 8, 128, 128)] * 2, KVScheme(full=COMPACT, window=COMPACT, tail=64)),
    "wide, recurrent": (
        [LayerSpec(0, "full", 8, 128, 128), LayerSpec(1, "state", arrays=2)],
        KVScheme(full=COMPACT, window=COMPACT, tail=64),
    ),
    "narrow values": ([LayerSpec(0, "full", 8, 128, 64)], KVScheme()),
    "short windows": (
        [LayerSpec(0, "full", 1, 256, 256), LayerSpec(1, "window", 1, 256, 256, 512)],
        KVScheme(window=LayerScheme(key_bits=8, value_group=32), tail=64),
    ),
    "long windows": ([LayerSpec(0, "full", 8, 64, 64), LayerSpec(1, "window", 8, 64, 64, 4096)], KVScheme()),
    "windows alone": ([LayerSpec(0, "window", 8, 64, 64, 512)], KVScheme()),
    "latent": ([LayerSpec(0, "latent", 1, 576, 512)], KVScheme()),
    "recurrent": ([LayerSpec(0, "state", arrays=2)], KVScheme()),
}


@pytest.mark.parametrize(("layers", "expected"), BY_SHAPE.values(), ids=BY_SHAPE)
def test_the_default_scheme_suits_the_shapes(layers: list[LayerSpec], expected: KVScheme) -> None:
    assert default_scheme(ModelCacheSpec(tuple(layers))) == expected


def test_known_models_have_what_was_measured_for_them() -> None:
    spec = ModelCacheSpec(tuple(LayerSpec(index, "full", 3, 64, 64) for index in range(30)))
    known = default_scheme(spec, "wheel:smollm2-135m-instruct")
    assert known.sharp
    assert spec.agent_bytes(4096, known) <= 0.32 * spec.fp16_bytes(4096)


def test_a_forgotten_profile_is_gone() -> None:
    save(made("abc"))
    assert forget("abc")
    assert find("abc") is None
    assert not forget("abc")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace('"key_bits": 8', '"key_bits": 5'),
        lambda text: text.replace('"tail": 64', '"tail": 100'),
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"model": "abc"', '"model": "xyz"'),
    ],
    ids=["empty", "truncated", "no object", "bits", "tail", "format", "other model"],
)
def test_a_profile_that_cannot_be_used_counts_as_none_and_is_said(
    damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    path = save(made("abc"))
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        assert scheme_for(SimpleNamespace(fingerprint="abc", ref="some/model"), SMALL) == KVScheme()
    assert str(path) in caplog.text


def test_a_profile_that_cannot_be_stored_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "profiles")

    save(made("abc"))
    monkeypatch.setattr(profile.os, "fsync", full)
    with pytest.raises(ModelError, match=r"storing the KV profile failed: the disk is full"):
        save(made("abc", KVScheme()))
    assert find("abc") == made("abc")


# ---- the engine


def run_loop(model: nn.Module, scheme: Any) -> EngineLoop:
    loaded = SimpleNamespace(
        model=model,
        fingerprint="abc",
        ref="some/model",
        weights_bytes=0,
        context_limit=4096,
        eos_token_ids=frozenset(),
        tokenizer=Characters(),
        fingerprint_for=lambda text: combine("abc", text),
    )
    loop = EngineLoop(
        lambda: loaded, lambda *_: None, scheme=scheme, budget_bytes=160 << 20, host=True, native=None
    )
    loop.start()
    loop.ready.result(60)
    loop.stop().result(60)
    return loop


def test_an_engine_keeps_memory_by_the_profile_and_its_blocks_are_others(
    tiny: Callable[..., nn.Module],
) -> None:
    before = run_loop(tiny("llama"), scheme_for)
    save(made("abc"))
    after = run_loop(tiny("llama"), scheme_for)
    assert (before.scheme, after.scheme) == (KVScheme(), OTHER)
    assert before.fingerprint != after.fingerprint
    assert after.fingerprint == run_loop(tiny("llama"), OTHER).fingerprint


@pytest.mark.parametrize(
    ("bits", "expected"), [(4, OTHER), (8, KVScheme.uniform(8)), (None, KVScheme.uniform(None))]
)
def test_the_profile_is_for_the_default_bits(bits: int | None, expected: KVScheme) -> None:
    save(made(load(str(TINY)).fingerprint))
    config = EngineConfig(name="t", endpoint="ipc://x", model=str(TINY), budget_bytes=300 << 20, kv_bits=bits)
    loop = build_loop(config)
    loop.start()
    loop.ready.result(60)
    loop.stop().result(60)
    assert loop.scheme == expected


# ---- the command line


def test_calibrate_keeps_a_profile_and_says_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_calibrate, "QUICK_WINDOWS", 1)
    monkeypatch.setattr(calibrate, "calibrate", partial(calibrate.calibrate, context=640))
    assert cli.run(["model", "calibrate", str(TINY), "--quick", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    chosen = [one for one in facts["measured"] if one["chosen"]]
    assert len(chosen) == 1
    kept = find(load(str(TINY)).fingerprint)
    assert kept is not None
    assert kept.scheme == msgspec.convert(chosen[0]["scheme"], KVScheme)
    assert kept.bytes_per_token <= facts["target_bytes_per_token"]
    assert cli.run(["model", "profile", str(TINY)]) == 0
    assert f"{kept.bytes_per_token:.0f} bytes a token" in capsys.readouterr().out
    assert cli.run(["model", "profile", str(TINY), "--forget"]) == 0
    assert "has no profile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "0.3", "--bytes-per-token", "900"], "InvalidRequest: give either"),
        (["--target", "0"], "give a number above 0"),
        (["--target", "0.1"], "the smallest takes"),
    ],
)
def test_a_target_that_cannot_be_is_an_error_and_changes_nothing(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert cli.run(["model", "calibrate", str(TINY), *arguments]) == 1
    assert says in capsys.readouterr().err
    assert not (cache / "profiles").exists()


def test_a_model_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["model", "calibrate", "./no-such-folder"]) == 1
    assert "no-such-folder" in capsys.readouterr().err
