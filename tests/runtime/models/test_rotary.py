"""Rotary positions of few tokens: MLX's bits, whatever the offsets."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE

from offbook.runtime.models import rotary

LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}


def both(module: nn.Module, limit: int = 32) -> tuple[nn.Module, nn.Module]:
    module.eval()
    plain = copy.deepcopy(module)
    rotary.install(module, limit)
    return module, plain


def queries(rows: int, length: int, width: int = 64, seed: int = 0) -> mx.array:
    """[rows, heads, length, width], a view as the models make it."""
    x = np.random.default_rng(seed).standard_normal((rows, length, 3, width), np.float32)
    return mx.array(x).transpose(0, 2, 1, 3)


def same(a: mx.array, b: mx.array) -> bool:
    assert a.dtype == b.dtype
    return np.array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [64, 24])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 1), (1, 12), (2, 5)])
def test_bits_are_mlxs(traditional: bool, dims: int, rows: int, length: int) -> None:
    for module in (
        nn.RoPE(dims, traditional=traditional, base=5000.0, scale=0.5),
        Llama3RoPE(dims, traditional=traditional, scaling_config=LLAMA3),
    ):
        ours, plain = both(module)
        assert isinstance(ours, rotary.Rotary)
        for offset in (0, 1000, 7777, mx.array([5, 4000, 8001][:rows]), mx.array([6, 4000, 8001][:rows])):
            x = queries(rows, length)
            assert same(ours(x, offset=offset), plain(x, offset=offset))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [64, 24, 10])
def test_kept_angles_are_those_of_each_position_alone(
    monkeypatch: pytest.MonkeyPatch, traditional: bool, dims: int
) -> None:
    monkeypatch.setattr(rotary, "SPANS", 3)  # so that some go and are got again
    rng = np.random.default_rng(4)
    for module in (
        nn.RoPE(dims, traditional=traditional, base=5000.0, scale=0.5),
        Llama3RoPE(dims, traditional=traditional, scaling_config=LLAMA3),
    ):
        ours, plain = both(module)
        unit = np.zeros((1, 1, 1, dims), np.float32)
        rotary.halves(ours, unit)[0][...] = 1
        for positions in ([0], [255, 256, 257], [8000, 3, 3, 511], rng.integers(0, 9000, 40).tolist()):
            for angles in (
                ours._angles.at(ours, np.array(positions)),
                ours._angles.at(ours, np.array(positions)),
            ):
                for row, position in enumerate(positions):
                    turned = np.array(plain(mx.array(unit), offset=mx.array([position])))
                    for got, expected in zip(angles, rotary.halves(ours, turned), strict=True):
                        assert np.array_equal(got[row], expected.ravel()), position
        assert len(ours._angles._spans) <= 3


def test_layers_share_the_angles_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.RoPE(64), nn.RoPE(64), nn.RoPE(64, base=77.0)]
    model, plain = both(nn.Sequential(*layers))
    asked: list[Any] = []
    turn = mx.fast.rope
    monkeypatch.setattr(mx.fast, "rope", lambda *a, **k: (asked.append(a[0].shape), turn(*a, **k))[1])
    x = queries(1, 1)
    got = [[layer(x, offset=at) for layer in model.layers] for at in (4, 5)]
    assert len(asked) == 4  # two kinds, two steps
    for at, of_step in zip((4, 5), got, strict=True):
        assert all(same(a, layer(x, offset=at)) for a, layer in zip(of_step, plain.layers, strict=True))


def test_what_goes_mlxs_way() -> None:
    ours, plain = both(nn.RoPE(64), limit=4)
    for x in (queries(1, 5), queries(5, 1), queries(1, 2).astype(mx.float16), queries(1, 2)[0]):
        assert same(ours(x, offset=3), plain(x, offset=3))
    x = queries(1, 2)
    assert same(mx.compile(lambda x: ours(x, offset=3))(x), plain(x, offset=3))
    at = mx.array([3])
    assert same(mx.compile(lambda at: ours(x, offset=at))(at), plain(x, offset=at))
    other = SuScaledRoPE(64)
    rotary.install(other, 4)
    assert type(other) is SuScaledRoPE


def test_undone() -> None:
    ours, _ = both(nn.Sequential(nn.RoPE(64)))
    again = copy.deepcopy(ours)
    rotary.uninstall(ours)
    assert type(ours.layers[0]) is nn.RoPE
    x = queries(1, 1)
    assert same(again.layers[0](x, offset=9), ours.layers[0](x, offset=9))
