"""What goes when room is needed, an agent is forgotten, or blocks have no owner left.

Order of going: quarantined files; blocks nobody owns; agents of other models, the longest unused first;
agents of this model likewise. The agent being saved loses nothing but its older turns. Nothing is
evicted for an entry that could not fit even then: it alone is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from .disk import disk_size, failure
from .index import AgentEntry
from .results import Full, Removed, RemoveResult
from .state import State


def reserve(state: State, nbytes: int, keep: bytes | None) -> Full | None:
    """Reserve ``nbytes`` of disk, evicting as needed but never the agent ``keep``. Full if it cannot fit.

    OSError if an eviction could not remove its files.
    """
    with state.lock:
        if state.cap_bytes is not None and _over(state, nbytes):
            index = state.index
            kept = index.agents.get(keep) if keep is not None else None
            if (
                state.catalog_bytes + state.reserved_bytes + nbytes + _kept_bytes(state, kept)
                > state.cap_bytes
            ):
                state.count("refused")
                return Full(f"{nbytes} bytes do not fit the cap of {state.cap_bytes} bytes")
            while _over(state, nbytes) and state.quarantined:
                state.drop_oldest_quarantined()
            if _over(state, nbytes):
                _evict(state, nbytes, keep)
            if _over(state, nbytes):
                state.count("refused")
                return Full(f"{nbytes} bytes do not fit the cap of {state.cap_bytes} bytes")
        state.reserved_bytes += nbytes
        return None


def release(state: State, nbytes: int) -> None:
    """Give a reservation back."""
    with state.lock:
        state.reserved_bytes -= nbytes


def shrink(state: State) -> None:
    """Bring the store under its cap, after a restart with a smaller one."""
    with state.lock:
        if state.cap_bytes is None or not _over(state, 0):
            return
        while _over(state, 0) and state.quarantined:
            state.drop_oldest_quarantined()
        if _over(state, 0):
            _evict(state, 0, None)


def _over(state: State, nbytes: int) -> bool:
    return state.cap_bytes is not None and state.used_bytes + state.reserved_bytes + nbytes > state.cap_bytes


def _kept_bytes(state: State, kept: AgentEntry | None) -> int:
    """What would remain if all but this agent's blocks and newest tail were evicted."""
    if kept is None:
        return 0
    blocks = sum(disk_size(entry.nbytes) for name in kept.owned if (entry := state.index.blocks.get(name)))
    return blocks + (disk_size(kept.tails[-1].nbytes) if kept.tails else 0)


def _evict(state: State, nbytes: int, keep: bytes | None) -> None:
    index = state.index
    for name in sorted(index.unowned(), key=lambda name: index.blocks[name].model == state.fingerprint):
        remove_block(state, name)
        if not _over(state, nbytes):
            return
    order = sorted(
        (entry.model == state.fingerprint, entry.last_used, key)
        for key, entry in index.agents.items()
        if key != keep
    )
    for _, _, key in order:
        remove_agent(state, key)
        state.count("evicted_agents")
        if not _over(state, nbytes):
            return
    if keep is not None and keep in index.agents:
        for tail in index.agents[keep].tails[:-1]:
            state.disk.remove(state.paths.tail(keep, tail.tokens))
            index.drop_tail(keep, tail)
            if not _over(state, nbytes):
                return


def remove_block(state: State, name: bytes) -> int:
    """Remove one block's file and entry. Returns the bytes freed."""
    entry = state.index.blocks.get(name)
    if entry is None:
        return 0
    state.disk.remove(state.paths.block(name))
    state.index.drop_block(name)
    return disk_size(entry.nbytes)


def remove_agent(state: State, key: bytes) -> Removed:
    """Remove an agent's tails and the blocks that only it owns."""
    with state.lock:
        index = state.index
        entry = index.agents[key]
        freed = blocks = 0
        tails = list(entry.tails)
        for tail in tails:
            state.disk.remove(state.paths.tail(key, tail.tokens))
            freed += disk_size(tail.nbytes)
        sole = index.sole_blocks(entry)
        index.drop_agent(key)
        for name in sole:
            freed += remove_block(state, name)
            blocks += 1
        return Removed(blocks, len(tails), freed)


def forget(state: State, keys: Iterable[bytes]) -> RemoveResult:
    """Remove agents. What other agents own stays."""
    refused = state.unwritable()
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
    return total


def collect(state: State, names: Iterable[bytes]) -> Removed:
    """Remove those of the named blocks that nobody owns. OSError if a file cannot be removed."""
    freed = blocks = 0
    with state.lock:
        for name in names:
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
    except OSError as error:
        state.count("write_errors")
        failure(error)
        state.index.lost |= lost


def _plus(a: Removed, b: Removed) -> Removed:
    return Removed(a.blocks + b.blocks, a.tails + b.tails, a.nbytes + b.nbytes)
