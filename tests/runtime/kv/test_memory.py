"""``KVMemory``: what of a request is reused, and that it is never the wrong thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.runtime.kv.memory import Plan
from offbook.runtime.store import Failed


def test_the_last_token_is_always_left_to_prefill(rig: Callable[..., Any], ids: Any) -> None:
    one, text = rig("llama"), ids(300)
    one.say("a", text)
    assert one.memory.plan(("a", ""), text).tokens < 300


def test_another_transcript_reuses_only_what_is_equal(rig: Callable[..., Any], ids: Any) -> None:
    one, text = rig("llama", bits=None), ids(300)
    one.say("a", text)
    other = np.concatenate([text[:290], ids(40, 9)])
    got, plan = one.say("a", other)
    assert (plan.source, plan.tokens) == ("hot", 290)
    np.testing.assert_allclose(got, rig("llama", bits=None).say("a", other)[0], atol=2e-2)


def test_a_transcript_with_nothing_in_common_is_cold(rig: Callable[..., Any], ids: Any) -> None:
    one = rig("llama")
    one.say("a", ids(300))
    other = ids(300, 9)
    got, plan = one.say("a", other)
    assert (plan.source, plan.tokens) == ("cold", 0)
    assert np.array_equal(got, rig("llama").say("a", other)[0])


def test_a_hybrid_model_that_must_go_back_starts_from_nothing(
    rig: Callable[..., Any], ids: Any, tmp_path: Path
) -> None:
    """A recurrent state cannot be cut back; a stale one must not be gone on from."""
    one = rig("lfm2")
    text = ids(100)
    one.say("a", text)
    other = np.concatenate([text[:50], ids(50, 9)])
    got, plan = one.say("a", other)
    assert plan.tokens == 0
    assert np.array_equal(got, rig("lfm2").say("a", other)[0])


@pytest.mark.parametrize("chunk", [1, 32, 64, 100])
@pytest.mark.parametrize(
    ("architecture", "kept"),
    [("llama", ("hot", 320)), ("gemma-300", ("warm", 256)), ("latent", ("hot", 320))],
)
def test_going_back_into_sealed_groups_works_in_chunks_of_any_size(
    rig: Callable[..., Any], ids: Any, chunk: int, architecture: str, kept: tuple[str, int]
) -> None:
    one = rig(architecture, bits=None)
    text = ids(600)
    one.say("a", text)
    other = np.concatenate([text[:450], ids(30, 9)])
    got, plan = one.say("a", other, chunk=chunk)
    assert (plan.source, plan.tokens) == kept
    np.testing.assert_allclose(got, rig(architecture, bits=None).say("a", other)[0], atol=2e-2)
    assert one.table("a").sealed == one.scheme.sealed(480)


def test_an_agent_stopped_while_it_grows_back_is_found_by_its_blocks(
    rig: Callable[..., Any], ids: Any, tmp_path: Path
) -> None:
    one = rig("llama", folder=tmp_path)
    text = ids(760)
    one.say("a", text)
    other = np.concatenate([text[:680], ids(50, 9)])
    table, plan = one.bring("a", other)
    assert (table.tokens, table.sealed) == (512, 512)
    table.ids = other
    one.batch.prefill([table], [other[512:544]], logits=False)  # and then the turn is cancelled
    one.memory.after_step(table)
    one.evict("a")
    got, plan = one.say("a", other)
    assert (plan.source, plan.tokens) == ("warm", 512)
    assert np.isfinite(got).all()


def test_salts_share_nothing(rig: Callable[..., Any], ids: Any, tmp_path: Path) -> None:
    one, text = rig("llama", folder=tmp_path), ids(600)
    one.say("a", text, salt="tenant 1")
    one.memory.save(one.table("a", "tenant 1"))
    one.store.flush(30)
    assert one.memory.plan(("a", "tenant 2"), text) == Plan("cold", 0)
    assert one.memory.plan(("b", "tenant 1"), text).tokens > 0


def test_another_fingerprint_finds_nothing(rig: Callable[..., Any], ids: Any, tmp_path: Path) -> None:
    one, text = rig("llama", folder=tmp_path), ids(600)
    one.say("a", text)
    one.evict("a")
    one.close()
    other = rig("llama", folder=tmp_path, fingerprint="e" * 64)
    assert other.memory.plan(("a", ""), text) == Plan("cold", 0)


def test_equal_blocks_of_two_agents_take_one_slot(rig: Callable[..., Any], ids: Any) -> None:
    one, text = rig("llama"), ids(760)
    one.say("a", text)
    alone = one.used[0]
    one.prefill(["b"], [text])  # not cloned: it reads everything itself
    # Two full blocks of 256; the part-filled one is each agent's own.
    assert one.used[0] == alone + 1
    assert one.table("b").slots[0][:2] == one.table("a").slots[0][:2]
    one.memory.drop(("a", ""))
    one.memory.drop(("b", ""))
    assert one.used == (0, 0)


def test_blocks_of_agents_that_left_are_found_in_memory(rig: Callable[..., Any], ids: Any) -> None:
    one, text = rig("llama"), ids(700)
    one.say("a", text)
    one.memory.drop(("a", ""))
    assert one.used == (0, 0)
    got, plan = one.say("b", text)
    assert (plan.source, plan.tokens) == ("warm", 512)
    assert one.memory.metrics["restores"] == 1
    assert np.isfinite(got).all()


def test_writing_into_a_shared_block_leaves_the_others_alone(rig: Callable[..., Any], ids: Any) -> None:
    one, text = rig("llama"), ids(700)
    one.say("a", text)
    one.prefill(["b"], [text])
    back = np.concatenate([text[:450], ids(300, 9)])
    _, plan = one.say("b", back)  # goes back into the second block, which a holds as well
    assert (plan.source, plan.tokens) == ("hot", 320)
    one.pool.check()
    again, plan = one.say("a", np.append(text, text[:1]))
    alone = rig("llama")
    alone.say("a", text)
    assert np.array_equal(again, alone.say("a", np.append(text, text[:1]))[0])


def test_evicting_gives_everything_back_at_once(
    architecture: str, rig: Callable[..., Any], ids: Any, tmp_path: Path
) -> None:
    one = rig(architecture, folder=tmp_path, slots=8, pages=6)
    for agent in "abcd":
        one.say(agent, ids(900, ord(agent)))
        one.memory.evict((agent, ""))
        assert one.used == (0,) * len(one.used)


def test_what_is_accounted_is_what_is_in_memory(architecture: str, rig: Callable[..., Any], ids: Any) -> None:
    one = rig(architecture)
    one.say("a", ids(900))
    table = one.table("a")
    assert table.nbytes(one.spec.page_bytes) == one.spec.agent_bytes(900, one.scheme)
    pool = one.pool.pages.used * one.spec.page_bytes + sum(
        allocator.used * group.block_bytes(one.scheme)
        for allocator, group in zip(one.pool.groups, one.spec.groups, strict=True)
    )
    assert pool == table.nbytes(one.spec.page_bytes)
    whole = one.pool.pages.capacity * one.spec.page_bytes + sum(
        allocator.capacity * group.block_bytes(one.scheme)
        for allocator, group in zip(one.pool.groups, one.spec.groups, strict=True)
    )
    assert one.arrays.nbytes == whole


# ---- faults of the disk


def corrupt(folder: Path, which: str) -> None:
    """Flip a byte near the end of every file of one kind."""
    files = [path for path in (folder / which).rglob("*") if path.is_file()]
    assert files
    for path in files:
        raw = bytearray(path.read_bytes())
        raw[-9] ^= 0x10
        path.write_bytes(raw)


@pytest.mark.parametrize(("which", "left"), [("blocks", 0), ("tails", 512)])
def test_flipped_bits_are_one_miss_and_the_right_answer(
    rig: Callable[..., Any], ids: Any, tmp_path: Path, which: str, left: int
) -> None:
    one, text = rig("llama", folder=tmp_path), ids(705)
    one.say("a", text[:700])
    one.evict("a")
    corrupt(tmp_path, which)
    got, plan = one.say("a", text)
    assert plan.tokens == left
    assert one.memory.metrics["load_failures"] == 1
    cold = rig("llama").say("a", text)[0]
    np.testing.assert_allclose(got, cold, atol=0 if not left else 0.05)
    one.pool.check()


def test_what_the_disk_cannot_give_is_not_asked_for_again(
    rig: Callable[..., Any], ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device error leaves the block listed; the same plan must not be made for ever."""
    one, text = rig("llama", folder=tmp_path), ids(705)
    one.say("a", text[:700])
    one.evict("a")
    load = one.store.load_blocks

    def failing(wanted: Any, *, priority: int = 0) -> Any:
        results = []
        for future in load(wanted, priority=priority):
            results.append(type(future)())
            future.add_done_callback(lambda _, of=results[-1]: of.set_result(Failed("Input/output error")))
        return results

    monkeypatch.setattr(one.store, "load_blocks", failing)
    got, plan = one.say("a", text)
    assert plan.source == "cold"
    assert np.array_equal(got, rig("llama").say("a", text)[0])


