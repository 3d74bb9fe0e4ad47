"""The user's cache folder: where converted models and compiled helpers live, and how they get there.

Owns the atomic publication of a folder: built beside its place under a lock, renamed into it when
complete. A process that dies half-way leaves only a temporary folder, which the next build of the
same name removes. Two processes that want the same model at once build it once; the other waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from offbook.bus.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``; stages ``wait``, ``download``, ``verify``, ``convert``,
``load``. Bytes or tensors; ``total`` is 0 when unknown. Called from the thread that loads."""


def no_progress(stage: str, done: int, total: int) -> None:
    """The progress callback that does nothing."""


def cache_root() -> Path:
    """``$OFFBOOK_CACHE``, else ``offbook`` in the user's cache folder. Not created here."""
    if chosen := os.environ.get("OFFBOOK_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "offbook"


def models_dir() -> Path:
    """Where converted models are kept, one folder each."""
    return cache_root() / "models"


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse before any work if the file system of ``folder`` cannot take ``needed`` bytes.

    Raises:
        ModelError: too little space; the message says how much is needed and how to use another folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{what} needs {needed / 1e6:.0f} MB in {folder}, but only {free / 1e6:.0f} MB are free; "
            "free some space or set OFFBOOK_CACHE to a folder on a larger disk"
        )


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn a full or read-only disk inside the block into a ``ModelError`` that says so."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full"
        elif exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT):
            reason = f"it may not be written: {exc.strerror}"
        else:
            raise
        raise ModelError(
            f"{what} failed: {reason} ({exc.filename or cache_root()}); "
            "free some space or set OFFBOOK_CACHE to another folder"
        ) from exc


@contextlib.contextmanager
def lock(path: Path, progress: Progress = no_progress) -> Iterator[None]:
    """Hold an exclusive file lock; released by the system if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            progress("wait", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build_once(
    final: Path,
    is_complete: Callable[[Path], bool],
    build: Callable[[Path], None],
    progress: Progress = no_progress,
) -> Path:
    """Return the folder ``final``, building it first if it is not there or not complete.

    ``build(folder)`` fills an empty temporary folder next to ``final``; if it raises, that folder is
    removed and nothing else changes. An incomplete ``final`` is replaced.
    """
    if is_complete(final):
        return final
    with disk_errors(f"preparing {final.name}"), lock(final.parent / f".{final.name}.lock", progress):
        if is_complete(final):
            return final
        for stale in final.parent.glob(f".{final.name}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = final.parent / f".{final.name}.tmp-{os.getpid()}"
        temporary.mkdir()
        try:
            build(temporary)
            _sync(temporary)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            _sync(final.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
