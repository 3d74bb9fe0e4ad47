"""``ModelCacheSpec``: derived from the model itself, or a refusal at load that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import deepseek_v3, gpt_oss, llama
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from offbook.bus.errors import ModelError
from offbook.runtime.kv.attention import install
from offbook.runtime.kv.probe import derive
from offbook.runtime.kv.scheme import KVScheme
from offbook.runtime.kv.spec import ModelCacheSpec

KINDS = {
    "llama": ["full", "full"],
    "gemma-300": ["window", "full"],
    "gemma-96": ["window", "full"],
    "lfm2": ["state", "full", "state"],
    "latent": ["latent", "latent"],
}


def test_every_layer_has_its_kind(architecture: str, model: nn.Module) -> None:
    assert [layer.kind for layer in derive(model).layers] == KINDS[architecture]


def test_heads_and_widths_are_those_of_the_model(tiny: Callable[..., nn.Module]) -> None:
    layer = derive(tiny("llama")).layers[0]
    assert (layer.heads, layer.key_width, layer.value_width, layer.window) == (2, 32, 32, None)


def test_a_latent_is_one_head_of_rank_and_rotary_part(tiny: Callable[..., nn.Module]) -> None:
    spec = derive(tiny("latent"))
    layer = spec.layers[0]
    assert (layer.heads, layer.key_width, layer.value_width) == (1, 96, 64)
    assert all(".v." not in tensor.name for tensor in spec.groups[0].tensors(KVScheme()))


def test_layers_that_see_the_same_span_form_a_group(tiny: Callable[..., nn.Module]) -> None:
    spec = derive(tiny("gemma-96"))
    assert [(group.name, group.window, [layer.index for layer in group.layers]) for group in spec.groups] == [
        ("full", None, [1]),
        ("window96", 96, [0]),
    ]


def test_a_window_is_found_in_the_mask_a_model_asks_for() -> None:
    """Models that window by mask and not by cache (their cache is a plain one)."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=32,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=128,
    )
    model = llama.Model(args)
    model.make_cache = lambda: [KVCache(), KVCache()]
    assert [layer.window for layer in derive(model).layers] == [128, None]


def test_deriving_twice_gives_the_same(model: nn.Module) -> None:
    assert derive(model) == derive(model)


def test_specs_that_differ_are_described_differently(tiny: Callable[..., nn.Module]) -> None:
    specs = [derive(tiny(name)) for name in KINDS]
    assert len({spec.describe() for spec in specs}) == len(specs)


def test_routing_leaves_other_caches_alone(model: nn.Module, oracle: Any, ids: Any) -> None:
    before = oracle(model).feed(ids(40))
    install(model)
    assert np.array_equal(oracle(model).feed(ids(40)), before)


def test_four_bits_take_less_than_a_third_of_16_bits_at_4k_tokens() -> None:
    from offbook.runtime.kv.spec import LayerSpec

    smollm2 = ModelCacheSpec(tuple(LayerSpec(i, "full", 3, 64, 64) for i in range(30)))
    assert smollm2.agent_bytes(4096, KVScheme()) <= 0.32 * smollm2.fp16_bytes(4096)


# ---- right, or a clear refusal


def test_a_model_with_attention_sinks_is_served_right(
    rig: Callable[..., Any], oracle: Any, ids: Any, native_kernel: bool
) -> None:
    mx.random.seed(3)
    args = gpt_oss.ModelArgs(
        num_hidden_layers=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=100,
    )
    model = gpt_oss.Model(args)
    for layer in model.layers:
        layer.self_attn.sinks = mx.array([1.0, -1.0, 3.0, 0.0])
    mx.eval(model.parameters())
    one, reference, text = rig(model, bits=None, native=native_kernel), oracle(model), ids(400)
    for piece in (text[:200], text[200:240], *text[240:260].reshape(-1, 1), text[260:]):
        got = one.prefill(["a"], [piece])[0] if len(piece) > 1 else one.decode(["a"], piece)[0]
        np.testing.assert_allclose(got, reference.feed(piece), atol=1e-3)


class Patched(llama.Model):  # type: ignore[misc]
    """A tiny Llama whose caches or attention a test replaces."""

    def __init__(self, **changes: Any) -> None:
        base: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "rms_norm_eps": 1e-5,
            "vocab_size": 32,
        }
        super().__init__(llama.ModelArgs(**(base | changes)))


def test_a_mask_of_the_models_own_is_refused_by_layer() -> None:
    class Alibi(nn.Module):  # type: ignore[misc]
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            return self.inner(x, mx.zeros((x.shape[1], x.shape[1])), cache)

    model = Patched()
    model.model.layers[1].self_attn = Alibi(model.model.layers[1].self_attn)
    with pytest.raises(ModelError, match=r"layer 1 .*mask of its own"):
        derive(model)


def test_a_list_of_caches_in_one_layer_is_refused() -> None:
    model = Patched()
    model.make_cache = lambda: [CacheList(KVCache(), KVCache()) for _ in range(2)]
    with pytest.raises(ModelError, match=r"layer 0 .*CacheList"):
        derive(model)


def test_a_rotating_cache_that_keeps_first_tokens_is_refused() -> None:
    model = Patched()
    model.make_cache = lambda: [RotatingKVCache(max_size=64, keep=4) for _ in range(2)]
    with pytest.raises(ModelError, match="keeps 4 first tokens"):
        derive(model)


def test_a_layer_that_does_not_call_the_shared_attention_is_refused() -> None:
    class Own(nn.Module):  # type: ignore[misc]
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            return x

    model = Patched()
    model.model.layers[1].self_attn = Own()
    with pytest.raises(ModelError, match=r"layer 1 .*called the shared attention 0 times"):
        derive(model)


def test_a_model_without_the_shared_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="calls mlx-lm's shared scaled_dot_product_attention"):
        install(nn.Linear(2, 2))


def test_a_model_that_passes_scores_as_its_mask_is_refused() -> None:
    """DeepSeek-V3 adds its rotary scores by way of the mask."""
    args = {
        "model_type": "deepseek_v3",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 40,
        "v_head_dim": 24,
        "rope_scaling": None,
    }
    with pytest.raises(ModelError, match=r"deepseek_v3 .*in a way of its own"):
        derive(deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(args)))


def test_a_layer_that_attends_otherwise_to_one_token_is_refused() -> None:
    class Twice(nn.Module):  # type: ignore[misc]
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            out = self.inner(x, mask, cache)
            return out if x.shape[1] > 1 else self.inner(x, mask, cache) + out

    model = Patched()
    model.model.layers[0].self_attn = Twice(model.model.layers[0].self_attn)
    with pytest.raises(ModelError, match=r"layer 0 .*otherwise to one token"):
        derive(model)