def test_a_tail_that_does_not_fit_the_model_is_a_miss(
    rig: Callable[..., Any], ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, text = rig("llama", folder=tmp_path), ids(305)
    one.say("a", text[:300])
    one.evict("a")
    loader = one.memory.loader
    load = loader._restore_tail
    monkeypatch.setattr(loader._unpacking, "restore", lambda *_: False)
    monkeypatch.setattr(loader, "_restore_tail", lambda table, tail: load(table, tail) or "of another form")
    got, plan = one.say("a", text)
    assert plan.source == "cold"
    assert np.array_equal(got, rig("llama").say("a", text)[0])


def test_saving_a_turn_writes_its_own_tokens_only(rig: Callable[..., Any], ids: Any, tmp_path: Path) -> None:
    one = rig("llama", folder=tmp_path, slots=40)

    def written(length: int) -> int:
        text = ids(length + 50, length)
        agent = f"a{length}"
        one.say(agent, text[:length])
        one.memory.save(one.table(agent))
        one.store.flush(30)
        before = one.store.stats().counters["bytes_written"]
        one.say(agent, text)
        one.memory.save(one.table(agent))
        one.store.flush(30)
        return int(one.store.stats().counters["bytes_written"] - before)

    assert abs(written(4096) - written(256)) <= one.store.block_bytes


# ---- windows and reports


@pytest.mark.parametrize("chunk", [1, 7, 100, 512])
def test_a_window_is_bounded_whatever_chunks_it_is_fed(rig: Callable[..., Any], ids: Any, chunk: int) -> None:
    one = rig("gemma-96")
    most = 0
    text = ids(400 if chunk == 1 else 2000)
    for start in range(0, len(text), chunk):
        piece = text[start : start + chunk]
        one.decode(["a"], piece) if chunk == 1 else one.prefill(["a"], [piece])
        most = max(most, one.table("a").held()[0][1])
    assert most <= 2


def test_what_is_said_to_be_in_memory_is_in_memory(architecture: str, rig: Callable[..., Any]) -> None:
    one = rig(architecture)
    for group in one.spec.groups:
        for tensor in group.tensors(one.scheme):
            _, index, name = tensor.name.split(".", 2)
            array = one.arrays.blocks[int(index)][name]
            assert (array.shape[1:], array.dtype.size) == (tensor.shape, {"U32": 4, "BF16": 2}[tensor.dtype])
