"""What goes when room is needed, an agent is forgotten, or blocks have no owner left.

Order of going: quarantined files; blocks nobody owns; agents of other models, the longest unused first;
agents of this model likewise. The agent being saved loses nothing but its older turns. Nothing is
evicted for an entry that could not fit even then: it alone is refused.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from .disk import disk_size
from .index import TailEntry
from .results import Full, Removed, RemoveResult
from .state import State


def reserve(state: State, nbytes: int, keep: bytes | None) -> Full | None:
    """Reserve ``nbytes`` of disk, evicting as needed but never the agent ``keep``. Full if it cannot fit.

    OSError if an eviction could not remove its files, or the disk has no room beside what others need.
    """
    if state.cap_bytes is not None and _over(state, nbytes):
        with state.lock:
            kept = _kept_bytes(state, keep)
        fixed = state.catalog_charge + state.reserved_bytes
        if fixed + nbytes + kept <= state.cap_bytes:
            _evict(state, nbytes, keep)
        if _over(state, nbytes):
            state.count("refused")
            return Full(f"{nbytes} bytes do not fit the cap of {state.cap_bytes} bytes")
    if _lacking(state, nbytes) > 0:
        _leave_free(state, nbytes, keep)
        if _lacking(state, nbytes) > 0:
            state.count("refused")
            free = state.disk.free(str(state.paths.root)) >> 20
            raise OSError(
                errno.ENOSPC, f"{free} MiB are left, {state.min_free >> 20} MiB are kept for others"
            )
    with state.lock:
        state.reserved_bytes += nbytes
    return None


def release(state: State, nbytes: int) -> None:
    """Give a reservation back."""
    with state.lock:
        state.reserved_bytes -= nbytes


def shrink(state: State) -> None:
    """Bring the store under its cap, after a restart with a smaller one, and leave others their room."""
    if _over(state, 0):
        _evict(state, 0, None)
    _leave_free(state, 0, None)


def _lacking(state: State, nbytes: int) -> int:
    """Bytes of the disk that would be missing to others beside ``nbytes`` more; 0 or less for none."""
    if not state.min_free:
        return 0
    return state.min_free + state.reserved_bytes + nbytes - state.disk.free(str(state.paths.root))


def _leave_free(state: State, nbytes: int, keep: bytes | None) -> None:
    """Evict in order until others have their room beside ``nbytes``; nothing, if that cannot be reached."""
    lacking = _lacking(state, nbytes)
    if lacking <= 0:
        return
    with state.lock:
        mine = state.index.file_bytes + state.quarantine_bytes - _kept_bytes(state, keep)
    if lacking > mine:
        return
    for action in _victims(state, keep):
        if _lacking(state, nbytes) <= 0:
            return
        action()


def _over(state: State, nbytes: int) -> bool:
    if state.cap_bytes is None:
        return False
    taken = state.index.file_bytes + state.quarantine_bytes + state.reserved_bytes
    return state.catalog_charge + taken + nbytes > state.cap_bytes


def _kept_bytes(state: State, keep: bytes | None) -> int:
    """What would remain if all but this agent's blocks and newest tail were evicted."""
    kept = state.index.agents.get(keep) if keep is not None else None
    if kept is None:
        return 0
    blocks = sum(disk_size(entry.nbytes) for name in kept.owned if (entry := state.index.blocks.get(name)))
    return blocks + (disk_size(kept.tails[-1].nbytes) if kept.tails else 0)


def _evict(state: State, nbytes: int, keep: bytes | None) -> None:
    """Evict in order until ``nbytes`` fit, or nothing is left to evict."""
    for action in _victims(state, keep):
        if not _over(state, nbytes):
            return
        action()


def _victims(state: State, keep: bytes | None) -> Iterator[Callable[[], object]]:
    """The actions that free room, in order."""
    index = state.index
    while state.quarantined:
        yield state.drop_oldest_quarantined
    with state.lock:
        orphans = sorted(index.unowned(), key=lambda name: index.blocks[name].model == state.fingerprint)
    for name in orphans:
        yield partial(remove_block, state, name)
    while (key := _longest_unused(state, keep)) is not None:
        yield partial(_evict_agent, state, key)
    kept = index.agents.get(keep) if keep is not None else None
    if keep is not None and kept is not None:
        for tail in kept.tails[:-1]:
            yield partial(remove_tail, state, keep, tail)


def _longest_unused(state: State, keep: bytes | None) -> bytes | None:
    """The next agent to evict: of another model if there is one, then the longest unused."""
    with state.lock:
        return min(
            (key for key in state.index.agents if key != keep),
            key=lambda key: (
                state.index.agents[key].model == state.fingerprint,
                state.index.agents[key].last_used,
            ),
            default=None,
        )


def _evict_agent(state: State, key: bytes) -> None:
    remove_agent(state, key)
    state.count("evicted_agents")


def remove_block(state: State, name: bytes) -> int:
    """Remove one block's file and entry. Returns the bytes freed."""
    # The lock is held for one file at a time: the step thread waits for it when it puts a block.
    with state.lock:
        entry = state.index.blocks.get(name)
        if entry is None:
            return 0
        state.disk.remove(state.paths.block(name))
        state.index.drop_block(name)
        return disk_size(entry.nbytes)


def remove_tail(state: State, key: bytes, tail: TailEntry) -> int:
    """Remove one tail's file and entry. Returns the bytes freed."""
    with state.lock:
        state.disk.remove(state.paths.tail(key, tail.tokens, tail.serial))
        state.index.drop_tail(key, tail)
        return disk_size(tail.nbytes)


def remove_agent(state: State, key: bytes) -> Removed:
    """Remove an agent's tails and the blocks that only it owns."""
    index = state.index
    with state.lock:
        entry = index.agents.get(key)
        if entry is None:
            return Removed(0, 0, 0)
        sole, tails = index.sole_blocks(entry), list(entry.tails)
    freed = sum(remove_tail(state, key, tail) for tail in tails)
    with state.lock:
        index.drop_agent(key)
    freed += sum(remove_block(state, name) for name in sole if not index.references[name])
    return Removed(len(sole), len(tails), freed)


def forget(state: State, keys: Iterable[bytes]) -> RemoveResult:
    """Remove agents. What other agents own stays."""
    refused = state.unwritable(freeing=True)
    if refused is not None:
        return refused
    total = Removed(0, 0, 0)
    try:
        for key in keys:
            if key in state.index.agents:
                total = _plus(total, remove_agent(state, key))
                state.count("forgotten_agents")
    except OSError as error:
        return state.refuse(error)
    state.freed()
    return total


def collect(state: State, names: Iterable[bytes]) -> Removed:
    """Remove those of the named blocks that nobody owns. OSError if a file cannot be removed."""
    freed = blocks = 0
    for name in names:
        with state.lock:
            if name in state.index.blocks and not state.index.references[name]:
                freed += remove_block(state, name)
                blocks += 1
    if blocks:
        state.count("collected_blocks", blocks)
    return Removed(blocks, 0, freed)


def collect_lost(state: State) -> None:
    """Remove blocks whose last owner let go of them since the last call."""
    with state.lock:
        lost, state.index.lost = state.index.lost, set()
    try:
        collect(state, lost)
    except OSError:
        state.count("write_errors")
        with state.lock:
            state.index.lost |= lost


def _plus(a: Removed, b: Removed) -> Removed:
    return Removed(a.blocks + b.blocks, a.tails + b.tails, a.nbytes + b.nbytes)
