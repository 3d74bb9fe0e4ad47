"""An agent moves to another machine as one file, whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from offbook.runtime.store import BlockStore, Corrupt, Exported, Failed, Full, Imported, ReadOnly
from offbook.runtime.store.container import seal_of


@pytest.fixture
def exported(kit, open_store, tmp_path):
    store = open_store(root=tmp_path / "here")
    kit.save(store, "villager/ann", 700, salt="s")
    path = tmp_path / "ann.offbook"
    result = store.export_agent("villager/ann", path, kit.ids("villager/ann", 720), salt="s")
    assert result == Exported(blocks=2, tokens=700, nbytes=path.stat().st_size)
    return path


def test_an_agent_arrives_with_transcript_blocks_and_tail(kit, open_store, exported):
    there = open_store()
    result = there.import_agent(exported)
    ids = kit.ids("villager/ann", 720)
    assert result == Imported("villager/ann", "s", ids.tobytes(), kit.fingerprint, 2, True, tokens=700)
    assert kit.check(there, "villager/ann", 700, salt="s") == (2, True)
    there.close()
    assert kit.check(open_store(), "villager/ann", 700, salt="s") == (2, True)


def test_an_agent_arrives_with_its_earlier_turns(kit, open_store, tmp_path):
    store = open_store()
    for tokens in (300, 420, 700):
        kit.save(store, "ann", tokens)
    path = tmp_path / "x"
    assert store.export_agent("ann", path, kit.ids("ann", 720)).tokens == 700
    there = open_store(root=tmp_path / "there")
    for _ in range(2):
        assert there.import_agent(path).tokens == 700
        assert [tail.tokens for tail in there.tails("ann")] == [tail.tokens for tail in store.tails("ann")]
        for tokens in (300, 420, 700):
            assert kit.check(there, "ann", tokens)[1]
    # A transcript that stops earlier has no use for later tails.
    assert store.export_agent("ann", path, kit.ids("ann", 500)).tokens == 420
    fewer = open_store(root=tmp_path / "fewer")
    assert fewer.import_agent(path).tokens == 420
    assert sorted(tail.tokens for tail in fewer.tails("ann")) == [300, 420]


def test_an_agent_may_arrive_under_another_name(kit, open_store, exported):
    there = open_store()
    assert there.import_agent(exported, agent="villager/eve").agent == "villager/eve"
    assert there.best_tail("villager/eve", kit.ids("villager/ann", 700), "s").tokens == 700
    assert there.tails("villager/ann", "s") == []


def test_importing_twice_changes_nothing(kit, open_store, exported):
    there = open_store()
    there.import_agent(exported)
    before = there.stats()
    assert there.import_agent(exported).ok
    after = there.stats()
    assert (after.blocks, after.tails) == (before.blocks, before.tails)


def test_tools_move_agents_of_models_they_do_not_know(kit, open_store, exported, tmp_path):
    with BlockStore.for_tools(tmp_path / "there", read_only=False) as tool:
        assert tool.import_agent(exported).ok
        assert [(r.agent, r.fingerprint) for r in tool.agents()] == [("villager/ann", kit.fingerprint)]
        again = tmp_path / "again.offbook"
        assert tool.export_agent("villager/ann", again, kit.ids("villager/ann", 720), salt="s").ok
        assert tool.verify().ok
    store = open_store(root=tmp_path / "there")
    assert kit.check(store, "villager/ann", 700, salt="s") == (2, True)
    fresh = open_store(root=tmp_path / "fresh")
    assert fresh.import_agent(again).ok
    assert kit.check(fresh, "villager/ann", 700, salt="s") == (2, True)


def test_a_damaged_file_is_refused_whole(kit, open_store, exported):
    there = open_store()
    raw = exported.read_bytes()
    rng = np.random.default_rng(3)
    for at in [0, 16, 24, len(raw) - 1, *rng.integers(0, len(raw), 20)]:
        bad = bytearray(raw)
        bad[at] ^= 1 << int(rng.integers(8))
        exported.write_bytes(bad)
        assert isinstance(there.import_agent(exported), Corrupt)
    for size in (0, 10, len(raw) // 2, len(raw) - 1):
        exported.write_bytes(raw[:size])
        assert isinstance(there.import_agent(exported), Corrupt)
    assert isinstance(there.import_agent(exported.with_name("nowhere")), Failed)
    assert there.stats().blocks == 0
    assert there.agents() == []


def test_blocks_of_another_transcript_are_refused_even_with_good_checksums(kit, open_store, exported):
    import xxhash

    raw = exported.read_bytes()
    ids = kit.ids("villager/ann", 720)
    import base64

    mine, other = (base64.b64encode(i.tobytes()) for i in (ids, kit.ids("someone else", 720)))
    forged = raw[:-16].replace(mine, other)
    exported.write_bytes(forged + xxhash.xxh3_128_digest(forged))
    there = open_store()
    result = there.import_agent(exported)
    assert isinstance(result, Corrupt)
    assert "not of this agent's transcript" in result.reason
    assert there.stats().blocks == 0


def test_only_what_belongs_to_the_transcript_is_exported(kit, open_store, tmp_path):
    store = open_store()
    kit.save(store, "ann", 700)
    path = tmp_path / "x"
    assert store.export_agent("ann", path, kit.ids("bob", 700)).blocks == 0
    assert store.export_agent("ann", path, kit.ids("ann", 300)).tokens == 256
    assert store.export_agent("nobody", path, kit.ids("nobody", 300)).tokens == 0
    there = open_store(root=tmp_path / "there")
    assert there.import_agent(path) == Imported(
        "nobody", "", kit.ids("nobody", 300).tobytes(), kit.fingerprint, blocks=0, tail=False
    )


def test_bad_blocks_are_left_out_of_an_export(kit, open_store, tmp_path, block_files):
    store = open_store()
    kit.save(store, "ann", 1100)
    second = store.chain(kit.ids("ann", 1100))[1]
    path = next(p for p in block_files() if p.stem == second.hex())
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    result = store.export_agent("ann", tmp_path / "x", kit.ids("ann", 1100))
    assert (result.blocks, result.tokens) == (1, 256)


def test_an_import_that_does_not_fit_says_so(open_store, exported):
    assert isinstance(open_store(cap_bytes=1000).import_agent(exported), Full)
    reader = BlockStore.for_tools(exported.with_name("here"), read_only=True)
    assert isinstance(reader.import_agent(exported), ReadOnly)
    reader.close()


def test_an_export_that_cannot_be_written_leaves_nothing(kit, open_store, tmp_path):
    store = open_store()
    kit.save(store, "ann", 300)
    result = store.export_agent("ann", tmp_path / "no" / "folder", kit.ids("ann", 300))
    assert isinstance(result, Failed)
    assert {p.name for p in tmp_path.iterdir()} == {"kv"}


def test_a_seal_is_what_the_header_says(kit, open_store, block_files):
    store = open_store()
    kit.save(store, "ann", 256)
    raw = block_files()[0].read_bytes()
    header = raw[: 8 + int.from_bytes(raw[:8], "little")]
    assert seal_of(header).hex().encode() in header
