"""Block files: one sealed 256-token block each, written once, proven at every read.

``BlockFormat`` knows the one header size and file size that all blocks of a (fingerprint, layout) have,
so that writing is one ``writev`` from the caller's arrays and reading is one ``readv`` into them.
"""

from __future__ import annotations

import os
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import container
from .container import CHECKSUMS_AT, CorruptFile, Header, digest
from .hashing import BLOCK_ID_BYTES, HASH_BYTES, TokenIds, block_hash, ids_bytes
from .layout import Array, TensorSpec
from .reading import Pieces, Places, Reader, address
from .results import StoreUsageError

FORMAT = "offbook-block-1"


Destinations = Mapping[str, Array] | Sequence[Array | None] | Places
"""Arrays to fill: by tensor name (those not named are not read), or in layout order with None to skip."""

Ordered = list[Array | None] | Places


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What a block file says of itself, proven against its name."""

    name: bytes
    fingerprint: str
    parent: bytes
    ids: bytes
    header: Header


def check_block_header(header: Header, name: bytes) -> BlockInfo:
    """Prove that a header belongs to a block of this name. CorruptFile says what is wrong."""
    fields = header.metadata
    try:
        if fields["format"] != FORMAT:
            raise CorruptFile(f"format {fields['format']!r} is not {FORMAT!r}")
        parent, ids = bytes.fromhex(fields["parent"]), a2b_base64(fields["ids"])
        if fields["block"] != name.hex():
            raise CorruptFile(f"the file says it is block {fields['block']}")
        if len(parent) != HASH_BYTES or len(ids) != BLOCK_ID_BYTES or block_hash(parent, ids) != name:
            raise CorruptFile("parent and token ids do not give the block's name")
        return BlockInfo(name, fields["fingerprint"], parent, ids, header)
    except (KeyError, ValueError) as error:
        raise CorruptFile(f"metadata cannot be read: {error!r}") from None


def inspect_block(path: str, name: bytes) -> BlockInfo:
    """Prove a block file's header, name and size, whatever model it belongs to; reads no tensor data.

    Raises CorruptFile, or OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return check_block_header(container.read_header(fd), name)
    finally:
        os.close(fd)


class Scratch:
    """One thread's memory for reading blocks of one format."""

    def __init__(self, fmt: BlockFormat) -> None:
        pieces = 1 + len(fmt.layout)
        self.header = bytearray(fmt.header_bytes)
        self.addresses = np.zeros(pieces, np.int64)
        self.addresses[0] = address(self.header)
        self.checksums = np.zeros(16 * pieces, np.uint8)


