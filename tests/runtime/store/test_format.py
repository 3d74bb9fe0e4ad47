"""FORMAT.md is exact: other programs read the files, and every byte of them is covered."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import xxhash

from offbook.runtime.store import StoreUsageError, block_hash, chain, chain_at, root_hash


def read_as_documented(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """A reader written from FORMAT.md alone."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert (8 + length) % 64 == 0
    assert raw[8:33] == b'{"__metadata__":{"seal":"'
    assert raw[33:65].decode() == metadata["seal"]
    assert raw[80:].startswith(metadata["checksums"].encode())
    zeroed = raw[:33] + b"0" * 32 + raw[65 : 8 + length]
    assert xxhash.xxh3_128_digest(zeroed).hex() == metadata["seal"]
    checksums = base64.b64decode(metadata["checksums"])
    tensors = {}
    end = 0
    for i, (name, entry) in enumerate(header.items()):
        start, stop = entry["data_offsets"]
        assert start == end
        end = stop
        tensors[name] = raw[8 + length + start : 8 + length + stop]
        assert xxhash.xxh3_128_digest(tensors[name]) == checksums[16 * i : 16 * i + 16]
    assert 8 + length + end == len(raw)
    return metadata, tensors


def test_a_block_is_read_by_the_documented_rules(kit, open_store, block_files):
    store = open_store()
    ids = kit.ids("ann", 512)
    kit.save(store, "ann", 512)
    names = store.chain(ids)
    assert sorted(names) == sorted(bytes.fromhex(path.stem) for path in block_files())
    for path in block_files():
        assert path.parent.name == path.stem[:2]
        metadata, tensors = read_as_documented(path)
        assert metadata["format"] == "offbook-block-1"
        assert metadata["fingerprint"] == kit.fingerprint
        parent, raw_ids = bytes.fromhex(metadata["parent"]), base64.b64decode(metadata["ids"])
        assert hashlib.sha256(parent + raw_ids).digest()[:16].hex() == path.stem == metadata["block"]
        at = names.index(bytes.fromhex(path.stem))
        assert raw_ids == ids[at * 256 : at * 256 + 256].astype("<u4").tobytes()
        assert parent == (names[at - 1] if at else store.root_hash())
        want = kit.contents(names[at])
        assert list(tensors) == [spec.name for spec in kit.layout]
        assert list(tensors.values()) == [array.tobytes() for array in want]


def test_a_block_is_read_by_the_safetensors_library(kit, open_store, block_files):
    store = open_store()
    kit.save(store, "ann", 256)
    (path,) = block_files()
    want = dict(zip([s.name for s in kit.layout], kit.contents(bytes.fromhex(path.stem)), strict=True))
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["format"] == "offbook-block-1"
        assert set(file.keys()) == set(want)
        packed = file.get_tensor("layers.1.k.packed")
        assert packed.dtype == np.uint32
        assert np.array_equal(packed, want["layers.1.k.packed"])
        assert file.get_slice("layers.0.k.scales").get_dtype() == "BF16"
    for name, entry in safetensors.deserialize(path.read_bytes()):
        spec = next(spec for spec in kit.layout if spec.name == name)
        assert (entry["dtype"], tuple(entry["shape"])) == (spec.dtype, spec.shape)
        assert bytes(entry["data"]) == want[name].tobytes()


def test_a_tail_is_read_by_the_documented_rules_and_the_library(kit, open_store, tail_files):
    store = open_store()
    ids = kit.ids("ann", 600)
    kit.save(store, "ann", 600, salt="s")
    (path,) = tail_files()
    metadata, tensors = read_as_documented(path)
    key = hashlib.sha256(b"offbook agent 1\0")
    for part in (kit.fingerprint, "s", "ann"):
        key.update(struct.pack("<Q", len(part.encode())) + part.encode())
    name, tokens, serial = path.stem.split("-")
    assert name == key.digest()[:16].hex()
    assert int(tokens) == int(metadata["tokens"]) == 600
    assert int(serial, 16) == int(metadata["serial"])
    assert metadata["chain"] == store.chain_at(ids, "s").hex()
    assert base64.b64decode(metadata["blocks"]) == b"".join(store.chain(ids, "s"))
    assert json.loads(metadata["note"]) == {"pages": 3}
    want = kit.tail(store, ids, "s").arrays
    assert {n: a.tobytes() for n, a in want.items()} == tensors
    with safetensors.safe_open(path, framework="numpy") as file:
        assert np.array_equal(file.get_tensor("state.0"), want["state.0"], equal_nan=True)


def test_names_are_what_the_format_says():
    def documented_root(fingerprint: str, salt: str) -> bytes:
        parts = (struct.pack("<Q", len(p.encode())) + p.encode() for p in (fingerprint, salt))
        return hashlib.sha256(b"offbook kv root 1\0" + b"".join(parts)).digest()[:16]

    ids = np.arange(600, dtype=np.uint32)
    root = root_hash("model", "täg")
    assert root == documented_root("model", "täg")
    assert root_hash("ab", "c") != root_hash("a", "bc")
    one = hashlib.sha256(root + ids[:256].tobytes()).digest()[:16]
    two = hashlib.sha256(one + ids[256:512].tobytes()).digest()[:16]
    assert chain(ids, root) == [one, two]
    assert block_hash(one, ids[256:512]) == two
    assert chain_at(ids, root) == hashlib.sha256(b"end\0" + two + ids[512:].tobytes()).digest()[:16]
    assert chain_at([], root) == hashlib.sha256(b"end\0" + root).digest()[:16]


def test_ids_are_the_same_ids_in_any_form():
    ids = np.arange(300, dtype=np.uint32)
    root = root_hash("m")
    forms = [
        ids,
        ids.tobytes(),
        list(range(300)),
        ids.astype(np.int64),
        memoryview(ids.tobytes()),
        ids.astype(">u4"),
    ]
    assert len({(tuple(chain(form, root)), chain_at(form, root)) for form in forms}) == 1


@pytest.mark.parametrize("bad", [b"abc", [1, -1], [2**32], [0.5], [[1, 2]]])
def test_what_are_no_token_ids_is_refused(bad, open_store):
    with pytest.raises(ValueError, match="ids"):
        chain_at(bad, root_hash("m"))
    with pytest.raises(StoreUsageError):
        open_store().best_tail("ann", bad)
