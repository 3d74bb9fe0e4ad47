"""Memory limits of control groups, as containers and services have them."""

from __future__ import annotations

from pathlib import Path

from offbook.runtime.limits import cgroup_headroom_bytes, cgroup_limit_bytes


def group(folder: Path, **files: object) -> None:
    """A control group's folder; ``memory_max=5`` is the file ``memory.max``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def member(tmp_path: Path, lines: str) -> tuple[Path, Path]:
    proc = tmp_path / "cgroup"
    proc.write_text(lines)
    return tmp_path / "sys", proc


def test_the_tightest_control_group_decides(tmp_path: Path) -> None:
    group(tmp_path / "sys" / "a" / "b", memory_max="max", memory_high="max")
    group(
        tmp_path / "sys" / "a",
        memory_max=1_000_000,
        memory_current=700_000,
        memory_stat="anon 600000\ninactive_file 100000",
    )
    at = member(tmp_path, "0::/a/b\n")
    assert cgroup_limit_bytes(*at) == 1_000_000
    assert cgroup_headroom_bytes(*at) == 400_000


def test_a_limit_that_slows_down_counts_as_one_that_kills(tmp_path: Path) -> None:
    group(tmp_path / "sys", memory_max=9000, memory_high=5000, memory_current=1000)
    at = member(tmp_path, "0::/\n")
    assert (cgroup_limit_bytes(*at), cgroup_headroom_bytes(*at)) == (5000, 4000)


def test_a_limit_of_the_first_control_group_version_is_read(tmp_path: Path) -> None:
    # A container: the path is one of the outside, its own folder is mounted as the root.
    group(tmp_path / "sys" / "memory", memory_limit_in_bytes=5000, memory_usage_in_bytes=1000)
    at = member(tmp_path, "4:memory:/docker/abc\n0::/\n")
    assert (cgroup_limit_bytes(*at), cgroup_headroom_bytes(*at)) == (5000, 4000)


def test_a_limit_outside_of_what_can_be_seen_is_read_from_the_statistics(tmp_path: Path) -> None:
    group(
        tmp_path / "sys" / "memory",
        memory_limit_in_bytes=(1 << 63) - 4096,
        memory_usage_in_bytes=1000,
        memory_stat="inactive_file 1\nhierarchical_memory_limit 6000\ntotal_inactive_file 500",
    )
    at = member(tmp_path, "4:cpu,memory:/\n")
    assert (cgroup_limit_bytes(*at), cgroup_headroom_bytes(*at)) == (6000, 5500)


def test_no_control_group_means_no_limit(tmp_path: Path) -> None:
    group(tmp_path / "sys" / "memory", memory_limit_in_bytes=(1 << 63) - 4096)
    at = member(tmp_path, "4:memory:/\n")
    assert cgroup_limit_bytes(*at) is None
    assert cgroup_headroom_bytes(tmp_path, tmp_path / "absent") is None
