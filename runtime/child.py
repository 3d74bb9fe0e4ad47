"""The engine as a child process: started, watched, restarted with backoff, ended.

Owns the life of one engine process and nothing of what is said to it. The engine may die at any time
(a GPU abort, an out-of-memory kill); the child is then started again after a pause that doubles with
every quick death, and the agents' calls, which wait for an engine to appear, only see the delay. A death
is quick if the engine had not served for a while, however long it took to get ready. An engine that says a
restart would not help (exit code 78, with the reason in a file) is not restarted.

The engine ends by itself when the host vanishes, so no process outlives a ``kill -9`` of the host for
long. While such an orphan still flushes, the next host's engine must not touch the same store: each
engine holds a lock for its own life, and is started only once the one before it let go.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc

from offbook.bus.errors import EngineFailed, OffbookError, from_wire
from offbook.runtime.config import EngineConfig
from offbook.runtime.lockfile import LockFile

log = logging.getLogger("offbook.runtime.child")

EX_CONFIG = 78
"""Exit code of an engine that cannot run with its configuration (``sysexits.h``)."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
STEADY_S = 30.0
"""An engine that served this long was healthy: the next restart is immediate again. Loading does not count,
for a large model may load for minutes and then die of it every time."""

QUICK_DEATHS = 6
"""So many deaths in a row without a steady life, and the engine is taken to be broken."""

TERM_S, KILL_S = 10.0, 5.0
"""How long an engine gets to flush after it was asked to end, and then after SIGTERM."""

ORPHAN_S = 20.0
"""How long an engine of an earlier, killed host gets to flush and end before it is killed."""

LOG_BYTES = 4 << 20
"""A larger log of earlier runs is set aside (one generation) when an engine starts."""


def engine_command(config: EngineConfig) -> list[str]:
    """The command line of an engine process."""
    return [sys.executable, "-m", "offbook.runtime.engine.process", "--config", config.to_json()]


