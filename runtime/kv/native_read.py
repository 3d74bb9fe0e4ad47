"""The native kernel as the block store's reader (``runtime.store.reading.Reader``)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import native_library


def reader() -> NativeReader | None:
    """The reader, or None where there is no compiled kernel."""
    return NativeReader() if native_library.available() else None


class NativeReader:
    """Reads a file of pieces into memory and takes their checksums, without the interpreter's lock."""

    def __init__(self) -> None:
        self._read = native_library.library().offbook_read

    def __call__(
        self,
        path: str,
        size: int,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        checksums: NDArray[np.uint8],
    ) -> tuple[int, int]:
        found = np.zeros(1, np.int64)
        got = self._read(
            os.fsencode(path),
            size,
            len(sizes),
            _address(addresses),
            _address(sizes),
            _address(checksums),
            _address(found),
        )
        if got < 0:
            raise OSError(-got, os.strerror(-got), path)
        return got, int(found[0])


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]
