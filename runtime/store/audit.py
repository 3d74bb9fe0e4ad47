"""``verify``: read everything, prove everything, report; for operators and tests."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import container
from .blocks import check_block_header
from .container import CorruptFile
from .index import BlockEntry, TailEntry
from .state import State
from .tails import tail_facts


@dataclass(frozen=True, slots=True)
class Fault:
    """One bad file, or one that the index lists and is not there."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` read (whole files, good ones) and what it found wrong."""

    blocks: int
    tails: int
    nbytes: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(state: State, *, quarantine: bool) -> VerifyReport:
    """Read all files of all models in the index. With ``quarantine``, bad ones go as at a failed load."""
    with state.lock:
        blocks = list(state.index.blocks.items())
        tails = [(key, tail) for key, agent in state.index.agents.items() for tail in agent.tails]
    faults: list[Fault] = []
    good = [proven_block(state, name, entry, faults, quarantine) for name, entry in blocks]
    good_tails = [proven_tail(state, key, tail, faults, quarantine) for key, tail in tails]
    nbytes = sum(entry.nbytes for (_, entry), ok in zip(blocks, good, strict=True) if ok)
    nbytes += sum(tail.nbytes for (_, tail), ok in zip(tails, good_tails, strict=True) if ok)
    return VerifyReport(sum(good), sum(good_tails), nbytes, tuple(faults))


def proven_block(
    state: State,
    name: bytes,
    entry: BlockEntry,
    faults: list[Fault] | None = None,
    quarantine: bool = False,
) -> bool:
    """Read a whole block file; is every byte as it was written?"""
    path = state.paths.block(name)
    try:
        check_block_header(_prove(path, entry.seal), name)
        return True
    except (CorruptFile, OSError) as error:
        # Not in the index any more: evicted while it was being read, and no fault.
        if faults is not None and state.index.blocks.get(name) is entry and not _removed(state, error):
            faults.append(Fault(path, _reason(error)))
            if quarantine:
                state.bad_block(name, entry, _what(error))
        return False


def proven_tail(
    state: State,
    key: bytes,
    entry: TailEntry,
    faults: list[Fault] | None = None,
    quarantine: bool = False,
) -> bool:
    """The same for a tail file."""
    path = state.paths.tail(key, entry.tokens, entry.serial)
    try:
        tail_facts(_prove(path, entry.seal), key, entry.tokens, entry.serial)
        return True
    except (CorruptFile, OSError) as error:
        agent = state.index.agents.get(key)
        if faults is not None and agent is not None and entry in agent.tails and not _removed(state, error):
            faults.append(Fault(path, _reason(error)))
            if quarantine:
                state.bad_tail(key, entry, _what(error))
        return False


def _prove(path: str, seal: bytes) -> container.Header:
    """Read a whole file and prove it against itself and the index's seal."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = container.read_header(fd)
        if header.seal != seal:
            raise CorruptFile("the header does not match the catalog's seal")
        container.read_arrays(fd, header)
        return header
    finally:
        os.close(fd)


def _removed(state: State, error: CorruptFile | OSError) -> bool:
    """Whether an engine beside this reader removed the file: it was there when the folder was opened."""
    return state.read_only and isinstance(error, FileNotFoundError)


def _reason(error: CorruptFile | OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file is gone"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _what(error: CorruptFile | OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else "corrupt"
