"""References lead to models, or to an error that says what to do; what is loaded works from any thread."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from offbook.bus.errors import ModelError, UnknownModel
from offbook.runtime.kv import native_library
from offbook.runtime.models import gguf
from offbook.runtime.models.load import LoadedModel, context_limit, load
from offbook.runtime.models.resolve import resolve

Make = Callable[..., Any]
IDS = mx.array([[5, 80, 120, 33, 260, 9]])


@pytest.fixture
def folder(tiny_gguf: Make, tmp_path: Path) -> Path:
    """A tiny Llama in mlx-lm format."""
    out = tmp_path / "tiny"
    out.mkdir()
    gguf.convert(tiny_gguf("llama").write(tmp_path / "m.gguf"), out, source="test")
    return out


def in_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns when a new thread does it."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as exc:
            failure.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def forward(loaded: LoadedModel) -> np.ndarray[Any, Any]:
    return np.array(loaded.model(mx.array([[5, 80, 120, 33, 260, 9]])))


def test_a_local_folder_loads_with_all_that_an_engine_needs(folder: Path) -> None:
    loaded = load(str(folder), device="cpu")
    assert loaded.path == folder
    assert loaded.context_limit == 512
    assert loaded.has_chat_template
    assert loaded.dtype == "float32"
    arrays = dict(tree_flatten(loaded.model.parameters()))
    assert loaded.weights_bytes == sum(array.nbytes for array in arrays.values())
    assert all(array.dtype == mx.float32 for array in arrays.values())
    turn = [{"role": "user", "content": "hello"}]
    ids = loaded.tokenizer.apply_chat_template(turn, add_generation_prompt=True)
    assert loaded.tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_first_use_in_a_worker_thread_works(folder: Path) -> None:
    loaded = load(str(folder), device="cpu")
    np.testing.assert_array_equal(in_thread(lambda: forward(loaded)), forward(loaded))


def test_a_model_loaded_in_a_worker_thread_works_in_another(folder: Path) -> None:
    loaded = in_thread(lambda: load(str(folder), device="cpu"))
    np.testing.assert_array_equal(in_thread(lambda: forward(loaded)), forward(loaded))


def test_arrays_that_are_no_parameters_are_ready_for_any_thread(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    loaded = in_thread(lambda: load(str(folder), device="cpu"))
    assert "_freqs" in loaded.model.layers[0].self_attn.rope
    assert np.isfinite(forward(loaded)).all()


def quantise(folder: Path, bits: int, mode: str) -> tuple[Any, dict[str, mx.array]]:
    """Make the folder's model one that MLX has quantised; the model and its weights."""
    from mlx_lm.utils import load_model

    model, config = load_model(folder)
    nn.quantize(model, group_size=32, bits=bits, mode=mode)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config["quantization"] = {"group_size": 32, "bits": bits, "mode": mode}
    (folder / "config.json").write_text(json.dumps(config))
    return model, weights


QUANTISED = pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])


