"""The step thread: the only thread that touches MLX.

Owns its life and its inbox. Other threads talk to it through ``post`` and ``call``; it talks back through
callbacks that must only hand things over. What it does is the loop's business.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

log = logging.getLogger("offbook.engine")

T = TypeVar("T")


class StepThread:
    """A thread that runs turns, and between them what others post.

    Attributes:
        ready: done when the thread has set itself up; has the error if it could not.
        step_started: ``time.monotonic()`` at which it began what it is at; 0 while it waits.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._done: Future[None] = Future()
        self.ready: Future[None] = Future()
        self.step_started = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="offbook-step", daemon=True).start()

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the step thread, between steps."""
        self._inbox.put(action)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` on the step thread and give its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future

    def stop(self) -> Future[None]:
        """End after saving everything. The future is done once all is on disk."""
        self._stopping.set()
        self.post(lambda: None)
        return self._done

    def _run(self) -> None:
        try:
            self._set_up()
        except BaseException as error:
            log.exception("the engine could not start")
            self.ready.set_exception(error)
            self._done.set_result(None)
            return
        self.ready.set_result(None)
        try:
            while not self._stopping.is_set():
                self._turn_safely()
        except BaseException:
            log.exception("the engine's loop ended")
        finally:
            self._tear_down()

    @property
    def died(self) -> bool:
        """Whether the thread has ended without having been asked to."""
        return self._done.done() and not self._stopping.is_set()

    def _set_up(self) -> None:
        raise NotImplementedError

    def _turn_safely(self) -> None:
        """One turn; raises to end the thread."""
        raise NotImplementedError

    def _tear_down(self) -> None:
        """The last thing it does; sets ``_done``."""
        raise NotImplementedError
