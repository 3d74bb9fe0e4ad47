"""What a model is, as one short hex string: cached keys and values are only good for the same one.

Owns the fingerprint. Two folders with equal fingerprints compute the same attention state from the
same text. It covers the weights, the tokenizer's files, the chat template, the configuration, the
scheme by which keys and values are stored, and the format version. A name is not part of it, so a
model that was replaced under its old name is another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

FORMAT_VERSION = 1
"""Raised when the meaning of stored blocks changes: every older block then becomes a miss."""

WHOLE_LIMIT = 64 << 20
"""Weight files up to this size are hashed whole; of larger ones, ``_SAMPLES`` evenly spread pieces."""

_SAMPLES = 256
_SAMPLE_BYTES = 64 << 10
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Notes of tools, in no way part of the computation.
_IGNORED_CONFIG = {"_name_or_path", "transformers_version", "use_cache"}


def fingerprint(
    path: Path,
    *,
    config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    dtype: str = "",
    kv_scheme: str = "",
) -> str:
    """The fingerprint of the mlx-lm folder ``path``: 32 hex digits.

    Args:
        config: the effective configuration; ``config.json`` when None.
        chat_template: the effective template, when it is not only what the tokenizer's files say.
        dtype: what the weights are computed with (``float32`` on the CPU).
        kv_scheme: the text of the scheme that stores keys and values.
    """
    state = xxhash.xxh3_128()

    def add(label: str, value: bytes) -> None:
        state.update(f"{label}:{len(value)}:".encode())
        state.update(value)

    add("format", str(FORMAT_VERSION).encode())
    if config is None:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    used = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG}
    add("config", json.dumps(used, sort_keys=True, default=str).encode())
    for name in _TOKENIZER_FILES:
        if (path / name).is_file():
            add(name, (path / name).read_bytes())
    add("template", (chat_template or "").encode())
    for weights in sorted(path.glob("*.safetensors")):
        add(weights.name, sampled_hash(weights).encode())
    add("dtype", dtype.encode())
    return combine(state.hexdigest(), kv_scheme)


def combine(model: str, kv_scheme: str) -> str:
    """The fingerprint of ``model`` (a fingerprint without a scheme) together with a KV scheme."""
    if not kv_scheme:
        return model
    return xxhash.xxh3_128(f"{model}:{kv_scheme}".encode()).hexdigest()


def sampled_hash(path: Path) -> str:
    """Hash of a file: its size, its first megabyte (a safetensors header), and all or samples of the rest.

    A rewritten weight file with the same shapes differs nearly everywhere, so evenly spread samples see
    it; a change of a few bytes inside a large file may go unseen between two samples.
    """
    size = path.stat().st_size
    state = xxhash.xxh3_128(str(size).encode())
    with path.open("rb") as handle:
        if size <= WHOLE_LIMIT:
            while chunk := handle.read(1 << 20):
                state.update(chunk)
            return state.hexdigest()
        header = int.from_bytes(handle.read(8), "little")
        handle.seek(0)
        state.update(handle.read(8 + header if header < (64 << 20) else 1 << 20))
        for index in range(_SAMPLES):
            handle.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            state.update(handle.read(_SAMPLE_BYTES))
    return state.hexdigest()
