"""Start-up: make the index and the folders agree, whatever the last process was doing when it ended.

Temporary files go. A file that the catalog does not know is proven by its own header and adopted, or
quarantined. An entry whose file is gone is dropped, one whose file has another size is quarantined.
Blocks that then have no owner are collected. A rebuild after a lost catalog is the same work with an
empty index.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .blocks import inspect_block
from .container import CorruptFile
from .disk import SUFFIX, disk_size
from .index import BlockEntry, TailEntry
from .state import State
from .tails import inspect_tail


def recover(state: State) -> None:
    """Bring the index in line with the files. OSError if the folders cannot be listed."""
    with state.lock:
        if not state.read_only:
            _clear(state)
        _recover_blocks(state)
        _recover_tails(state)


def _clear(state: State) -> None:
    for path, _ in _files(state.paths.tmp):
        state.disk.discard(path)
        state.count("orphans_removed")
    for path, size in sorted(_files(state.paths.quarantine)):
        state.quarantined.append((path, disk_size(size)))
        state.quarantine_bytes += disk_size(size)


def _recover_blocks(state: State) -> None:
    index = state.index
    found: set[bytes] = set()
    for folder in _folders(state.paths.blocks):
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
            found.add(name)
    for name in index.blocks.keys() - found:
        index.drop_block(name)
        state.count("missing")


def _recover_tails(state: State) -> None:
    index = state.index
    known = {(key, tail.tokens): tail for key, agent in index.agents.items() for tail in agent.tails}
    found: set[tuple[bytes, int]] = set()
    adopted: list[tuple[int, bytes, TailEntry, tuple[str, str, str], float]] = []
    for folder in _folders(state.paths.tails):
        for path, size in _files(folder):
            named = _tail_name(path, folder)
            if named is None:
                state.quarantine(path, "stray")
                continue
            entry = known.get(named)
            key, tokens = named
            try:
                # A tail's file may have been replaced by one of the same size just before the end, so the
                # seal decides, not the size: a few files an agent.
                facts = inspect_tail(path, key, tokens)
                used = os.stat(path).st_mtime
            except CorruptFile:
                state.count("corrupt")
                state.quarantine(path, f"{key.hex()}-{tokens}.tail")
                continue
            except OSError:
                state.count("read_errors")
                continue
            if entry is not None and entry.seal == facts.header.seal:
                found.add(named)
                continue
            tail = TailEntry(tokens, facts.chain, facts.serial, size, facts.header.seal, facts.blocks)
            adopted.append((facts.serial, key, tail, (facts.agent, facts.salt, facts.fingerprint), used))
    for (key, tokens), tail in known.items():
        if (key, tokens) not in found:
            index.drop_tail(key, tail)
    for _, key, tail, (agent, salt, model), used in sorted(adopted, key=lambda item: item[0]):
        entry_of = index.agent(key, agent, salt, sys.intern(model), used)
        fresh = set(entry_of.fresh)
        for old in index.add_tail(key, tail, keep=sys.maxsize):
            if not state.read_only:
                state.disk.discard(state.paths.tail(key, old.tokens))
        index.claim(key, fresh)
        state.count("adopted_tails")


def _folders(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        yield from sorted(path for path in parent.iterdir() if path.is_dir())


def _files(folder: Path) -> list[tuple[str, int]]:
    """Files of a folder with their sizes."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [
            (entry.path, entry.stat().st_size) for entry in entries if entry.is_file(follow_symlinks=False)
        ]


def _block_name(path: str, folder: Path) -> bytes | None:
    text = os.path.basename(path)
    if len(text) != 32 + len(SUFFIX) or not text.endswith(SUFFIX) or text[:2] != folder.name:
        return None
    try:
        return bytes.fromhex(text[:32])
    except ValueError:
        return None


def _tail_name(path: str, folder: Path) -> tuple[bytes, int] | None:
    text = os.path.basename(path)
    key, dash, tokens = text[:32], text[32:33], text[33 : -len(SUFFIX)]
    if dash != "-" or not text.endswith(SUFFIX) or text[:2] != folder.name or not tokens.isdecimal():
        return None
    try:
        return bytes.fromhex(key), int(tokens)
    except ValueError:
        return None
