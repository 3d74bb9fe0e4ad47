"""The whole index in memory: which blocks and tails exist, who owns what, how much room it takes.

Plain bookkeeping without a file or a thread in it. The catalog keeps a copy on disk, from the sets of
what changed. Every change happens under the store's lock; ``has`` is a bare dict look-up and needs none.

A block's owners are the agents whose remembered tails list it, or who wrote it since their last tail.
A reference counts whether or not the block exists, so a block that is written again finds its owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .disk import disk_size
from .tails import split_names


class BlockEntry:
    """One block on disk."""

    __slots__ = ("model", "nbytes", "seal")

    def __init__(self, model: str, nbytes: int, seal: bytes) -> None:
        self.model = model
        self.nbytes = nbytes
        self.seal = seal


class TailEntry:
    """One tail on disk. ``blocks`` holds 16-byte names, concatenated."""

    __slots__ = ("blocks", "chain", "nbytes", "seal", "serial", "tokens")

    def __init__(
        self, tokens: int, chain: bytes, serial: int, nbytes: int, seal: bytes, blocks: bytes
    ) -> None:
        self.tokens = tokens
        self.chain = chain
        self.serial = serial
        self.nbytes = nbytes
        self.seal = seal
        self.blocks = blocks


class AgentEntry:
    """One agent's memory under one model and salt. ``tails`` are in order of writing, the newest last."""

    __slots__ = ("agent", "fresh", "last_used", "model", "owned", "salt", "tails")

    def __init__(self, agent: str, salt: str, model: str, last_used: float) -> None:
        self.agent = agent
        self.salt = salt
        self.model = model
        self.last_used = last_used
        self.tails: list[TailEntry] = []
        self.fresh: dict[bytes, int] = {}
        """Blocks written for this agent that no tail of it lists yet, and how many tails came since."""
        self.owned: set[bytes] = set()


class Index:
    """All entries, with reference counts and sizes kept in step."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, BlockEntry] = {}
        self.agents: dict[bytes, AgentEntry] = {}
        self.references: Counter[bytes] = Counter()
        self.file_bytes = 0
        """Bytes on disk of all blocks and tails, in whole pages."""
        self._unowned: dict[bytes, None] = {}
        """Stored blocks without an owner, in order of becoming so; kept, as looking for them is slow."""
        self.changed_blocks: set[bytes] = set()
        self.changed_agents: set[bytes] = set()
        self.lost: set[bytes] = set()
        """Blocks whose last owner let go of them: to be collected."""
        self.last_serial = 0

    # Blocks

    def add_block(self, name: bytes, entry: BlockEntry) -> None:
        self.drop_block(name)
        self.blocks[name] = entry
        self.file_bytes += disk_size(entry.nbytes)
        self.changed_blocks.add(name)
        if not self.references[name]:
            self._unowned[name] = None

    def drop_block(self, name: bytes) -> BlockEntry | None:
        entry = self.blocks.pop(name, None)
        if entry is not None:
            self.file_bytes -= disk_size(entry.nbytes)
            self.changed_blocks.add(name)
            self._unowned.pop(name, None)
        return entry

    def unowned(self) -> list[bytes]:
        """Blocks without an owner, the longest so first."""
        return list(self._unowned)

    # Agents

    def agent(self, key: bytes, agent: str, salt: str, model: str, now: float) -> AgentEntry:
        """The agent's entry, made if needed, marked as used now."""
        entry = self.agents.get(key)
        if entry is None:
            entry = self.agents[key] = AgentEntry(agent, salt, model, now)
        entry.last_used = now
        self.changed_agents.add(key)
        return entry

    def touch(self, key: bytes, now: float) -> None:
        entry = self.agents.get(key)
        if entry is not None:
            entry.last_used = now
            self.changed_agents.add(key)

    def claim(self, key: bytes, names: Iterable[bytes]) -> None:
        """The agent wrote, or shares, these blocks."""
        entry = self.agents[key]
        entry.fresh.update(dict.fromkeys(names, 0))
        self._own(entry)
        self.changed_agents.add(key)

    def add_tail(self, key: bytes, tail: TailEntry, keep: int) -> list[TailEntry]:
        """Add the agent's newest tail. Returns the tails now given up: their files are to be removed.

        Given up are the oldest beyond ``keep``, one of the same token count, and longer ones: the agent was
        rewound, and they are of a branch that is no more.
        """
        entry = self.agents[key]
        stay = [old for old in entry.tails if old.tokens < tail.tokens]
        gone = [old for old in entry.tails if old.tokens >= tail.tokens]
        gone += stay[: max(0, len(stay) - (keep - 1))]
        entry.tails = [old for old in stay if old not in gone] + [tail]
        # Blocks may be written ahead of the turn that a tail ends; the tail after that lists them, or nobody.
        listed = set(split_names(tail.blocks))
        entry.fresh = {name: age + 1 for name, age in entry.fresh.items() if name not in listed and not age}
        self.file_bytes += disk_size(tail.nbytes) - sum(disk_size(old.nbytes) for old in gone)
        self.last_serial = max(self.last_serial, tail.serial)
        self._own(entry)
        self.changed_agents.add(key)
        return gone

    def drop_tail(self, key: bytes, tail: TailEntry, *, keep_blocks: bool = False) -> None:
        """Take a tail out. ``keep_blocks``: it went bad, and the blocks it lists are still the agent's."""
        entry = self.agents.get(key)
        if entry is not None and tail in entry.tails:
            entry.tails.remove(tail)
            if keep_blocks:
                entry.fresh.update(dict.fromkeys(split_names(tail.blocks), 0))
            self.file_bytes -= disk_size(tail.nbytes)
            self._own(entry)
            self.changed_agents.add(key)

    def drop_agent(self, key: bytes) -> AgentEntry | None:
        """Forget the agent and its tails; its blocks stay until someone collects those without owner."""
        entry = self.agents.pop(key, None)
        if entry is not None:
            self.references.subtract(entry.owned)
            self._prune(entry.owned)
            self.file_bytes -= sum(disk_size(tail.nbytes) for tail in entry.tails)
            self.changed_agents.add(key)
        return entry

    def sole_blocks(self, entry: AgentEntry) -> list[bytes]:
        """Stored blocks that only this agent owns."""
        return [name for name in entry.owned if self.references[name] == 1 and name in self.blocks]

    def _own(self, entry: AgentEntry) -> None:
        """Bring the agent's owned blocks and the reference counts in line with its tails."""
        owned = set(entry.fresh)
        for tail in entry.tails:
            owned.update(split_names(tail.blocks))
        gained = owned - entry.owned
        self.references.update(gained)
        for name in gained:
            self._unowned.pop(name, None)
        lost = entry.owned - owned
        self.references.subtract(lost)
        self._prune(lost)
        entry.owned = owned

    def _prune(self, names: Iterable[bytes]) -> None:
        for name in names:
            if self.references[name] <= 0:
                del self.references[name]
                self.lost.add(name)
                if name in self.blocks:
                    self._unowned[name] = None
