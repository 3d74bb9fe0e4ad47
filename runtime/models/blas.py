"""Which BLAS library MLX's CPU backend computes with, and how to get a fast one.

Owns the preload. MLX's Linux wheel links the reference BLAS (one thread, no vector code: 4 to 8
GFLOP/s). Its symbols are looked up by name, so a library loaded earlier with global visibility
answers in its place: OpenBLAS does float32 products 25 times faster or more. Two sources, in order:

1. the system's ``libopenblas.so.0`` (Debian: ``libopenblas0-pthread``);
2. the OpenBLAS inside numpy's wheel, through a shim compiled once with the C compiler
   (``blas_shim``): no root needed.

``preload_blas()`` must run before anything imports ``mlx.core``; afterwards it changes nothing.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass
from typing import Literal

from offbook.runtime.models import blas_shim

SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas64.so.0")
_WANTED_SYMBOL = "cblas_sgemm"

Source = Literal["system", "numpy", "builtin", "accelerate", "late"]


@dataclass(frozen=True)
class Blas:
    """The BLAS that answers MLX's calls.

    Attributes:
        source: ``system`` (a preloaded OpenBLAS), ``numpy`` (the one in numpy's wheel),
            ``accelerate`` (macOS), ``builtin`` (whatever MLX was linked with; slow in the Linux
            wheel), ``late`` (MLX had been imported before the preload, so it could not take part).
        path: the library's name or path, if one was loaded.
        why: why no faster one was taken, in words; empty when there is nothing to mend.
    """

    source: Source
    path: str = ""
    why: str = ""

    @property
    def fast(self) -> bool:
        return self.source in ("system", "numpy", "accelerate")


_lock = threading.Lock()
_active: Blas | None = None


def preload_blas() -> Blas:
    """Load a fast BLAS ahead of MLX's own. Idempotent, thread-safe, never raises.

    Returns what is in use from now on. Call it before the first ``import mlx.core``.
    """
    global _active
    with _lock:
        if _active is None:
            _active = _preload()
        return _active


def _preload() -> Blas:
    if sys.platform != "linux":
        return Blas("accelerate") if sys.platform == "darwin" else Blas("builtin")
    if "mlx.core" in sys.modules:
        return Blas("late", why="mlx.core was imported before preload_blas(): call preload_blas() first")
    for name in SYSTEM_LIBRARIES:
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, _WANTED_SYMBOL):
            return Blas("system", name)
    try:
        path = blas_shim.library()
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (blas_shim.ShimUnavailable, OSError) as exc:
        return Blas("builtin", why=str(exc))
    return Blas("numpy", str(path))
