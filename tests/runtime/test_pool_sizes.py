"""Dividing the budget: what one agent takes, and that blocks and pages run out together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.runtime.kv.scheme import KVScheme
from offbook.runtime.kv.spec import LayerSpec, ModelCacheSpec
from offbook.runtime.supervisor import TYPICAL_CONTEXT, agent_share, pool_sizes

SPECS = {
    "dense": ModelCacheSpec(tuple(LayerSpec(index, "full", 3, 64, 64) for index in range(4))),
    "windowed": ModelCacheSpec(
        tuple(
            LayerSpec(i, "window" if i % 3 else "full", 1, 64, 64, 512 if i % 3 else None) for i in range(6)
        )
    ),
    "short window": ModelCacheSpec((LayerSpec(0, "full", 2, 32, 32), LayerSpec(1, "window", 2, 32, 32, 96))),
    "latent": ModelCacheSpec(tuple(LayerSpec(index, "latent", 1, 192, 128) for index in range(4))),
}
TAILS = st.sampled_from([64, 128, 192])


@pytest.mark.parametrize("tokens", [60, 128, 383, 384, 640, 767, 1024])
def test_an_agent_at_rest_holds_its_share(
    rig: Callable[..., Any], model: nn.Module, ids: Callable[..., Any], tokens: int
) -> None:
    one = rig(model)
    one.say("ann", ids(tokens))
    assert one.table("ann").held() == agent_share(one.spec, one.scheme, tokens, at_rest=True)


@given(st.sampled_from(list(SPECS)), TAILS, st.integers(1, 9000), st.data())
def test_no_length_up_to_the_context_holds_more_than_the_share_of_one_who_speaks(
    name: str, tail: int, context: int, data: st.DataObject
) -> None:
    spec, scheme = SPECS[name], KVScheme(tail=tail)
    most, most_pages = agent_share(spec, scheme, context)
    blocks, pages = agent_share(spec, scheme, data.draw(st.integers(1, context)), at_rest=True)
    assert pages <= most_pages
    assert all(a <= b for a, b in zip(blocks, most, strict=True))


@given(st.sampled_from(list(SPECS)), TAILS, st.integers(1, 9000), st.floats(0, 40), st.booleans())
def test_as_many_agents_fit_as_their_bytes_allow(
    name: str, tail: int, context: int, agents: float, at_rest: bool
) -> None:
    spec, scheme = SPECS[name], KVScheme(tail=tail)
    blocks, pages = agent_share(spec, scheme, context, at_rest=at_rest)
    each = pages * spec.page_bytes + sum(
        n * group.block_bytes(scheme) for n, group in zip(blocks, spec.groups, strict=True)
    )
    budget = int(agents * each) + 1
    sizes = pool_sizes(spec, scheme, budget, context=context, at_rest=at_rest)
    assert sizes.nbytes <= budget
    assert sizes.pages >= int(agents - 1e-6) * pages
    assert all(
        have >= int(agents - 1e-6) * need for have, need in zip(sizes.group_slots, blocks, strict=True)
    )


def test_the_typical_agent_is_one_who_speaks() -> None:
    spec, scheme = SPECS["dense"], KVScheme()
    assert pool_sizes(spec, scheme, 1 << 28) == pool_sizes(spec, scheme, 1 << 28, context=TYPICAL_CONTEXT)
