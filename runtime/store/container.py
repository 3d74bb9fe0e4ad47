"""The one file container: a safetensors file that can prove its own contents.

The header's metadata starts with ``seal``, an xxh3-128 of the whole header (with the seal's own digits
as zeros), and ``checksums``, the xxh3-128 of each tensor's bytes in file order. The seal covers the
checksums and the checksums cover the data, so every byte of the file is covered, and a catalog needs to
remember 16 bytes per file. Both fields sit at fixed places, so a hot read parses no JSON. FORMAT.md has
the bytes.
"""

from __future__ import annotations

import json
import os
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from .layout import Array, TensorSpec

SEAL_AT = 8 + len('{"__metadata__":{"seal":"')
SEAL_DIGITS = 32
CHECKSUMS_AT = SEAL_AT + SEAL_DIGITS + len('","checksums":"')
ALIGN = 64
"""The data start at a multiple of this, so a mapped file has aligned tensors."""
MAX_HEADER = 64 << 20
IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 1024)

_ZEROS = b"0" * SEAL_DIGITS


class CorruptFile(Exception):
    """The file is not what it claims to be; the message says in what way."""


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed and proven header. ``size`` counts the 8 length bytes; tensors are in file order."""

    metadata: dict[str, str]
    tensors: tuple[TensorSpec, ...]
    checksums: bytes
    seal: bytes
    size: int

    @property
    def file_bytes(self) -> int:
        return self.size + sum(spec.nbytes for spec in self.tensors)


digest: Callable[[Any], bytes] = xxhash.xxh3_128_digest
"""xxh3-128 of any contiguous buffer, 16 bytes."""


def digests(arrays: Sequence[Array]) -> bytes:
    """The checksums of arrays, one after the other."""
    one = digest
    return b"".join([one(array) for array in arrays])


def compare(
    tensors: Sequence[TensorSpec], got: bytes, want: bytes, which: Sequence[Any] | None = None
) -> None:
    """Raise CorruptFile if checksums (of those tensors for which ``which`` is true) differ."""
    if got == want:
        return
    bad = [
        spec.name
        for i, spec in enumerate(tensors)
        if (which is None or which[i]) and got[16 * i : 16 * i + 16] != want[16 * i : 16 * i + 16]
    ]
    if bad:
        raise CorruptFile(f"checksum of {', '.join(bad[:3])} differs")


def tensor_table(specs: Sequence[TensorSpec]) -> bytes:
    """The part of the header's JSON that lists the tensors, from the comma to the closing brace."""
    table: dict[str, Any] = {}
    at = 0
    for spec in specs:
        if spec.name in table:
            raise ValueError(f"two tensors are named {spec.name!r}")
        end = at + spec.nbytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    return b"," + text[1:] if table else b"}"


def make_header(metadata: dict[str, str], table: bytes, checksums: bytes) -> bytearray:
    """A sealed header, its 8 length bytes first. ``seal`` and ``checksums`` come before ``metadata``."""
    fields = {"seal": _ZEROS.decode(), "checksums": b2a_base64(checksums, newline=False).decode(), **metadata}
    text = b'{"__metadata__":' + json.dumps(fields, separators=(",", ":")).encode() + table
    text += b" " * (-(8 + len(text)) % ALIGN)
    header = bytearray(len(text).to_bytes(8, "little") + text)
    header[SEAL_AT : SEAL_AT + SEAL_DIGITS] = seal_of(header).hex().encode()
    return header


def seal_of(header: bytearray | bytes) -> bytes:
    """The seal this header ought to carry, 16 bytes."""
    view = memoryview(header)
    state = xxhash.xxh3_128(view[:SEAL_AT])
    state.update(_ZEROS)
    state.update(view[SEAL_AT + SEAL_DIGITS :])
    return state.digest()


def read_seal(header: bytearray | bytes) -> bytes | None:
    """The seal a header carries, None if those are no lower-case hex digits."""
    text = bytes(header[SEAL_AT : SEAL_AT + SEAL_DIGITS])
    try:
        seal = bytes.fromhex(text.decode())
    except ValueError:
        return None
    return seal if seal.hex().encode() == text else None


