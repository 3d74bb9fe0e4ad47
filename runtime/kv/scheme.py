"""How KV is quantised: a value that is part of the fingerprint.

Keys are quantised per channel (groups of 64 along time) and values per token (groups along the
width), after KIVI (Liu et al., arXiv 2402.02750); the most recent tokens stay at 16 bits in a hot
tail. Positions alone decide what is sealed, so a restored agent has the same bits as a live one.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from offbook.bus.errors import InvalidRequest

BLOCK: Final = 256
"""Tokens in a block: the unit of sharing, of eviction and of a file on disk."""

GROUP: Final = 64
"""Tokens in a group: the unit of sealing, one quantisation group of the keys."""

Bits = Literal[4, 8] | None


class LayerScheme(msgspec.Struct, frozen=True, kw_only=True):
    """Bits of one kind of layer; ``None`` keeps that tensor at 16 bits.

    Attributes:
        value_group: channels that share a scale; the largest of 128, 64, 32 up to this that fits the width.
    """

    key_bits: Bits = 4
    value_bits: Bits = 4
    value_group: Literal[32, 64, 128] = 64


class KVScheme(msgspec.Struct, frozen=True, kw_only=True):
    """The quantisation of a whole model.

    Attributes:
        full: full-attention and latent layers.
        window: sliding-window layers (their size is bounded, so more bits cost little).
        tail: at least this many most recent tokens stay at 16 bits; a positive multiple of 64.
        sharp: layers, by index and ascending, whose keys have 8 bits where others have 4. What quantising
            costs comes from few layers (one of SmolLM2's 30 causes two fifths), and calibration finds them.
    """

    full: LayerScheme = LayerScheme()
    window: LayerScheme = LayerScheme()
    tail: int = 128
    sharp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tail < GROUP or self.tail % GROUP:
            raise InvalidRequest(f"KV tail of {self.tail} tokens: use a positive multiple of {GROUP}")
        if list(self.sharp) != sorted(set(self.sharp)) or any(index < 0 for index in self.sharp):
            raise InvalidRequest(f"sharp layers {self.sharp}: give each once, ascending, from 0")

    @classmethod
    def uniform(cls, bits: Bits, *, tail: int = 128) -> KVScheme:
        """The same bits for every tensor of every layer."""
        if bits not in (4, 8, None):
            raise InvalidRequest(f"KV bits {bits!r}: use 4, 8 or None (16-bit)")
        layer = LayerScheme(key_bits=bits, value_bits=bits)
        return cls(full=layer, window=layer, tail=tail)

    def of(self, index: int, *, windowed: bool) -> LayerScheme:
        """The scheme of the layer with this index."""
        scheme = self.window if windowed else self.full
        if index in self.sharp and scheme.key_bits == 4:
            return msgspec.structs.replace(scheme, key_bits=8)
        return scheme

    def sealed(self, tokens: int) -> int:
        """How many of ``tokens`` are in sealed groups: a function of the length alone."""
        return max(0, tokens - self.tail) // GROUP * GROUP

    @property
    def pages(self) -> int:
        """16-bit pages of 64 tokens an agent holds at most while it decodes."""
        return self.tail // GROUP + 1

    def describe(self) -> str:
        """A canonical string, part of the fingerprint."""
        return msgspec.json.encode(self, order="deterministic").decode()
