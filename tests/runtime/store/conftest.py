"""A small layout, agents with known contents, and what every fault test asserts about them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.runtime.kv import native_read
from offbook.runtime.store import Array, BlockStore, Tail, TensorSpec
from offbook.runtime.store.disk import Disk
from offbook.runtime.store.reading import Places

FINGERPRINT = "f" * 64
LAYOUT = [
    TensorSpec(f"layers.{layer}.{part}", dtype, shape)
    for layer in range(3)
    for part, dtype, shape in (
        ("k.packed", "U32", (2, 8, 32)),
        ("k.scales", "BF16", (2, 8, 4)),
        ("v.raw", "F32", (2, 16, 4)),
    )
]


def random_like(spec: TensorSpec, seed: bytes) -> Array:
    """Bytes that depend on the seed alone."""
    rng = np.random.default_rng(
        int.from_bytes(hashlib.sha256(seed + spec.name.encode()).digest()[:8], "little")
    )
    return rng.integers(0, 256, spec.nbytes, dtype=np.uint8).view(spec.empty().dtype).reshape(spec.shape)


class Kit:
    """Agents whose blocks' contents follow from their names, so that any load can be checked."""

    fingerprint = FINGERPRINT
    layout = LAYOUT

    def ids(self, who: str, tokens: int) -> Array:
        seed = int.from_bytes(hashlib.sha256(who.encode()).digest()[:8], "little")
        return np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.uint32)

    def contents(self, name: bytes, layout: list[TensorSpec] = LAYOUT) -> list[Array]:
        return [random_like(spec, name) for spec in layout]

    def empty(self) -> list[Array]:
        return [spec.empty() for spec in self.layout]

    def put_blocks(
        self, store: BlockStore, ids: Array, agent: str | None = None, salt: str = ""
    ) -> list[Any]:
        names = store.chain(ids, salt)
        parents = [store.root_hash(salt), *names]
        futures = [
            store.put_block(
                name,
                parents[i],
                ids[i * 256 : i * 256 + 256],
                self.contents(name, list(store.layout)),
                agent=agent,
                salt=salt,
            )
            for i, name in enumerate(names)
        ]
        return [future.result() for future in futures]

    def tail(self, store: BlockStore, ids: Array, salt: str = "") -> Tail:
        chain = store.chain_at(ids, salt)
        arrays = {
            "pages.k": random_like(TensorSpec("pages.k", "BF16", (3, 2, 16)), chain),
            "state.0": random_like(TensorSpec("state.0", "F32", (5,)), chain),
        }
        return Tail(len(ids), chain, store.chain(ids, salt), arrays, {"pages": 3})

    def save(self, store: BlockStore, who: str, tokens: int, salt: str = "") -> Any:
        """Save an agent of so many tokens as an engine does: its new blocks, then its tail."""
        ids = self.ids(who, tokens)
        self.put_blocks(store, ids, who, salt)
        return store.put_tail(who, self.tail(store, ids, salt), salt=salt).result()

    def load(self, store: BlockStore, name: bytes, *, at_once: bool) -> tuple[Any, list[Array]]:
        """Load a block into new arrays, one piece after the other or with the store's reader."""
        dests = self.empty()
        places = Places(np.array([dest.ctypes.data for dest in dests], np.int64), dests)
        return store.load_block(name, places if at_once else dests).result(), dests

    def check(self, store: BlockStore, who: str, tokens: int, salt: str = "") -> tuple[int, bool]:
        """Load what there is: what comes back good must be right. Returns (good blocks, tail good)."""
        ids = self.ids(who, tokens)
        good = 0
        for name in store.chain(ids, salt):
            result, dests = self.load(store, name, at_once=store.takes_places and name[0] % 2 == 0)
            if result.ok:
                assert_same(dests, self.contents(name))
                good += 1
        info = store.best_tail(who, ids, salt)
        result: Any = store.load_tail(who, salt, at=info.tokens).result() if info is not None else None
        if result is None or not result.ok:
            return good, False
        want = self.tail(store, ids[: result.tail.tokens], salt)
        assert (result.tail.tokens, result.tail.chain) == (want.tokens, want.chain)
        assert list(result.tail.blocks) == list(want.blocks)
        assert result.tail.note == want.note
        assert list(result.tail.arrays) == list(want.arrays)
        assert_same(list(result.tail.arrays.values()), list(want.arrays.values()))
        return good, result.tail.tokens == tokens


def assert_same(got: list[Array], want: list[Array]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


class QuickDisk(Disk):
    """Does not wait for the device: what most tests are about does not need it."""

    def sync(self, fd: int) -> None:
        pass


Opener = Callable[..., BlockStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Opener]:
    """Opens stores on one folder and closes them in the end."""
    opened: list[BlockStore] = []

    def open_one(**options: Any) -> BlockStore:
        options = {"fingerprint": FINGERPRINT, "layout": LAYOUT, "lock_seconds": 0.0, **options}
        options = {"disk": QuickDisk(), "reader": native_read.reader(), **options}
        store = BlockStore(options.pop("root", tmp_path / "kv"), **options)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def block_files(tmp_path: Path) -> Callable[[], list[Path]]:
    return lambda: sorted((tmp_path / "kv" / "blocks").glob("*/*"))


@pytest.fixture
def tail_files(tmp_path: Path) -> Callable[[], list[Path]]:
    return lambda: sorted((tmp_path / "kv" / "tails").glob("*/*"))