def checksums_text_length(tensors: int) -> int:
    """Length in the header of the checksums of so many tensors."""
    return (16 * tensors + 2) // 3 * 4


def parse_header(raw: bytes | bytearray) -> Header:
    """Prove and parse a whole header. CorruptFile says what is wrong with it."""
    try:
        if int.from_bytes(raw[:8], "little") != len(raw) - 8:
            raise CorruptFile("the header's length does not agree with the file")
        seal = seal_of(raw)
        if raw[SEAL_AT : SEAL_AT + SEAL_DIGITS] != seal.hex().encode():
            raise CorruptFile("the header does not match its seal")
        table = json.loads(bytes(raw[8:]))
        metadata = table.pop("__metadata__")
        specs: list[TensorSpec] = []
        at = 0
        for name, entry in table.items():
            spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
            if entry["data_offsets"] != [at, at + spec.nbytes]:
                raise CorruptFile(f"tensor {name!r} is not where its shape puts it")
            at += spec.nbytes
            specs.append(spec)
        checksums = a2b_base64(metadata["checksums"])
        if len(checksums) != 16 * len(specs):
            raise CorruptFile("the number of checksums differs from the number of tensors")
    except CorruptFile:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, Base64Error) as error:
        raise CorruptFile(f"the header cannot be read: {error}") from None
    return Header(metadata, tuple(specs), checksums, seal, len(raw))


def read_header(fd: int, at: int = 0, size: int | None = None) -> Header:
    """Read and prove the header of an open file, and that the file has the size it says.

    ``at`` and ``size``: where it lies in a larger file. Raises CorruptFile, OSError.
    """
    os.lseek(fd, at, os.SEEK_SET)
    size = os.fstat(fd).st_size if size is None else size
    length = int.from_bytes(os.read(fd, 8), "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise CorruptFile(f"no header: {size} bytes, header length {length}")
    raw = bytearray(8 + length)
    os.lseek(fd, at, os.SEEK_SET)
    read_into(fd, [raw])
    header = parse_header(raw)
    if header.file_bytes != size:
        raise CorruptFile(f"{size} bytes instead of {header.file_bytes}")
    return header


def read_into(fd: int, buffers: Sequence[Any]) -> None:
    """Fill buffers, in order, from the file's position. CorruptFile if the file ends first."""
    for start in range(0, len(buffers), IOV_MAX):
        part = buffers[start : start + IOV_MAX]
        want = sum(_nbytes(buffer) for buffer in part)
        got = os.readv(fd, part)
        while got < want:
            rest = _after(part, got)
            more = os.readv(fd, rest[:IOV_MAX])
            if more == 0:
                raise CorruptFile(f"the file ends {want - got} bytes early")
            got += more


def write_from(fd: int, buffers: Sequence[Any]) -> None:
    """Write buffers, in order, at the file's position; copies nothing."""
    for start in range(0, len(buffers), IOV_MAX):
        part = buffers[start : start + IOV_MAX]
        want = sum(_nbytes(buffer) for buffer in part)
        done = os.writev(fd, part)
        while done < want:
            done += os.writev(fd, _after(part, done)[:IOV_MAX])


def _nbytes(buffer: Any) -> int:
    return buffer.nbytes if isinstance(buffer, np.ndarray) else memoryview(buffer).nbytes


def _after(buffers: Sequence[Any], done: int) -> list[memoryview]:
    """What is left of buffers after their first ``done`` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes > done:
            rest.append(view.cast("B")[done:])
        done = max(0, done - view.nbytes)
    return rest


def read_arrays(fd: int, header: Header, at: int = 0) -> dict[str, Array]:
    """Read all tensors of an open file (which begins at ``at``) into new arrays and verify them."""
    arrays = [spec.empty() for spec in header.tensors]
    os.lseek(fd, at + header.size, os.SEEK_SET)
    read_into(fd, [array for array in arrays if array.nbytes])
    compare(header.tensors, digests(arrays), header.checksums)
    return {spec.name: array for spec, array in zip(header.tensors, arrays, strict=True)}
