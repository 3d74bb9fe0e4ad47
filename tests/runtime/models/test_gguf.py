"""GGUF files become mlx-lm folders that compute the same, or are refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from mlx_lm.models import gemma3_text, llama

from offbook.bus.errors import ModelError
from offbook.runtime.models import gguf
from offbook.runtime.models.architectures import llama3_factors
from offbook.runtime.models.load import load

Make = Callable[..., Any]
IDS = mx.array([[5, 80, 120, 33, 260, 9, 17, 64, 201, 90, 41, 7]])


def converted(file: Any, folder: Path) -> Path:
    path = file.write(folder / "m.gguf")
    out: Path = folder / "out"
    out.mkdir()
    gguf.convert(path, out, source="test")
    return out


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(IDS))


def test_a_llama_file_computes_what_its_weights_say(tiny_gguf: Make, tmp_path: Path) -> None:
    file = tiny_gguf("llama")
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=len(file.tokens),
        rope_theta=5000.0,
    )
    expected = llama.Model(args)
    expected.load_weights([(name, mx.array(values)) for name, values in file.plain.items()])
    loaded = load(str(converted(file, tmp_path)), device="cpu")
    np.testing.assert_array_equal(logits(loaded.model), logits(expected))


def test_a_gemma3_file_computes_what_its_weights_say(tiny_gguf: Make, tmp_path: Path) -> None:
    file = tiny_gguf("gemma3")
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=64,
        num_hidden_layers=6,
        intermediate_size=96,
        num_attention_heads=4,
        head_dim=16,
        rms_norm_eps=1e-5,
        vocab_size=len(file.tokens),
        num_key_value_heads=2,
        rope_theta=5000.0,
        query_pre_attn_scalar=16,
        sliding_window=8,
    )
    expected = gemma3_text.Model(args)
    expected.load_weights(list(expected.sanitize({n: mx.array(v) for n, v in file.plain.items()}).items()))
    loaded = load(str(converted(file, tmp_path)), device="cpu")
    # Norm weights are stored with one added: taking it off again rounds once.
    np.testing.assert_allclose(logits(loaded.model), logits(expected), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q5_0", "F16", "BF16"])
def test_quantised_tensors_are_dequantised_exactly(tiny_gguf: Make, tmp_path: Path, kind: str) -> None:
    file = tiny_gguf("llama")
    quantisation = GGMLQuantizationType[kind]
    name = "blk.1.ffn_up.weight"
    file.quantised[name] = quantisation
    out = converted(file, tmp_path)
    packed = quants.quantize(file.tensors[name], quantisation)
    weights = mx.load(str(out / "model.safetensors"))["model.layers.1.mlp.up_proj.weight"]
    assert weights.dtype == mx.float32
    np.testing.assert_array_equal(np.array(weights), quants.dequantize(packed, quantisation))


def test_an_untied_output_matrix_is_used(tiny_gguf: Make, tmp_path: Path) -> None:
    file = tiny_gguf("llama")
    file.tensors["output.weight"] = np.zeros_like(file.tensors["token_embd.weight"])
    loaded = load(str(converted(file, tmp_path)), device="cpu")
    assert loaded.config["tie_word_embeddings"] is False
    assert not logits(loaded.model).any()


def test_llama3_rope_factors_become_their_scaling(tiny_gguf: Make, tmp_path: Path) -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    file = tiny_gguf("llama")
    file.fields["llama.rope.freq_base"] = 500000.0
    file.tensors["rope_freqs.weight"] = llama3_factors(500000.0, 16, scaling)
    loaded = load(str(converted(file, tmp_path)), device="cpu")
    assert loaded.config["rope_scaling"] == scaling | {"rope_type": "llama3"}
    # mlx-lm builds the same frequencies from it as llama.cpp does from the factors.
    plain = 500000.0 ** (np.arange(0, 16, 2) / 16)
    frequencies = np.array(loaded.model.layers[0].self_attn.rope._freqs)
    np.testing.assert_allclose(frequencies, plain * file.tensors["rope_freqs.weight"], rtol=1e-5)


def test_every_end_of_turn_token_ends_a_generation(tiny_gguf: Make, tmp_path: Path) -> None:
    loaded = load(str(converted(tiny_gguf("llama"), tmp_path)), device="cpu")
    assert loaded.eos_token_ids == {0, 2}  # <|endoftext|> and <|im_end|>


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(tiny_gguf: Make, tmp_path: Path) -> None:
    tokenizer = load(str(converted(tiny_gguf("llama"), tmp_path)), device="cpu").tokenizer
    text = "<|im_start|>hello world 42é\n<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids)[:5] == ["<|im_start|>", "hello", "Ġwor", "ld", "Ġ"]
    assert tokenizer.decode(ids) == text


def _without(key: str) -> Callable[[Any], None]:
    return lambda file: file.fields.pop(key)


def _with(**fields: Any) -> Callable[[Any], None]:
    return lambda file: file.fields.update({name.replace("__", "."): value for name, value in fields.items()})


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "unknown architecture": (lambda file: setattr(file, "architecture", "mamba"), "'mamba' is not supported"),
    "missing field": (_without("llama.block_count"), "llama.block_count"),
    "missing tensor": (lambda file: file.tensors.pop("blk.1.attn_q.weight"), "blk.1.attn_q.weight"),
    "foreign tensor": (
        lambda file: file.tensors.update({"blk.0.ssm.weight": np.ones(4, np.float32)}),
        "blk.0.ssm.weight",
    ),
    "experts": (_with(llama__expert_count=8), "experts"),
    "no tokenizer": (_without("tokenizer.ggml.tokens"), "no tokenizer"),
    "other tokenizer": (_with(tokenizer__ggml__model="rwkv"), "'rwkv'"),
    "other pre-tokenizer": (_with(tokenizer__ggml__pre="deepseek-r1-qwen"), "'deepseek-r1-qwen'"),
    "no merges": (_without("tokenizer.ggml.merges"), "merges"),
    "yarn": (_with(llama__rope__scaling__type="yarn"), "'yarn'"),
    "odd rope factors": (
        lambda file: file.tensors.update({"rope_freqs.weight": np.full(8, 3.0, np.float32)}),
        "Llama 3.1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_rightly_is_refused(tiny_gguf: Make, tmp_path: Path, case: str) -> None:
    change, said = REFUSED[case]
    file = tiny_gguf("llama")
    change(file)
    with pytest.raises(ModelError, match=said):
        converted(file, tmp_path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ModelError, match="not a GGUF file"):
        gguf.read(path)


@pytest.mark.parametrize("part", [0.001, 0.05, 0.3, 0.9])
def test_a_truncated_file_is_refused(tiny_gguf: Make, tmp_path: Path, part: float) -> None:
    whole = tiny_gguf("llama").write(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ModelError, match="truncated"):
        gguf.convert(cut, tmp_path / "nowhere", source="test")


def test_a_folder_whose_file_was_cut_is_not_complete(tiny_gguf: Make, tmp_path: Path) -> None:
    out = converted(tiny_gguf("llama"), tmp_path)
    assert gguf.is_complete(out)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not gguf.is_complete(out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