class EngineChild:
    """Keeps one engine process running for as long as ``run`` is.

    Attributes:
        pid: the process now running, or None between lives.
        restarts: how often it died and was started again.
        failure: why it is not restarted any more, or None while it is.
    """

    def __init__(self, config: EngineConfig, run_dir: Path, *, command: Sequence[str] | None = None) -> None:
        self.config = config
        self.log_path = run_dir / "engine.log"
        self.restarts = 0
        self.failure: OffbookError | None = None
        self._error_path = run_dir / "engine.error"
        self._ready_path = run_dir / "engine.ready"
        self._lock = LockFile(run_dir / "engine.lock")
        self._command = list(command) if command is not None else engine_command(config)
        self._process: anyio.abc.Process | None = None
        self._ending = False

    def reconfigure(self, config: EngineConfig) -> None:
        """Settings for the next start; the engine that runs now keeps those it has."""
        self.config = config
        self._command = engine_command(config)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self, on_failure: Callable[[OffbookError], Awaitable[None]]) -> None:
        """Start the engine and keep it running until ``end`` was called.

        ``on_failure`` is called once if the engine cannot be kept running; ``run`` then returns.
        Cancelling kills the process.
        """
        pause, quick = FIRST_PAUSE_S, 0
        while not self._ending:
            started = time.monotonic()
            code = await self._live_once()
            if self._ending:
                return
            lived = time.monotonic() - started
            served = self._served(lived)
            if served >= STEADY_S:
                pause, quick = FIRST_PAUSE_S, 0
            quick += 1
            self.failure = self._verdict(code, quick, lived, served)
            if self.failure is not None:
                await on_failure(self.failure)
                return
            log.warning("engine ended %s after %.1f s; starting it again in %.1f s", _how(code), lived, pause)
            self.restarts += 1
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def end(self, ask_to_end: Callable[[], Awaitable[None]] | None = None) -> None:
        """End the engine: ask it (``Shutdown``), then SIGTERM, then SIGKILL. Returns once it is gone."""
        self._ending = True
        process = self._process
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            if ask_to_end is not None and process.returncode is None:
                with anyio.move_on_after(TERM_S), suppress(OffbookError, OSError):
                    await ask_to_end()
                    await process.wait()
            if process.returncode is None:
                _signal(process, signal.SIGTERM)
                with anyio.move_on_after(KILL_S):
                    await process.wait()
            if process.returncode is None:
                log.warning("engine %d did not end in time; killed", process.pid)
                _signal(process, signal.SIGKILL)
                await process.wait()

    async def _live_once(self) -> int:
        """One life of the process, from start to exit code."""
        await self._take_lock()
        self._error_path.unlink(missing_ok=True)
        self._ready_path.unlink(missing_ok=True)
        _set_aside(self.log_path)
        environment = {
            **os.environ,
            "OFFBOOK_PARENT_PID": str(os.getpid()),
            "OFFBOOK_ENGINE_ERROR": str(self._error_path),
            "OFFBOOK_ENGINE_READY": str(self._ready_path),
            "PYTHONUNBUFFERED": "1",
        }
        try:
            with self.log_path.open("ab") as out:
                # In a session of its own, so that Ctrl-C at a terminal reaches the host alone, which then
                # ends the engine in order.
                process = await anyio.open_process(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=environment,
                    start_new_session=True,
                    pass_fds=(self._lock.fileno,),
                )
            self._lock.note_holder(process.pid)
        finally:
            self._lock.release()  # the engine has it now
        self._process = process
        try:
            return await process.wait()
        finally:
            if process.returncode is None:  # cancelled
                _signal(process, signal.SIGKILL)
                with anyio.CancelScope(shield=True):
                    await process.wait()

    async def _take_lock(self) -> None:
        """Wait until no other engine works on this runtime's store; kill one that does not end."""
        deadline = time.monotonic() + ORPHAN_S
        while not self._lock.acquire():
            holder = self._lock.holder()
            if time.monotonic() > deadline and holder is not None:
                # It holds the lock, so the pid is truly its own and was not given to another process.
                log.warning("engine %d of an earlier run did not end in %.0f s; killed", holder, ORPHAN_S)
                with suppress(ProcessLookupError):
                    os.kill(holder, signal.SIGKILL)
            await anyio.sleep(0.05)

    def _served(self, lived: float) -> float:
        """How many of the seconds that an engine lived it was ready; 0 if it never was."""
        try:
            ready = float(self._ready_path.read_text())
        except (OSError, ValueError):
            return 0.0
        return min(lived, max(0.0, time.monotonic() - ready))

    def _verdict(self, code: int, quick: int, lived: float, served: float) -> OffbookError | None:
        """Why the engine is not to be started again, or None if it is."""
        if code == EX_CONFIG:
            try:
                return from_wire(json.loads(self._error_path.read_text()))
            except (OSError, ValueError):
                return EngineFailed(f"the engine refused to start{self._tail()}")
        if quick >= QUICK_DEATHS:
            return EngineFailed(
                f"the engine died {quick} times in a row, last {_how(code)} after {lived:.1f} s, "
                f"{f'ready for {served:.1f} s' if served else 'before it was ready'}{self._tail()}"
            )
        return None

    def _tail(self, lines: int = 4) -> str:
        """The last lines of the log, for an error message."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - 4096))
                text = file.read().decode(errors="replace").strip().splitlines()[-lines:]
        except OSError:
            text = []
        return f"; the end of {self.log_path}:\n  " + "\n  ".join(text) if text else f"; see {self.log_path}"


def _signal(process: anyio.abc.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def _how(code: int) -> str:
    if code < 0:
        try:
            return f"by {signal.Signals(-code).name}"
        except ValueError:
            return f"by signal {-code}"
    return f"with code {code}"


def _set_aside(path: Path) -> None:
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
