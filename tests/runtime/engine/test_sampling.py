"""Sampling values are checked before any work, and each does what it says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from offbook.actors.lm import SamplingParams
from offbook.bus.errors import InvalidRequest
from offbook.runtime.engine.sampling import Logits, Sampler, filtered, top_logprobs, validate


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 101),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", 1.0),
        ("min_p", -0.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 10.5),
        ("repetition_context", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", ("x" * 300,)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_an_impossible_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field):
        validate(SamplingParams(**{field: value}))


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_every_seed_that_is_allowed_can_be_drawn_from(seed: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed)
    validate(params)
    draws = [Sampler(params).draw(np.zeros(50, np.float32), []) for _ in range(2)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-46, 1e-30])
def test_the_lowest_temperatures_draw_the_likeliest_token(
    temperature: float, filters: dict[str, Any]
) -> None:
    """Also those that are zero in float32, and with tokens that a typed reply does not allow."""
    params = SamplingParams(temperature=temperature, seed=1, **filters)
    validate(params)
    assert Sampler(params).draw(np.array([1.0, 9.0, -np.inf, 2.0], np.float32), []) == 1


def test_the_highest_temperature_draws_a_token() -> None:
    params = SamplingParams(temperature=100.0, seed=1)
    validate(params)
    assert 0 <= Sampler(params).draw(np.array([1.0, 9.0, 2.0], np.float32), []) < 3


@pytest.mark.parametrize("temperature", [0.0, 1e-46, 1.0])
@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-30])
def test_the_smallest_penalty_makes_a_seen_token_certain(penalty: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, repetition_penalty=penalty, seed=1)
    validate(params)
    assert Sampler(params).draw(np.array([1.0, 9.0, 2.0], np.float32), [2]) == 2


def kept(logits: Logits) -> list[int]:
    return np.flatnonzero(np.isfinite(logits)).tolist()


LOGITS = np.log(np.array([0.05, 0.5, 0.15, 0.3], np.float32))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.79}, [1, 3]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.25}, [1, 2, 3]),
        ({"top_k": 3, "top_p": 0.6, "min_p": 0.1}, [1, 3]),
    ],
)
def test_filters_leave_just_the_tokens_they_name(values: dict[str, Any], expected: list[int]) -> None:
    assert kept(filtered(LOGITS, SamplingParams(**values))) == expected


def test_a_penalised_token_is_less_likely_and_the_callers_logits_stay() -> None:
    logits = np.array([2.0, -2.0, 1.0], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    assert np.array(sampler.penalised(logits, [0, 1])).tolist() == [1.0, -4.0, 1.0]
    assert np.array(logits).tolist() == [2.0, -2.0, 1.0]
    assert sampler.draw(np.array([2.0, 1.5, 0.0], np.float32), [0]) == 1


def test_a_penalty_sees_only_its_context() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0, repetition_context=1))
    assert np.array(sampler.penalised(np.array([2.0, 2.0], np.float32), [0, 1])).tolist() == [2.0, 1.0]
    off = Sampler(SamplingParams(repetition_penalty=2.0, repetition_context=0))
    assert np.array(off.penalised(np.array([2.0, 2.0], np.float32), [0, 1])).tolist() == [2.0, 2.0]


def test_logprobs_are_of_the_likeliest_tokens_in_order() -> None:
    tops = top_logprobs(LOGITS, 3)
    assert [token for token, _ in tops] == [1, 3, 2]
    assert [round(math.exp(p), 4) for _, p in tops] == [0.5, 0.3, 0.15]


def test_as_many_logprobs_as_tokens_can_be_asked_for() -> None:
    assert len(top_logprobs(LOGITS, 4)) == 4


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 1.0}, [0.05, 0.5, 0.15, 0.3]),
        ({"temperature": 0.5}, [0.0068, 0.6849, 0.0616, 0.2466]),
        ({"temperature": 3.0}, [0.1486, 0.3201, 0.2143, 0.2700]),
        ({"temperature": 1.0, "top_k": 2}, [0, 0.625, 0, 0.375]),
        ({"temperature": 1.0, "top_p": 0.6}, [0, 0.625, 0, 0.375]),
        ({"temperature": 1.0, "min_p": 0.2}, [0, 0.5263, 0.1579, 0.3158]),
        ({"temperature": 1.0, "repetition_penalty": 2.0}, [0.0667, 0.3333, 0.2000, 0.4000]),
    ],
)
def test_draws_are_distributed_as_asked_for(values: dict[str, Any], expected: list[float]) -> None:
    """By 4000 draws with one seed. The penalised token is the likeliest; its log-probability is doubled."""
    sampler = Sampler(SamplingParams(seed=1, **values))
    counts = np.bincount([sampler.draw(LOGITS, [1]) for _ in range(4000)], minlength=4)
    assert np.allclose(counts / 4000, expected, atol=0.03)


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    def draws(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.draw(LOGITS, []) for _ in range(40)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_leaves_the_smallest_set_that_has_the_mass(top_p: float) -> None:
    """Also where most of a large vocabulary is not looked at."""
    for scale in (0.0, 1.0, 4.0):
        logits = np.random.default_rng(7).standard_normal(5000).astype(np.float32) * np.float32(scale)
        shares = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
        left = kept(filtered(logits, SamplingParams(top_p=top_p)))
        mass = shares[left].sum()
        assert mass >= top_p - 1e-5
        assert mass - shares[left].min() < top_p + 1e-5
        assert shares[left].min() >= np.delete(shares, left).max(initial=0)
