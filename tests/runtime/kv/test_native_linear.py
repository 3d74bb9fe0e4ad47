"""The native kernel for linear layers against NumPy in float64, and its promise about bits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from offbook.runtime.kv import native, native_library
from offbook.runtime.models.few_rows import LinearStruct

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

Array = NDArray[np.float32]
SILU, GELU = 0, 1

SHAPES = [(1, 1), (7, 3), (16, 4), (17, 5), (100, 9), (576, 37), (577, 30), (1536, 18), (4099, 6)]
"""Inputs and outputs: less than a vector, odd, several panels, several tasks' rows."""


@pytest.fixture(params=["plain", "avx2", "avx512"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        yield native.instruction_set(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    native.instruction_set()


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    yield
    native.set_threads(native.default_threads())


def array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def pointer(x: Array | None) -> int:
    return 0 if x is None else int(x.ctypes.data)


def describe(weights: Sequence[Array], biases: Sequence[Array | None]) -> Any:
    layers = (LinearStruct * len(weights))()
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        layer.weight, layer.bias, layer.outputs = pointer(weight), pointer(bias), len(weight)
    return layers


def linear(x: Array, weights: Sequence[Array], biases: Sequence[Array | None] | None = None) -> list[Array]:
    layers = describe(weights, biases or [None] * len(weights))
    rows, inputs = x.shape
    out = np.full(rows * sum(len(weight) for weight in weights) + 1, np.nan, np.float32)
    assert not native_library.library().offbook_linear(
        len(weights), ctypes.addressof(layers), rows, inputs, pointer(x), pointer(out)
    )
    assert np.isnan(out[-1])  # nothing behind the end was written
    cuts = np.cumsum([rows * len(weight) for weight in weights])
    return [part.reshape(rows, -1) for part in np.split(out[:-1], cuts[:-1])]


def gated(x: Array, weights: Sequence[Array], kind: int) -> Array:
    layers = describe(weights, [None] * 3)
    out = np.empty((len(x), len(weights[2])), np.float32)
    assert not native_library.library().offbook_gated(
        ctypes.addressof(layers), kind, len(x), x.shape[1], pointer(x), pointer(out)
    )
    return out


def near(got: Array, expected: NDArray[np.float64], depth: int) -> None:
    np.testing.assert_allclose(
        got, expected, rtol=1e-4, atol=2e-6 * depth**0.5 * max(1.0, abs(expected).max())
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13, 30])
def test_products(instruction_set: str, shape: tuple[int, int], rows: int) -> None:
    inputs, outputs = shape
    x, weight, bias = array(rows, inputs), array(outputs, inputs, seed=1), array(outputs, seed=2)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    near(linear(x, [weight])[0], expected, inputs)
    near(linear(x, [weight], [bias])[0], expected + bias, inputs)


@pytest.mark.parametrize(("inputs", "outputs"), [(577, 70), (1536, 29), (30, 6)])
def test_a_rows_bits_do_not_depend_on_the_others(instruction_set: str, inputs: int, outputs: int) -> None:
    x, weight = array(128, inputs), array(outputs, inputs, seed=1)
    alone = np.concatenate([linear(row[None], [weight])[0] for row in x])
    for rows in [*range(2, 34), 47, 64, 128]:
        assert np.array_equal(linear(x[:rows], [weight])[0], alone[:rows]), rows
    assert np.array_equal(linear(np.ascontiguousarray(x[::-1]), [weight])[0], alone[::-1])


@pytest.mark.parametrize("rows", [1, 8, 19])
def test_bits_do_not_depend_on_the_threads(instruction_set: str, rows: int) -> None:
    x, weights = array(rows, 577), [array(n, 577, seed=n) for n in (600, 190, 190)]
    native.set_threads(1)
    one = linear(x, weights)
    for threads in (2, 3):
        native.set_threads(threads)
        for _ in range(3):
            assert all(map(np.array_equal, linear(x, weights), one))


def test_layers_in_one_call_are_what_each_is_alone(instruction_set: str) -> None:
    x, weights, biases = array(9, 100), [array(n, 100, seed=n) for n in (64, 5, 33)], [None, array(5), None]
    for got, weight, bias in zip(linear(x, weights, biases), weights, biases, strict=True):
        assert np.array_equal(got, linear(x, [weight], [bias])[0])


@pytest.mark.parametrize("kind", [SILU, GELU])
@pytest.mark.parametrize(("inputs", "inner", "outputs"), [(64, 96, 64), (37, 53, 11), (600, 1536, 576)])
def test_gated_blocks(instruction_set: str, kind: int, inputs: int, inner: int, outputs: int) -> None:
    x = array(11, inputs)
    weights = [array(a, b, seed=a) / 8 for a, b in ((inner, inputs), (inner, inputs), (outputs, inner))]
    gate, up = (x.astype(np.float64) @ weight.T for weight in weights[:2])
    z = gate if kind == SILU else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    got = gated(x, weights, kind)
    near(got, (gate / (1 + np.exp(-z)) * up) @ weights[2].T, inner)
    for rows in (1, 2, 7):
        assert np.array_equal(gated(x[:rows], weights, kind), got[:rows])
    native.set_threads(1)
    assert np.array_equal(gated(x, weights, kind), got)


@pytest.mark.parametrize("kind", [SILU, GELU])
def test_activations_at_the_ends(instruction_set: str, kind: int) -> None:
    values = np.array([0, -0.0, 1e-30, 20, -20, 88, -88, 200, -200, 1e4, -1e4, np.nan], np.float32)
    eye = np.eye(len(values), dtype=np.float32)
    got = gated(np.nan_to_num(values)[:, None], [np.ones((1, 1), np.float32)] * 3, kind)[:, 0]
    x = np.nan_to_num(values).astype(np.float64)
    z = x if kind == SILU else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    np.testing.assert_allclose(got, x * x / (1 + np.exp(-np.clip(z, -700, 700))), rtol=1e-6, atol=1e-28)
    one = np.ones((1, len(values)), np.float32)
    assert np.isnan(gated(values[None], [eye[:1] * 0 + 1, one, np.ones((1, 1), np.float32)], kind)).all()


def test_callers_on_several_threads_take_turns() -> None:
    x, weights = [array(rows, 300, seed=rows) for rows in (1, 4, 17)], [array(900, 300)]
    expected = [linear(one, weights)[0] for one in x]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(30):
            if not np.array_equal(linear(x[index], weights)[0], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
