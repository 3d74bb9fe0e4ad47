"""From one GGUF file to a folder that mlx-lm loads: config, weights, tokenizer.

Owns reading the file and writing the folder; ``architectures`` knows how each architecture names and
shapes things, ``gguf_tokenizer`` the vocabulary. Weights are dequantised exactly (float32 up to
``EXACT_LIMIT`` parameters) and written one tensor at a time, so memory stays at the size of the
largest tensor whatever the model.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offbook.bus.errors import ModelError
from offbook.runtime.models.architectures import Plan, plan_for
from offbook.runtime.models.cache import Progress, no_progress
from offbook.runtime.models.gguf_tokenizer import GgufVocabulary

CONVERTER_VERSION = 2
"""Part of a converted folder's name: a change of what is written makes old folders unused."""

EXACT_LIMIT = 2_000_000_000
"""Parameters up to which weights are kept as float32; above it, float16 halves a folder that would
otherwise exceed 8 GB. A block-quantised weight is scale * integer + offset with float16 factors:
float32 holds it exactly or nearly, float16 rounds it once more."""

_MANIFEST = "offbook.json"


@dataclass(frozen=True)
class GgufFile:
    """A parsed GGUF file: plain metadata and its tensors, still quantised and memory-mapped."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def parameters(self) -> int:
        return sum(math.prod(int(n) for n in tensor.shape) for tensor in self.tensors.values())


def read(path: Path) -> GgufFile:
    """Parse ``path``.

    Raises:
        ModelError: not a GGUF file, truncated, or of a version the reader does not know.
    """
    from gguf import GGUFReader

    if not path.is_file():
        raise ModelError(f"there is no GGUF file at {path}")
    with path.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as exc:
        raise ModelError(f"{path} does not parse as GGUF (truncated or damaged?): {exc}") from exc
    return GgufFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})


def folder_bytes(file: GgufFile) -> int:
    """About how many bytes ``convert`` will write."""
    width = 4 if file.parameters <= EXACT_LIMIT else 2
    return file.parameters * width + 32_000_000  # tokenizer files


def convert(path: Path, folder: Path, *, source: str, progress: Progress = no_progress) -> None:
    """Write the mlx-lm folder of the GGUF file ``path`` into the existing, empty ``folder``.

    Raises:
        ModelError: an architecture, tokenizer or tensor type that is not supported, or a damaged file.
    """
    file = read(path)
    vocabulary = GgufVocabulary(file.fields)
    factors = file.tensors.get("rope_freqs.weight")
    plan = plan_for(
        file.fields, set(file.tensors), vocabulary, None if factors is None else _dequantise(factors)
    )
    exact = file.parameters <= EXACT_LIMIT
    config = plan.config | {
        "torch_dtype": "float32" if exact else "float16",
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_ids,
    }
    vocabulary.write(folder, config["max_position_embeddings"])
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_ids},
    )
    _write_weights(file, plan, folder / "model.safetensors", exact, progress)
    sizes = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir()) if entry.is_file()}
    _write_json(folder / _MANIFEST, {"converter": CONVERTER_VERSION, "source": source, "sizes": sizes})


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` is a finished conversion: every file there, of the size it was written with."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes: dict[str, int] = manifest["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _write_weights(file: GgufFile, plan: Plan, path: Path, exact: bool, progress: Progress) -> None:
    """Write a safetensors file tensor by tensor: the header needs only the shapes, known beforehand."""
    dtype: npt.DTypeLike = np.float32 if exact else np.float16
    width = 4 if exact else 2
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, source in plan.tensors.items():
        tensor = file.tensors[source.name]
        shape = [int(n) for n in reversed(tensor.shape)]  # GGUF lists the fastest axis first
        size = math.prod(shape) * width
        header[name] = {
            "dtype": "F32" if exact else "F16",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for done, source in enumerate(plan.tensors.values()):
            progress("convert", done, len(plan.tensors))
            values = source.transform(_dequantise(file.tensors[source.name]))
            out.write(np.ascontiguousarray(values, dtype=dtype).data)
        out.flush()
        os.fsync(out.fileno())
    progress("convert", len(plan.tensors), len(plan.tensors))


def _dequantise(tensor: Any) -> npt.NDArray[np.float32]:
    """The tensor as float32, slowest axis first."""
    from gguf import GGMLQuantizationType, quants

    try:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as exc:
        kind = GGMLQuantizationType(tensor.tensor_type).name
        raise ModelError(f"tensor {tensor.name!r} has the type {kind}, which cannot be dequantised") from exc
    shape = tuple(int(n) for n in reversed(tensor.shape))
    return np.asarray(values, dtype=np.float32).reshape(shape)
