"""Moving an agent to another machine: transcript, blocks and tails as one checksummed file.

The file (FORMAT.md) holds the stored files as they are, so that exporting copies bytes that were just
proven, and importing proves them again and saves them as if an engine had.
"""

from __future__ import annotations

import json
import os
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, ClassVar, TypeAlias

import xxhash

from . import container
from .audit import proven_block, proven_tail
from .blocks import BlockFormat, BlockInfo, check_block_header
from .container import CorruptFile, Header
from .disk import failure
from .hashing import HASH_BYTES, chain, root_hash
from .layout import BLOCK_TOKENS, Array, Tail
from .results import Corrupt, Failed, Full, ReadOnly, StoreUsageError
from .saving import BlockPut, TailPut
from .state import State
from .tails import TailFacts, agent_key, inspect_tail, split_names, tail_facts
from .writer import Writer

MAGIC = b"offbook-agent-1\n"
_CHUNK = 1 << 20
_IN_FLIGHT = 8
"""Files read ahead of the writer by an import: bounds its memory."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An agent's file is complete and durable. ``tokens``: how far the memory in it reaches."""

    ok: ClassVar[bool] = True
    blocks: int
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What an agent's file held.

    Attributes:
        agent, salt, ids: whose it is and the whole transcript (little-endian uint32).
        fingerprint: the model and scheme the KV is of; under another the engine prefills from ``ids``.
        blocks, tail: what was saved here. tokens: how far that memory reaches.
        record: what the exporter put in beside the memory.
    """

    ok: ClassVar[bool] = True
    agent: str
    salt: str
    ids: bytes
    fingerprint: str
    blocks: int
    tail: bool
    tokens: int = 0
    record: bytes = b""


ExportResult: TypeAlias = Exported | Full | ReadOnly | Failed
ImportResult: TypeAlias = Imported | Corrupt | Full | ReadOnly | Failed


@dataclass(frozen=True, slots=True)
class Manifest:
    """The head of an agent's file.

    Attributes:
        files: (kind, name, bytes) with kind ``block`` or ``tail``. record: the exporter's own bytes.
    """

    agent: str
    salt: str
    fingerprint: str
    ids: bytes
    files: tuple[tuple[str, str, int], ...]
    record: bytes = b""


def export_agent(
    state: State, path: str, agent: str, salt: str, ids: bytes, fingerprint: str | None, record: bytes = b""
) -> ExportResult:
    """Write an agent's file: ``ids``, and all proven blocks and tails that belong to them.

    The tails of earlier turns go along, so that the agent can go back to these without a prefill there, too.

    ``fingerprint``: of which model; None takes the one the agent used last, or the store's.
    """
    with state.lock:
        entries = [
            entry
            for entry in state.index.agents.values()
            if (entry.agent, entry.salt) == (agent, salt) and fingerprint in (None, entry.model)
        ]
        entry = max(entries, key=lambda entry: entry.last_used, default=None)
        model = entry.model if entry is not None else fingerprint or state.fingerprint
        tails = sorted(entry.tails, key=lambda tail: tail.tokens) if entry is not None else []
    root = root_hash(model, salt)
    files: list[tuple[str, str, int]] = []
    sources: list[str] = []
    reach = 0
    for name in chain(ids, root):
        block = state.index.blocks.get(name)
        if block is None or not proven_block(state, name, block):
            break  # What follows a gap is of no use.
        files.append(("block", name.hex(), block.nbytes))
        sources.append(state.paths.block(name))
        reach += BLOCK_TOKENS
    blocks = len(files)
    key = agent_key(model, salt, agent)
    # The longest last: a shorter one that is saved after it would mean that the agent went back.
    for tail in tails:
        source = state.paths.tail(key, tail.tokens, tail.serial)
        listed = len(tail.blocks) // HASH_BYTES
        try:
            tokens = inspect_tail(source, key, tail.tokens, tail.serial).follows(ids, root)
        except (CorruptFile, OSError):
            continue
        if tokens is not None and listed <= blocks and proven_tail(state, key, tail):
            files.append(("tail", f"{key.hex()}-{tail.tokens}-{tail.serial}", tail.nbytes))
            sources.append(source)
            reach = max(reach, tokens)
    try:
        size = write_agent(path, Manifest(agent, salt, model, ids, tuple(files), record), sources)
    except CorruptFile as error:
        return Failed(str(error))
    except OSError as error:
        return failure(error)
    return Exported(blocks, reach, size)


def import_agent(state: State, writer: Writer, path: str, agent: str | None, keep: int) -> ImportResult:
    """Save what an agent's file holds, under its own name or ``agent``. Waits for the writer."""
    pending: deque[Future[Any]] = deque()
    blocks = reach = 0
    saved_tail = False

    def settle(left: int) -> Any:
        while len(pending) > left:
            result = pending.popleft().result()
            if not result.ok:
                return result
        return None

    try:
        with open_agent(path) as (manifest, file):
            owner = agent if agent is not None else manifest.agent
            root = root_hash(manifest.fingerprint, manifest.salt)
            names = set(chain(manifest.ids, root))
            for info, arrays in stored_files(manifest, file):
                put: BlockPut | TailPut
                if isinstance(info, BlockInfo):
                    if info.name not in names or info.fingerprint != manifest.fingerprint:
                        raise CorruptFile(f"block {info.name.hex()} is not of this agent's transcript")
                    fmt = BlockFormat(info.fingerprint, info.header.tensors)
                    tensors = list(arrays.values())
                    put = BlockPut(
                        state, fmt, info.name, info.parent, info.ids, tensors, owner, manifest.salt
                    )
                    blocks += 1
                    reach = max(reach, blocks * BLOCK_TOKENS)
                else:
                    tokens = info.follows(manifest.ids, root)
                    if tokens is None:
                        raise CorruptFile("the tail is not of this agent's transcript")
                    tail = tail_of(info, arrays)
                    put = TailPut(state, manifest.fingerprint, owner, manifest.salt, tail, keep)
                    saved_tail = True
                    reach = max(reach, tokens)
                if (bad := settle(_IN_FLIGHT)) is not None:
                    return bad  # type: ignore[no-any-return]  # a result of a put, which all are among ours
                if not writer.offer(put):
                    return Failed("the write queue is full or closed")
                pending.append(put.future)
            if (bad := settle(0)) is not None:
                return bad  # type: ignore[no-any-return]  # likewise
    except CorruptFile as error:
        return Corrupt(f"{path}: {error}")
    except StoreUsageError as error:
        return Corrupt(f"{path}: {error}")
    except OSError as error:
        return Failed(f"{path} cannot be read: {error.strerror}")
    return Imported(
        owner,
        manifest.salt,
        manifest.ids,
        manifest.fingerprint,
        blocks,
        saved_tail,
        reach,
        manifest.record,
    )


