"""The documents: their links lead somewhere, their Python runs, and they speak of what there is."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "bus/*.md", "runtime/**/*.md", "examples/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_paths_in_code_font_exist(name: str) -> None:
    for path in re.findall(
        r"`((?:bus|actors|runtime|tests|examples|benchmarks)/[\w./-]*)`", (ROOT / name).read_text()
    ):
        assert (ROOT / path).exists(), path


def test_the_readme_example_is_python_with_names_that_exist() -> None:
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    example = example.replace("\nanyio.run(main)\n", "\n")
    names: dict[str, object] = {}
    exec(compile(ast.parse(example), "README.md", "exec"), names)
    assert {"Villager", "Heard", "Ask", "main"} <= set(names)


def test_the_readme_names_every_extra_and_make_target_it_uses() -> None:
    text = (ROOT / "README.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[(\w+)\]", text)) <= set(extras)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.M)) <= targets
