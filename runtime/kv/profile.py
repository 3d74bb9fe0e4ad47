"""A model's KV profile: the scheme that calibration found best for it, on disk.

Owns the profile's file, ``profiles/<fingerprint of the model>.json`` in the cache folder, and the choice
of a scheme for a model. The scheme is part of the fingerprint of blocks, so another profile means other
blocks: nothing stored by one scheme is ever read by another. Imports no MLX.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from offbook.bus.errors import InvalidRequest, OffbookError

from ..models.cache import cache_root, disk_errors
from .scheme import GROUP, KVScheme, LayerScheme
from .spec import ModelCacheSpec

FORMAT: Final = 1

log = logging.getLogger("offbook.kv")


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured, and the scheme that follows from it.

    Attributes:
        model: the model's fingerprint (without a scheme). ref: what it was called, for people.
        bytes_per_token: of an agent of 4,096 tokens, tail included.
        perplexity_pct: increase of the perplexity over 16-bit KV, percent.
        divergence: mean Kullback-Leibler divergence from the predictions with 16-bit KV, nats a token.
        scored: tokens that were scored.
    """

    model: str
    ref: str
    scheme: KVScheme
    bytes_per_token: float
    perplexity_pct: float
    divergence: float
    scored: int
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise InvalidRequest(f"KV profile of format {self.format}; this version reads {FORMAT}")


def check_target(per_token: float | None, ratio: float | None) -> None:
    """Refuse byte targets that cannot be meant, before any work.

    Raises:
        InvalidRequest: both are given, or one is not a number above 0.
    """
    if per_token is not None and ratio is not None:
        raise InvalidRequest("give either bytes per token or a ratio to 16-bit KV, not both")
    for name, value in (("bytes per token", per_token), ("ratio to 16-bit KV", ratio)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidRequest(f"{name} {value}: give a number above 0")


def profile_path(model: str) -> Path:
    """Where the profile of the model with this fingerprint is, if it has one."""
    return cache_root() / "profiles" / f"{model}.json"


def save(profile: Profile) -> Path:
    """Store the profile in place of an older one: a reader sees the one or the other.

    Raises:
        ModelError: the disk is full or may not be written.
    """
    path = profile_path(profile.model)
    with disk_errors("storing the KV profile"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".tmp-{os.getpid()}")
        try:
            with temporary.open("wb") as handle:
                handle.write(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def find(model: str) -> Profile | None:
    """The stored profile of the model with this fingerprint.

    One that cannot be read counts as none, and a warning says so: memory must come up all the same, and
    the default scheme is right for any model.
    """
    path = profile_path(model)
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, OffbookError) as error:
        log.warning("the KV profile %s cannot be used (%s); calibrate again or delete it", path, error)
        return None
    if profile.model != model:
        log.warning("the KV profile %s is of another model (%s); it is not used", path, profile.model)
        return None
    return profile


def forget(model: str) -> bool:
    """Delete the model's profile; False if it had none."""
    path = profile_path(model)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


WIDE: Final = 128
"""Head width from which the default scheme of dense models is the compact one."""

SHORT: Final = 1024
"""Windows up to this length beside full layers get more bits."""

COMPACT: Final = LayerScheme(value_group=128)
FINE: Final = LayerScheme(key_bits=8, value_group=32)


KNOWN: Final[dict[str, KVScheme]] = {
    "wheel:smollm2-135m-instruct": KVScheme(tail=GROUP, sharp=(15, 17, 18, 20, 23)),
}
"""Schemes of models that many start with, by reference.

SmolLM2: which layers matter differs between texts; these gain most over three contexts together. Predictions
then move by 5.6 instead of 13.3 thousandths of a nat a token (three contexts, one of them not used for the
choice: 6.4 for 14.9), at 0.318 of 16-bit KV.
"""


def default_scheme(spec: ModelCacheSpec, ref: str = "") -> KVScheme:
    """The scheme of a model that was not calibrated here: of a known one, else by its shapes.

    Figures are divergences from the predictions with 16-bit KV, thousandths of a nat a token, on the topics
    of ``help()``. A tail of 64 instead of 128 alone changes hardly anything (SmolLM2 14.3 for 13.6, Gemma 3
    270M 5.6 for 4.9, the tiny DeepSeek-V2 2.1 both), so it pays for other things where a page is large:

    * Short windows beside full layers: 8-bit keys and value groups of 32 in the windows, whose size is
      bounded (Gemma 3 270M: 3.5 for 4.9, at the same bytes at 4K; plain 4 bits: 286).
    * Dense models with wide heads, whose agents are the largest: value groups as wide as a head, 4.38 bits
      a number instead of 4.5, so that an agent takes about what it does in plain 4-bit caches without a
      tail (7.0 for 4.9 on the wide heads of Gemma 3 270M).
    """
    if ref in KNOWN:
        return KNOWN[ref]
    layers = spec.attention_layers
    windows = [layer.window for layer in layers if layer.window is not None]
    if windows and len(windows) < len(layers) and max(windows) <= SHORT:
        return KVScheme(window=FINE, tail=GROUP)
    if layers and all(layer.kind == "full" and layer.value_width >= WIDE for layer in layers):
        return KVScheme(full=COMPACT, window=COMPACT, tail=GROUP)
    return KVScheme()


def scheme_for(loaded: Any, spec: ModelCacheSpec) -> KVScheme:
    """The scheme for a ``LoadedModel``: its profile's, else the default."""
    profile = find(loaded.fingerprint)
    return profile.scheme if profile is not None else default_scheme(spec, loaded.ref)
