"""The OpenBLAS of numpy's wheel behind the names MLX calls.

Owns finding that library and the compiled forwarder (``blas_shim.c``): built when offbook is installed, or
on first use into the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from offbook.runtime.models.cache import cache_root

_SOURCE = Path(__file__).with_name("blas_shim.c")
_NAMES = (("scipy_", "64_"),)  # prefix and suffix of the 64-bit-integer build that numpy >= 1.26 bundles


class ShimUnavailable(Exception):
    """numpy's OpenBLAS cannot be used here; the message says why and what would help."""


def library() -> Path:
    """The compiled forwarder, loaded with global visibility and bound to numpy's OpenBLAS.

    Raises:
        ShimUnavailable: no bundled OpenBLAS, no C compiler, or an unwritable cache.
    """
    bundled = bundled_openblas()
    path = _compiled()
    handle = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    for prefix, suffix in _NAMES:
        if handle.offbook_blas_bind(str(bundled).encode(), prefix.encode(), suffix.encode()) == 0:
            return path
    raise ShimUnavailable(f"{bundled} does not export the expected symbols")


def bundled_openblas() -> Path:
    """The OpenBLAS inside numpy's wheel. Looked up without importing numpy."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        raise ShimUnavailable("numpy is not installed")
    folder = Path(spec.origin).parent.parent / "numpy.libs"
    found = sorted(folder.glob("libscipy_openblas64_*.so"))
    if not found:
        raise ShimUnavailable(f"this numpy bundles no OpenBLAS ({folder} has none)")
    return found[0]


def installed() -> Path | None:
    """The forwarder that was compiled when offbook was installed, if it was."""
    spec = importlib.util.find_spec("offbook.runtime.models._blas_shim")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _compiled() -> Path:
    if (ready := installed()) is not None:
        return ready
    key = hashlib.sha256(_SOURCE.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    target = cache_root() / "blas" / f"shim-{key}.so"
    if target.exists():
        return target
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise ShimUnavailable(
            "no system OpenBLAS and no C compiler to use numpy's: "
            "install libopenblas0-pthread (Debian: apt install libopenblas0-pthread) or a compiler"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
    except OSError as exc:
        raise ShimUnavailable(f"cannot write {target.parent}: {exc.strerror}") from exc
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", temporary, str(_SOURCE), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise ShimUnavailable(f"{compiler} could not compile the BLAS forwarder: {done.stderr[-300:]}")
        Path(temporary).replace(target)  # concurrent builders write equal files; the last rename wins
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ShimUnavailable(f"compiling the BLAS forwarder failed: {exc}") from exc
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target
