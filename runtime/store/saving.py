"""Saving one block or one tail: the stages the writer runs."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from . import retention
from .blocks import BlockFormat
from .container import seal_of
from .disk import disk_size
from .index import BlockEntry, TailEntry
from .layout import Array, Tail
from .results import PutResult, Stored
from .state import State
from .tails import agent_key, encode_tail, tail_bytes
from .writer import new_future


class FilePut(ABC):
    """The stages common to both: room, temporary file, rename, and what to do when one of them fails."""

    def __init__(
        self, state: State, fingerprint: str, key: bytes | None, agent: str, salt: str, nbytes: int
    ) -> None:
        self.state = state
        self.fingerprint = fingerprint
        self.key = key
        self.agent = agent
        self.salt = salt
        self.nbytes = nbytes
        self.queued_bytes = nbytes
        self.future = new_future()
        self.outcome: PutResult | None = None
        self.header = bytearray()
        self._room = 0
        self._temporary: str | None = None
        self._published = False

    @abstractmethod
    def path(self) -> str:
        """Where the file goes."""

    @abstractmethod
    def file_bytes(self) -> int:
        """The exact size of the file."""

    @abstractmethod
    def contents(self) -> Sequence[Any]:
        """Set ``header`` and give the whole file's buffers."""

    @abstractmethod
    def enter(self) -> Stored:
        """Enter the published file in the index; the lock is held."""

    def admit(self) -> None:
        refused = self.state.unwritable()
        if refused is not None:
            self.outcome = refused
            return
        self.nbytes = self.file_bytes()
        room = disk_size(self.nbytes)
        try:
            try:
                self.outcome = retention.reserve(self.state, room, self.key)
            except FileNotFoundError:  # Someone removed the folders under the running store.
                self.state.prepare_folders()
                self.outcome = retention.reserve(self.state, room, self.key)
        except OSError as error:
            self.outcome = self.state.refuse(error)
        if self.outcome is None:
            self._room = room

    def prepare(self) -> None:
        disk = self.state.disk
        path = disk.temporary(self.state.paths.tmp)
        try:
            contents = self.contents()
            try:
                disk.write(path, contents)
            except FileNotFoundError:  # ... and again
                self.state.prepare_folders()
                disk.write(path, contents)
            self._temporary = path
        except OSError as error:
            self.outcome = self.state.refuse(error)

    def publish(self) -> str | None:
        assert self._temporary is not None
        path = self.path()
        folder = os.path.dirname(path)
        try:
            self.state.disk.make_folder(folder)
            self.state.disk.rename(self._temporary, path)
        except OSError as error:
            self.outcome = self.state.refuse(error)
            return None
        self._temporary = None
        self._published = True
        return folder

    def settle(self) -> None:
        state = self.state
        retention.release(state, self._room)
        with state.lock:
            if self.outcome is None:
                self.outcome = self.enter()
                state.wrote()
                return
            if self._temporary is not None:
                state.disk.discard(self._temporary)
            if self._published:  # In place, but perhaps not durable.
                state.disk.discard(self.path())


class BlockPut(FilePut):
    """Saves one sealed block from the caller's arrays, which must not change until the future is done."""

    def __init__(
        self,
        state: State,
        fmt: BlockFormat,
        name: bytes,
        parent: bytes,
        ids: bytes,
        arrays: Sequence[Array],
        agent: str | None,
        salt: str,
    ) -> None:
        key = agent_key(fmt.fingerprint, salt, agent) if agent is not None else None
        super().__init__(state, fmt.fingerprint, key, agent or "", salt, fmt.file_bytes)
        self.name = name
        self.owners: dict[bytes, tuple[str, str]] = {key: (agent or "", salt)} if key is not None else {}
        self._format = fmt
        self._parent = parent
        self._ids = ids
        self._arrays: Sequence[Array] = arrays

    def path(self) -> str:
        return self.state.paths.block(self.name)

    def admit(self) -> None:
        with self.state.lock:
            if self.name in self.state.index.blocks:
                self._claim()
                self.outcome = Stored(0, existed=True)
                return
        super().admit()

    def file_bytes(self) -> int:
        return self._format.file_bytes

    def contents(self) -> Sequence[Any]:
        self.header = self._format.encode(self.name, self._parent, self._ids, self._arrays)
        return [self.header, *self._arrays]

    def enter(self) -> Stored:
        entry = BlockEntry(self.fingerprint, self.nbytes, seal_of(self.header))
        self.state.index.add_block(self.name, entry)
        self._claim()
        self.state.count("blocks_written")
        self.state.count("bytes_written", self.nbytes)
        return Stored(self.nbytes)

    def settle(self) -> None:
        super().settle()
        self._arrays = ()  # The caller's memory is its own again.

    def _claim(self) -> None:
        for key, (agent, salt) in self.owners.items():
            self.state.index.agent(key, agent, salt, self.fingerprint, self.state.clock())
            self.state.index.claim(key, [self.name])


class TailPut(FilePut):
    """Saves an agent's tail and gives up its oldest ones beyond ``keep``."""

    def __init__(self, state: State, fingerprint: str, agent: str, salt: str, tail: Tail, keep: int) -> None:
        self.tail = tail
        self.tokens = tail.tokens
        self._serial = state.next_serial()
        nbytes = sum(array.nbytes for array in tail.arrays.values())  # Near enough for the queue.
        super().__init__(state, fingerprint, agent_key(fingerprint, salt, agent), agent, salt, nbytes)
        self._keep = keep

    def path(self) -> str:
        assert self.key is not None
        return self.state.paths.tail(self.key, self.tokens, self._serial)

    def file_bytes(self) -> int:
        return tail_bytes(self.fingerprint, self.salt, self.agent, self.tail, self._serial)

    def contents(self) -> Sequence[Any]:
        self.header, arrays, facts = encode_tail(
            self.fingerprint, self.salt, self.agent, self.tail, self._serial
        )
        self.state.known_tails.add(facts)
        return [self.header, *(array for array in arrays if array.nbytes)]

    def enter(self) -> Stored:
        assert self.key is not None
        state, index = self.state, self.state.index
        blocks = b"".join(self.tail.blocks)
        entry = TailEntry(
            self.tokens, self.tail.chain, self._serial, self.nbytes, seal_of(self.header), blocks
        )
        index.agent(self.key, self.agent, self.salt, self.fingerprint, state.clock())
        for old in index.add_tail(self.key, entry, self._keep):
            state.disk.discard(state.paths.tail(self.key, old.tokens, old.serial))
        state.count("tails_written")
        state.count("bytes_written", self.nbytes)
        missing = tuple(name for name in self.tail.blocks if name not in index.blocks)
        return Stored(self.nbytes, missing=missing)
