"""What MLX itself says of memory: the pool is written in place, prefill is frugal, nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from offbook.runtime.kv.scheme import BLOCK, KVScheme

MIB = 1 << 20
LONG = 4096
CHUNK = 512


@pytest.fixture(autouse=True)
def no_buffer_cache() -> Any:
    """Freed buffers go back at once, so that active memory is all there is."""
    before = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(before)


def active() -> int:
    gc.collect()
    return int(mx.get_active_memory())


def rise(work: Callable[[], Any]) -> int:
    """By how many bytes memory rises at most above what it is before, while ``work`` runs."""
    before = active()
    mx.reset_peak_memory()
    work()
    return int(mx.get_peak_memory()) - before


# ---- in place


@pytest.mark.parametrize("host", [True, False])
def test_pages_and_blocks_are_written_in_place(
    architecture: str, rig: Callable[..., Any], ids: Any, host: bool
) -> None:
    """A copy of one of the pool's arrays would be seen: each is larger than all a small step needs."""
    small, large = rig(architecture, host=host), rig(architecture, host=host, slots=3000, pages=3000)
    least = min(a.nbytes for of in (large.arrays.pages,) for d in of.values() for a in d.values())
    text = ids(700)

    def steps(one: Any) -> None:
        one.say("a", text[:300], chunk=100)
        for token in text[300:400]:  # over the sealing of a page
            one.decode(["a"], [token])
        one.say("b", text, chunk=100)
        one.memory.drop(("a", ""))

    needed = rise(lambda: steps(small))
    assert rise(lambda: steps(large)) < needed + least // 2


# ---- prefill


def wide(dtype: Any) -> Any:
    mx.random.seed(5)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=8,
            intermediate_size=32,
            num_attention_heads=1,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            vocab_size=128,
            head_dim=64,
        )
    )
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def peak_of_ours(rig: Callable[..., Any], model: Any, text: Any, bits: int | None, *, native: bool) -> int:
    """Pool included, which is just as large as the agent."""
    slots, pages = -(-LONG // BLOCK), KVScheme().pages

    def work() -> None:
        one = rig(model, bits=bits, native=native, slots=slots, pages=pages)
        for at in range(0, LONG, CHUNK):
            table = one.table("a")
            table.ids = text
            one.batch.prefill([table], [text[at : at + CHUNK]], logits=True)
            one.memory.after_step(table)

    return rise(work)


def peak_of_mlx_lm(model: Any, text: Any) -> int:
    def work() -> None:
        cache = make_prompt_cache(model)
        for at in range(0, LONG, CHUNK):
            out = model(mx.array(text[at : at + CHUNK])[None], cache=cache)[:, -1]
            mx.eval(out, [layer.state for layer in cache])
        assert cache[0].keys.dtype == mx.bfloat16

    return rise(work)


def test_a_4_bit_prefill_takes_less_than_mlx_lms_16_bit_one(rig: Callable[..., Any], ids: Any) -> None:
    model, text = wide(mx.bfloat16), ids(LONG)
    assert peak_of_ours(rig, model, text, 4, native=False) <= peak_of_mlx_lm(model, text)


def test_a_4_bit_prefill_takes_less_than_a_16_bit_one(
    rig: Callable[..., Any], ids: Any, native_kernel: bool
) -> None:
    model, text = wide(mx.float32), ids(LONG)
    four, sixteen = (peak_of_ours(rig, model, text, bits, native=native_kernel) for bits in (4, None))
    assert four <= sixteen


# ---- accounts


def test_the_pool_takes_what_is_accounted_for_and_no_byte_more_when_used(
    architecture: str, rig: Callable[..., Any], ids: Any
) -> None:
    before = active()
    one = rig(architecture, slots=400, pages=400)
    weights = sum(a.nbytes for _, a in tree_flatten(one.model.parameters()))
    taken = active() - before
    assert abs(taken - one.arrays.nbytes) <= MIB // 2 + weights // 100
    for seed in range(4):
        one.say("a", ids(700, seed))
        one.decode(["a"], [5])
        one.memory.drop(("a", ""))
    assert one.used == (0,) * len(one.used)
    assert active() - before - taken <= MIB // 4


def test_a_recurrent_state_leaves_with_its_agent(rig: Callable[..., Any], ids: Any) -> None:
    one = rig("lfm2")
    one.say("a", ids(40))
    held = active()
    state = sum(s.nbytes for s in one.table("a").state.values())
    assert state > 0
    one.memory.drop(("a", ""))
    assert held - active() >= state
    assert np.isfinite(one.say("a", ids(40))[0]).all()
