"""Against mlx-lm's own caches: with 16-bit KV the logits are the same, with fewer bits they stay near.

And the ways to do one thing agree: native and portable attention, writes through views and on a device,
a batch and each row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbook.runtime.kv import native
from offbook.runtime.kv.scheme import KVScheme, LayerScheme

CHUNKS = (100, 350, 37, *[1] * 6, 60, *[1] * 30, 90, 1, 1, 300, 1, 1)
"""Reads and decode steps over group, block, tail and window boundaries."""


def worst(rig: Any, oracle: Any, ids: Any) -> float:
    """The largest difference of a logit over all chunks, as a share of the largest logit."""
    reference, at, difference = oracle(rig.model), 0, 0.0
    for chunk in CHUNKS:
        piece = ids[at : at + chunk]
        at += chunk
        got = rig.prefill(["a"], [piece])[0] if chunk > 1 else rig.decode(["a"], piece)[0]
        expected = reference.feed(piece)
        difference = max(difference, float(np.abs(got - expected).max() / np.abs(expected).max()))
    return difference


# At 16 bits too a rounding error in a product may become one of a whole step of bfloat16 in a key.
@pytest.mark.parametrize(("bits", "tolerance"), [(None, 5e-4), (8, 0.02), (4, 0.25)])
def test_logits_are_those_of_the_plain_model(
    architecture: str,
    rig: Callable[..., Any],
    oracle: Any,
    ids: Any,
    bits: int | None,
    tolerance: float,
    native_kernel: bool,
) -> None:
    one = rig(architecture, bits=bits, native=native_kernel)
    assert worst(one, oracle, ids(sum(CHUNKS))) < tolerance


def test_long_reads_need_no_quantised_history_to_be_right(
    architecture: str, rig: Callable[..., Any], oracle: Any, ids: Any
) -> None:
    """A prompt read in one chunk attends to itself at 16 bits, whatever is sealed afterwards."""
    text = ids(900)
    expected = oracle(rig(architecture).model).feed(text)
    np.testing.assert_allclose(rig(architecture).prefill(["a"], [text])[0], expected, atol=1e-4)


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_native_and_portable_attention_agree(architecture: str, rig: Callable[..., Any], ids: Any) -> None:
    one, other = rig(architecture), rig(architecture, native=True, whole=False)
    text, at = ids(sum(CHUNKS)), 0
    for chunk in CHUNKS:
        piece = text[at : at + chunk]
        at += chunk
        a, b = ((r.prefill(["a"], [piece]) if chunk > 1 else r.decode(["a"], piece)) for r in (one, other))
        np.testing.assert_allclose(a, b, atol=0.02)


def test_writes_on_a_device_store_the_same_bits_as_writes_through_views(
    architecture: str, rig: Callable[..., Any], ids: Any
) -> None:
    one, other = rig(architecture), rig(architecture, host=False)
    text, at = ids(sum(CHUNKS)), 0
    for chunk in CHUNKS:
        piece = text[at : at + chunk]
        at += chunk
        a, b = ((r.prefill(["a"], [piece]) if chunk > 1 else r.decode(["a"], piece)) for r in (one, other))
        assert np.array_equal(a, b), at


def test_a_value_width_that_fits_no_group_stays_at_16_bits(
    rig: Callable[..., Any], oracle: Any, ids: Any, tiny: Callable[..., Any], native_kernel: bool
) -> None:
    one = rig(tiny("llama", head_dim=80), native=native_kernel)
    names = {tensor.name for group in one.spec.groups for tensor in group.tensors(one.scheme)}
    assert {"layers.0.k.packed", "layers.0.v.raw"} <= names
    assert "layers.0.v.packed" not in names
    assert worst(one, oracle, ids(sum(CHUNKS))) < 0.25


def test_window_layers_may_keep_more_bits_than_full_ones(
    rig: Callable[..., Any], oracle: Any, ids: Any, native_kernel: bool
) -> None:
    wide = LayerScheme(key_bits=8, value_bits=8)
    one = rig("gemma-300", scheme=KVScheme(window=wide, tail=64), native=native_kernel)
    packed = {group.name: group.block_bytes(one.scheme) for group in one.spec.groups}
    assert packed["window300"] > packed["full"]
    assert worst(one, oracle, ids(sum(CHUNKS))) < 0.25


def test_values_may_be_grouped_by_32(rig: Callable[..., Any], oracle: Any, ids: Any) -> None:
    fine = LayerScheme(value_group=32)
    one = rig("llama", scheme=KVScheme(full=fine, window=fine))
    assert worst(one, oracle, ids(sum(CHUNKS))) < 0.25


# ---- batched equals alone


def greedy_alone(rig: Any, prompt: Any, count: int) -> list[int]:
    token = int(rig.prefill(["alone"], [prompt])[0].argmax())
    out = [token]
    while len(out) < count:
        out.append(token := int(rig.decode(["alone"], [token])[0].argmax()))
    rig.lose("alone")
    return out


@pytest.mark.parametrize("architecture", ["llama", "gemma-96", "lfm2", "latent"])
def test_a_batch_of_mixed_lengths_with_joins_and_leaves_speaks_as_each_row_alone(
    architecture: str, rig: Callable[..., Any], ids: Any, native_kernel: bool
) -> None:
    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.tuples(st.integers(1, 420), st.integers(0, 6), st.integers(1, 8)), min_size=2, max_size=4)
    )
    def check(rows: list[tuple[int, int, int]]) -> None:
        """Rows as (prompt's length, step at which it joins, tokens it says)."""
        one = rig(architecture, native=native_kernel)
        prompts = [ids(length, seed) for seed, (length, _, _) in enumerate(rows)]
        said: dict[int, list[int]] = {}
        for step in range(16):
            joining = [row for row, (_, at, _) in enumerate(rows) if at == step]
            if joining:
                logits = one.prefill([f"r{row}" for row in joining], [prompts[row] for row in joining])
                said |= {row: [int(best)] for row, best in zip(joining, logits.argmax(-1), strict=True)}
            speaking = [row for row in said if row not in joining and len(said[row]) < rows[row][2]]
            if speaking:
                logits = one.decode([f"r{row}" for row in speaking], [said[row][-1] for row in speaking])
                for row, best in zip(speaking, logits.argmax(-1), strict=True):
                    said[row].append(int(best))
        for row, (_, _, count) in enumerate(rows):
            assert said[row] == greedy_alone(one, prompts[row], count)[: len(said[row])]
            assert len(said[row]) == count

    check()
