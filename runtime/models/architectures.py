"""How each model architecture's GGUF tensors and metadata become mlx-lm's.

Owns the names, shapes and conventions of ``llama`` and ``gemma3``. A ``Plan`` is data (config and a
list of tensors with a transform each), so that what a conversion will do can be tested without weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from offbook.bus.errors import ModelError

if TYPE_CHECKING:
    from offbook.runtime.models.gguf_tokenizer import GgufVocabulary

Array = npt.NDArray[np.float32]
Transform = Callable[[Array], Array]


def _same(values: Array) -> Array:
    return values


@dataclass(frozen=True)
class Source:
    """Where a tensor of the folder comes from: the GGUF tensor's name, and what to do with its values."""

    name: str
    transform: Transform = _same


@dataclass(frozen=True)
class Plan:
    """A conversion: the folder's ``config.json`` and its tensors by mlx-lm name."""

    config: dict[str, Any]
    tensors: dict[str, Source]


def plan_for(
    fields: dict[str, Any],
    tensors: set[str],
    vocabulary: GgufVocabulary,
    rope_factors: Array | None = None,
) -> Plan:
    """The plan for a file with these metadata fields and tensor names.

    ``rope_factors`` are the values of the tensor ``rope_freqs.weight``, if the file has one.

    Raises:
        ModelError: an unknown architecture, a variant of a known one that would compute something else,
            or a tensor that is missing or that nothing would use.
    """
    architecture = fields.get("general.architecture")
    if architecture not in _PLANNERS:
        raise ModelError(
            f"GGUF architecture {architecture!r} is not supported; known: {', '.join(sorted(_PLANNERS))}"
        )
    plan = _PLANNERS[architecture](_Reader(architecture, fields, rope_factors), tensors, vocabulary)
    used = {source.name for source in plan.tensors.values()}
    if missing := sorted(used - tensors):
        raise ModelError(
            f"the GGUF file lacks {len(missing)} tensors of a {architecture} model: {missing[0]!r}, ..."
        )
    if left := sorted(tensors - used - _NOT_WEIGHTS):
        raise ModelError(
            f"the GGUF file has {len(left)} tensors that a plain {architecture} model has not: "
            f"{left[0]!r}, ..."
        )
    return plan


_NOT_WEIGHTS = {"rope_freqs.weight"}  # read by the planner itself


@dataclass(frozen=True)
class _Reader:
    architecture: str
    fields: dict[str, Any]
    rope_factors: Array | None

    def need(self, name: str) -> Any:
        key = f"{self.architecture}.{name}"
        if key not in self.fields:
            raise ModelError(f"the GGUF file lacks the field {key!r}")
        return self.fields[key]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.architecture}.{name}", default)


def _decimal(value: float) -> float:
    """A float32 field as the decimal number it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def _common(read: _Reader, vocabulary: GgufVocabulary) -> dict[str, Any]:
    heads = read.need("attention.head_count")
    if not isinstance(heads, int) or not isinstance(read.get("attention.head_count_kv", heads), int):
        raise ModelError("head counts that differ between layers are not supported")
    hidden = read.need("embedding_length")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": read.need("block_count"),
        "intermediate_size": read.need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.get("attention.head_count_kv", heads),
        "head_dim": read.get("attention.key_length", hidden // heads),
        "rms_norm_eps": _decimal(read.need("attention.layer_norm_rms_epsilon")),
        "vocab_size": len(vocabulary.tokens),
        "max_position_embeddings": read.need("context_length"),
    }


def _undo_rope_permutation(heads: int) -> Transform:
    """llama.cpp rotates neighbouring pairs and stores query and key rows in that order; mlx-lm, like the
    original checkpoints, rotates the first half against the second."""

    def transform(values: Array) -> Array:
        grouped = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return grouped.swapaxes(1, 2).reshape(values.shape)

    return transform


def _minus_one(values: Array) -> Array:
    """llama.cpp stores Gemma's norm weights with the one added that mlx-lm adds when it computes."""
    return values - np.float32(1)


