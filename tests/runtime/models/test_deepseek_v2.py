"""The latent form of DeepSeek-V2 computes what mlx-lm's form does, and caches one narrow row a token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from offbook.runtime.models.blas import preload_blas

preload_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import deepseek_v2, llama  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache  # noqa: E402

from offbook.bus.errors import ModelError  # noqa: E402
from offbook.runtime.models import deepseek_v2 as ours  # noqa: E402
from offbook.runtime.models.deepseek_v2 import LatentCache, to_latent  # noqa: E402

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 40,
    "v_head_dim": 24,
    "max_position_embeddings": 4096,
    # mscale and mscale_all_dim differ, so that the rotary parts are scaled too, not the scores alone.
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
}
RANK, WIDTH = 64, 96


def plain_model(**changes: Any) -> deepseek_v2.Model:
    mx.random.seed(7)
    model = deepseek_v2.Model(deepseek_v2.ModelArgs.from_dict(TINY | changes))
    for layer in model.layers[1:]:
        layer.mlp.gate.weight = mx.random.normal(layer.mlp.gate.weight.shape)
    for layer in model.layers:  # scores far from uniform, so that a wrong scale or position shows
        layer.self_attn.q_proj.weight *= 6
    return model


def prompt(rows: int, length: int, seed: int = 3) -> mx.array:
    return mx.random.randint(0, TINY["vocab_size"], (rows, length), key=mx.random.key(seed))


def assert_close(actual: mx.array, expected: mx.array, tolerance: float = 1e-5) -> None:
    """Equal within `tolerance` of the largest expected number."""
    worst = (mx.abs(actual - expected).max() / mx.abs(expected).max()).item()
    assert worst < tolerance, f"relative difference {worst:.2e}"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="yarn"),
        pytest.param({"rope_scaling": {"factor": 1}}, id="no-scaling"),
        pytest.param({"rope_scaling": TINY["rope_scaling"] | {"mscale": 0.707}}, id="equal-mscales"),
        pytest.param({"attention_bias": True}, id="biases"),
        pytest.param(
            {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}, id="grouped-experts"
        ),
    ],
)
def test_logits_equal_the_decompressed_form(changes: dict[str, Any]) -> None:
    model, ids = plain_model(**changes), prompt(2, 100)
    expected = model(ids)
    assert_close(to_latent(model)(ids), expected)


def test_queries_with_a_low_rank_projection() -> None:
    mx.random.seed(7)
    model = deepseek_v2.Model(deepseek_v2.ModelArgs.from_dict(TINY | {"q_lora_rank": 48}))
    expected = model(prompt(2, 60))
    assert_close(to_latent(model)(prompt(2, 60)), expected)


@pytest.mark.parametrize("make", [LatentCache, KVCache], ids=["latent-cache", "plain-cache"])
def test_chunks_and_decode_steps_equal_one_pass(make: type[KVCache]) -> None:
    model, ids = plain_model(), prompt(1, 90)
    expected = model(ids)
    model = to_latent(model)
    caches = [make() for _ in model.layers]
    cuts = [0, 33, 34, 85, 86, 87, 88, 89, 90]
    parts = [model(ids[:, a:b], caches) for a, b in itertools.pairwise(cuts)]
    assert_close(mx.concatenate(parts, axis=1), expected)


def test_the_cache_holds_one_latent_row_a_token() -> None:
    model = to_latent(plain_model())
    caches = make_prompt_cache(model)
    model(prompt(2, 10), caches)
    for cache in caches:
        assert isinstance(cache, LatentCache)
        keys, values = cache.keys_and_values()
        assert keys.shape == (2, 1, 10, WIDTH)
        assert values.size == 0


def test_rows_at_different_positions_equal_each_row_alone() -> None:
    """A batch with an array of offsets: prefill of mixed lengths, then decode steps."""
    model = plain_model()
    lengths, steps = [5, 40, 17], 4
    rows = [prompt(1, n + steps, seed=n) for n in lengths]
    expected = [model(row) for row in rows]
    model = to_latent(model)

    padding = [max(lengths) - n for n in lengths]
    caches = [BatchKVCache(padding) for _ in model.layers]
    padded = [mx.pad(r[:, :n], ((0, 0), (p, 0))) for r, n, p in zip(rows, lengths, padding, strict=True)]
    first = model(mx.concatenate(padded), caches)[:, -1:]
    for step in range(steps):
        assert caches[0].offset.tolist() == [n + step for n in lengths]
        for row, n in enumerate(lengths):
            assert_close(first[row], expected[row][0, n + step - 1 : n + step])
        ids = mx.concatenate([r[:, n + step : n + step + 1] for r, n in zip(rows, lengths, strict=True)])
        first = model(ids, caches)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_stay_packed_and_mean_the_same(bits: int) -> None:
    model, ids = plain_model(qk_nope_head_dim=32, v_head_dim=32), prompt(1, 40)
    nn.quantize(model, group_size=32, bits=bits)
    expected = model(ids)
    model = to_latent(model)
    for layer in model.layers:
        assert layer.self_attn.up_keys.weight.dtype == mx.uint32
        assert layer.self_attn.up_values.weight.dtype == mx.uint32
    assert_close(model(ids), expected, 1e-4)


def test_attention_is_called_by_the_modules_name_with_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    original = ours.scaled_dot_product_attention

    def record(queries: mx.array, keys: mx.array, values: mx.array, **rest: Any) -> mx.array:
        calls.append(
            (queries.shape, keys.shape, values.shape, mx.array_equal(values, keys[..., :RANK]).item())
        )
        return original(queries, keys, values, **rest)

    model = to_latent(plain_model())
    caches = make_prompt_cache(model)
    model(prompt(2, 6), caches)
    monkeypatch.setattr(ours, "scaled_dot_product_attention", record)
    model(prompt(2, 1), caches)
    assert calls == [((2, 4, 1, WIDTH), (2, 1, 7, WIDTH), (2, 1, 7, RANK), True)] * 3


def test_no_weight_is_lost_or_doubled() -> None:
    model = plain_model()
    before = sum(value.size for _, value in tree_flatten(model.parameters()))
    model = to_latent(model)
    assert sum(value.size for _, value in tree_flatten(model.parameters())) == before


def test_converting_twice_changes_nothing() -> None:
    model = to_latent(plain_model())
    layers = [layer.self_attn for layer in model.layers]
    assert to_latent(model) is model
    assert [layer.self_attn for layer in model.layers] == layers


def test_other_models_are_refused() -> None:
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=16,
    )
    with pytest.raises(ModelError, match="llama"):
        to_latent(llama.Model(arguments))