def write_agent(path: str, manifest: Manifest, sources: list[str]) -> int:
    """Write an agent's file by way of a temporary one beside it. Returns its size.

    Raises CorruptFile if a source changed size, OSError.
    """
    head = json.dumps(
        {
            "agent": manifest.agent,
            "salt": manifest.salt,
            "fingerprint": manifest.fingerprint,
            "ids": b2a_base64(manifest.ids, newline=False).decode(),
            "record": b2a_base64(manifest.record, newline=False).decode(),
            "files": manifest.files,
        }
    ).encode()
    temporary = f"{path}.part-{os.getpid()}"
    digest = xxhash.xxh3_128()
    try:
        with open(temporary, "xb") as out:

            def put(data: bytes) -> None:
                digest.update(data)
                out.write(data)

            put(MAGIC + len(head).to_bytes(8, "little") + head)
            for source, (_, name, size) in zip(sources, manifest.files, strict=True):
                with open(source, "rb") as file:
                    left = size
                    while chunk := file.read(_CHUNK):
                        put(chunk)
                        left -= len(chunk)
                if left:
                    raise CorruptFile(f"{name} is not {size} bytes long")
            out.write(digest.digest())
            out.flush()
            os.fsync(out.fileno())
            total = out.tell()
        os.replace(temporary, path)
        return total
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


@contextmanager
def open_agent(path: str) -> Iterator[tuple[Manifest, IO[bytes]]]:
    """Open an agent's file, proven whole by its checksum, at its first stored file.

    Raises CorruptFile, OSError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = xxhash.xxh3_128()
        left = size - 16
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
        if size < len(MAGIC) + 24 or file.read(16) != digest.digest():
            raise CorruptFile("the file is damaged or incomplete: its checksum differs")
        file.seek(0)
        if file.read(len(MAGIC)) != MAGIC:
            raise CorruptFile("this is not an exported agent, or one of another version")
        try:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            manifest = Manifest(
                str(head["agent"]),
                str(head["salt"]),
                str(head["fingerprint"]),
                a2b_base64(head["ids"]),
                tuple((str(kind), str(name), int(nbytes)) for kind, name, nbytes in head["files"]),
                a2b_base64(head.get("record", "")),
            )
        except (ValueError, KeyError, TypeError, Base64Error) as error:
            raise CorruptFile(f"its head cannot be read: {error!r}") from None
        if file.tell() + sum(nbytes for _, _, nbytes in manifest.files) + 16 != size:
            raise CorruptFile("its size is not that of the files it lists")
        yield manifest, file


def stored_files(
    manifest: Manifest, file: IO[bytes]
) -> Iterator[tuple[BlockInfo | TailFacts, dict[str, Array]]]:
    """The files inside, each proven like one of the store's. Raises CorruptFile."""
    at = file.tell()
    for kind, name, nbytes in manifest.files:
        header, arrays = _read_at(file.fileno(), at, nbytes)
        at += nbytes
        try:
            if kind == "block":
                yield check_block_header(header, bytes.fromhex(name)), arrays
            elif kind == "tail":
                key, tokens, serial = name.split("-")
                yield tail_facts(header, bytes.fromhex(key), int(tokens), int(serial)), arrays
        except ValueError:
            raise CorruptFile(f"{name!r} names no {kind}") from None


def tail_of(facts: TailFacts, arrays: dict[str, Array]) -> Tail:
    """The tail record of a tail file that was read."""
    return Tail(facts.tokens, facts.chain, split_names(facts.blocks), arrays, facts.note)


def _read_at(fd: int, at: int, nbytes: int) -> tuple[Header, dict[str, Any]]:
    header = container.read_header(fd, at, nbytes)
    return header, container.read_arrays(fd, header, at)