def _llama(read: _Reader, tensors: set[str], vocabulary: GgufVocabulary) -> Plan:
    if read.get("expert_count", 0):
        raise ModelError("GGUF llama models with experts (Mixtral) are not supported")
    config = _common(read, vocabulary)
    if read.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise ModelError("GGUF llama models that rotate only part of a head are not supported")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key = _undo_rope_permutation(heads), _undo_rope_permutation(kv_heads)
    out = {
        "model.embed_tokens.weight": Source("token_embd.weight"),
        "model.norm.weight": Source("output_norm.weight"),
    }
    if "output.weight" in tensors:
        out["lm_head.weight"] = Source("output.weight")
    names = {
        "input_layernorm": ("attn_norm", _same),
        "post_attention_layernorm": ("ffn_norm", _same),
        "self_attn.q_proj": ("attn_q", query),
        "self_attn.k_proj": ("attn_k", key),
        "self_attn.v_proj": ("attn_v", _same),
        "self_attn.o_proj": ("attn_output", _same),
        "mlp.gate_proj": ("ffn_gate", _same),
        "mlp.up_proj": ("ffn_up", _same),
        "mlp.down_proj": ("ffn_down", _same),
    }
    for layer in range(config["num_hidden_layers"]):
        for target, (source, transform) in names.items():
            out[f"model.layers.{layer}.{target}.weight"] = Source(f"blk.{layer}.{source}.weight", transform)
            if f"blk.{layer}.{source}.bias" in tensors:
                out[f"model.layers.{layer}.{target}.bias"] = Source(f"blk.{layer}.{source}.bias", transform)
    config |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": _decimal(read.get("rope.freq_base", 10000.0)),
        "rope_traditional": False,
        "rope_scaling": _rope_scaling(read, config["head_dim"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    return Plan(config, out)


_LLAMA3_SCALINGS: tuple[dict[str, Any], ...] = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)  # Llama 3.1 and 3.3; Llama 3.2
)


def llama3_factors(base: float, width: int, scaling: dict[str, Any]) -> Array:
    """By how much Llama 3's scaling slows each frequency down: what GGUF files hold as ``rope_freqs``."""
    original = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelengths = 2 * np.pi * base ** (np.arange(0, width, 2) / width)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), dtype=np.float32)


def _rope_scaling(read: _Reader, width: int) -> dict[str, Any] | None:
    if read.rope_factors is not None:
        # The file has the resulting factors, not the scaling's parameters: find those that give them.
        base = _decimal(read.get("rope.freq_base", 10000.0))
        for scaling in _LLAMA3_SCALINGS:
            expected = llama3_factors(base, width, scaling)
            if expected.shape == read.rope_factors.shape and np.allclose(
                expected, read.rope_factors, rtol=1e-4
            ):
                return dict(scaling)
        raise ModelError(
            "the GGUF file scales RoPE by factors that are not those of Llama 3.1 to 3.3; "
            "load the model from its mlx-lm or Hub folder instead"
        )
    kind = read.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": _decimal(read.need("rope.scaling.factor"))}
    raise ModelError(f"RoPE scaling {kind!r} in GGUF files is not supported; known: none, linear")


def _gemma3(read: _Reader, tensors: set[str], vocabulary: GgufVocabulary) -> Plan:
    config = _common(read, vocabulary)
    out = {
        "model.embed_tokens.weight": Source("token_embd.weight"),
        "model.norm.weight": Source("output_norm.weight", _minus_one),
    }
    if "output.weight" in tensors:
        out["lm_head.weight"] = Source("output.weight")
    names = {
        "input_layernorm": ("attn_norm", _minus_one),
        "post_attention_layernorm": ("post_attention_norm", _minus_one),
        "pre_feedforward_layernorm": ("ffn_norm", _minus_one),
        "post_feedforward_layernorm": ("post_ffw_norm", _minus_one),
        "self_attn.q_norm": ("attn_q_norm", _minus_one),
        "self_attn.k_norm": ("attn_k_norm", _minus_one),
        "self_attn.q_proj": ("attn_q", _same),
        "self_attn.k_proj": ("attn_k", _same),
        "self_attn.v_proj": ("attn_v", _same),
        "self_attn.o_proj": ("attn_output", _same),
        "mlp.gate_proj": ("ffn_gate", _same),
        "mlp.up_proj": ("ffn_up", _same),
        "mlp.down_proj": ("ffn_down", _same),
    }
    for layer in range(config["num_hidden_layers"]):
        for target, (source, transform) in names.items():
            out[f"model.layers.{layer}.{target}.weight"] = Source(f"blk.{layer}.{source}.weight", transform)
    # The 27B model scales queries by its width per head, all others by the head's own width.
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    scalar = hidden // heads if config["num_hidden_layers"] == 62 else config["head_dim"]
    config |= {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": _decimal(read.get("rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": _decimal(read.get("rope.freq_base_swa", 10_000.0)),
        "rope_scaling": _rope_scaling(read, config["head_dim"]),
        "query_pre_attn_scalar": scalar,
        "sliding_window": read.need("attention.sliding_window"),
        "sliding_window_pattern": read.get("attention.sliding_window_pattern", 6),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    return Plan(config, out)


_PLANNERS: dict[str, Callable[[_Reader, set[str], GgufVocabulary], Plan]] = {
    "llama": _llama,
    "gemma3": _gemma3,
}
