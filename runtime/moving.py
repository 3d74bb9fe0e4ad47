"""Moving an agent to another machine: its journal rows, blocks and tails as one file.

Owns how journal and store work together in that. Exporting reads, beside a running team, too; importing
needs the team to be down, and enters the agent in the journal last, so that a failed import leaves nothing
but blocks that a repetition finds again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from offbook.actors import moving
from offbook.actors.journal import Journal
from offbook.bus.errors import NoSuchActor, OffbookError
from offbook.bus.security import home, run_dir
from offbook.runtime.config import default_store_dir
from offbook.runtime.lockfile import LockFile


class StoreFailed(OffbookError):
    """The store could not do it; says why."""


@dataclass(frozen=True)
class Moved:
    """What a file holds of an agent.

    Attributes:
        agent: its address. tokens: length of its transcript. kept: tokens whose KV is in the file.
        nbytes: size of the file.
    """

    agent: str
    tokens: int
    kept: int
    nbytes: int


def export_agent(runtime: str, agent: str, path: Path) -> Moved:
    """Write everything of an agent to a file; replaces one that is there.

    Raises:
        NoSuchActor: the runtime has no such agent. StoreFailed: the file could not be written.
    """
    packed = moving.read(home() / runtime / "journal.sqlite", agent)
    ids = packed.transcript
    with _store(default_store_dir(home() / runtime), read_only=True) as store:
        # A fork that has not spoken has blocks of its origin's, and no memory of its own yet.
        records = [r for r in store.agents() if r.agent in (agent, packed.origin) and r.salt == packed.salt]
        records.sort(key=lambda record: (record.agent == agent, record.last_used))
        result = store.export_agent(
            agent,
            path,
            ids,
            salt=packed.salt,
            fingerprint=records[-1].fingerprint if records else None,
            record=moving.encode(packed),
        )
    if not result.ok:
        raise StoreFailed(result.reason)
    return Moved(agent, len(ids) // 4, result.tokens, result.nbytes)


def import_agent(runtime: str, path: Path, agent: str | None = None) -> Moved:
    """Enter an exported agent into a runtime that is not running, under its own address or ``agent``.

    Raises:
        InvalidRequest: it exists already, or ``agent`` is of another kind.
        StoreFailed: the file is damaged or holds no actor, the team runs, or nothing can be written.
    """
    packed = _packed(path)
    if agent is not None and agent != packed.id:
        packed = moving.renamed(packed, agent)
    folder = run_dir(runtime)
    lock = LockFile(folder / "runtime.lock")
    if not lock.acquire(tries=5):
        raise StoreFailed(f"runtime {runtime!r} is running, in process {lock.holder()}: end it first")
    try:
        imported = anyio.run(_import, folder, path, packed)
    finally:
        lock.release()
    return Moved(packed.id, len(imported.ids) // 4, imported.tokens, path.stat().st_size)


async def _import(folder: Path, path: Path, packed: moving.PackedActor) -> Any:
    journal = await Journal.open(folder / "journal.sqlite")
    try:
        await journal.do("look", lambda db: moving.refuse_existing(db, packed.id))
        imported = await anyio.to_thread.run_sync(_import_memory, folder, path, packed.id)
        await journal.do("import", lambda db: moving.enter(db, packed), admits=True)
    finally:
        await journal.close()
    return imported


def _import_memory(folder: Path, path: Path, agent: str) -> Any:
    with _store(default_store_dir(folder), read_only=False) as store:
        result = store.import_agent(path, agent=agent)
    if not result.ok:
        raise StoreFailed(result.reason)
    return result


def _packed(path: Path) -> moving.PackedActor:
    """The actor in a file that is whole."""
    from offbook.runtime.store.container import CorruptFile
    from offbook.runtime.store.transfer import open_agent

    try:
        with open_agent(str(path)) as (manifest, _):
            if not manifest.record:
                raise StoreFailed(f"{path} holds memory alone and no actor")
            packed = moving.decode(manifest.record)
            if (packed.transcript, packed.salt) != (manifest.ids, manifest.salt):
                raise StoreFailed(f"{path}: the actor and the memory in it are not of each other")
            return packed
    except CorruptFile as error:
        raise StoreFailed(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise NoSuchActor(f"there is no file {path}") from error


def _store(folder: Path, *, read_only: bool) -> Any:
    from offbook.runtime.store import BlockStore, StoreLocked

    try:
        return BlockStore.for_tools(folder, read_only=read_only)
    except StoreLocked as error:
        raise StoreFailed(f"{error}: end the team first, its engine is writing there") from error
