"""The engine as a child process: restarted when it dies, given up when that is no use, ended in order."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from offbook.bus.errors import EngineFailed, OffbookError, UnknownModel
from offbook.runtime import child as child_module
from offbook.runtime.child import EngineChild
from offbook.runtime.config import EngineConfig
from offbook.runtime.lockfile import LockFile

CONFIG = EngineConfig(name="t", endpoint="ipc:///nowhere")


def make(tmp_path: Path, script: str) -> EngineChild:
    return EngineChild(CONFIG, tmp_path, command=[sys.executable, "-S", "-c", script])


async def never(error: OffbookError) -> None:
    raise AssertionError(f"unexpected: {error}")


async def file_with(path: Path, lines: int) -> list[str]:
    """The lines of a file, once it has so many."""
    with anyio.fail_after(20):
        while not path.exists() or len(path.read_text().splitlines()) < lines:
            await anyio.sleep(0.01)
    return path.read_text().splitlines()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(child_module, "KILL_S", 0.3)


async def test_a_dead_engine_is_started_again(tmp_path: Path) -> None:
    script = (
        f"import os, time; open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    )
    child = make(tmp_path, script)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.run, never)
        (first,) = await file_with(tmp_path / "pids", 1)
        assert child.pid == int(first)
        os.kill(int(first), signal.SIGKILL)
        lives = await file_with(tmp_path / "pids", 2)
        assert lives[1] != first
        assert child.restarts == 1
        await child.end()
    assert child.pid is None


async def test_an_engine_that_says_why_it_cannot_run_is_not_restarted(tmp_path: Path) -> None:
    script = (
        "import os, sys; open(os.environ['OFFBOOK_ENGINE_ERROR'], 'w')"
        """.write('{"code": "UnknownModel", "message": "no model named x", "details": {}}'); sys.exit(78)"""
    )
    failures: list[OffbookError] = []

    async def note(error: OffbookError) -> None:
        failures.append(error)

    child = make(tmp_path, script)
    with anyio.fail_after(20):
        await child.run(note)
    assert [type(f) for f in failures] == [UnknownModel]
    assert child.failure is failures[0]
    assert child.restarts == 0


async def test_an_engine_that_keeps_dying_is_given_up_with_the_end_of_its_log(tmp_path: Path) -> None:
    failures: list[OffbookError] = []

    async def note(error: OffbookError) -> None:
        failures.append(error)

    with anyio.fail_after(20):
        await make(tmp_path, "print('out of luck'); raise SystemExit(3)").run(note)
    assert isinstance(failures[0], EngineFailed)
    assert "code 3" in str(failures[0])
    assert "before it was ready" in str(failures[0])
    assert "out of luck" in str(failures[0])


async def test_a_long_load_that_ends_in_death_is_no_healthy_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "STEADY_S", 0.0001)  # every process lives longer than this
    failures: list[OffbookError] = []

    async def note(error: OffbookError) -> None:
        failures.append(error)

    child = make(tmp_path, "raise SystemExit(3)")
    with anyio.fail_after(20):
        await child.run(note)
    assert isinstance(failures[0], EngineFailed)
    assert child.restarts == child_module.QUICK_DEATHS - 1


async def test_an_engine_that_served_for_long_is_started_again_however_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "STEADY_S", 100.0)
    # Each life but the first two has served for long when it ends; only a few come without.
    script = f"""
import os, time
lives = open({str(tmp_path / "lives")!r}, "a+")
lives.seek(0)
before = len(lives.readlines())
print("life", file=lives, flush=True)
served = 1000 if before >= 2 else 1
open(os.environ["OFFBOOK_ENGINE_READY"], "w").write(str(time.monotonic() - served))
if before > {2 * child_module.QUICK_DEATHS}: time.sleep(60)
"""
    child = make(tmp_path, script)
    monkeypatch.setattr(child, "_served", lambda lived, real=child._served: real(1e9))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.run, never)
        await file_with(tmp_path / "lives", 2 * child_module.QUICK_DEATHS + 2)
        await child.end()


async def test_an_engine_that_dies_soon_after_it_was_ready_is_given_up(tmp_path: Path) -> None:
    failures: list[OffbookError] = []

    async def note(error: OffbookError) -> None:
        failures.append(error)

    script = (
        "import os, time; open(os.environ['OFFBOOK_ENGINE_READY'], 'w').write(str(time.monotonic())); "
        "raise SystemExit(4)"
    )
    child = make(tmp_path, script)
    with anyio.fail_after(20):
        await child.run(note)
    assert "ready for 0." in str(failures[0])
    assert child.restarts == child_module.QUICK_DEATHS - 1


async def test_ending_asks_then_terminates_then_kills(tmp_path: Path) -> None:
    asked = anyio.Event()
    script = f"""
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("deaf to SIGTERM", flush=True))
open({str(tmp_path / "up")!r}, "w").write("up\\n")
time.sleep(0.1)
while True: time.sleep(0.05)
"""
    child = make(tmp_path, script)

    async def ask() -> None:
        asked.set()
        raise ConnectionError("nobody there")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.run, never)
        await file_with(tmp_path / "up", 1)
        await child.end(ask)
    assert asked.is_set()
    assert child.pid is None
    assert "deaf to SIGTERM" in (tmp_path / "engine.log").read_text()


async def test_cancelling_leaves_no_process(tmp_path: Path) -> None:
    child = make(
        tmp_path, f"import os, time; open({str(tmp_path / 'up')!r}, 'w').write('1\\n'); time.sleep(60)"
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.run, never)
        await file_with(tmp_path / "up", 1)
        pid = child.pid
        tasks.cancel_scope.cancel()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_engine_waits_for_the_orphan_of_a_killed_host(tmp_path: Path) -> None:
    up = tmp_path / "up"
    orphan = make(tmp_path, f"import time; open({str(up)!r}, 'a').write('x\\n'); time.sleep(60)")
    after = make(tmp_path, f"import time; open({str(up)!r}, 'a').write('y\\n'); time.sleep(60)")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(orphan.run, never)
        await file_with(up, 1)
        tasks.start_soon(after.run, never)
        await anyio.wait_all_tasks_blocked()
        assert after.pid is None
        await orphan.end()
        assert await file_with(up, 2) == ["x", "y"]
        await after.end()


async def test_an_orphan_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up = tmp_path / "up"
    orphan = make(tmp_path, f"import time; open({str(up)!r}, 'a').write('x\\n'); time.sleep(60)")
    after = make(tmp_path, f"import time; open({str(up)!r}, 'a').write('y\\n'); time.sleep(60)")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(orphan.run, never)
        await file_with(up, 1)
        orphan._ending = True  # nobody watches it any more, as after a kill of its host
        monkeypatch.setattr(child_module, "ORPHAN_S", 0.1)
        tasks.start_soon(after.run, never)
        await file_with(up, 2)
        await after.end()


def test_a_lock_is_held_by_one_and_names_it(tmp_path: Path) -> None:
    first, second = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire()
    assert second.holder() == os.getpid()
    first.release()
    with second, pytest.raises(BlockingIOError, match=str(os.getpid())), first:
        pass


def test_a_long_log_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "LOG_BYTES", 10)
    path = tmp_path / "engine.log"
    path.write_text("x" * 11)
    child_module._set_aside(path)
    assert not path.exists()
    assert (tmp_path / "engine.log.1").read_text() == "x" * 11
