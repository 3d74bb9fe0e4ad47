"""The wheel: built from this tree, unpacked into a clean environment, every module of it imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bus", "actors", "runtime")

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    assert not module.__file__.startswith({root!r}), f"{{name}} came from the source tree"
print(len(sys.argv) - 1)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder of an earlier time can lend it a file."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=skip)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*build, "--wheel-dir", str(out), str(source)], check=True, capture_output=True, text=True)
    (path,) = out.glob("offbook-*.whl")
    return path


def modules_on_disk() -> set[str]:
    names: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = ("offbook", *path.relative_to(ROOT).with_suffix("").parts)
            names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_every_module_of_the_wheel_imports_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    (site,) = env.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The dependencies only: a .pth line does not run the .pth files it leads to, so not our editable install.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    python = env / "bin" / "python"
    names = sorted(name for name in modules_on_disk() if not name.endswith("__main__"))
    done = subprocess.run(
        [str(python), "-I", "-c", IMPORT_ALL.format(root=str(ROOT) + "/"), *names],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(names) > 10

    bare = "import importlib.util as u; print(*[n for n in ('actors', 'bus', 'runtime') if u.find_spec(n)])"
    done = subprocess.run([str(python), "-I", "-c", bare], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_wheel_carries_licence_type_marker_and_formats(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(n for n in names if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert any(n.endswith("licenses/LICENSE") for n in names)
    for part in FOLDERS:
        assert f"offbook/{part}/py.typed" in names
    for document in (*(ROOT / "bus").glob("*.md"), *(ROOT / "runtime" / "store").glob("*.md")):
        assert f"offbook/{document.relative_to(ROOT)}" in names
    assert "License-Expression: Apache-2.0" in text
    assert not [n for n in names if n.startswith(("tests/", "examples/", "benchmarks/"))]
