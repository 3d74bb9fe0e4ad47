"""Bad files and bad disks under a running engine: the right words, one miss, nobody else concerned."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.actors.lm import SamplingParams
from offbook.runtime.kv.scheme import KVScheme

Engine = Callable[..., Any]
GREEDY = SamplingParams(max_tokens=4, logprobs=8)
LENGTH, KEPT = 920, 900


def same(reply: Any, expected: Any) -> bool:
    """The same words, drawn from the same distributions (16-bit KV: but for rounding)."""
    words = [np.frombuffer(r.appended, "<u4")[r.kept :] for r in (reply, expected)]
    near = all(
        abs(value - wanted[name]) < 1e-3
        for got, wanted in zip(reply.logprobs, expected.logprobs, strict=True)
        for name, value in got.items()
        if name in wanted
    )
    return np.array_equal(*words) and near


def longer(reply: Any, ids: Any) -> Any:
    """What an agent reads after its first reply of 4 words, the last of which has no KV yet."""
    return np.concatenate([np.frombuffer(reply.appended, "<u4"), ids(5, 8)])


def exact(engine: Engine, folder: Path | None = None, **options: Any) -> Any:
    return engine("llama", folder, scheme=KVScheme.uniform(None), **options)


def flip(path: Path, other: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) * 2 // 3] ^= 4
    path.write_bytes(raw)


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def delete(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def a_folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def file_of(folder: Path, name: bytes) -> Path:
    [path] = (folder / "blocks").rglob(f"{name.hex()}*")
    return path


def tail_of(one: Any, folder: Path, agent: str) -> Path:
    from offbook.runtime.store.tails import agent_key

    key = agent_key(one.loop.fingerprint, "", agent).hex()
    return max((folder / "tails").rglob(f"{key}*"))


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("damage", [flip, truncate, delete, swap, a_folder])
@pytest.mark.parametrize("what", ["first block", "second block", "tail"])
def test_damage_to_a_file_is_a_miss_and_the_right_answer(
    engine: Engine,
    ids: Any,
    tmp_path: Path,
    what: str,
    damage: Callable[[Path, Path], None],
    restart: bool,
) -> None:
    one, texts = exact(engine, tmp_path), [ids(LENGTH, seed) for seed in range(3)]
    for agent, text in zip("abc", texts, strict=True):
        one.run(agent, text[:KEPT], max_tokens=1)
    chains = one.call(lambda: {a: list(one.loop.memory.tables[a, ""].chain) for a in "abc"})
    one.evict()
    for group in one.loop.pool.groups:
        one.call(group.forget_content)
    if restart:
        one.stop()
    if what == "tail":
        damage(tail_of(one, tmp_path, "a"), tail_of(one, tmp_path, "b"))
    else:
        place = 0 if what == "first block" else 1
        damage(*(file_of(tmp_path, chains[agent][place]) for agent in "ab"))
    if restart:
        one = exact(engine, tmp_path)
    fresh = exact(engine)
    reply = one.run("a", texts[0], sampling=GREEDY)
    assert same(reply, fresh.run("a", texts[0], sampling=GREEDY))
    # What comes before a bad block is good; behind it all is read again.
    assert reply.usage.reused_tokens == {"first block": 0, "second block": 256, "tail": 768}[what]
    assert one.counters.get("store.missing", 0) + one.counters.get("store.corrupt", 0) >= 1
    for agent, text in zip("bc", texts[1:], strict=True):
        other = one.run(agent, text, sampling=GREEDY)
        assert same(other, fresh.run(agent, text, sampling=GREEDY))
        if agent == "c" or damage is not swap:
            assert (other.usage.source, other.usage.reused_tokens) == ("warm", KEPT)
    # What was lost is written again and good from then on.
    one.evict()
    for group in one.loop.pool.groups:
        one.call(group.forget_content)
    again = one.run("a", longer(reply, ids), max_tokens=1)
    assert (again.usage.source, again.usage.reused_tokens) == ("warm", LENGTH + 3)


@pytest.mark.parametrize("damage", ["lost", "garbage"])
def test_a_lost_catalog_costs_nobody_anything(engine: Engine, ids: Any, tmp_path: Path, damage: str) -> None:
    one, text = exact(engine, tmp_path), ids(LENGTH)
    one.run("a", text[:KEPT], max_tokens=1)
    one.stop()
    for path in tmp_path.glob("catalog*"):
        path.unlink() if damage == "lost" else path.write_bytes(b"nonsense" * 999)
    reply = exact(engine, tmp_path).run("a", text, sampling=GREEDY)
    assert (reply.usage.source, reply.usage.reused_tokens) == ("warm", KEPT)
    assert same(reply, exact(engine).run("a", text, sampling=GREEDY))


def test_seals_mixed_up_in_the_catalog_are_misses(engine: Engine, ids: Any, tmp_path: Path) -> None:
    one, text = exact(engine, tmp_path), ids(LENGTH)
    one.run("a", text[:KEPT], max_tokens=1)
    one.stop()
    db = sqlite3.connect(tmp_path / "catalog.sqlite")
    db.execute("UPDATE blocks SET seal = (SELECT max(seal) FROM blocks)")
    db.commit()
    db.close()
    reply = exact(engine, tmp_path).run("a", text, sampling=GREEDY)
    assert reply.usage.source in ("cold", "warm")
    assert same(reply, exact(engine).run("a", text, sampling=GREEDY))


# ---- another model, other bits


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "other weights, tokenizer or template"},
        {"scheme": KVScheme.uniform(8)},
        {"scheme": KVScheme.uniform(4, tail=64)},
        {"scheme": KVScheme.uniform(None)},
    ],
)
def test_what_another_model_or_scheme_kept_is_a_miss_both_ways(
    engine: Engine, ids: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    text = ids(LENGTH)

    def serve(**options: Any) -> Any:
        one = engine("llama", tmp_path, **options)
        reply = one.run("a", text, sampling=GREEDY)
        one.stop()
        return reply

    cold = serve()
    changed = serve(**other)
    assert (changed.usage.source, changed.usage.reused_tokens) == ("cold", 0)
    assert same(changed, engine("llama", **other).run("a", text, sampling=GREEDY))
    for options, expected in (({}, cold), (other, changed)):
        back = serve(**options)
        assert back.usage.source == "warm"
        assert back.usage.reused_tokens >= 256
        assert [next(iter(t)) for t in back.logprobs] == [next(iter(t)) for t in expected.logprobs]


# ---- disks that refuse


@pytest.mark.parametrize(
    ("error", "says"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "cannot be written")]
)
def test_a_disk_that_takes_no_more_is_said_and_serving_goes_on(
    engine: Engine, ids: Any, tmp_path: Path, error: int, says: str
) -> None:
    one = exact(engine, tmp_path, slots=8, pages=12)
    texts = {agent: ids(LENGTH, ord(agent)) for agent in "abcd"}
    one.run("a", texts["a"][:KEPT], max_tokens=1)
    one.evict("a")
    disk = one.loop.store._state.disk
    real = disk.step

    def refusing(what: str, path: str) -> None:
        if what != "remove":
            raise OSError(error, os.strerror(error), path)
        real(what, path)

    disk.step = refusing
    fresh = exact(engine)
    for agent in "bcdb":  # too many to stay in memory together: b is read again
        reply = one.run(agent, texts[agent], sampling=GREEDY)
        assert same(reply, fresh.run(agent, texts[agent], sampling=GREEDY))
        one.evict(agent)
    assert says in one.stats.degraded
    assert one.counters["store.write_errors"] >= 1
    # What was kept before is still of use.
    reply = one.run("a", texts["a"], sampling=GREEDY)
    assert (reply.usage.source, reply.usage.reused_tokens) == ("warm", KEPT)
    # With room again, saving goes on.
    disk.step = real
    one.loop.store._state._retry_at = 0.0
    reply = one.run("d", texts["d"], max_tokens=4)
    one.evict("d")
    assert one.stats.degraded == ""
    assert one.run("d", longer(reply, ids), max_tokens=1).usage.reused_tokens == LENGTH + 3


def test_a_folder_removed_under_the_engine_is_a_miss(engine: Engine, ids: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    one, text = exact(engine, folder), ids(LENGTH)
    one.run("a", text[:KEPT], max_tokens=1)
    one.evict("a")
    for group in one.loop.pool.groups:
        one.call(group.forget_content)
    shutil.rmtree(folder)
    assert same(one.run("a", text, sampling=GREEDY), exact(engine).run("a", text, sampling=GREEDY))
    assert one.counters["load_failures"] >= 1
