"""Which KV schemes are worth measuring for a model, and what they take.

Owns the byte target and the search space of calibration: bits of keys and values for full and for window
layers, value groups, tails, and *sharp* layers. Most of the divergence comes from the keys of few layers (of
SmolLM2's 30, four cause 70 %), so these may have 8 bits while the rest has 4. Imports no MLX.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from offbook.bus.errors import InvalidRequest

from .profile import check_target, default_scheme
from .scheme import KVScheme, LayerScheme
from .spec import ModelCacheSpec, value_group

TYPICAL: Final = 4096
"""Tokens of the agent whose bytes are compared."""


def bytes_per_token(spec: ModelCacheSpec, scheme: KVScheme) -> float:
    """Bytes a token of a 4,096-token agent takes, blocks and hot tail."""
    return spec.agent_bytes(TYPICAL, scheme) / TYPICAL


def target_bytes(
    spec: ModelCacheSpec,
    *,
    per_token: float | None = None,
    ratio: float | None = None,
    default: KVScheme | None = None,
) -> float:
    """The bytes a token may take: as given, as a share of 16-bit KV, or what the default scheme takes.

    Raises:
        InvalidRequest: both are given, one is not a positive number, or nothing is that small.
    """
    check_target(per_token, ratio)
    full = spec.fp16_bytes(TYPICAL) / TYPICAL
    least = min(bytes_per_token(spec, scheme) for scheme in every_scheme(spec))
    if per_token is None:
        if ratio is None:
            return bytes_per_token(spec, default or default_scheme(spec))
        per_token = ratio * full
    if per_token < least:
        raise InvalidRequest(
            f"no scheme takes {per_token:.0f} bytes a token ({per_token / full:.3f} of 16-bit KV) with this "
            f"model: the smallest takes {least:.0f} ({least / full:.3f})"
        )
    return per_token


_PAIRS: Final[tuple[tuple[Literal[4, 8], Literal[4, 8]], ...]] = ((4, 4), (4, 8), (8, 4), (8, 8))
_GROUPS: Final[tuple[Literal[32, 64, 128], ...]] = (64, 32, 128)
_TAILS: Final = (64, 128)


def every_scheme(spec: ModelCacheSpec) -> list[KVScheme]:
    """All combinations of tail, bits and value groups that differ for this model."""
    layers = [
        LayerScheme(key_bits=key, value_bits=value, value_group=group)
        for (key, value), group in itertools.product(_PAIRS, _GROUPS)
    ]
    windowed = any(group.window is not None for group in spec.groups)
    unbounded = any(group.window is None for group in spec.groups)
    found: dict[str, KVScheme] = {}
    for tail, full, window in itertools.product(_TAILS, layers, layers):
        if (windowed and unbounded) or full == window:
            scheme = KVScheme(full=full, window=window, tail=tail)
        else:
            continue
        layout = [group.tensors(scheme) for group in spec.groups]
        found.setdefault(f"{tail}:{layout}", scheme)
    return list(found.values())


def candidates(spec: ModelCacheSpec, target: float, default: KVScheme | None = None) -> list[KVScheme]:
    """The schemes worth measuring: those within ``target`` bytes a token that no other such scheme beats
    in everything (bits, groups and tail), and the default for comparison."""
    fitting = [
        (scheme, _precision(spec, scheme))
        for scheme in every_scheme(spec)
        if bytes_per_token(spec, scheme) <= target
    ]
    best = [
        scheme
        for scheme, exact in fitting
        if not any(
            exact != other and all(a <= b for a, b in zip(exact, other, strict=True)) for _, other in fitting
        )
    ]
    default = default or default_scheme(spec)
    return best if default in best else [default, *best]


def _precision(spec: ModelCacheSpec, scheme: KVScheme) -> tuple[int, ...]:
    """What ``candidates`` compares: more is more exact, in every place."""
    figures = [scheme.tail]
    for layer in spec.attention_layers:
        of = scheme.of(layer.index, windowed=layer.window is not None)
        figures.append(of.key_bits or 16)
        if layer.kind != "latent":
            figures += [of.value_bits or 16, -(value_group(layer.value_width, of.value_group) or 0)]
    return tuple(figures)


def sharpened(spec: ModelCacheSpec, target: float, gains: Mapping[int, float]) -> list[KVScheme]:
    """Schemes of 4 bits whose rest of the target goes to 8-bit keys of the layers that gain most by them.

    Args:
        gains: what each layer gains (``sensitivities``).
    """
    found: list[KVScheme] = []
    for base in every_scheme(spec):
        if base.full != base.window or (base.full.key_bits, base.full.value_bits) != (4, 4):
            continue
        least = bytes_per_token(spec, base)
        cost = {
            index: bytes_per_token(spec, msgspec.structs.replace(base, sharp=(index,))) - least
            for index in gains
        }
        chosen: list[int] = []
        for index in sorted(gains, key=lambda index: gains[index] / cost[index], reverse=True):
            if gains[index] > 0 and least + cost[index] <= target:
                chosen.append(index)
                least += cost[index]
        if chosen and least <= target:
            found.append(msgspec.structs.replace(base, sharp=tuple(sorted(chosen))))
    return found
