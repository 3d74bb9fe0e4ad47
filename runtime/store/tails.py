"""Tail files: what an agent needs beside its sealed blocks, one file per remembered turn.

A tail belongs to (fingerprint, salt, agent id) and is named by their hash and its token count. Unlike a
block it is found by an agent's name, so it carries the chain hash of all its token ids: the caller
compares that with its transcript and so still decides on token ids alone.
"""

from __future__ import annotations

import json
import os
import threading
from binascii import a2b_base64, b2a_base64
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from . import container
from .container import CorruptFile, Header
from .hashing import HASH_BYTES, chain_at, ids_bytes
from .layout import OPENING, Array, Tail, TensorSpec
from .reading import FlatArrays, FlatLayout, Reader, Reusable, address
from .results import StoreUsageError

FORMAT = "offbook-tail-1"


def agent_key(fingerprint: str, salt: str, agent: str) -> bytes:
    """The 16-byte name on disk of one agent's memory under one model and salt."""
    digest = sha256(b"offbook agent 1\0")
    for part in (fingerprint, salt, agent):
        try:
            raw = part.encode()
        except UnicodeEncodeError:
            raise StoreUsageError(f"{part!r} is not proper text and cannot name an agent") from None
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()[:HASH_BYTES]


@dataclass(frozen=True, slots=True)
class TailFacts:
    """What a tail file says of itself, beside its arrays. ``serial`` orders the tails of one agent."""

    fingerprint: str
    salt: str
    agent: str
    tokens: int
    chain: bytes
    blocks: bytes
    serial: int
    note: dict[str, Any]
    header: Header

    @property
    def opening(self) -> bytes:
        """The last of its ids, little-endian, that are no part of the agent's transcript. CorruptFile."""
        try:
            return ids_bytes(self.note.get(OPENING, ()))
        except (ValueError, TypeError, AttributeError):
            raise CorruptFile(f"its note's {OPENING} is no list of token ids") from None

    def follows(self, ids: bytes, root: bytes) -> int | None:
        """How many ids of a transcript it stands for; None if it is of another one. CorruptFile."""
        opening = self.opening
        tokens = self.tokens - len(opening) // 4
        fits = 0 <= tokens * 4 <= len(ids) and chain_at(ids[: tokens * 4] + opening, root) == self.chain
        return tokens if fits else None


def check_tail(tail: Tail) -> None:
    """StoreUsageError if this record could not be stored."""
    if tail.tokens < 0 or len(tail.chain) != HASH_BYTES:
        raise StoreUsageError(
            f"a tail has a token count and a {HASH_BYTES}-byte chain; got {tail.tokens}, {tail.chain!r}"
        )
    if any(len(name) != HASH_BYTES for name in tail.blocks):
        raise StoreUsageError("a tail lists blocks by their 16-byte names")
    for name, array in tail.arrays.items():
        try:
            TensorSpec.of(name, array)
        except ValueError as error:
            raise StoreUsageError(str(error)) from None


def encode_tail(
    fingerprint: str, salt: str, agent: str, tail: Tail, serial: int
) -> tuple[bytearray, list[Array], TailFacts]:
    """The sealed header and the arrays (contiguous, in file order) of a tail file, and what it says."""
    arrays = [np.ascontiguousarray(array) for array in tail.arrays.values()]
    checksums = container.digests(arrays)
    raw, fields, specs = _tail_header(fingerprint, salt, agent, tail, serial, checksums)
    header = Header(fields, tuple(specs), checksums, container.seal_of(raw), len(raw))
    blocks, note = b"".join(tail.blocks), dict(tail.note)
    facts = TailFacts(fingerprint, salt, agent, tail.tokens, tail.chain, blocks, serial, note, header)
    return raw, arrays, facts


def _tail_header(
    fingerprint: str, salt: str, agent: str, tail: Tail, serial: int, checksums: bytes
) -> tuple[bytearray, dict[str, str], list[TensorSpec]]:
    fields = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "salt": salt,
        "agent": agent,
        "tokens": str(tail.tokens),
        "chain": tail.chain.hex(),
        "serial": str(serial),
        "blocks": b2a_base64(b"".join(tail.blocks), newline=False).decode(),
        "note": json.dumps(dict(tail.note), separators=(",", ":")),
    }
    specs = [TensorSpec.of(name, array) for name, array in tail.arrays.items()]
    return container.make_header(fields, container.tensor_table(specs), checksums), fields, specs


