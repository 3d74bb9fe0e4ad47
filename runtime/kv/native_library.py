"""Finding, loading and setting up the compiled kernel (``native.c``).

The library is an extension module built at install time and optional, called through ctypes. Ask
``available()`` first; ``library()`` raises with the reason where there is none.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
from pathlib import Path
from typing import Any

_ABI = 10


class NativeUnavailable(RuntimeError):
    """The compiled kernel cannot be used here; the message says why."""


def _load() -> ctypes.CDLL:
    if os.environ.get("OFFBOOK_NATIVE") == "0":
        raise NativeUnavailable("the native kernel is switched off by OFFBOOK_NATIVE=0")
    spec = importlib.util.find_spec("offbook.runtime.kv._native")
    if spec is None or spec.origin is None:
        raise NativeUnavailable(
            "offbook was installed without its native kernel (no C compiler at install time?); "
            "install one and reinstall offbook"
        )
    try:
        loaded = ctypes.CDLL(str(Path(spec.origin)))
        abi = loaded.offbook_abi()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"the native kernel {spec.origin} does not load: {error}") from error
    if abi != _ABI:
        raise NativeUnavailable(
            f"the native kernel {spec.origin} has interface {abi}, not {_ABI}; reinstall offbook"
        )
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    rows = [pointer, integer, integer]
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "offbook_decode": (ctypes.c_int, [pointer, pointer, *rows * 4, pointer]),
        "offbook_share": (integer, [pointer]),
        "offbook_prefill": (ctypes.c_int, [pointer, pointer, *[integer] * 4, *rows * 4, pointer]),
        "offbook_seal": (ctypes.c_int, [pointer, integer, pointer, pointer, pointer]),
        "offbook_dequantise": (
            ctypes.c_int,
            [pointer, pointer, integer, integer, integer, pointer, integer, pointer, integer],
        ),
        "offbook_linear": (ctypes.c_int, [integer, pointer, integer, integer, pointer, pointer]),
        "offbook_gated": (
            ctypes.c_int,
            [pointer, ctypes.c_int, integer, integer, pointer, pointer],
        ),
        "offbook_block_in": (
            ctypes.c_int,
            [pointer, integer, pointer, pointer, pointer, ctypes.c_int, pointer],
        ),
        "offbook_block_out": (ctypes.c_int, [pointer, integer, pointer, pointer]),
        "offbook_head": (
            ctypes.c_int,
            [pointer, pointer, ctypes.c_float, integer, integer, pointer, pointer],
        ),
        "offbook_packed_bytes": (integer, [integer, integer, integer]),
        "offbook_pack": (ctypes.c_int, [pointer, integer, integer, integer, pointer]),
        "offbook_unpack": (ctypes.c_int, [pointer, integer, pointer, integer, pointer]),
        "offbook_read": (integer, [ctypes.c_char_p, integer, integer, *[pointer] * 4]),
        "offbook_copy": (None, [integer, pointer]),
        "offbook_large_pages": (None, [pointer, integer]),
        "offbook_threads": (None, [ctypes.c_int]),
        "offbook_isa": (ctypes.c_char_p, [ctypes.c_char_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    _use(loaded, "")
    loaded.offbook_threads(default_threads())
    return loaded


_library: ctypes.CDLL | None = None
_reason: str | None = None


def library() -> ctypes.CDLL:
    """The loaded kernel.

    Raises:
        NativeUnavailable: there is none; asked again, it says the same without trying again.
    """
    global _library, _reason
    if _library is None:
        if _reason is not None:
            raise NativeUnavailable(_reason)
        try:
            _library = _load()
        except NativeUnavailable as error:
            _reason = str(error)
            raise
    return _library


def available() -> bool:
    """Whether the compiled kernel is there and can be used (loads it on the first call)."""
    try:
        library()
    except NativeUnavailable:
        return False
    return True


def unavailable_reason() -> str | None:
    """Why ``available()`` is false, for people; None if it is true."""
    return None if available() else _reason


def default_threads() -> int:
    """The cores this process may use: its CPU affinity, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def set_threads(threads: int) -> None:
    """Use at most this many threads, the caller among them. Results do not depend on it."""
    if threads < 1:
        raise ValueError(f"{threads} threads: use 1 or more")
    library().offbook_threads(threads)


def instruction_set(name: str = "") -> str:
    """Choose ``plain``, ``avx2`` or ``avx512`` (default: the best this CPU has); returns the one in use.

    Raises:
        ValueError: this CPU or this build does not have it.
    """
    return _use(library(), name)


def instruction_set_in_use() -> str:
    """The instruction set the kernel computes with now."""
    library()
    return _in_use


_in_use = ""


def _use(loaded: ctypes.CDLL, name: str) -> str:
    global _in_use
    chosen: bytes | None = loaded.offbook_isa(name.encode())
    if chosen is None:
        raise ValueError(f"instruction set {name!r} is not available on this machine")
    _in_use = chosen.decode()
    return _in_use
