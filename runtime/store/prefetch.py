"""Loader threads: reads in order of need, straight into the caller's destinations, cancellable.

A load that has not begun can be cancelled through its future (``future.cancel()``); its destinations
were then not touched and never will be. One that has begun runs to its end, within a millisecond or so.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from .results import Failed

log = logging.getLogger(__name__)

NICE = 10
"""Niceness of loaders over that of the process. A turn that waits for a load computes nothing: then they have
the cores."""


class Load:
    """One read: ``work(scratch)`` returns the result. Lower ``priority`` goes first."""

    __slots__ = ("future", "priority", "started", "work")

    def __init__(self, work: Callable[[dict[str, Any]], Any], priority: int) -> None:
        self.work = work
        self.priority = priority
        self.started = False
        self.future: Future[Any] = Future()


class Loader:
    """A pool of loader threads over one priority queue."""

    def __init__(self, threads: int) -> None:
        self._heap: list[tuple[int, int, Load]] = []
        self._serial = itertools.count()
        self._wake = threading.Condition()
        self._waiting: dict[Future[Any], Load] = {}
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(i, threads), name=f"offbook-store-load-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, loads: Iterable[Load]) -> list[Future[Any]]:
        """Queue loads; equal priorities keep the order given."""
        loads = list(loads)
        with self._wake:
            if self._closing:
                for load in loads:
                    load.future.set_result(Failed("the store is closed"))
                return [load.future for load in loads]
            for load in loads:
                heapq.heappush(self._heap, (load.priority, next(self._serial), load))
                self._waiting[load.future] = load
            self._wake.notify(len(loads))
        return [load.future for load in loads]

    def promote(self, futures: Iterable[Future[Any]], priority: int) -> None:
        """Move loads that have not begun to a more urgent place. Others are left as they are."""
        with self._wake:
            for future in futures:
                load = self._waiting.get(future)
                if load is not None and priority < load.priority:
                    # The old heap entry stays and is skipped when it comes up.
                    load.priority = priority
                    heapq.heappush(self._heap, (priority, next(self._serial), load))

    @property
    def depth(self) -> int:
        """Loads that have not begun."""
        return len(self._waiting)

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, end the threads."""
        with self._wake:
            self._closing = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._heap.clear()
            for load in waiting:
                load.started = True
            self._wake.notify_all()
        for load in waiting:
            if load.future.set_running_or_notify_cancel():
                load.future.set_result(Failed("the store is closed"))
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, of: int) -> None:
        _settle_down(number, of)
        scratch: dict[str, Any] = {}
        while True:
            with self._wake:
                while not self._heap:
                    if self._closing:
                        return
                    self._wake.wait()
                load = heapq.heappop(self._heap)[2]
                begun, load.started = load.started, True
                if not begun:
                    self._waiting.pop(load.future, None)
            if begun or not load.future.set_running_or_notify_cancel():
                del load
                continue
            try:
                result = load.work(scratch)
            except Exception as error:
                log.exception("a load failed")
                result = Failed(repr(error))
            load.future.set_result(result)
            del load, result  # An idle thread must not keep the caller's arrays alive.


def _settle_down(number: int, of: int) -> None:
    """Give this loader a share of the cores that the others do not have, and put it behind who computes.

    Woken together, loaders often wait for one core while another idles: Linux moves a thread that waits only
    after some milliseconds, which is as long as reading an agent's blocks takes. Beside a decode step they
    would take a core from one of its threads, and its other threads wait.
    """
    if sys.platform != "linux":
        return
    cores, this = sorted(os.sched_getaffinity(0)), threading.get_native_id()
    if len(cores) >= of > 1:
        with suppress(OSError):
            os.sched_setaffinity(this, cores[number::of])
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, this, min(19, os.getpriority(os.PRIO_PROCESS, this) + NICE))
