"""Start-up: make the index and the folders agree, whatever the last process was doing when it ended.

Temporary files go. A file that the catalog does not know is proven by its own header and adopted, or
quarantined. An entry whose file is gone is dropped, one whose file has another size is quarantined.
Blocks that were known and have no owner are collected; those just adopted are spared until the next
start, as the note of their owner may be what was lost. A rebuild after a lost catalog is the same work
with an empty index.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from . import retention
from .blocks import inspect_block
from .container import CorruptFile
from .disk import SUFFIX, disk_size
from .index import BlockEntry, TailEntry
from .state import State
from .tails import TailFacts, inspect_tail

_BLOCK_NAME = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}")
_TAIL_NAME = re.compile(rf"([0-9a-f]{{32}})-(\d{{10,}})-([0-9a-f]{{16}}){re.escape(SUFFIX)}")


def recover(state: State) -> None:
    """Bring the index in line with the files. OSError if the folders cannot be read or changed."""
    with state.lock:
        if state.may_write:
            _clear(state)
        adopted = _recover_blocks(state)
        _recover_tails(state)
        if state.may_write:
            retention.collect(state, set(state.index.unowned()) - adopted)
            retention.shrink(state)


def _clear(state: State) -> None:
    for path, _ in _files(state.paths.tmp):
        state.disk.discard(path)
        state.count("orphans_removed")
    for path, size in sorted(_files(state.paths.quarantine)):
        state.quarantined.append((path, disk_size(size)))
        state.quarantine_bytes += disk_size(size)


def _recover_blocks(state: State) -> set[bytes]:
    """Returns the blocks that were adopted."""
    index = state.index
    adopted: set[bytes] = set()
    found: set[bytes] = set()
    for folder in _folders(state.paths.blocks):
        _set_strays_aside(state, folder)
        for path, size in _files(folder):
            name = _block_name(path, folder)
            if name is None:
                state.quarantine(path, "stray")
                continue
            entry = index.blocks.get(name)
            if entry is not None and entry.nbytes == size:
                found.add(name)
                continue
            try:
                info = inspect_block(path, name)
            except CorruptFile:
                index.drop_block(name)
                state.count("corrupt")
                state.quarantine(path, f"{name.hex()}.block")
                continue
            except OSError:
                state.count("read_errors")
                continue
            index.add_block(name, BlockEntry(sys.intern(info.fingerprint), size, info.header.seal))
            state.count("adopted_blocks")
            adopted.add(name)
    found |= adopted
    for name in index.blocks.keys() - found:
        index.drop_block(name)
        state.count("missing")
    return adopted


def _recover_tails(state: State) -> None:
    index = state.index
    known = {
        (key, tail.tokens, tail.serial): tail for key, agent in index.agents.items() for tail in agent.tails
    }
    found: set[tuple[bytes, int, int]] = set()
    adopted: list[tuple[TailFacts, bytes, float]] = []
    for folder in _folders(state.paths.tails):
        _set_strays_aside(state, folder)
        for path, size in _files(folder):
            named = _tail_name(path, folder)
            if named is None:
                state.quarantine(path, "stray")
                continue
            entry = known.get(named)
            if entry is not None and entry.nbytes == size:
                found.add(named)
                continue
            key, tokens, serial = named
            try:
                adopted.append((inspect_tail(path, key, tokens, serial), key, os.stat(path).st_mtime))
            except CorruptFile:
                state.count("corrupt")
                state.quarantine(path, f"{key.hex()}-{tokens}.tail")
            except OSError:
                state.count("read_errors")
    for named, tail in known.items():
        if named not in found:
            index.drop_tail(named[0], tail, keep_blocks=True)
            state.count("missing")
    for facts, key, used in sorted(adopted, key=lambda item: item[0].serial):
        _adopt_tail(state, facts, key, used)


def _adopt_tail(state: State, facts: TailFacts, key: bytes, used: float) -> None:
    index, header = state.index, facts.header
    entry = index.agent(key, facts.agent, facts.salt, sys.intern(facts.fingerprint), used)
    tail = TailEntry(facts.tokens, facts.chain, facts.serial, header.file_bytes, header.seal, facts.blocks)
    fresh = set(entry.fresh)
    if entry.tails and entry.tails[-1].serial > facts.serial:
        # Older than one that is known: its removal did not come to pass, or it is a copy put back.
        if state.may_write:
            state.disk.discard(state.paths.tail(key, tail.tokens, tail.serial))
        state.count("orphans_removed")
        return
    for old in index.add_tail(key, tail, keep=sys.maxsize):
        if state.may_write:
            state.disk.discard(state.paths.tail(key, old.tokens, old.serial))
    index.claim(key, fresh)
    state.count("adopted_tails")


def _folders(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        yield from sorted(path for path in parent.iterdir() if path.is_dir())


def _set_strays_aside(state: State, folder: Path) -> None:
    """What is no file (a folder, a link) must not stand where one is to be written."""
    with os.scandir(folder) as entries:
        strays = [entry.path for entry in entries if not entry.is_file(follow_symlinks=False)]
    for path in strays:
        state.quarantine(path, "stray")


def _files(folder: Path) -> list[tuple[str, int]]:
    """Files of a folder with their sizes."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [
            (entry.path, entry.stat().st_size) for entry in entries if entry.is_file(follow_symlinks=False)
        ]


def _block_name(path: str, folder: Path) -> bytes | None:
    match = _BLOCK_NAME.fullmatch(os.path.basename(path))
    if match is None or match[1][:2] != folder.name:
        return None
    return bytes.fromhex(match[1])


def _tail_name(path: str, folder: Path) -> tuple[bytes, int, int] | None:
    match = _TAIL_NAME.fullmatch(os.path.basename(path))
    if match is None or match[1][:2] != folder.name:
        return None
    return bytes.fromhex(match[1]), int(match[2]), int(match[3], 16)
