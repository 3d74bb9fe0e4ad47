"""Cached memory belongs to one model: whatever changes what it computes changes the fingerprint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from offbook.runtime.models import fingerprint as module
from offbook.runtime.models import gguf
from offbook.runtime.models.fingerprint import combine, fingerprint, sampled_hash
from offbook.runtime.models.load import load

Make = Callable[..., Any]


@pytest.fixture
def folder(tiny_gguf: Make, tmp_path: Path) -> Path:
    out = tmp_path / "tiny"
    out.mkdir()
    gguf.convert(tiny_gguf("llama").write(tmp_path / "m.gguf"), out, source="test")
    return out


def _weights(folder: Path) -> None:
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.0001
    mx.eval(weights)
    mx.save_safetensors(path, weights)


def _json(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": _weights,
    "vocabulary": _json("tokenizer.json", lambda t: t["model"]["merges"].pop()),
    "template": _json("tokenizer_config.json", lambda t: t.update(chat_template="{{ messages }}")),
    "template in its own file": lambda folder: (
        (folder / "chat_template.jinja").write_text("{{ messages }}") and None
    ),
    "rope": _json("config.json", lambda c: c.update(rope_theta=1234.0)),
    "norm": _json("config.json", lambda c: c.update(rms_norm_eps=1e-6)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_model_under_the_same_name_is_another_model(folder: Path, what: str) -> None:
    before = load(str(folder), device="cpu").fingerprint
    CHANGES[what](folder)
    assert load(str(folder), device="cpu").fingerprint != before


def test_the_same_model_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert load(str(copy), device="cpu").fingerprint == load(str(folder), device="cpu").fingerprint


def test_notes_of_tools_are_no_part_of_a_model(folder: Path) -> None:
    before = fingerprint(folder)
    _json("config.json", lambda c: c.update(transformers_version="9", _name_or_path="/x"))(folder)
    (folder / "README.md").write_text("changed")
    assert fingerprint(folder) == before


def test_the_kv_scheme_and_the_dtype_are_part_of_it(folder: Path) -> None:
    loaded = load(str(folder), device="cpu")
    schemes = [loaded.fingerprint_for(scheme) for scheme in ("bits=4", "bits=8", "")]
    assert len({*schemes, fingerprint(folder, dtype="bfloat16"), fingerprint(folder, dtype="float32")}) == 5
    assert fingerprint(folder, kv_scheme="bits=4") == combine(fingerprint(folder), "bits=4")
    assert all(len(text) == 32 for text in schemes)


def test_large_files_are_sampled_and_a_rewrite_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE_LIMIT", 1 << 20)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 1 << 10)
    header = (16).to_bytes(8, "little") + b"{}" + b" " * 14
    path = tmp_path / "w.safetensors"
    path.write_bytes(header + bytes(4 << 20))
    before = sampled_hash(path)
    assert sampled_hash(path) == before
    path.write_bytes(header + b"\x01" * (4 << 20))
    assert sampled_hash(path) != before
    path.write_bytes(header + bytes((4 << 20) + 1))
    assert sampled_hash(path) != before
    path.write_bytes(header.replace(b"{}", b"{ ") + bytes(4 << 20))
    assert sampled_hash(path) != before