def tail_bytes(fingerprint: str, salt: str, agent: str, tail: Tail, serial: int) -> int:
    """The size of the file ``encode_tail`` would make, without reading the arrays."""
    raw, _, _ = _tail_header(fingerprint, salt, agent, tail, serial, bytes(16 * len(tail.arrays)))
    return len(raw) + sum(array.nbytes for array in tail.arrays.values())


def tail_facts(header: Header, key: bytes, tokens: int, serial: int) -> TailFacts:
    """Prove that a header belongs to the tail of this key, token count and serial. CorruptFile if not."""
    fields = header.metadata
    try:
        if fields["format"] != FORMAT:
            raise CorruptFile(f"format {fields['format']!r} is not {FORMAT!r}")
        facts = TailFacts(
            fingerprint=fields["fingerprint"],
            salt=fields["salt"],
            agent=fields["agent"],
            tokens=int(fields["tokens"]),
            chain=bytes.fromhex(fields["chain"]),
            blocks=a2b_base64(fields["blocks"]),
            serial=int(fields["serial"]),
            note=json.loads(fields["note"]),
            header=header,
        )
        named = (agent_key(facts.fingerprint, facts.salt, facts.agent), facts.tokens, facts.serial)
        if named != (key, tokens, serial):
            raise CorruptFile("the file belongs to another agent or turn")
        if len(facts.chain) != HASH_BYTES or len(facts.blocks) % HASH_BYTES:
            raise CorruptFile("a hash has the wrong length")
    except (KeyError, ValueError) as error:
        raise CorruptFile(f"metadata cannot be read: {error!r}") from None
    return facts


def inspect_tail(path: str, key: bytes, tokens: int, serial: int) -> TailFacts:
    """Prove a tail file's header, name and size; reads no arrays. Raises CorruptFile, OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return tail_facts(container.read_header(fd), key, tokens, serial)
    finally:
        os.close(fd)


class KnownTails:
    """Facts and layouts of tails lately written or read, by their headers' seals. Thread-safe.

    Working them out takes as long as reading the file.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._known: OrderedDict[bytes, tuple[TailFacts, FlatLayout]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, facts: TailFacts) -> tuple[TailFacts, FlatLayout]:
        entry = facts, FlatLayout(facts.header)
        with self._lock:
            self._known[facts.header.seal] = entry
            self._known.move_to_end(facts.header.seal)
            while len(self._known) > self._limit:
                self._known.popitem(last=False)
        return entry

    def get(self, seal: bytes) -> tuple[TailFacts, FlatLayout] | None:
        with self._lock:
            return self._known.get(seal)


def read_tail(
    path: str,
    key: bytes,
    tokens: int,
    serial: int,
    seal: bytes,
    known: KnownTails,
    reader: Reader | None,
    memory: Reusable,
) -> Tail:
    """Read and verify a tail file into ``memory``. ``seal``: what the index remembers.

    Raises:
        CorruptFile, OSError.
    """
    entry = known.get(seal)
    if entry is None:
        facts = inspect_tail(path, key, tokens, serial)
        if facts.header.seal != seal:
            raise CorruptFile("the header does not match the catalog's seal")
        entry = known.add(facts)
    facts, layout = entry
    header = facts.header
    raw, arrays = bytearray(header.size), FlatArrays(layout, memory)
    if reader is not None:
        addresses = np.empty(len(layout.offsets), np.int64)
        addresses[0], addresses[1:] = address(raw), address(arrays.data) + layout.offsets[:-1]
        checksums = np.zeros(16 * len(addresses), np.uint8)
        layout.pieces.read(reader, path, addresses, checksums)
        got = checksums[16:].tobytes()
    else:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (size := os.fstat(fd).st_size) != header.file_bytes:
                raise CorruptFile(f"{size} bytes instead of {header.file_bytes}")
            container.read_into(fd, [raw, arrays.data])
        finally:
            os.close(fd)
        got = container.digests(list(arrays.values()))
    if container.seal_of(raw) != seal or container.read_seal(raw) != seal:
        raise CorruptFile("the header does not match the catalog's seal")
    container.compare(header.tensors, got, header.checksums)
    return Tail(facts.tokens, facts.chain, split_names(facts.blocks), arrays, facts.note)


def split_names(packed: bytes) -> Sequence[bytes]:
    """Names of blocks from their concatenation."""
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
