"""The kernel's forward of few rows: which models it takes, and that it computes what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, llama, phi3, qwen2, qwen3, stablelm

from offbook.runtime.engine.batch import Batch
from offbook.runtime.kv import native
from offbook.runtime.kv.arrays import PoolArrays
from offbook.runtime.kv.kernel import NativeAttention
from offbook.runtime.kv.pool import BlockPool
from offbook.runtime.kv.probe import derive
from offbook.runtime.kv.scheme import KVScheme
from offbook.runtime.kv.spec import ModelCacheSpec
from offbook.runtime.kv.table import ABSENT, AgentTable
from offbook.runtime.models import decoder, linear

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 90,
}
GEMMA = SIZES | {
    "head_dim": 32,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20,
}


def seeded(model: Any, seed: int = 3) -> nn.Module:
    """Random weights large enough that every part of a layer matters, norms' factors included."""
    mx.random.seed(seed)
    model.update(tree_map(lambda p: p + 0.2 * mx.random.normal(p.shape), model.parameters()))
    mx.eval(model.parameters())
    return model


def llama_model(**extra: Any) -> nn.Module:
    sizes = SIZES | {"head_dim": 16} | extra
    return seeded(llama.Model(llama.ModelArgs(model_type="llama", **sizes)))


MODELS: dict[str, Any] = {
    "llama": llama_model,
    "llama with an odd head, biases and neighbouring pairs": lambda: llama_model(
        tie_word_embeddings=False, rope_traditional=True, attention_bias=True, mlp_bias=True
    ),
    "llama with scaled positions": lambda: llama_model(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "qwen2": lambda: seeded(
        qwen2.Model(
            qwen2.ModelArgs(model_type="qwen2", tie_word_embeddings=True, **SIZES | {"hidden_size": 64})
        )
    ),
    "qwen3": lambda: seeded(
        qwen3.Model(
            qwen3.ModelArgs(
                model_type="qwen3",
                tie_word_embeddings=False,
                head_dim=24,
                rope_theta=10000.0,
                max_position_embeddings=512,
                **SIZES,
            )
        )
    ),
    "gemma3": lambda: seeded(gemma3_text.Model(gemma3_text.ModelArgs(model_type="gemma3_text", **GEMMA))),
}


class Pair:
    """One model served both ways, over pools of their own."""

    def __init__(self, model: nn.Module, scheme: KVScheme | None = None) -> None:
        linear.install(model)
        self.spec: ModelCacheSpec = derive(model)
        self.scheme = scheme or KVScheme()
        found = decoder.find(model, self.spec)
        assert found is not None
        self.decoder = found
        self.plain, self.ours = self.batch(model, None), self.batch(model, found)

    def batch(self, model: nn.Module, by: decoder.Decoder | None) -> Batch:
        groups = [(group.name, 40) for group in self.spec.groups]
        arrays = PoolArrays(self.spec, self.scheme, [40 for _ in groups], 40, host=True)
        return Batch(model, arrays, BlockPool(groups, 40), native=NativeAttention(arrays), decoder=by)

    def tables(self, rows: int) -> list[AgentTable]:
        return [AgentTable(f"a/{row}", "", self.spec.groups, self.scheme) for row in range(rows)]


def ids(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], count).astype(np.uint32)


