"""Other families of models with recurrent layers: their state travels with the agent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import falcon_h1, granitemoehybrid, qwen3_next

from offbook.bus.errors import ModelError
from offbook.runtime.kv.probe import derive
from offbook.runtime.models.load import _evaluate_everything

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}


def qwen() -> nn.Module:
    """Gated delta rule, three layers of four, and a mixture of experts."""
    return qwen3_next.Model(
        qwen3_next.ModelArgs(
            model_type="qwen3_next",
            num_hidden_layers=4,
            full_attention_interval=4,
            head_dim=32,
            partial_rotary_factor=0.5,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=32,
            moe_intermediate_size=32,
            mlp_only_layers=[],
            **SIZES,
        )
    )


def granite() -> nn.Module:
    """Mamba 2 around an attention layer."""
    return granitemoehybrid.Model(
        granitemoehybrid.ModelArgs(
            model_type="granitemoehybrid",
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            attention_bias=False,
            embedding_multiplier=1.0,
            attention_multiplier=0.2,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            num_local_experts=None,
            num_experts_per_tok=None,
            shared_intermediate_size=64,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_proj_bias=False,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_n_groups=1,
            mamba_conv_bias=True,
            mlp_bias=False,
            position_embedding_type="rope",
            **SIZES,
        )
    )


@pytest.fixture(params=[qwen, granite])
def hybrid(request: pytest.FixtureRequest) -> nn.Module:
    mx.random.seed(1)
    model = request.param()
    _evaluate_everything(model)
    return model


def test_restored_equals_live_and_both_equal_the_plain_model(
    hybrid: nn.Module, rig: Callable[..., Any], oracle: Any, ids: Any, tmp_path: Path
) -> None:
    text, lengths = ids(330, 3), (127, 300)
    for length in lengths:
        live, other = rig(hybrid, bits=None), rig(hybrid, bits=None, folder=tmp_path / str(length))
        live.say("a", text[:length])
        other.say("a", text[:length])
        other.evict("a")
        reference = oracle(hybrid)
        reference.feed(text[:length])
        expected, got = live.say("a", text[: length + 20])[0], other.say("a", text[: length + 20])
        assert (got[1].source, got[1].tokens) == ("warm", length)
        assert np.array_equal(got[0], expected)
        np.testing.assert_allclose(expected, reference.feed(text[length : length + 20]), atol=1e-3)


def test_rows_of_different_lengths_equal_each_alone(
    hybrid: nn.Module, rig: Callable[..., Any], oracle: Any, ids: Any
) -> None:
    one, text, lengths = rig(hybrid, bits=None), ids(200, 3), (30, 77, 140)
    names = [f"a{length}" for length in lengths]
    read = one.prefill(names, [text[:length] for length in lengths])
    said = one.decode(names, [text[length] for length in lengths])
    for row, length in enumerate(lengths):
        reference = oracle(hybrid)
        np.testing.assert_allclose(read[row], reference.feed(text[:length]), atol=1e-3)
        np.testing.assert_allclose(said[row], reference.feed(text[length : length + 1]), atol=1e-3)


def test_layers_that_are_recurrent_and_attend_are_refused() -> None:
    """Falcon-H1 keeps two caches in each layer."""
    model = falcon_h1.Model(falcon_h1.ModelArgs(num_hidden_layers=1, hidden_size=64, vocab_size=64))
    with pytest.raises(ModelError, match=r"layer 0 .*keeps a CacheList"):
        derive(model)
