"""``Runtime``: a named team of agents on this machine, wired and running.

Owns the wiring and its order: the lock on the name, the broker, the host of the actors, the engine
process. Everything that is said goes over the bus; this file only starts, watches and ends the parts.

Root supervision is *rest for one*: broker and host live in this process and end it if they fail; the
engine is a child that may die and is started again without the actors noticing more than a delay.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import anyio
import anyio.abc
import msgspec
from msgspec import Struct

from offbook.actors.actor import Actor
from offbook.actors.clock import Clock, Seconds
from offbook.actors.clock import seconds as as_seconds
from offbook.actors.engine import PATIENCE
from offbook.actors.host import Host
from offbook.actors.journal import Journal
from offbook.actors.lm import ENGINE_ADDRESS, EngineStats, SetMemory, Shutdown, Stats
from offbook.actors.message import Request
from offbook.actors.running import RunReport
from offbook.actors.topicstore import JournalTopicStore
from offbook.bus import Broker, Bus, ReplyStream, Subscription, connect, endpoint_for, run_dir
from offbook.bus.errors import (
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    NoSuchActor,
    OffbookError,
    ProtocolError,
)
from offbook.runtime.child import EngineChild
from offbook.runtime.config import (
    DEFAULT_MODEL,
    LEAVE_FREE_BYTES,
    MIB,
    EngineConfig,
    InvalidConfig,
    check_budget,
    check_clock,
    check_peers,
    check_runtime_name,
    check_trace,
    default_store_dir,
    format_bytes,
    parse_memory,
)
from offbook.runtime.describe import serve_descriptions
from offbook.runtime.lockfile import LockFile
from offbook.runtime.waiting import ask_engine

log = logging.getLogger("offbook.runtime")

T = TypeVar("T")

DISK_LOOK_S = 10.0
"""Seconds between looks at the free space of the disk."""

ABSENT_PATIENCE_S = 2.0
"""Seconds for which calls wait for an engine where none was started and none was announced in ``peers``: a
new connection's time. Then it is a slip, and more waiting would hide it behind the asker's deadline."""

Until = Seconds | datetime | Callable[[], Awaitable[Any]] | None


class RuntimeInUse(OffbookError):
    """A runtime of this name runs already; ``details["pid"]`` is its process."""


def hours(count: float) -> timedelta:
    """``run(until=hours(12))``."""
    return timedelta(hours=count)


def minutes(count: float) -> timedelta:
    """``run(until=minutes(5))``."""
    return timedelta(minutes=count)


def seconds(count: float) -> timedelta:
    """``run(until=seconds(30))``."""
    return timedelta(seconds=count)


class Runtime:
    """A team of agents with their engine: ``async with Runtime("village") as rt: ...``.

    What it was told is durable under its name: started again, also after ``kill -9``, the same script
    goes on where it was.

    Args:
        name: names the runtime on this machine, and its folder: up to 120 of ``A-Z a-z 0-9 _ . -``.
        model: which model the engine serves; see ``offbook models``.
        memory: budget of the engine for weights, KV and workspace: ``"2 GiB"`` or bytes; None takes
            what the machine can spare.
        disk: most that KV may take on disk, or None.
        kv_bits: 4, 8, or None for 16-bit.
        clock: ``VirtualClock(seed)`` for simulated time; default real time.
        engine: False if no engine is to be started here (actors only, or one that runs elsewhere). An
            agent's calls then fail within seconds if there is none; with ``peers=["engine"]`` they wait
            for it as for one of their own.
        trace: file for a Perfetto trace of the engine's work. One that is there already, as after a
            restart of the engine, is kept: ``trace.json`` as ``trace.1.json``, the next as ``trace.2.json``.
        peers: kinds of addresses that other processes will serve. An actor's message to them waits while
            nobody does; to a kind that nobody knows it is refused, once the team runs, as a slip.

    Raises:
        InvalidConfig, InvalidAddress: a setting that cannot be used; at once.
        RuntimeInUse: on entering, if this name already runs.
    """

    def __init__(
        self,
        name: str,
        *,
        model: str = DEFAULT_MODEL,
        memory: int | str | None = None,
        disk: int | str | None = None,
        kv_bits: int | None = 4,
        clock: Clock | None = None,
        engine: bool = True,
        trace: str | os.PathLike[str] | None = None,
        peers: Collection[str] = (),
    ) -> None:
        if engine and importlib.util.find_spec("mlx") is None:
            raise InvalidConfig(
                "this installation has no MLX to run an engine with: pip install 'offbook[cpu]' (or [metal], "
                "[cuda]), or pass engine=False"
            )
        self.name = check_runtime_name(name)
        self.run_dir = run_dir(name)
        self.endpoint = endpoint_for(name)
        self.config = EngineConfig(
            name=name,
            endpoint=self.endpoint,
            model=model,
            store_dir=str(default_store_dir(self.run_dir)),
            budget_bytes=None if memory is None else check_budget(parse_memory(memory)),
            disk_cap_bytes=None if disk is None else parse_memory(disk, what="disk"),
            kv_bits=kv_bits,
            trace=None if trace is None else check_trace(trace),
        )
        self.engine = EngineChild(self.config, self.run_dir) if engine else None
        self._clock = check_clock(clock)
        self._peers = check_peers(peers)
        self._lock = LockFile(self.run_dir / "runtime.lock")
        self._bus: Bus | None = None
        self._host: Host | None = None
        self._failed = anyio.Event()
        self._stack = AsyncExitStack()

    # -- life -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Runtime:
        await self._stack.enter_async_context(self._running())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, exc, trace)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        if not self._lock.acquire(tries=5):
            pid = self._lock.holder()
            raise RuntimeInUse(
                f"runtime {self.name!r} already runs, in process {pid}: stop it, or choose another name",
                pid=pid,
            )
        try:
            async with unwrapped(), anyio.create_task_group() as tasks:
                up, stop = anyio.Event(), anyio.Event()
                try:
                    # Not tasks.start(): cancelled, it would cancel the parts instead of ending them.
                    tasks.start_soon(self._parts, up, stop)
                    await up.wait()
                    yield
                finally:
                    stop.set()
        finally:
            self._lock.release()

    async def _parts(self, up: anyio.Event, stop: anyio.Event) -> None:
        """Start the parts, say ``up``, keep them until ``stop``, end them in order.

        Shielded: a cancelled script (Ctrl-C, a passed deadline) still ends in order. The actors go first,
        so that no turn sees the engine go; then the engine, which flushes; then the bus and the journal.
        """
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as stack:
                journal = await Journal.open(self.run_dir / "journal.sqlite")
                stack.push_async_callback(journal.close)
                await stack.enter_async_context(Broker(self.endpoint, topic_store=JournalTopicStore(journal)))
                bus = await stack.enter_async_context(connect(self.endpoint, name=f"runtime.{self.name}"))
                children = await stack.enter_async_context(anyio.create_task_group())
                stack.callback(children.cancel_scope.cancel)
                if self.engine is not None:
                    children.start_soon(self.engine.run, partial(self._engine_failed, children))
                    stack.push_async_callback(self.engine.end, partial(_ask_to_end, bus))
                    children.start_soon(_warn_of_full_disk, self.run_dir)
                awaited = self.engine is not None or "engine" in self._peers
                host = Host(
                    self.name,
                    journal=journal,
                    endpoint=self.endpoint,
                    clock=self._clock,
                    engine_patience=PATIENCE if awaited else ABSENT_PATIENCE_S,
                    peers=self._peers,
                )
                self._host = await stack.enter_async_context(host)
                children.start_soon(serve_descriptions, bus, host)
                self._bus = bus
                try:
                    up.set()
                    await stop.wait()
                finally:
                    self._host = self._bus = None

    async def _engine_failed(self, children: anyio.abc.TaskGroup, error: OffbookError) -> None:
        """The engine cannot be kept running: whoever asks it learns why, at once."""
        log.error("there is no engine: %s", error)
        self._failed.set()
        children.start_soon(_stand_in, self.endpoint, error)

    # -- the parts --------------------------------------------------------------------------------------

    @property
    def host(self) -> Host:
        """The host of the actors. Raises ``InvalidRequest`` outside of ``async with``."""
        if self._host is None:
            raise InvalidRequest(f"runtime {self.name!r} is not running: use 'async with Runtime(...)'")
        return self._host

    @property
    def bus(self) -> Bus:
        """A client of the bus. Raises ``InvalidRequest`` outside of ``async with``."""
        if self._bus is None:
            raise InvalidRequest(f"runtime {self.name!r} is not running: use 'async with Runtime(...)'")
        return self._bus

    async def ready(self, *, timeout: Seconds = 600.0) -> EngineStats:
        """Wait until the engine has loaded its model; agents' calls wait by themselves.

        Raises:
            UnknownModel, ModelError, EngineFailed...: it cannot be started, and why.
            DeadlineExceeded: it is not up in time.
        """
        end = time.monotonic() + as_seconds(timeout)
        while True:
            if self.engine is not None and self.engine.failure is not None:
                raise self.engine.failure
            try:
                return await self.stats()
            except (NoSuchActor, ConnectionLost) as exc:
                if time.monotonic() >= end:
                    where = f"; see {self.engine.log_path}" if self.engine is not None else ""
                    raise DeadlineExceeded(f"no engine after {as_seconds(timeout):g} s{where}") from exc
            with anyio.move_on_after(0.1):
                await self._failed.wait()

    async def stats(self) -> EngineStats:
        """The engine's counters and sizes. Raises ``NoSuchActor`` while it is not up."""
        stats: EngineStats = await self.bus.ask(ENGINE_ADDRESS, Stats(), timeout=30, returns=EngineStats)
        return stats

    async def set_memory(self, budget: int | str) -> EngineStats:
        """Change the engine's memory budget while it runs. While it loads or restarts, this waits for it.

        Raises:
            InvalidConfig, ContextTooLarge: not a size, or less than the model itself needs.
            EngineBusy: it is still loading after a minute.
            UnknownModel, ModelError, EngineFailed...: it cannot be started, and why.
        """
        request = SetMemory(budget_bytes=check_budget(parse_memory(budget)))
        engine = self.engine
        try:
            stats = await ask_engine(
                self.bus, request, expected=lambda: engine is not None and engine.failure is None
            )
        except (NoSuchActor, ConnectionLost):
            if engine is not None and engine.failure is not None:  # its stand-in may not be there yet
                raise engine.failure from None
            raise
        if self.engine is not None:
            # Also for an engine that is started after this one.
            self.config = msgspec.structs.replace(self.config, budget_bytes=request.budget_bytes)
            self.engine.reconfigure(self.config)
        return stats

    # -- what scripts say; all of it is the host's -----------------------------------------------------

    async def register(self, *classes: type[Actor]) -> None:
        """Make every key of these classes reachable, and go on with what their actors had left to do."""
        await self.host.register(*classes)

    async def spawn(self, cls: type[Actor], key: str, **state: Any) -> str:
        """Create an actor unless it exists already; returns its address. ``state`` is for a new one only.

        Raises:
            InvalidAddress: the key is not legal.
            InvalidRequest: a field of the state is missing, unknown, or of another type.
        """
        return await self.host.spawn(cls, key, **state)

    async def tell(
        self, to: str, message: Struct | dict[str, Any], *, once: str | None = None, timeout: float = 60.0
    ) -> None:
        """Send a message; returns once it is stored. ``once`` names the send: it happens once, however
        often the script runs."""
        await self.host.tell(to, message, once=once, timeout=timeout)

    async def ask(self, to: str, request: Request[T], *, once: str | None = None, timeout: float = 60.0) -> T:
        """Send a request and wait for its answer. With ``once`` the first answer is kept."""
        return await self.host.ask(to, request, once=once, timeout=timeout)

    def stream(self, to: str, request: Struct | dict[str, Any], *, timeout: float = 60.0) -> ReplyStream:
        """Send a request and read its answer in pieces."""
        return self.host.stream(to, request, timeout=timeout)

    async def publish(self, topic: str, message: Struct | dict[str, Any], *, once: str | None = None) -> int:
        """Publish on a topic; returns the event's number. ``once`` as in :meth:`tell`."""
        return await self.host.publish(topic, message, once=once)

    def subscribe(self, topic: str, *, after: int | None = None) -> Subscription:
        """Read a topic: from now on, or with ``after`` all that is retained beyond that number."""
        return self.bus.subscribe(topic, after=after)

    async def idle(self) -> None:
        """Return once nothing is left to do: no message waits and no turn runs."""
        await self.host.idle()

    async def run(self, until: Until = None) -> RunReport:
        """Let the team go on, and report what happened: turns, and failed turns with their errors.

        Args:
            until: a duration (``hours(12)``), an absolute ``datetime``, or an async function: until it
                returns. With a virtual clock a duration counts from the beginning of the simulation, so
                the same script goes on after a restart. None: until SIGTERM or SIGINT (and, with a
                virtual clock, until no timer is left).

        SIGTERM and SIGINT end the run in order: with ``until=None`` it returns, for a script that waited
        for something else goes no further.

        Raises:
            InvalidRequest: ``until`` is nothing of these.
            SystemExit, KeyboardInterrupt: after SIGTERM and SIGINT, unless ``until`` is None.
            UnknownModel, ModelError, EngineFailed...: the engine cannot be kept running, so no agent
                can go on.
        """
        host = self.host
        _check_until(until)
        turns = host.turns
        host.directory.complete = True  # whatever runs after this, the team has been set up
        report: RunReport | None = None

        async def wait(what: Callable[[], Awaitable[Any]]) -> None:
            nonlocal report
            result = await what()
            if isinstance(result, RunReport):
                report = result
            tasks.cancel_scope.cancel()

        got: list[signal.Signals] = []
        waits: list[Callable[[], Awaitable[Any]]] = [self._failed.wait, partial(_signalled, got)]
        waits.append(until if callable(until) else partial(host.run, until))
        async with unwrapped(), anyio.create_task_group() as tasks:
            for what in waits:
                tasks.start_soon(wait, what)
        if self.engine is not None and self.engine.failure is not None:
            raise self.engine.failure
        if got and until is not None:
            raise KeyboardInterrupt if got[0] is signal.SIGINT else SystemExit(128 + got[0])
        if report is not None:
            return report
        return host.report(turns)


