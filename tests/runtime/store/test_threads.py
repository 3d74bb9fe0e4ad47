"""The loader and the writer: order, cancelling, many threads at once."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, get_native_id

import numpy as np
import pytest

from offbook.runtime.store import Failed, Missing
from offbook.runtime.store.prefetch import NICE, Load, Loader


@pytest.fixture
def loader():
    loader = Loader(threads=1)
    yield loader
    loader.close()


@pytest.fixture
def held(loader):
    """A loader whose only thread waits until the event is set."""
    reached, go = Event(), Event()

    def wait(_):
        reached.set()
        assert go.wait(10)

    loader.submit([Load(wait, 0)])
    assert reached.wait(10)
    return go


def test_loads_run_in_order_of_need(loader, held):
    order: list[str] = []
    jobs = [("late", 9), ("first", 1), ("second", 1), ("urgent", 0)]
    futures = [
        loader.submit([Load(lambda _, n=name: order.append(n), priority)])[0] for name, priority in jobs
    ]
    assert loader.depth == 4
    held.set()
    for future in futures:
        future.result(10)
    assert order == ["urgent", "first", "second", "late"]


def test_a_prefetch_that_becomes_needed_moves_forward_and_runs_once(loader, held):
    order: list[int] = []
    futures = loader.submit([Load(lambda _, n=n: order.append(n), 5) for n in range(4)])
    loader.promote(futures[2:], 1)
    loader.promote(futures[2:], 3)  # Less urgent than it is: no change.
    held.set()
    for future in futures:
        future.result(10)
    loader.promote(futures, 0)
    assert order == [2, 3, 0, 1]


def test_a_cancelled_load_never_touches_its_destinations(kit, open_store):
    store = open_store(load_threads=1)
    kit.save(store, "ann", 512)
    names = store.chain(kit.ids("ann", 512))
    reached, go = Event(), Event()

    def wait(_):
        reached.set()
        assert go.wait(10)

    store._loader.submit([Load(wait, 0)])  # Holds the only thread.
    assert reached.wait(10)
    dests = [np.zeros_like(array) for array in kit.empty()]
    cancelled, kept = store.load_blocks([(names[1], dests), (names[0], kit.empty())])
    assert cancelled.cancel()
    go.set()
    assert kept.result(10).ok
    assert not any(array.any() for array in dests)
    assert store.load_block(names[1], dests).result(10).ok


def test_closing_ends_loads_that_have_not_begun(held, loader):
    futures = loader.submit([Load(lambda _: "done", 0) for _ in range(3)])
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(loader.close)
        for future in futures:
            assert future.result(10) == Failed("the store is closed")
        held.set()
        closing.result(10)
    assert loader.submit([Load(lambda _: "done", 0)])[0].result(10) == Failed("the store is closed")


def test_a_raising_callback_does_not_end_the_threads(kit, open_store, caplog):
    store = open_store()
    for _ in range(4):
        store.load_block(bytes(16), kit.empty()).add_done_callback(lambda _: 1 / 0)
        store.put_tail("ann", kit.tail(store, kit.ids("ann", 5))).add_done_callback(lambda _: 1 / 0)
    assert store.flush(10)
    assert isinstance(store.load_block(bytes(16), kit.empty()).result(10), Missing)
    assert kit.save(store, "ann", 300).ok
    caplog.clear()


def test_what_is_accepted_for_writing_cannot_be_cancelled(kit, open_store):
    store = open_store()
    future = store.put_tail("ann", kit.tail(store, kit.ids("ann", 5)))
    assert not future.cancel()
    assert future.result(10).ok


def test_many_threads_saving_loading_and_forgetting_at_once(kit, open_store):
    store = open_store(cap_bytes=1_500_000, snapshots=2, load_threads=3)

    def live(who: str) -> int:
        good = 0
        for turn in range(1, 9):
            kit.save(store, who, turn * 150)
            blocks, _ = kit.check(store, who, turn * 150)  # Asserts that what is good is right.
            good += blocks
            if turn == 5:
                assert store.forget(who).result(10).ok
        return good

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(live, [f"agent {i}" for i in range(12)])) > 0
    assert store.flush(10)
    assert store.verify().ok
    assert "corrupt" not in store.stats().counters
    assert store.stats().pending_bytes == 0
    assert store.stats().queued_writes == store.stats().queued_loads == 0


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's cores and niceness are Linux's")
def test_loaders_have_cores_of_their_own_and_stand_back():
    def mine(_=None):
        return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, get_native_id())

    cores, nice = mine()
    both, loader = Barrier(2), Loader(threads=2)

    def work(_):
        both.wait(10)
        return mine()

    try:
        first, second = (future.result(10) for future in loader.submit([Load(work, 0), Load(work, 0)]))
    finally:
        loader.close()
    assert first[0] | second[0] == cores
    assert not first[0] & second[0] or len(cores) == 1
    assert first[1] == second[1] == min(19, nice + NICE)
    assert mine() == (cores, nice), "this thread is as it was"
