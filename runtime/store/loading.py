"""Loading one block or one tail: what a loader thread does, and what a bad file leads to."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from .blocks import BlockFormat, Ordered, Scratch
from .container import CorruptFile
from .reading import Reader
from .results import Corrupt, Failed, Loaded, LoadResult, Missing, TailLoaded, TailResult
from .state import State
from .tails import read_tail

log = logging.getLogger(__name__)

# These say something of the process or the moment, nothing of the file.
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR, errno.EAGAIN}


def load_block(
    state: State, fmt: BlockFormat, name: bytes, dests: Ordered, scratch: dict[str, Scratch]
) -> LoadResult:
    """Read and verify a block into its destinations. ``scratch`` keeps the thread's memory for it."""
    entry = state.index.blocks.get(name)
    if entry is None:
        return Missing(f"block {name.hex()} is not stored")
    mine = scratch.get("block") or scratch.setdefault("block", Scratch(fmt))
    try:
        nbytes = fmt.read(state.paths.block(name), entry.seal, dests, mine)
    except (CorruptFile, OSError) as error:
        return _bad(state, error, f"block {name.hex()}", lambda what: state.bad_block(name, entry, what))
    state.count("blocks_loaded")
    state.count("bytes_loaded", nbytes)
    return Loaded(nbytes)


def load_tail(state: State, key: bytes, agent: str, at: int | None, reader: Reader | None) -> TailResult:
    """Read and verify the tail of an agent at ``at`` tokens, or its newest."""
    with state.lock:
        entry = state.index.agents.get(key)
        found = [tail for tail in entry.tails if at in (None, tail.tokens)] if entry is not None else []
        state.index.touch(key, state.clock())
    if not found:
        return Missing(f"no tail of {agent!r}" + (f" at {at} tokens" if at is not None else ""))
    tail = found[-1]
    path = state.paths.tail(key, tail.tokens, tail.serial)
    try:
        about = key, tail.tokens, tail.serial, tail.seal
        loaded = read_tail(path, *about, state.known_tails, reader, state.tail_memory)
    except (CorruptFile, OSError) as error:
        label = f"tail of {agent!r} at {tail.tokens} tokens"
        return _bad(state, error, label, lambda what: state.bad_tail(key, tail, what))
    state.count("tails_loaded")
    state.count("bytes_loaded", tail.nbytes)
    return TailLoaded(loaded, tail.nbytes)


def _bad(
    state: State, error: CorruptFile | OSError, label: str, note: Callable[[str], None]
) -> Missing | Corrupt | Failed:
    """The outcome of a failed read, after noting it."""
    if isinstance(error, FileNotFoundError):
        note("missing")
        return Missing(f"{label} is gone from the disk")
    if isinstance(error, OSError) and error.errno in _TRANSIENT:
        state.count("read_errors")
        return Failed(f"{label} cannot be read now: {error.strerror}")
    note("corrupt")
    log.warning("%s is corrupt: %s", label, error)
    return Corrupt(f"{label}: {error}")