def _check_until(until: Any) -> None:
    if until is None or callable(until) or isinstance(until, datetime | timedelta):
        return
    if isinstance(until, int | float) and not isinstance(until, bool) and not math.isnan(until):
        return
    if inspect.iscoroutine(until):
        until.close()  # it will not run, which is no second thing to warn of
        raise InvalidRequest(f"until is a coroutine, {until.__qualname__}(): give the function, not its call")
    raise InvalidRequest(
        f"until is {until!r:.100}: give a duration such as hours(12), a number of seconds, a datetime, an "
        "async function, or None"
    )


async def _warn_of_full_disk(folder: Path) -> None:
    """Say it once when the disk has so little room left that agents' memory is not kept on it any more."""
    enough = LEAVE_FREE_BYTES + 16 * MIB
    while (free := shutil.disk_usage(folder).free) >= enough:  # noqa: ASYNC110  # disks have no events
        await anyio.sleep(DISK_LOOK_S)
    log.warning(
        "the disk of %s has %s left; the last %s are kept for messages, so agents' memory that was unused "
        "longest goes from the disk, or is not saved: free some space, or bound it with disk=",
        folder, format_bytes(free), format_bytes(LEAVE_FREE_BYTES),
    )  # fmt: skip


async def _ask_to_end(bus: Bus) -> None:
    await bus.ask(ENGINE_ADDRESS, Shutdown(), timeout=60)


async def _stand_in(endpoint: str, error: OffbookError) -> None:
    """Answer for an engine that cannot run: every request gets the reason."""
    async with connect(endpoint, name="engine.stand-in") as bus:
        while True:
            try:
                await bus.serve(ENGINE_ADDRESS)
                break
            except ProtocolError:  # the broker has not noticed yet that the engine is gone
                await anyio.sleep(0.2)
        async for delivery in bus.deliveries():
            await delivery.fail(error)


async def _signalled(got: list[signal.Signals]) -> None:
    """Return at SIGTERM or SIGINT, noting it; never, where signals cannot be received."""
    if threading.current_thread() is not threading.main_thread():
        await anyio.sleep_forever()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("%s: ending in order", number.name)
            got.append(number)
            return


@asynccontextmanager
async def unwrapped() -> AsyncIterator[None]:
    """Raise the one exception of a group itself: who waits for one thing expects one error."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from error.__cause__
