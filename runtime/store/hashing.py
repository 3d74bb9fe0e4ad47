"""Names of blocks: a hash chain over (fingerprint, salt, token ids).

A block's name says everything its bytes depend on: the model and scheme (fingerprint), the tenant
(salt), and all token ids from the first to the block's last. Equal names therefore mean equal contents,
whoever computed them, and nothing is ever looked up by an agent's or a model's name alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .layout import BLOCK_TOKENS

HASH_BYTES = 16
BLOCK_ID_BYTES = BLOCK_TOKENS * 4

TokenIds: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any] | Sequence[int]"
"""Token ids: little-endian uint32 bytes, an integer array, or a sequence of integers."""


def ids_bytes(ids: TokenIds) -> bytes:
    """Token ids as little-endian uint32 bytes. ValueError if they are no such thing."""
    if isinstance(ids, bytes | bytearray | memoryview):
        raw = bytes(ids)
        if len(raw) % 4:
            raise ValueError(f"token ids are 4 bytes each; got {len(raw)} bytes")
        return raw
    array = np.asarray(ids)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids are one row of integers; got {array.dtype} of shape {array.shape}")
    if array.dtype != np.uint32 and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise ValueError("token ids must fit 32 bits without sign")
    return array.astype("<u4", copy=False).tobytes()


def root_hash(fingerprint: str, salt: str = "") -> bytes:
    """Where the chain of one model and one tenant starts. 16 bytes."""
    digest = sha256(b"offbook kv root 1\0")
    for part in (fingerprint.encode(), salt.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()[:HASH_BYTES]


def block_hash(parent: bytes, ids: TokenIds) -> bytes:
    """The 16-byte name of the block of 256 ``ids`` that follows ``parent``: a block's name, or the root."""
    raw = ids_bytes(ids)
    if len(parent) != HASH_BYTES or len(raw) != BLOCK_ID_BYTES:
        raise ValueError(
            f"a block is named by a {HASH_BYTES}-byte parent and {BLOCK_TOKENS} ids; "
            f"got {len(parent)} bytes and {len(raw) // 4} ids"
        )
    return sha256(parent + raw).digest()[:HASH_BYTES]


def chain(ids: TokenIds, root: bytes) -> list[bytes]:
    """The names of all full blocks of ``ids``, oldest first."""
    raw = ids_bytes(ids)
    names: list[bytes] = []
    for start in range(0, len(raw) - BLOCK_ID_BYTES + 1, BLOCK_ID_BYTES):
        root = sha256(root + raw[start : start + BLOCK_ID_BYTES]).digest()[:HASH_BYTES]
        names.append(root)
    return names


def chain_at(ids: TokenIds, root: bytes) -> bytes:
    """One hash of *all* ``ids``, the part-filled last block included. Tells whether a tail fits. 16 bytes."""
    raw = ids_bytes(ids)
    names = chain(raw, root)
    rest = raw[len(names) * BLOCK_ID_BYTES :]
    # The tag keeps an end apart from a block: no list of ids can make the two collide.
    return sha256(b"end\0" + (names[-1] if names else root) + rest).digest()[:HASH_BYTES]