@QUANTISED
def test_quantised_layers_become_float32_on_the_cpu(folder: Path, bits: int, mode: str) -> None:
    model, weights = quantise(folder, bits, mode)
    loaded = load(str(folder), device="cpu")
    name = "model.layers.1.mlp.up_proj"
    expected = mx.dequantize(
        weights[f"{name}.weight"],
        weights[f"{name}.scales"],
        weights.get(f"{name}.biases"),
        group_size=32,
        bits=bits,
        mode=mode,
        dtype=mx.float32,
    )
    got = loaded.model.layers[1].mlp.up_proj.weight
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-6)
    assert not [m for m in loaded.model.modules() if "Quantized" in type(m).__name__]
    np.testing.assert_allclose(forward(loaded), np.array(model(IDS)), rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(not native_library.available(), reason="packing is the native kernel's")
@QUANTISED
def test_loaded_compactly_a_quantised_model_has_no_floats_and_the_same_logits(
    folder: Path, bits: int, mode: str
) -> None:
    model, _ = quantise(folder, bits, mode)
    # As published models have them: 16-bit factors.
    model.set_dtype(mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    plain, compact = load(str(folder), device="cpu"), load(str(folder), device="cpu", compact=True)
    assert compact.model.layers[1].mlp.up_proj.get("weight") is None
    assert compact.weights_bytes < plain.weights_bytes / 2
    np.testing.assert_allclose(forward(compact), forward(plain), rtol=1e-4, atol=1e-4)
    many = mx.array(np.random.default_rng(0).integers(0, 90, (1, 200)))
    assert np.array_equal(np.array(compact.model(many)), np.array(plain.model(many)))


def test_a_base_model_is_given_a_plain_template_with_one_bos(tiny_gguf: Make, tmp_path: Path) -> None:
    file = tiny_gguf("llama")
    del file.fields["tokenizer.chat_template"]
    file.fields["tokenizer.ggml.add_bos_token"] = True
    out = tmp_path / "base"
    out.mkdir()
    gguf.convert(file.write(tmp_path / "m.gguf"), out, source="test")
    loaded = load(str(out), device="cpu")
    assert not loaded.has_chat_template
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert loaded.tokenizer.decode(ids) == "<|im_start|>System: Be kind.\n\nUser: hello\n\nAssistant:"
    assert ids.count(loaded.tokenizer.bos_token_id) == 1


def test_a_base_model_without_bos_gets_none(tiny_gguf: Make, tmp_path: Path) -> None:
    file = tiny_gguf("llama")
    del file.fields["tokenizer.chat_template"]
    out = tmp_path / "base"
    out.mkdir()
    gguf.convert(file.write(tmp_path / "m.gguf"), out, source="test")
    loaded = load(str(out), device="cpu")
    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    assert loaded.tokenizer.decode(ids) == "User: hello\n\nAssistant:"


def test_a_gguf_reference_is_converted_once_and_found_by_content(
    tiny_gguf: Make, cache: Path, tmp_path: Path
) -> None:
    path = tiny_gguf("llama").write(tmp_path / "m.gguf")
    events: list[str] = []
    first = resolve(f"gguf:{path}", progress=lambda stage, *_: events.append(stage))
    moved = path.rename(tmp_path / "moved.gguf")
    assert resolve(f"gguf:{moved}", progress=lambda *_: pytest.fail("converted again")) == first
    assert set(events) == {"convert"}
    other = tiny_gguf("llama")
    other.tensors["output_norm.weight"] += 1
    other.write(moved)
    assert resolve(f"gguf:{moved}") != first


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ("no-such-model", "wheel:NAME"),
        ("", "wheel:NAME"),
        ("./nowhere/at-all", "a folder in mlx-lm format"),
        ("../x", "a folder in mlx-lm format"),
        ("wheel:", "known: wheel:gemma3-270m"),
        ("hf:only-a-name", "hf:ORG/NAME"),
        ("ftp://a/b", "there is no model 'ftp://a/b'"),
    ],
)
def test_a_reference_that_names_nothing_says_what_would(ref: str, said: str) -> None:
    with pytest.raises(UnknownModel, match=said):
        resolve(ref)


def test_a_gguf_file_without_its_prefix_is_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnknownModel, match="gguf:"):
        resolve(str(tmp_path / "x.gguf"))


def test_a_gguf_file_that_is_not_there(cache: Path) -> None:
    with pytest.raises(ModelError, match="no GGUF file at /nowhere/x"):
        resolve("gguf:/nowhere/x.gguf")


def _cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config that is not JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "config without a type": (lambda folder: (folder / "config.json").write_text("{}"), "no model_type"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "cut weights": (_cut_weights, "weights"),
    "unknown architecture": (_change_config(model_type="spqr"), "spqr"),
    "weights of another shape": (_change_config(hidden_size=128), "does not load"),
    "no context length": (_change_config(max_position_embeddings=None), "max_position_embeddings"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "tokenizer that is not JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_the_reason(folder: Path, case: str) -> None:
    damage, said = BROKEN[case]
    damage(folder)
    with pytest.raises(ModelError, match=said):
        load(str(folder), device="cpu")


def test_the_context_of_a_nested_configuration_is_found() -> None:
    assert context_limit({"text_config": {"max_position_embeddings": 77}}) == 77


HUB = """
from offbook.bus.errors import OffbookError
from offbook.runtime.models.resolve import resolve
try:
    resolve("nobody/nothing")
except OffbookError as exc:
    print(exc.code, exc)
"""


@pytest.mark.parametrize(
    "environment",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_a_hub_that_cannot_be_reached_says_so(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", HUB]
    env = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path), "HOME": str(tmp_path), **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=True)
    assert done.stdout.startswith("ModelError nobody/nothing is not in the local cache"), done.stdout


def test_a_hub_snapshot_is_checked_like_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    assert resolve("org/name") == folder
    assert resolve("hf:org/name") == folder
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(ModelError, match="has no config"):
        resolve("hf:org/name")


def test_importing_mlx_first_is_pointed_out(folder: Path) -> None:
    code = (
        "import warnings, mlx.core\n"
        "from offbook.runtime.models.load import load\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        f"    load({str(folder)!r}, device='cpu')\n"
        "print([str(w.message) for w in seen if w.category is RuntimeWarning])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ("before mlx.core" in done.stdout) == (sys.platform == "linux")
