"""A private endpoint per test, and helpers to run a broker with peers, some in real child processes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import anyio.abc
import pytest

from offbook.bus import Bus, Delivery, Kind, connect

CHILD = Path(__file__).with_name("child.py")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def endpoint() -> Iterator[str]:
    # Not under tmp_path: the path of a Unix socket must be short.
    folder = tempfile.mkdtemp(prefix="obt-")
    yield f"ipc://{folder}/bus.sock"
    shutil.rmtree(folder, ignore_errors=True)


Handler = Callable[[Delivery], Awaitable[None]]


async def echo(delivery: Delivery) -> None:
    """Accepts tells; answers anything else with what it got."""
    if delivery.expects_reply:
        await delivery.reply(delivery.decode())
    else:
        await delivery.accept()


@contextlib.asynccontextmanager
async def serving(
    endpoint: str, pattern: str, handler: Handler, name: str | None = None
) -> AsyncIterator[Bus]:
    """A peer that serves ``pattern``, each delivery in a task of its own."""
    async with connect(endpoint, name=name) as bus, anyio.create_task_group() as tasks:
        await bus.serve(pattern)

        async def loop() -> None:
            async for delivery in bus.deliveries():
                tasks.start_soon(handler, delivery)

        tasks.start_soon(loop)
        yield bus
        tasks.cancel_scope.cancel()


class Child:
    """A real process that runs one role of child.py."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        assert process.stdout is not None
        self._lines = process.stdout
        self._buffer = b""

    async def line(self) -> str:
        """The next line it prints."""
        with anyio.fail_after(30):
            while b"\n" not in self._buffer:
                self._buffer += await self._lines.receive()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """SIGKILL: it gets no chance to say goodbye."""
        self.process.send_signal(signal.SIGKILL)


@contextlib.asynccontextmanager
async def child(role: str, *args: str) -> AsyncIterator[Child]:
    async with await anyio.open_process([sys.executable, str(CHILD), role, *args], stderr=None) as process:
        try:
            yield Child(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until ``check()`` holds: for facts that no event announces."""
    with anyio.fail_after(20):
        while not check():
            await anyio.sleep(0.005)


class Kit:
    """What tests use; a fixture because test folders are no packages."""

    echo = staticmethod(echo)
    serving = staticmethod(serving)
    child = staticmethod(child)
    Kind = Kind
    eventually = staticmethod(eventually)


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
