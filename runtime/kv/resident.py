"""``Resident``: what all parts of an agent's KV memory share.

Owns the tables of the agents in memory, the names of their content, and the two facts that everyone needs of
a full block: is it on disk, and which slot is its one copy. What is done with these is elsewhere: found
(``planning.py``), brought in (``loading.py``), kept (``saving.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from ..observe.metrics import Metrics
from ..store.blocks import Destinations
from ..store.hashing import root_hash
from ..store.layout import Tail, TailInfo
from .arrays import PoolArrays
from .pool import BlockPool
from .scheme import KVScheme
from .spec import ModelCacheSpec
from .table import AgentTable, Ids

if TYPE_CHECKING:
    from .loading import Loading

Key = tuple[str, str]
"""Agent id and salt."""


class Store(Protocol):
    """What the memory needs of the block store (``runtime.store``)."""

    def has(self, name: bytes) -> bool: ...
    def put_block(
        self,
        name: bytes,
        parent: bytes,
        ids: Any,
        tensors: Sequence[NDArray[Any]],
        *,
        agent: str | None = None,
        salt: str = "",
    ) -> Future[Any]: ...
    @property
    def takes_places(self) -> bool: ...
    def load_block(self, name: bytes, dests: Destinations, *, priority: int = 0) -> Future[Any]: ...
    def load_blocks(
        self, wanted: Iterable[tuple[bytes, Destinations]], *, priority: int = 0
    ) -> list[Future[Any]]: ...
    def put_tail(self, agent: str, tail: Tail, *, salt: str = "", copy: bool = True) -> Future[Any]: ...
    def load_tail(
        self, agent: str, salt: str = "", *, at: int | None = None, priority: int = 0
    ) -> Future[Any]: ...
    def promote(self, futures: Iterable[Future[Any]], priority: int) -> None: ...
    def tails(self, agent: str, salt: str = "") -> Sequence[TailInfo]: ...
    def touch(self, agent: str, salt: str = "") -> None: ...


class Resident:
    """The tables of the agents whose KV is in memory, or on its way there.

    Attributes:
        tables: by agent and salt.
        loading: loads under way; their tables are in ``tables``, and not to be touched.
        unreadable: blocks (names) and tails (agent, salt, tokens) that the store lists but could not give.
            Plans avoid them, so a plan that failed is not made again.
        openings: ids that may stand in a table or a saved tail behind a transcript: what every next message
            begins with.
        saved: called on an I/O thread when an agent's tail has been written.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        scheme: KVScheme,
        fingerprint: str,
        arrays: PoolArrays,
        pool: BlockPool,
        store: Store | None,
    ) -> None:
        self.spec, self.scheme, self.fingerprint = spec, scheme, fingerprint
        self.arrays, self.pool, self.store = arrays, pool, store
        self.tables: dict[Key, AgentTable] = {}
        self.loading: dict[Key, Loading] = {}
        self.metrics = Metrics()
        self.saved: Callable[[], None] = lambda: None
        self.unreadable: set[Any] = set()
        self.openings: tuple[Ids, ...] = ()
        self._roots: dict[str, bytes] = {}

    def count(self, name: str, by: float = 1) -> None:
        self.metrics.count(name, by)

    def root(self, salt: str) -> bytes:
        if salt not in self._roots:
            self._roots[salt] = root_hash(self.fingerprint, salt)
        return self._roots[salt]

    def on_disk(self, name: bytes) -> bool:
        """Whether a block can be read from disk, as far as is known."""
        return self.store is not None and self.store.has(name) and name not in self.unreadable

    def one_copy(self, group: int, slot: int, name: bytes) -> int:
        """Name a full block's content; if another slot has it already, take that one instead.

        Equal ids, so one copy is enough, and the first one's bits are everyone's.
        """
        allocator = self.pool.groups[group]
        known = allocator.find(name)
        if known is None:
            allocator.name_content(slot, name)
        elif known != slot:
            allocator.retain(known)
            allocator.release(slot)
            return known
        return slot

    def drop(self, key: Key) -> None:
        """Give back an agent's slots and pages at once, without saving.

        Not while a load writes into them: cancel the load and wait for its ``finish``.
        """
        assert key not in self.loading, key
        table = self.tables.pop(key, None)
        if table is not None:
            table.release(self.pool)