def run(batch: Batch, tables: Sequence[AgentTable], seeds: Sequence[int]) -> list[Any]:
    """Histories of different lengths, a prefill of several rows, and some decode steps."""
    out = []
    for table, seed in zip(tables, seeds, strict=True):
        for part in np.array_split(ids(150 + 61 * seed, seed), 3):
            batch.prefill([table], [part], logits=False)
    chunks = [ids(3 + 9 * seed, seed + 10) for seed in seeds]
    logits = batch.prefill(tables, chunks, logits=True)
    assert logits is not None
    out.append(np.array(logits))
    out += [np.array(batch.decode(tables, [(7 * seed + step) % 90 for seed in seeds])) for step in range(3)]
    return out


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_model_computes(name: str) -> None:
    # At 16 bits: with codes of 4, a difference in the last place of a key may become one of a whole step.
    pair = Pair(MODELS[name](), KVScheme.uniform(None))
    expected = run(pair.plain, pair.tables(3), [0, 1, 2])
    for got, wanted in zip(run(pair.ours, pair.tables(3), [0, 1, 2]), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3 * abs(wanted).max())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_row_has_the_same_bits_alone_and_with_others(name: str) -> None:
    pair = Pair(MODELS[name]())
    together = run(pair.ours, pair.tables(3), [0, 1, 2])
    for row in range(3):
        alone = run(pair.ours, pair.tables(1), [row])
        for got, wanted in zip(alone, together, strict=True):
            assert np.array_equal(got[0], wanted[row])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_is_read_beside_a_decode_step_has_the_bits_of_steps_apart(name: str) -> None:
    """Rows that decode, others that begin or go on, over block and page ends."""
    pair = Pair(MODELS[name]())
    batch = pair.ours

    def histories() -> tuple[list[AgentTable], list[AgentTable]]:
        speaking, joining = pair.tables(2), pair.tables(3)
        for table, length in zip([*speaking, *joining[:2]], (250, 130, 300, 63), strict=True):
            for part in np.array_split(ids(length, length), 3):
                batch.prefill([table], [part], logits=False)
        return speaking, joining

    speaking, joining = histories()
    chunks = [ids(5, 1), ids(20, 2), ids(11, 3)]
    assert batch.room(2) >= sum(map(len, chunks))
    apart = []
    for step in range(12):
        decoded = batch.decode(speaking, [step, step + 1])
        read = batch.prefill(joining, chunks, logits=step % 2 == 0)
        apart.append((decoded, read))
    for tables in (speaking, joining):
        for table in tables:
            release(batch, table)
    speaking, joining = histories()
    for step, (decoded, read) in enumerate(apart):
        got = batch.both(speaking, [step, step + 1], joining, chunks, logits=step % 2 == 0)
        assert np.array_equal(np.array(got[0]), np.array(decoded)), step
        if read is None:
            assert got[1] is None
        else:
            assert got[1] is not None
            assert np.array_equal(np.array(got[1]), np.array(read)), step


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_nobody_asked_for_of_the_last_layer_changes_no_bit(name: str, monkeypatch: Any) -> None:
    """The last layer is computed for the tokens whose logits are wanted alone."""
    pair = Pair(MODELS[name]())
    asked = []

    def counted(*given: Any, wanted: Any, **more: Any) -> Any:
        asked.append((len(given[0]), len(wanted)))
        return few(*given, wanted=wanted, **more)

    def whole(*given: Any, wanted: Any, **more: Any) -> Any:
        return few(*given, **more)[wanted]

    few = pair.decoder.hidden_states
    monkeypatch.setattr(pair.decoder, "hidden_states", counted)
    got = run(pair.ours, pair.tables(3), [0, 1, 2])
    assert asked[:2] == [(50, 0), (50, 0)]  # pieces of a longer prompt
    assert asked[-4:] == [(3 + 12 + 21, 3), (3, 3), (3, 3), (3, 3)]
    monkeypatch.setattr(pair.decoder, "hidden_states", whole)
    for mine, expected in zip(got, run(pair.ours, pair.tables(3), [0, 1, 2]), strict=True):
        assert np.array_equal(mine, expected)


def release(batch: Batch, table: AgentTable) -> None:
    for group, slots in enumerate(table.slots):
        for slot in slots:
            if slot != ABSENT:
                batch.pool.groups[group].release(slot)
    for page in table.pages:
        batch.pool.pages.release(page)


def test_more_tokens_than_its_limit_go_the_models_way() -> None:
    pair = Pair(llama_model())
    pair.decoder.limit = 4
    pair.decoder.forward = None  # type: ignore[method-assign, assignment]
    table = pair.tables(1)
    assert pair.ours.prefill(table, [ids(5, 0)], logits=True) is not None


def test_new_weights_go_the_models_way() -> None:
    model: Any = llama_model()
    pair = Pair(model)
    assert pair.decoder.current()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight * 2
    assert not pair.decoder.current()
    expected = run(pair.plain, pair.tables(2), [0, 1])
    for got, wanted in zip(run(pair.ours, pair.tables(2), [0, 1]), expected, strict=True):
        assert np.array_equal(got, wanted)


class Doubled(llama.TransformerBlock):  # type: ignore[misc]
    """A layer with the names of Llama's that computes something else."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, mask, cache) * 2


class Scaled(llama.Attention):  # type: ignore[misc]
    """Attention whose queries grow with their positions, beyond the first thousand."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        by = 1.0 if cache is None or cache.offset < 1000 else 1.2
        return super().__call__(x * by, mask, cache)


class ExactGelu(gemma3_text.MLP):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu(self.gate_proj(x)) * self.up_proj(x))


def changed(model: Any, part: str, cls: Any) -> nn.Module:
    for layer in model.model.layers:
        (layer if not part else layer[part]).__class__ = cls
    return model


def test_models_that_compute_otherwise_are_not_taken() -> None:
    others = [
        changed(llama_model(), "", Doubled),
        changed(llama_model(), "self_attn", Scaled),
        changed(MODELS["gemma3"](), "mlp", ExactGelu),
        seeded(phi3.Model(phi3.ModelArgs(model_type="phi3", **SIZES))),
        seeded(
            stablelm.Model(
                stablelm.ModelArgs(
                    model_type="stablelm",
                    rope_theta=10000.0,
                    use_qkv_bias=False,
                    partial_rotary_factor=0.5,
                    layer_norm_eps=1e-5,
                    **{k: v for k, v in SIZES.items() if k != "rms_norm_eps"},
                )
            )
        ),
    ]
    for model in others:
        linear.install(model)
        assert decoder.find(model, derive(model)) is None
