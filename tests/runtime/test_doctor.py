"""The doctor's findings: complete, honest, each with a way to mend it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from offbook.runtime import doctor
from offbook.runtime.config import GIB
from offbook.runtime.models import blas
from offbook.runtime.models.blas import Blas


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path / "home"))


def test_everything_is_looked_at_and_nothing_left_behind(tmp_path: Path) -> None:
    report = doctor.report()
    names = [check.name for check in report.checks]
    assert names == ["python", "mlx", "blas", "kernel", "memory", "disk", "models", "pip"]
    assert all(check.value for check in report.checks)
    assert all(bool(check.mend) == (check.status != "ok") for check in report.checks)
    assert report["blas"].data["gflops"] > 0
    assert not (tmp_path / "home").exists()
    with pytest.raises(KeyError):
        report["crystal ball"]


def test_a_slow_blas_comes_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "preload_blas", lambda: Blas("builtin", why="no OpenBLAS"))
    check = doctor._blas()
    assert check.status == "slow"
    assert "25 times faster" in check.mend
    assert "no OpenBLAS" in check.mend


def test_a_missing_kernel_is_slow_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook.runtime.kv.native.available", lambda: False)
    check = doctor._kernel()
    assert check.status == "slow"
    assert "compiler" in check.mend


def test_little_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: GIB)
    monkeypatch.setattr(doctor, "cgroup_limit_bytes", lambda: GIB)
    monkeypatch.setattr(doctor, "cgroup_headroom_bytes", lambda: GIB // 2)
    monkeypatch.setattr(doctor, "default_budget_bytes", lambda: GIB // 3)
    check = doctor._memory()
    assert check.status == "problem"
    assert check.data["cgroup_headroom_bytes"] == GIB // 2
    assert "512 MiB left of the 1 GiB that this control group allows" in check.value


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, 10**6))
    check = doctor._disk()
    assert check.status == "problem"
    assert "OFFBOOK_CACHE" in check.mend
    assert "OFFBOOK_HOME" in check.mend


def test_a_missing_pip_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "ensurepip" in doctor._pip().mend


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Check:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "_memory", broken)
    report = doctor.report()
    assert report.status == "problem"
    assert "no such device" in report["memory"].value
