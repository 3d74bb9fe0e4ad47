"""Packed weights: nothing is lost, and products have the bits that float weights give."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from numpy.typing import NDArray

from offbook.runtime.kv import native
from offbook.runtime.models import linear, packed
from offbook.runtime.models.few_rows import Weights, packed_form

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

Array = NDArray[np.float32]


@pytest.fixture(params=["plain", "avx2", "avx512"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        yield native.instruction_set(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    native.instruction_set()


def quantised(kind: str, outputs: int, inputs: int, seed: int = 0) -> Array:
    """Weights as GGUF's formats give them back: float16 factors for every 32 inputs."""
    rng = np.random.default_rng(seed)
    shape = outputs, inputs // 32, 32
    scale = (rng.random((outputs, inputs // 32, 1)) * 0.02).astype(np.float16).astype(np.float32)
    least = (rng.standard_normal((outputs, inputs // 32, 1)) * 0.1).astype(np.float16).astype(np.float32)
    if kind == "Q4_1":
        weights = scale * rng.integers(0, 16, shape).astype(np.float32) + least
    elif kind == "Q4_0":
        weights = scale * (rng.integers(0, 16, shape).astype(np.float32) - 8)
    else:
        weights = scale * rng.integers(-127, 128, shape).astype(np.float32)
        weights[:, :, 0] = 127 * scale[:, :, 0]
    return np.ascontiguousarray(weights.reshape(outputs, inputs), np.float32)


def layer(weights: Array, *, bias: bool = False) -> nn.Linear:
    module = nn.Linear(weights.shape[1], weights.shape[0], bias=bias)
    module.weight = mx.array(weights)
    return module


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
@pytest.mark.parametrize("shape", [(1, 64), (3, 128), (6, 576), (37, 192), (50, 1536)], ids=str)
def test_products_have_the_bits_of_float_weights(
    instruction_set: str, kind: str, bits: int, shape: tuple[int, int]
) -> None:
    weights = quantised(kind, *shape)
    plain, small = layer(weights, bias=True), layer(weights, bias=True)
    small.bias = plain.bias
    linear.install(plain, limit=64)
    packed.restore(plain)
    linear.install(small, limit=64)
    form = packed_form(small)
    assert form is not None
    assert form.bits == bits
    assert form.data.nbytes < weights.nbytes or shape[0] < 3
    for rows in (1, 2, 7, 14, 40):
        x = mx.random.normal((rows, shape[1]))
        assert np.array_equal(np.asarray(small(x)), np.asarray(plain(x))), rows


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("bits", "packed_bits"), [(3, 4), (4, 4), (6, 8), (8, 8)])
def test_what_mlx_has_quantised_is_packed(dtype: mx.Dtype, bits: int, packed_bits: int) -> None:
    weight = (0.05 * mx.random.normal((96, 256))).astype(dtype)
    codes, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
    factors = (scales.astype(mx.float32), biases.astype(mx.float32))
    form = packed.pack(mx.dequantize(codes, *factors, group_size=64, bits=bits))
    assert form is not None
    assert form.bits == packed_bits


def test_groups_that_use_few_codes(instruction_set: str) -> None:
    """One value, two values, zeros, and values that begin above the least code."""
    weights = quantised("Q4_1", 8, 128)
    weights[0] = 0
    weights[1] = 0.25
    weights[2, ::2], weights[2, 1::2] = 0.5, -0.5
    weights[3] = np.tile(np.array([3, 5], np.float32) * 0.125, 64)
    form = packed.pack(mx.array(weights))
    assert form is not None
    assert form.bits == 4


def test_weights_that_would_change_are_left_alone(instruction_set: str) -> None:
    weights = quantised("Q4_1", 8, 128)
    weights[5, 77] = np.nextafter(weights[5, 77], np.float32(1))
    assert packed.pack(mx.array(weights)) is None
    assert packed.pack(mx.random.normal((8, 128))) is None
    weights[5, 77] = np.nan
    assert packed.pack(mx.array(weights)) is None
    weights[5, 77] = np.inf
    assert packed.pack(mx.array(weights)) is None


def test_what_has_no_whole_pieces_or_other_numbers_is_left_alone() -> None:
    assert packed.pack(mx.array(quantised("Q4_1", 8, 96))) is None
    assert packed.pack(mx.array(quantised("Q4_1", 8, 128)).astype(mx.float16)) is None


def test_new_weights_are_not_taken_for_the_packed_ones() -> None:
    module = layer(quantised("Q4_1", 16, 128))
    linear.install(module, limit=8)
    x = mx.random.normal((2, 128))
    before = np.asarray(module(x))
    module.weight = module.weight * 2
    assert np.allclose(np.asarray(module(x)), 2 * before, rtol=1e-5)
    assert Weights([module]).packed == [None]


def test_a_copy_computes_the_same() -> None:
    module = layer(quantised("Q4_1", 16, 128))
    linear.install(module, limit=8)
    x = mx.random.normal((2, 128))
    assert np.array_equal(np.asarray(copy.deepcopy(module)(x)), np.asarray(module(x)))


class Tied(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(70, 128)
        self.embed.weight = mx.array(quantised("Q8_0", 70, 128))
        self.layer = layer(quantised("Q4_1", 128, 128), bias=True)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embed.as_linear(self.layer(self.embed(tokens)))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_without_its_floats_a_model_computes_the_same(rows: int) -> None:
    """Few rows by the kernel and many by MLX."""
    model = Tied()
    tokens = mx.array(np.random.default_rng(0).integers(0, 70, (1, rows)))
    linear.install(model, limit=8)
    expected, held = np.asarray(model(tokens)), packed.weights_bytes(model)
    linear.install(model, limit=8, release=True)
    assert model.embed.get("weight") is None
    assert model.layer.get("weight") is None
    assert packed.weights_bytes(model) < held / 3
    assert np.array_equal(np.asarray(model.embed(tokens)), quantised("Q8_0", 70, 128)[np.asarray(tokens)])
    assert np.array_equal(np.asarray(model(tokens)), expected)
    linear.uninstall(model)
    assert type(model.layer) is nn.Linear
    assert np.array_equal(np.asarray(model.layer.weight), quantised("Q4_1", 128, 128))
    assert np.array_equal(np.asarray(model.embed.weight), quantised("Q8_0", 70, 128))


def test_rows_that_are_not_there_are_refused() -> None:
    form = packed.pack(mx.array(quantised("Q8_0", 6, 64)))
    assert form is not None
    with pytest.raises(IndexError, match="of 6"):
        packed.rows(form, np.array([2, 6]))
