"""Few-row linear layers by the native kernel: the same results, the same model, and never a stale one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from offbook.runtime.kv import native, native_library
from offbook.runtime.models import linear
from offbook.runtime.models.few_rows import LIMITS
from offbook.runtime.models.gated import Gated
from offbook.runtime.models.linear import NativeEmbedding, NativeLinear, Siblings

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))


class Attention(nn.Module):  # type: ignore[misc]
    """Projections that get the same input, and one that does not; odd widths."""

    def __init__(self, inputs: int = 70, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(inputs, 37, bias=bias)
        self.k_proj = nn.Linear(inputs, 11, bias=bias)
        self.v_proj = nn.Linear(inputs, 11, bias=bias)
        self.o_proj = nn.Linear(37, inputs, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q + mx.sum(k * v, axis=-1, keepdims=True))


class Feed(nn.Module):  # type: ignore[misc]
    """A gated block with any activation."""

    def __init__(self, activation: Callable[[mx.array], mx.array], inputs: int = 40, inner: int = 50) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(inputs, inner, bias=False)
        self.up_proj = nn.Linear(inputs, inner, bias=False)
        self.down_proj = nn.Linear(inner, inputs, bias=False)
        self.activation = lambda x: activation(x)  # MLX's compiled functions cannot be copied

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of the kernel had."""
    made: list[int] = []
    products, product = Siblings._products, Gated.product

    def counted(self: Siblings, weights: Any, values: Any) -> Any:
        made.append(len(weights.modules))
        return products(self, weights, values)

    def counted_block(self: Gated, values: Any) -> Any:
        made.append(3)
        return product(self, values)

    monkeypatch.setattr(Siblings, "_products", counted)
    monkeypatch.setattr(Gated, "product", counted_block)
    return made


@pytest.fixture(autouse=True)
def seed() -> None:
    mx.random.seed(3)


