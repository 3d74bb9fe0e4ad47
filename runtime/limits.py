"""How much memory there is for this process: the machine's, and what its control groups allow of it.

Owns reading these facts from the operating system; ``config.py`` decides with them. A container or a
service has the machine's memory in sight and a fraction of it to use: who goes over is killed, so both
numbers count and the smaller one holds.

Imports neither MLX nor NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc/self/cgroup")

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a huge number."""


def machine_bytes() -> int | None:
    """The memory of this machine, or None where it cannot be known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def available_bytes() -> int:
    """Memory that can be taken without pushing others out, as the operating system estimates it.

    It knows the machine alone: see :func:`cgroup_headroom_bytes`.
    """
    import psutil  # here, because only an engine's host has it

    return int(psutil.virtual_memory().available)


def cgroup_limit_bytes(root: Path = ROOT, proc: Path = PROC) -> int | None:
    """The tightest memory limit of this process's control groups; None without one."""
    return min((group.limit for group in _limited_groups(root, proc)), default=None)


def cgroup_headroom_bytes(root: Path = ROOT, proc: Path = PROC) -> int | None:
    """Bytes left under the tightest memory limit of this process's control groups; None without limit.

    Cache that a group could drop counts as left.
    """
    return min((group.headroom for group in _limited_groups(root, proc)), default=None)


@dataclass(frozen=True)
class _Group:
    limit: int
    headroom: int


def _limited_groups(root: Path, proc: Path) -> Iterator[_Group]:
    """The control groups that limit this process's memory.

    Both versions are read: v2 (``memory.max``, and ``memory.high``, above which a group is slowed down until
    it is of no use), and v1 (``memory.limit_in_bytes``, and the limit of groups that cannot be seen from
    inside a container, which v1 tells in ``memory.stat``).
    """
    for folder in _folders(root, proc):
        stat = _stat(folder / "memory.stat")
        limits = [_read_int(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limits.append(stat.get("hierarchical_memory_limit"))
        known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
        if known:
            used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes") or 0
            droppable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            yield _Group(min(known), max(0, min(known) - used + droppable))


def _folders(root: Path, proc: Path) -> list[Path]:
    """Every folder whose limit binds this process, innermost first."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            base = root
        elif "memory" in controllers.split(","):
            base = root / "memory"
        else:
            continue
        folder = base / path.strip("/")
        # In a container the path may name a folder of the outside; then only the root is visible.
        while True:
            folders.append(folder)
            if folder in (base, folder.parent):
                break
            folder = folder.parent
    return folders


def _stat(path: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # absent, or "max"
        return None
