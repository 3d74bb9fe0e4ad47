"""Files as pieces: a header and tensors, read at once into memory that is given by addresses.

Owns what a ``Reader`` is (the native kernel's, see ``runtime.kv.native_read``) and how its result is checked.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray

from .container import CorruptFile, Header, digest
from .layout import DTYPES, Array, TensorSpec

Reader = Callable[[str, int, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]], tuple[int, int]]
"""Reads a file of pieces, the interpreter's lock released: path, the file's size, addresses (0: not wanted)
and sizes of all its pieces, and room for 16 bytes of xxh3-128 of each (not of those up to ``HASHED_HERE``
bytes).

Returns bytes read and the file's true size; reads nothing if that is another. Raises OSError.
"""

HASHED_HERE = 240
"""Bytes of a piece up to which a ``Reader`` leaves the checksum to us."""


@dataclass(frozen=True, slots=True)
class Places:
    """Memory to fill, for a store with a ``Reader``: contiguous, of the layout's sizes, and not checked.

    Attributes:
        addresses: int64 [tensors], in layout order; 0 skips a tensor.
        owner: what keeps the memory alive.
    """

    addresses: NDArray[np.int64]
    owner: Any


def address(buffer: bytearray | Array) -> int:
    """Where a buffer's bytes begin."""
    array = np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytearray) else buffer
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


class Pieces:
    """The pieces of a kind of file: header, then tensors."""

    def __init__(self, header_bytes: int, tensors: Sequence[int]) -> None:
        self.sizes = np.array([header_bytes, *tensors], np.int64)
        self.file_bytes = int(self.sizes.sum())
        self._hashed_here = [i for i, size in enumerate(tensors, 1) if size <= HASHED_HERE]

    def read(
        self, reader: Reader, path: str, addresses: NDArray[np.int64], checksums: NDArray[np.uint8]
    ) -> int:
        """Read the pieces whose address is not 0; bytes read.

        Args:
            checksums: gets 16 bytes for every piece that is read, but for the header.

        Raises:
            CorruptFile: the file has another size. OSError.
        """
        nbytes, found = reader(path, self.file_bytes, addresses, self.sizes, checksums)
        if found != self.file_bytes:
            raise CorruptFile(f"{found} bytes instead of {self.file_bytes}")
        missing = int(self.sizes[addresses != 0].sum()) - nbytes
        if missing:
            raise CorruptFile(f"the file ends {missing} bytes early")
        for i in self._hashed_here:
            if addresses[i]:
                content = ctypes.string_at(int(addresses[i]), int(self.sizes[i]))
                checksums[16 * i : 16 * i + 16] = np.frombuffer(digest(content), np.uint8)
        return nbytes


class FlatLayout:
    """Where a file's tensors lie in it, one after the other. Worked out once for a file.

    Attributes:
        names: in file order. specs: by name.
        offsets: int64 [tensors + 1], where each begins behind the header, and the end.
        pieces: of the whole file.
    """

    def __init__(self, header: Header) -> None:
        self.specs: dict[str, TensorSpec] = {spec.name: spec for spec in header.tensors}
        self.names = tuple(self.specs)
        sizes = [spec.nbytes for spec in header.tensors]
        self.offsets = np.cumsum([0, *sizes])
        self.place = dict(zip(self.names, self.offsets.tolist(), strict=False))
        self.pieces = Pieces(header.size, sizes)


class Reusable:
    """Memory for files, used again when nothing refers to it any more. Thread-safe.

    Fresh memory costs a fault for every page that is written first, together longer than reading the file.
    """

    KEPT = 2
    """Pieces that are kept: as many files as are read at one time."""

    ROUND = 1 << 20
    """Pieces are multiples of this many bytes: files of one kind differ in size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[Array, ReferenceType[Array]]] = []  # the last lent first

    def take(self, nbytes: int) -> Array:
        """Uninitialised, uint8 [nbytes]; this and all views of it belong to the caller."""
        with self._lock:
            # Whether one is lent is not for its count of references to say: interpreters count differently.
            free = (
                i for i, (piece, lent) in enumerate(self._kept) if len(piece) >= nbytes and lent() is None
            )
            found = next(free, None)
            if found is None:
                piece: Array = np.empty(-(-max(1, nbytes) // self.ROUND) * self.ROUND, np.uint8)
            else:
                piece, _ = self._kept.pop(found)
            # Views refer to the first array behind them that is no view of an array: with a memoryview
            # between, to this one. It is gone when all of them are, and the piece is not.
            whole: Array = np.frombuffer(piece.data, np.uint8)
            self._kept = [(piece, ref(whole)), *self._kept[: self.KEPT - 1]]
            return whole[:nbytes]


class FlatArrays(Mapping[str, Array]):
    """A file's tensors as they lie in it; views of them are made when asked for.

    Attributes:
        data: uint8, all bytes.
    """

    def __init__(self, layout: FlatLayout, memory: Reusable) -> None:
        self.layout = layout
        self.data = memory.take(int(layout.offsets[-1]))

    def __getitem__(self, name: str) -> Array:
        spec, at = self.layout.specs[name], self.layout.place[name]
        return self.data[at : at + spec.nbytes].view(DTYPES[spec.dtype]).reshape(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)
