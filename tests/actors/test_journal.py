"""The journal: group commit, isolation of failures, and refusing what it cannot hold safely."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest

from offbook.actors import (
    Actor,
    InvalidRequest,
    Journal,
    JournalFailed,
    JournalInUse,
    Message,
    Request,
    StateNotLoadable,
    on,
    schema,
)
from offbook.actors.schema import VERSION
from offbook.actors.testing import stored_state, team
from offbook.actors.topicstore import JournalTopicStore
from offbook.bus.topics import Record


def put(db: sqlite3.Connection, key: str) -> None:
    db.execute("INSERT INTO once VALUES (?, NULL)", (key,))


async def test_work_that_waits_together_is_committed_together(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j")
    hold = threading.Event()
    first = journal.submit("hold", lambda db: hold.wait())
    rest = [journal.submit("put", lambda db, n=n: put(db, str(n))) for n in range(100)]  # type: ignore[misc]
    hold.set()
    await first
    for future in rest:
        await future
    assert journal.works == 101
    assert journal.commits <= 2
    await journal.close()


async def test_a_failing_piece_is_undone_alone(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j")
    hold = threading.Event()

    def half(db: sqlite3.Connection) -> None:
        put(db, "half")
        raise ValueError("no")

    first = journal.submit("hold", lambda db: hold.wait())
    good, bad, after = (
        journal.submit("put", lambda db: put(db, "a")),
        journal.submit("half", half),
        journal.submit("put", lambda db: put(db, "b")),
    )
    hold.set()
    await first
    await good
    with pytest.raises(ValueError, match="no"):
        await bad
    await after
    rows = await journal.do("read", lambda db: db.execute("SELECT key FROM once ORDER BY key").fetchall())
    assert rows == [("a",), ("b",)]
    await journal.close()


async def test_a_journal_is_open_once(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j")
    with pytest.raises(JournalInUse, match="another process"):
        await Journal.open(tmp_path / "j")
    await journal.close()
    again = await Journal.open(tmp_path / "j")
    await again.close()
    with pytest.raises(InvalidRequest, match="closed"):
        again.submit("x", lambda db: None)


async def test_a_newer_or_foreign_file_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "new")
    db.execute(f"PRAGMA user_version={VERSION + 1}")
    db.close()
    with pytest.raises(StateNotLoadable, match=f"schema version {VERSION + 1}"):
        await Journal.open(tmp_path / "new")
    (tmp_path / "noise").write_bytes(b"not a database" * 1000)
    with pytest.raises(StateNotLoadable, match=r"/noise cannot be used: file is not a database$"):
        await Journal.open(tmp_path / "noise")


async def test_a_full_disk_is_said_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_MIGRATIONS", {1: "SELECT * FROM nothing;"})
    monkeypatch.setattr(schema.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(StateNotLoadable, match=r"/j cannot be used: .*the disk is full \(4 KiB left\)"):
        await Journal.open(tmp_path / "j")


async def test_it_is_durable_by_its_settings(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j")
    settings = await journal.do(
        "read",
        lambda db: [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")],
    )
    assert settings == ["wal", 2]
    await journal.close()


async def test_a_nearly_full_disk_admits_nothing_new_but_lets_turns_commit(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j", min_free=1 << 60)
    with pytest.raises(JournalFailed, match="free some space"):
        await journal.do("put", lambda db: put(db, "a"), admits=True)
    await journal.do("put", lambda db: put(db, "b"))
    await journal.close()


class Note(Message):
    text: str


class Count(Request[int]):
    pass


class Keeper(Actor):
    notes: list[str] = []

    @on
    async def note(self, msg: Note) -> None:
        self.notes.append(msg.text)

    @on
    async def count(self, ask: Count) -> int:
        return len(self.notes)


async def test_when_nothing_can_be_written_messages_wait_and_askers_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbook.actors.cell.RETRY_AFTER", 0.01)
    broken = False

    def fault(point: str) -> None:
        if broken and point == "commit" and "turn" in seen:
            raise OSError("disk I/O error")
        seen.clear() if point == "begin" else seen.add(point.removeprefix("work:"))

    seen: set[str] = set()
    async with team(tmp_path, engine=False, fault=fault) as (host, _):
        await host.register(Keeper)
        broken = True
        with pytest.raises(JournalFailed, match="could not be written: disk I/O error"):
            await host.ask("keeper/k", Count())
        await host.tell("keeper/k", Note("kept"))
        broken = False
        await host.idle()
        assert (await stored_state(host, "keeper/k"))["notes"] == ["kept"]
        assert {failure.verdict for failure in host.failures} == {"waits for the journal"}


async def test_topics_in_the_journal_number_and_remember(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j")
    store = JournalTopicStore(journal, retain=5, remember=8)
    assert await store.bounds("t") == (1, 0)
    numbers = [(await store.append("t", [Record(id=str(n), body=b"x")]))[0] for n in range(10)]
    assert numbers == list(range(1, 11))
    assert await store.append("t", [Record(id="9", body=b"y"), Record(id="n", body=b"n")]) == [10, 11]
    assert await store.append("t", [Record(id="m", body=b"n"), Record(id="m", body=b"n")]) == [12, 12]
    assert await store.bounds("t") == (8, 12)
    assert [event.seq for event in await store.read("t", 9, 2)] == [10, 11]
    await journal.close()
    journal = await Journal.open(tmp_path / "j")
    store = JournalTopicStore(journal, retain=5, remember=8)
    assert await store.append("t", [Record(id="4", body=b"x"), Record(id="z", body=b"z")]) == [5, 13]
    await journal.close()


async def test_closing_finishes_what_was_submitted(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "j")
    futures = [journal.submit("put", lambda db, n=n: put(db, str(n))) for n in range(10)]  # type: ignore[misc]
    await journal.close()
    await anyio.lowlevel.checkpoint()
    assert all(future.done() for future in futures)


def test_actors_import_quickly_and_without_mlx() -> None:
    code = (
        "import sys, offbook.actors; "
        "print([m for m in ('mlx', 'numpy', 'mlx_lm', 'transformers', 'typer') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
