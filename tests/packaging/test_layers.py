"""Who may import whom: bus knows nobody, actors know the bus, the runtime knows both, MLX stays there."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"mlx", "mlx_lm", "numpy", "transformers", "torch", "safetensors", "gguf"}


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """(file, imported module) for every import statement under a top-level folder, nested ones included."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                for name in node.names:
                    yield str(path.relative_to(ROOT)), name.name
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    package = ("offbook", *path.relative_to(ROOT).parts)[: -node.level]
                    module = ".".join((*package, module) if module else package)
                yield str(path.relative_to(ROOT)), module
                for name in node.names:
                    yield str(path.relative_to(ROOT)), f"{module}.{name.name}"


@pytest.mark.parametrize(("folder", "forbidden"), [("bus", ("actors", "runtime")), ("actors", ("runtime",))])
def test_dependencies_point_one_way(folder: str, forbidden: tuple[str, ...]) -> None:
    wrong = [
        (file, module)
        for file, module in imports(folder)
        for name in forbidden
        if module == f"offbook.{name}" or module.startswith(f"offbook.{name}.")
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["bus", "actors"])
def test_nothing_outside_the_runtime_imports_mlx_or_arrays(folder: str) -> None:
    assert [(f, m) for f, m in imports(folder) if m.split(".")[0] in HEAVY] == []


@pytest.mark.parametrize(
    "module",
    ["offbook.bus", "offbook.actors", "offbook.runtime", "offbook.runtime.cli", "offbook.runtime.config"],
)
def test_importing_it_starts_no_array_library(module: str) -> None:
    """A process that hosts actors, and the command line, start without MLX, NumPy or transformers."""
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}} & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_bare_names_are_not_importable() -> None:
    """A user's own ``actors`` folder must never be shadowed by ours."""
    code = "import importlib.util as u; print(*[n for n in ('actors', 'bus', 'runtime') if u.find_spec(n)])"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_sub_package_is_listed_for_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {
        "offbook." + ".".join(init.parent.relative_to(ROOT).parts)
        for folder in ("bus", "actors", "runtime")
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == on_disk
    assert set(settings["package-dir"]) == on_disk
    assert all((ROOT / path).is_dir() for path in settings["package-dir"].values())


def test_every_header_of_the_kernel_is_listed_for_the_source_distribution() -> None:
    extensions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    listed = [path for extension in extensions for path in extension.get("depends", ())]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("runtime/**/*.h"))


def test_a_plain_install_brings_no_mlx() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [r for r in project["dependencies"] if r.split(">")[0].split("[")[0].strip() in HEAVY]
    for extra in ("metal", "cpu", "cuda"):
        assert any(r.startswith("mlx") for r in project["optional-dependencies"][extra])
