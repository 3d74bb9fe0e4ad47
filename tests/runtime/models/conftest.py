"""Tiny GGUF files with known weights, written the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(spare)) for byte in range(256)]


class TinyGguf:
    """A GGUF file to be: change ``fields`` and ``tensors``, then ``write``.

    Attributes:
        tensors: GGUF names and float32 values, slowest axis first.
        plain: the same weights under mlx-lm's names and conventions.
    """

    def __init__(self, architecture: str = "llama") -> None:
        self.architecture = architecture
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.plain: dict[str, np.ndarray[Any, Any]] = {}
        self.quantised: dict[str, GGMLQuantizationType] = {}
        self._random = np.random.default_rng(5)
        merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d"]
        self.tokens = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
        self.types = [3] * len(SPECIAL) + [1] * (len(self.tokens) - len(SPECIAL))
        self.fields |= {
            f"{architecture}.context_length": 512,
            f"{architecture}.embedding_length": 64,
            f"{architecture}.block_count": 2,
            f"{architecture}.feed_forward_length": 96,
            f"{architecture}.attention.head_count": 4,
            f"{architecture}.attention.head_count_kv": 2,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{architecture}.rope.freq_base": 5000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": self.types,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }
        self._fill(64, 96, 4, 2, 16)

    def _fill(self, hidden: int, inner: int, heads: int, kv_heads: int, width: int) -> None:
        gemma = self.architecture == "gemma3"
        if gemma:
            self.fields |= {
                "gemma3.attention.key_length": width,
                "gemma3.attention.value_length": width,
                "gemma3.attention.sliding_window": 8,
                "gemma3.block_count": 6,
            }

        def matrix(gguf: str, plain: str, rows: int, columns: int, rotated: int = 0) -> None:
            values = self._random.standard_normal((rows, columns), dtype=np.float32) * 0.3
            self.plain[f"model.{plain}.weight"] = values
            if rotated and not gemma:  # as convert_hf_to_gguf.py permutes query and key rows
                values = values.reshape(rotated, 2, rows // rotated // 2, columns).swapaxes(1, 2)
            self.tensors[f"{gguf}.weight"] = np.ascontiguousarray(values.reshape(rows, columns))

        def norm(gguf: str, plain: str, length: int) -> None:
            values = self._random.standard_normal(length, dtype=np.float32) * 0.1 + (0 if gemma else 1)
            self.plain[f"model.{plain}.weight"] = values
            self.tensors[f"{gguf}.weight"] = values + 1 if gemma else values

        matrix("token_embd", "embed_tokens", len(self.tokens), hidden)
        norm("output_norm", "norm", hidden)
        for n in range(self.fields[f"{self.architecture}.block_count"]):
            blk, layer = f"blk.{n}", f"layers.{n}"
            norm(f"{blk}.attn_norm", f"{layer}.input_layernorm", hidden)
            if gemma:
                norm(f"{blk}.post_attention_norm", f"{layer}.post_attention_layernorm", hidden)
                norm(f"{blk}.ffn_norm", f"{layer}.pre_feedforward_layernorm", hidden)
                norm(f"{blk}.post_ffw_norm", f"{layer}.post_feedforward_layernorm", hidden)
                norm(f"{blk}.attn_q_norm", f"{layer}.self_attn.q_norm", width)
                norm(f"{blk}.attn_k_norm", f"{layer}.self_attn.k_norm", width)
            else:
                norm(f"{blk}.ffn_norm", f"{layer}.post_attention_layernorm", hidden)
            matrix(f"{blk}.attn_q", f"{layer}.self_attn.q_proj", heads * width, hidden, heads)
            matrix(f"{blk}.attn_k", f"{layer}.self_attn.k_proj", kv_heads * width, hidden, kv_heads)
            matrix(f"{blk}.attn_v", f"{layer}.self_attn.v_proj", kv_heads * width, hidden)
            matrix(f"{blk}.attn_output", f"{layer}.self_attn.o_proj", hidden, heads * width)
            matrix(f"{blk}.ffn_gate", f"{layer}.mlp.gate_proj", inner, hidden)
            matrix(f"{blk}.ffn_up", f"{layer}.mlp.up_proj", inner, hidden)
            matrix(f"{blk}.ffn_down", f"{layer}.mlp.down_proj", hidden, inner)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for name, value in self.fields.items():
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, list):
                writer.add_array(name, value)
            else:
                writer.add_string(name, value)
        for name, values in self.tensors.items():
            if kind := self.quantised.get(name):
                writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture
def tiny_gguf() -> Callable[..., TinyGguf]:
    """``tiny_gguf("llama")`` or ``tiny_gguf("gemma3")``: a file to change and write."""
    return TinyGguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of its own for this test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OFFBOOK_CACHE", str(folder))
    return folder
