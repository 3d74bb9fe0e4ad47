"""What a store operation came to: one small frozen type per outcome.

Futures of the store are resolved with one of these and never raise, so a step thread can poll them
without ``try``. ``result.ok`` is true for the good outcomes; the others carry a ``reason`` for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from .layout import Tail


class StoreUsageError(ValueError):
    """The caller passed something no store could take: wrong shape, hash, path or agent name."""


class StoreLocked(RuntimeError):
    """Another process has the store open for writing."""


@dataclass(frozen=True, slots=True)
class Stored:
    """It is on disk and durable.

    Attributes:
        nbytes: bytes written now.
        existed: nothing had to be written.
        missing: for a tail, the blocks it lists that are not stored; write them again.
    """

    ok: ClassVar[bool] = True
    nbytes: int
    existed: bool = False
    missing: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The destinations hold the block's bytes and every checksum agreed."""

    ok: ClassVar[bool] = True
    nbytes: int


@dataclass(frozen=True, slots=True)
class TailLoaded:
    """A tail, read and verified."""

    ok: ClassVar[bool] = True
    tail: Tail
    nbytes: int


@dataclass(frozen=True, slots=True)
class Removed:
    """What ``forget`` and ``gc`` took off the disk. ``nbytes`` are bytes on disk freed."""

    ok: ClassVar[bool] = True
    blocks: int
    tails: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Not stored (any more). Prefill from tokens."""

    ok: ClassVar[bool] = False
    reason: str


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The file was there and is not what it claims; it went to quarantine. Destinations hold garbage."""

    ok: ClassVar[bool] = False
    reason: str


@dataclass(frozen=True, slots=True)
class Full:
    """No room: above the cap, or the disk itself is full."""

    ok: ClassVar[bool] = False
    reason: str


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """The folder cannot be written."""

    ok: ClassVar[bool] = False
    reason: str


@dataclass(frozen=True, slots=True)
class Busy:
    """The write queue is full; nothing was taken. Try again after a future of it is done."""

    ok: ClassVar[bool] = False
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Any other failure: an I/O error of the device, a closed store."""

    ok: ClassVar[bool] = False
    reason: str


PutResult: TypeAlias = Stored | Full | ReadOnly | Busy | Failed
LoadResult: TypeAlias = Loaded | Missing | Corrupt | Failed
TailResult: TypeAlias = TailLoaded | Missing | Corrupt | Failed
RemoveResult: TypeAlias = Removed | Full | ReadOnly | Failed