def both(module: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A module with our layers, and the same without."""
    mx.eval(module.parameters())
    plain = copy.deepcopy(module)
    linear.install(module, **options)
    return module, plain


def x_of(*shape: int) -> mx.array:
    x = mx.random.normal(shape)
    mx.eval(x)
    return x


def near(a: mx.array, b: mx.array, tolerance: float = 1e-5) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=tolerance)


# ---- the same model


@pytest.mark.parametrize("shape", [(1, 70), (1, 1, 70), (3, 70), (2, 5, 70), (70,), (1, 12, 70)])
def test_results_are_mlxs(shape: tuple[int, ...], calls: list[int]) -> None:
    ours, plain = both(Attention())
    x = x_of(*shape)
    near(ours(x), plain(x))
    assert calls == [3, 1]


def test_an_input_may_be_a_view_or_a_promise(calls: list[int]) -> None:
    ours, plain = both(Attention())
    x = x_of(70, 4)
    near(ours(x.T), plain(x.T))
    wide = x_of(6, 140)
    near(ours(wide[::2, ::2] * 2 + 1), plain(wide[::2, ::2] * 2 + 1))
    assert calls == [3, 1] * 2


def test_parameters_and_their_paths_stay(tiny: Callable[..., nn.Module], architecture: str) -> None:
    model = copy.deepcopy(tiny(architecture))
    before = tree_flatten(model.parameters())
    types = {name: type(module) for name, module in model.named_modules()}
    changed = linear.install(model)
    after = tree_flatten(model.parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
    native = [type(m) for _, m in model.named_modules() if isinstance(m, NativeLinear | NativeEmbedding)]
    assert changed == len(native) > 5
    assert linear.install(model) == 0
    linear.uninstall(model)
    assert {name: type(module) for name, module in model.named_modules()} == types


def greedy(model: nn.Module, prompt: Any, count: int) -> list[int]:
    caches, ids = make_prompt_cache(model), []
    logits = model(mx.array(prompt)[None], cache=caches)[:, -1]
    for _ in range(count):
        ids.append(int(mx.argmax(logits, axis=-1)))
        logits = model(mx.array([[ids[-1]]]), cache=caches)[:, -1]
    return ids


def test_tiny_models_say_the_same(
    tiny: Callable[..., nn.Module], architecture: str, ids: Any, calls: list[int]
) -> None:
    plain = copy.deepcopy(tiny(architecture))
    linear.uninstall(plain)
    ours = copy.deepcopy(plain)
    linear.install(ours)
    tokens = mx.array(ids(24))[None]
    near(ours(tokens), plain(tokens), 1e-3)
    assert greedy(ours, ids(9, 1), 12) == greedy(plain, ids(9, 1), 12)
    assert calls


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    ours, _ = both(Attention(577))
    feed, _ = both(Feed(nn.silu, 577))
    x = x_of(LIMITS[native.instruction_set()], 577)
    for layer in (ours.q_proj, ours.v_proj, feed):
        alone = np.concatenate([np.array(layer(row[None])) for row in x])
        for rows in (2, 3, 8, 12, len(x)):
            assert np.array_equal(np.array(layer(mx.array(x[:rows]))), alone[:rows])


def test_a_copy_of_the_model_is_its_own() -> None:
    ours, plain = both(nn.Sequential(Attention(), Attention(bias=False), Feed(nn.silu, 70)))
    x = x_of(2, 70)
    ours.layers[0].q_proj(x)  # its siblings' results are held now
    again = copy.deepcopy(ours)
    assert again.layers[0].q_proj._siblings.modules[1] is again.layers[0].k_proj
    ours.update({"layers": [{"q_proj": {"weight": mx.zeros((37, 70))}}]})
    del ours
    near(again(x), plain(x), 1e-4)


# ---- layers of the same input


def test_siblings_are_one_call_and_only_for_that_input(calls: list[int]) -> None:
    ours, plain = both(Attention())
    x, y = x_of(2, 70), x_of(2, 70)
    ours.q_proj(x)
    near(ours.k_proj(x), plain.k_proj(x))
    near(ours.v_proj(x), plain.v_proj(x))
    assert calls == [3]
    near(ours.v_proj(y), plain.v_proj(y))
    near(ours.k_proj(y), plain.k_proj(y))
    near(ours.q_proj(y), plain.q_proj(y))
    assert calls == [3, 3]
    assert ours.q_proj._siblings._mine.held is None  # nothing is kept once all have theirs


def test_an_input_changed_in_place_is_another_input() -> None:
    ours, plain = both(Attention())
    x = x_of(2, 70)
    near(ours.q_proj(x), plain.q_proj(x))
    x[0] = 5.0
    near(ours.k_proj(x), plain.k_proj(x))
    x += 1
    near(ours.v_proj(x), plain.v_proj(x))


def test_an_input_that_took_a_lost_ones_place_is_another_input() -> None:
    ours, plain = both(Attention())
    for _ in range(50):  # Python gives a new array the id of the one just lost
        x = x_of(1, 70)
        near(ours.q_proj(x), plain.q_proj(x))
        del x
        x = x_of(1, 70)
        near(ours.k_proj(x), plain.k_proj(x))
        del x


def test_a_layer_that_gets_something_else_is_set_apart(calls: list[int]) -> None:
    ours, plain = both(Attention())
    for _ in range(3):
        x = x_of(2, 70)
        near(ours.q_proj(x), plain.q_proj(x))
        near(ours.v_proj(x), plain.v_proj(x))
        near(ours.k_proj(x + 1), plain.k_proj(x + 1))
    assert calls[-3:] == [2, 1] or calls[-2:] == [2, 1]


def test_threads_do_not_get_each_others_results() -> None:
    ours, plain = both(nn.Sequential(Attention(), Feed(nn.silu, 70), Attention()))
    inputs = [x_of(rows, 70) for rows in (1, 2, 3)]
    expected = [np.array(plain(x)) for x in inputs]
    wrong: list[Any] = []

    def work(index: int) -> None:
        try:
            for _ in range(40):
                got = np.array(ours(inputs[index]))
                np.testing.assert_allclose(got, expected[index], rtol=1e-4, atol=1e-4)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- gated blocks


@pytest.mark.parametrize("activation", [nn.silu, nn.gelu_approx])
def test_a_gated_block_is_one_call(activation: Any, calls: list[int]) -> None:
    ours, plain = both(Feed(activation))
    calls.clear()
    x = x_of(3, 40) * 4
    near(ours(x), plain(x), 1e-4)
    assert calls == [3]
    assert isinstance(ours, Feed)


@pytest.mark.parametrize(
    "activation", [nn.relu, nn.sigmoid, lambda x: mx.clip(nn.silu(x), -7, 7), lambda x: nn.silu(x) + 1e-2]
)
def test_other_activations_stay_mlxs(activation: Any, calls: list[int]) -> None:
    ours, plain = both(Feed(activation))
    assert type(ours) is Feed
    calls.clear()
    x = x_of(3, 40)
    near(ours(x), plain(x))
    assert calls == [2, 1]


def test_a_block_that_takes_something_else_is_left_alone() -> None:
    class Other(Feed):
        def __call__(self, x: mx.array, scale: mx.array) -> mx.array:
            return super().__call__(x) * scale

    ours, plain = both(Other(nn.silu))
    assert type(ours) is Other
    near(ours(x_of(1, 40) * 0 + 1, mx.array(2.0)), plain(mx.ones((1, 40)), mx.array(2.0)))


# ---- what goes MLX's way


def test_more_rows_and_other_dtypes(calls: list[int]) -> None:
    ours, plain = both(Attention(), limit=8)
    for x in (x_of(9, 70), x_of(3, 3, 70), x_of(0, 70)):
        near(ours(x), plain(x))
    half = x_of(2, 70).astype(mx.float16)
    near(ours.q_proj(half), plain.q_proj(half))
    assert not calls
    near(ours(x_of(8, 70) * 0), plain(mx.zeros((8, 70))))
    assert calls == [3, 1]


def test_inside_a_trace() -> None:
    ours, plain = both(nn.Sequential(Attention(), Feed(nn.silu, 70)))
    x = x_of(2, 70)
    near(mx.compile(lambda x: ours(x * 2))(x), plain(x * 2), 1e-4)
    near(mx.compile(lambda x: ours(x), shapeless=True)(x), plain(x), 1e-4)
    near(mx.vmap(lambda x: ours(x))(x), plain(x), 1e-4)
    near(ours(x), plain(x), 1e-4)


def test_training_has_gradients() -> None:
    ours, plain = both(nn.Sequential(Attention(), Feed(nn.silu, 70)))
    ours.train()
    x = x_of(2, 70)

    def gradients(model: nn.Module) -> Any:
        return nn.value_and_grad(model, lambda model: mx.sum(model(x) ** 2))(model)[1]

    for (name, got), (_, expected) in zip(
        *(tree_flatten(gradients(model)) for model in (ours, plain)), strict=True
    ):
        assert mx.abs(expected).max().item() > 0, name
        near(got, expected, 1e-3)


def test_new_weights_are_used() -> None:
    ours, plain = both(nn.Sequential(Attention(), Feed(nn.silu, 70)))
    x = x_of(2, 70)
    near(ours(x), plain(x), 1e-4)
    new = [(name, x_of(*value.shape) / 8) for name, value in tree_flatten(ours.parameters())]
    for model in (ours, plain):
        model.load_weights(new)
    near(ours(x), plain(x), 1e-3)
    for model in (ours, plain):
        model.set_dtype(mx.float16)
    near(ours(x), plain(x), 1e-2)


def test_weights_that_are_views_of_others() -> None:
    layer, plain = nn.Linear(30, 20, bias=False), nn.Linear(30, 20, bias=False)
    layer.weight = plain.weight = x_of(30, 20).T
    linear.install(layer)
    near(layer(x_of(1, 30) * 0 + 1), plain(mx.ones((1, 30))))


def test_a_forward_for_its_shape_only(tiny: Callable[..., nn.Module]) -> None:
    model = copy.deepcopy(tiny("llama"))
    linear.install(model)
    out = model(mx.array([[1, 2]]), cache=make_prompt_cache(model))
    assert out.shape == (1, 2, model.args.vocab_size)
    del out
    assert greedy(model, [1, 2], 3)


def test_models_of_other_kinds_are_left_alone(calls: list[int]) -> None:
    class Subclass(nn.Linear):  # type: ignore[misc]
        pass

    class Mixed(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.switch = SwitchGLU(64, 32, 4)
            self.quantised = nn.QuantizedLinear(64, 64)
            self.sub = Subclass(64, 64)
            self.half = nn.Linear(64, 64)
            self.half.set_dtype(mx.bfloat16)

        def __call__(self, x: mx.array) -> mx.array:
            y = self.sub(self.quantised(x)) + self.half(x.astype(mx.bfloat16)).astype(mx.float32)
            return y + self.switch(x, mx.array([[0, 3]] * len(x))).sum(axis=1)

    model, plain = both(Mixed())
    types = {type(module) for _, module in model.named_modules()}
    assert types >= {SwitchLinear, nn.QuantizedLinear, Subclass, nn.Linear}
    assert not types & {NativeLinear, NativeEmbedding}
    x = x_of(3, 64)
    near(model(x), plain(x))
    assert not calls


def test_a_head_that_is_the_embedding(calls: list[int]) -> None:
    ours, plain = both(nn.Embedding(101, 33))
    ids, x = mx.array([[0, 100]]), x_of(3, 33)
    near(ours(ids), plain(ids))
    assert not calls
    near(ours.as_linear(x), plain.as_linear(x))
    assert calls == [1]


# ---- without the kernel


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("OFFBOOK_NATIVE", "0")
        patch.setattr(native_library, "_library", None)
        patch.setattr(native_library, "_reason", None)
        yield


def test_switched_off_nothing_is_changed(switched_off: None) -> None:
    model = nn.Sequential(Attention(), Feed(nn.silu, 70))
    assert linear.install(model) == 0
    assert {type(module) for module in model.layers} == {Attention, Feed}
