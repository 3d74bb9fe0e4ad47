"""What an engine counts, measures and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offbook.runtime.observe.trace import FIRST_AGENT_TRACK, LOAD_TRACK, STEP_TRACK, Trace, read
from tests.runtime.engine.replies import Engine


def test_stats_count_turns_and_tokens_and_measure_by_where_the_memory_was(
    engine: Engine, ids: Any, tmp_path: Path
) -> None:
    one, text = engine("llama", tmp_path), ids(700)
    one.run("a", text[:500], max_tokens=4)  # cold
    one.run("a", text[:550], max_tokens=3)  # hot, from 500: what was said before is another history
    one.evict("a")
    one.run("a", text[:600], max_tokens=2)  # warm
    one.observe("b", text[:40])
    got = one.counters
    expected = {
        "turns": 3,
        "observed": 1,
        "generated_tokens": 9,
        "cold_prefills": 2,
        "restores": 1,
        "evictions": 1,
        "decode_steps": 6,  # the first token of each turn comes from its prefill
        "decode_rows": 6,
        "ttft_cold_ms.count": 1,
        "ttft_hot_ms.count": 1,
        "ttft_warm_ms.count": 1,
        "queue_ms.count": 3,
        "load_ms.count": 1,
        "decode_step_ms.count": 6,
        "queued": 0,
        "running": 0,
    }
    assert {name: got.get(name) for name in expected} == expected
    assert got["reused_tokens"] + got["prefilled_tokens"] == 500 + 550 + 600 + 40
    assert got["restored_tokens"] == 256  # a full block; the tail holds what was said, which is not asked for
    for name in ("ttft_cold_ms", "load_ms", "decode_step_ms", "prefill_chunk_ms"):
        assert 0 < got[f"{name}.p50"] <= got[f"{name}.p95"]
        assert 0 < got[f"{name}.mean"] <= got[f"{name}.p95"]


def test_the_trace_shows_one_agents_load_under_anothers_decode_step(
    engine: Engine, gate: Any, ids: Any, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    one, text = engine("llama", tmp_path / "store", trace=path), ids(620)
    one.run("a", text[:600], max_tokens=1)
    one.evict("a")
    held = gate(one, "decode")
    speaking = one.start("b", ids(40, 2), max_tokens=20)
    held.wait()
    # The step that stands at the gate goes on after the load has begun and its reads have ended.
    began = one.loop.call(lambda: one.loop.prefetch(("a", ""), text[:600]))
    held.step()
    held.wait()
    began.result(60)
    [reads] = one.loop.memory.loading.values()
    for read_ in reads.reads:
        assert read_.result(60).ok
    held.open()
    speaking.wait()
    one.stop()
    events = [event for event in json.loads(path.read_text()) if event]
    assert events == read(path)
    assert {event["ph"] for event in events} == {"M", "X"}
    [load] = [e for e in events if e["tid"] == LOAD_TRACK and e["ph"] == "X"]
    assert (load["name"], load["args"]["tokens"]) == ("a", 600)
    under = [
        e
        for e in events
        if e["tid"] == STEP_TRACK
        and e["name"] == "decode 1"
        and e["ts"] < load["ts"] + load["dur"]
        and load["ts"] < e["ts"] + e["dur"]
    ]
    assert [e["args"]["agents"] for e in under] == [["b"]] * len(under)
    assert under
    names = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert {"step thread", "loads from disk", "a", "b"} <= set(names)
    phases = [e["name"] for e in events if e["tid"] == names["b"] and e["ph"] == "X"]
    assert phases == ["queued", "load", "prefill", "decode"]
    assert names["b"] >= FIRST_AGENT_TRACK


def test_a_cancelled_load_is_no_part_of_what_loads_took(engine: Engine, ids: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    one, text = engine("llama", tmp_path / "store", trace=path), ids(620)
    one.run("a", text[:600], max_tokens=1)
    one.evict("a")
    one.call(lambda: (one.loop.prefetch(("a", ""), text[:600]), one.loop.memory.cancel(("a", ""))))
    while one.call(lambda: bool(one.loop.memory.loading)):
        pass
    assert "load_ms.count" not in one.counters
    one.stop()
    assert not [e for e in read(path) if e["tid"] == LOAD_TRACK and e["ph"] == "X"]


def test_the_trace_of_an_engine_that_died_is_kept_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for number in range(3):
        trace = Trace(path)
        trace.step(f"step {number}", 0.0, 1.0)
        if number:
            trace.close()
        else:
            trace._file.close()  # it ends without its end, as that of a killed engine

    def steps(name: str) -> list[str]:
        return [event["name"] for event in read(tmp_path / name) if event["ph"] == "X"]

    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "trace.1.json", "trace.2.json"}
    assert [steps(name) for name in ("trace.1.json", "trace.2.json", "trace.json")] == [
        ["step 0"],
        ["step 1"],
        ["step 2"],
    ]


def test_a_trace_is_plain_json_of_named_events_once_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.step("decode 1", 1.0, 2.0, agents=["a"])
    trace.close()
    assert [event["name"] for event in json.loads(path.read_text())][-1] == "decode 1"
    for number, end in enumerate((-2, -5, -40)):  # cut off where a killed process had written to
        cut = tmp_path / f"{number}.json"
        cut.write_text(path.read_text()[:end])
        assert all(event["name"] for event in read(cut))
