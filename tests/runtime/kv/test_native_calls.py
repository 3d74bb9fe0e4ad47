"""Calling the native kernel: from several threads, after a fork, with what contradicts itself."""

from __future__ import annotations

import multiprocessing
import os
import threading

import numpy as np
import pytest
from native_pool import BLOCK, Pool, Shape, lay_out

from offbook.runtime.kv import native, native_library
from offbook.runtime.kv.native import LayerHandle, StepTables

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))


# ---- threads and processes


def test_calls_from_several_threads_take_turns() -> None:
    rows, slots, pages = lay_out([2000, 900])
    pools = [Pool(Shape(), slots, pages, seed) for seed in range(3)]
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((2, h, 64), np.float32) for h in (6, 2, 2))
    wants = [pool.layer.decode(rows.tables(), q, k, v) for pool in pools]
    wrong: list[int] = []

    def call(i: int) -> None:
        tables = rows.tables()
        for _ in range(50):
            if not np.array_equal(pools[i].layer.decode(tables, q, k, v), wants[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_starts_its_own_threads() -> None:
    rows, slots, pages = lay_out([3000])
    pool = Pool(Shape(), slots, pages)
    q, k, v = (np.ones((1, h, 64), np.float32) for h in (6, 2, 2))
    want = pool.layer.decode(rows.tables(), q, k, v)

    def child() -> None:
        same = np.array_equal(pool.layer.decode(rows.tables(), q, k, v), want)
        os._exit(0 if same else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0


# ---- wrong arguments


def test_contradicting_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        StepTables([[0]], [[0]], [63], [100])
    with pytest.raises(ValueError, match="0 blocks"):
        StepTables([[]], [[0, 1]], [64], [100])
    with pytest.raises(ValueError, match="1 pages"):
        StepTables([[0]], [[0]], [64], [200])
    with pytest.raises(ValueError, match="no slot"):
        StepTables([[-1]], [[0]], [64], [100])
    with pytest.raises(ValueError, match="one of each"):
        StepTables([[0]], [[0]], [64], [100, 3])


def test_wrong_shapes_and_slots_are_refused_before_any_memory_is_touched() -> None:
    rows, slots, pages = lay_out([400])
    pool, tables = Pool(Shape(), slots, pages), rows.tables()
    q, k, v = (np.ones((1, h, 64), np.float32) for h in (6, 2, 2))
    with pytest.raises(ValueError, match=r"queries is float32 \[1, 2, 64\]: expected float32 \[1, 6, 64\]"):
        pool.layer.decode(tables, k, k, v)
    with pytest.raises(ValueError, match="float64"):
        pool.layer.decode(tables, q.astype(np.float64), k, v)
    with pytest.raises(ValueError, match="values are missing"):
        pool.layer.decode(tables, q, k, None)
    with pytest.raises(ValueError, match="contiguous"):
        pool.layer.decode(tables, np.ones((1, 6, 128), np.float32)[..., ::2], k, v)
    with pytest.raises(ValueError, match="this layer has"):
        pool.layer.decode(StepTables([[slots, 1]], rows.pages, rows.sealed, rows.lengths), q, k, v)
    with pytest.raises(ValueError, match="no page place"):
        pool.layer.decode(StepTables([[0]], [[]], [64], [64]), q, k, v)
    short = {**pool.tensors, "k.scales": pool.tensors["k.scales"][..., :3]}
    with pytest.raises(ValueError, match=r"k\.scales"):
        LayerHandle(query_heads=6, heads=2, key_width=64, value_width=64, tensors=short)
    with pytest.raises(ValueError, match="out of range"):
        native.seal([pool.layer], [0], [slots], [0])
    with pytest.raises(ValueError, match="1 layers, 2 pages"):
        native.seal([pool.layer], [0, 1], [0], [0])


def test_a_missing_kernel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_library", None)
    monkeypatch.setattr(native_library, "_reason", None)
    monkeypatch.setenv("OFFBOOK_NATIVE", "0")
    assert not native.available()
    assert "OFFBOOK_NATIVE" in str(native.unavailable_reason())
    pool = np.zeros((1, 1, BLOCK, 64), np.uint16)
    with pytest.raises(native.NativeUnavailable, match="OFFBOOK_NATIVE"):
        LayerHandle(query_heads=1, heads=1, key_width=64, value_width=64, tensors={"k.raw": pool})
    monkeypatch.setattr(native_library, "_reason", None)
    monkeypatch.delenv("OFFBOOK_NATIVE")
    monkeypatch.setattr(native_library.importlib.util, "find_spec", lambda name: None)
    assert "compiler" in str(native.unavailable_reason())