class BlockFormat:
    """Writes and reads blocks of one fingerprint and layout. Thread-safe: holds no changing state."""

    def __init__(self, fingerprint: str, layout: Sequence[TensorSpec], reader: Reader | None = None) -> None:
        if not layout or any(spec.nbytes == 0 for spec in layout):
            raise StoreUsageError("a block's layout needs at least one tensor, and no empty ones")
        self.fingerprint, self.reader = fingerprint, reader
        self.layout = tuple(layout)
        self.sizes = tuple(spec.nbytes for spec in self.layout)
        self.data_bytes = sum(self.sizes)
        try:
            self._table = container.tensor_table(self.layout)
        except ValueError as error:
            raise StoreUsageError(str(error)) from None
        blank = self._header(
            bytes(HASH_BYTES), bytes(HASH_BYTES), bytes(BLOCK_ID_BYTES), bytes(16 * len(layout))
        )
        self.header_bytes = len(blank)
        self.file_bytes = self.header_bytes + self.data_bytes
        self._pieces = Pieces(self.header_bytes, self.sizes)
        self._checksums_end = CHECKSUMS_AT + container.checksums_text_length(len(self.layout))

    def _header(self, name: bytes, parent: bytes, ids: bytes, checksums: bytes) -> bytearray:
        fields = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "block": name.hex(),
            "parent": parent.hex(),
            "ids": b2a_base64(ids, newline=False).decode(),
        }
        return container.make_header(fields, self._table, checksums)

    def arrange(self, arrays: Mapping[str, Array] | Sequence[Array]) -> list[Array]:
        """A block's arrays in file order, checked. StoreUsageError names the one that does not fit."""
        ordered = self._order(arrays)
        for spec, array in zip(self.layout, ordered, strict=True):
            if array is None:
                raise StoreUsageError(f"a block to be written lacks {spec.name!r}")
        return ordered  # type: ignore[return-value]  # no None is left, as just checked

    def destinations(self, dests: Destinations) -> Ordered:
        """Destinations in file order, checked, None for what is not wanted."""
        if isinstance(dests, Places):
            if self.reader is None or dests.addresses.shape != (len(self.layout),):
                raise StoreUsageError(f"{len(dests.addresses)} places for {len(self.layout)} tensors")
            return dests
        ordered = self._order(dests)
        for spec, array in zip(self.layout, ordered, strict=True):
            if array is not None and not array.flags.writeable:
                raise StoreUsageError(f"the destination for {spec.name!r} cannot be written")
        return ordered

    def _order(self, arrays: Mapping[str, Array] | Sequence[Array | None]) -> list[Array | None]:
        if isinstance(arrays, Mapping):
            ordered: list[Array | None] = [arrays.get(spec.name) for spec in self.layout]
            if len(arrays) != sum(array is not None for array in ordered):
                strange = sorted(set(arrays) - {spec.name for spec in self.layout})
                raise StoreUsageError(f"not in the layout: {', '.join(strange[:3])}")
        else:
            ordered = list(arrays)
            if len(ordered) != len(self.layout):
                raise StoreUsageError(
                    f"{len(ordered)} arrays for the {len(self.layout)} tensors of the layout"
                )
        for size, array in zip(self.sizes, ordered, strict=True):
            if array is not None and (array.nbytes != size or not array.flags.c_contiguous):
                spec = next(s for s, a in zip(self.layout, ordered, strict=True) if a is array)
                raise StoreUsageError(
                    f"{spec.name!r} is {spec.dtype} {list(spec.shape)}, {size} contiguous bytes; "
                    f"got {array.dtype} {list(array.shape)}, {array.nbytes} bytes"
                )
        return ordered

    def encode(self, name: bytes, parent: bytes, ids: TokenIds, arrays: Sequence[Array]) -> bytearray:
        """The sealed header of a block of these arrays: header then arrays is the file."""
        return self._header(name, parent, ids_bytes(ids), container.digests(arrays))

    def read(self, path: str, seal: bytes, dests: Ordered, scratch: Scratch) -> int:
        """Read and verify the wanted tensors of a block straight into their destinations.

        Args:
            path: the file.
            seal: the seal the index remembers for it.
            dests: as from ``destinations``.
            scratch: of this format; overwritten.

        Returns: bytes read. Raises: CorruptFile, OSError; destinations then hold garbage.
        """
        if isinstance(dests, Places):
            wanted = dests.addresses != 0
            nbytes, got = self._read_at_once(path, dests, scratch)
        else:
            wanted = np.array([dest is not None for dest in dests])
            nbytes = self._read_pieces(path, dests, scratch.header)
            got = b"".join([bytes(16) if dest is None else digest(dest) for dest in dests])
        if container.seal_of(scratch.header) != seal or container.read_seal(scratch.header) != seal:
            raise CorruptFile("the header does not match the catalog's seal")
        want = a2b_base64(scratch.header[CHECKSUMS_AT : self._checksums_end])
        container.compare(self.layout, got, want, wanted)
        return nbytes

    def _read_at_once(self, path: str, places: Places, scratch: Scratch) -> tuple[int, bytes]:
        """With the ``Reader``: bytes read, and the checksums of all tensors that are wanted."""
        assert self.reader is not None
        scratch.addresses[1:] = places.addresses
        nbytes = self._pieces.read(self.reader, path, scratch.addresses, scratch.checksums)
        return nbytes, scratch.checksums[16:].tobytes()

    def _read_pieces(self, path: str, dests: Sequence[Array | None], header: bytearray) -> int:
        runs: list[tuple[int, list[Any]]] = [(0, [header])]
        at, end = self.header_bytes, self.header_bytes
        for size, dest in zip(self.sizes, dests, strict=True):
            if dest is not None:
                if end != at:
                    runs.append((at, []))
                runs[-1][1].append(dest)
                end = at + size
            at += size
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size != self.file_bytes:
                raise CorruptFile(f"{size} bytes instead of {self.file_bytes}")
            for offset, buffers in runs:
                if offset:
                    os.lseek(fd, offset, os.SEEK_SET)
                container.read_into(fd, buffers)
        finally:
            os.close(fd)
        return sum(len(buffer) if buffer is header else buffer.nbytes for _, part in runs for buffer in part)
