"""The supervisor's policy, on tables that hold no arrays: who gives way, and that none does in vain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.bus.errors import ContextTooLarge
from offbook.runtime.kv.pool import BlockPool
from offbook.runtime.kv.scheme import BLOCK, KVScheme
from offbook.runtime.kv.spec import LayerSpec, ModelCacheSpec
from offbook.runtime.kv.table import AgentTable
from offbook.runtime.supervisor import Supervisor, pool_sizes

FULL = ModelCacheSpec((LayerSpec(0, "full", 2, 64, 64),))
MIXED = ModelCacheSpec((LayerSpec(0, "full", 2, 64, 64), LayerSpec(1, "window", 2, 64, 64, 512)))
SCHEME = KVScheme()


@dataclass
class Memory:
    """As much of ``KVMemory`` as the supervisor looks at."""

    pool: BlockPool
    tables: dict[Any, AgentTable] = field(default_factory=dict)
    loading: dict[Any, Any] = field(default_factory=dict)
    store: Any = None
    evicted: list[str] = field(default_factory=list)

    def add(self, agent: str, tokens: int, spec: ModelCacheSpec = FULL) -> AgentTable:
        table = AgentTable(agent, "", spec.groups, SCHEME, tokens=tokens, sealed=SCHEME.sealed(tokens))
        for index, group in enumerate(spec.groups):
            count = group.blocks(tokens, table.sealed)
            table.slots[index] = [self.pool.groups[index].take() for _ in range(count)]
        table.pages = [self.pool.pages.take() for _ in range(-(-(tokens - table.sealed) // 64))]
        self.tables[agent, ""] = table
        return table

    def evict(self, key: Any) -> None:
        self.evicted.append(key[0])
        self.tables.pop(key).release(self.pool)


@dataclass
class Running:
    """As much of a ``Job`` as the supervisor looks at."""

    key: Any
    table: Any
    limit: int


def made(slots: int = 8, pages: int = 12) -> tuple[Supervisor, Memory]:
    pool = BlockPool([("full", slots)], pages)
    return Supervisor(FULL, SCHEME, pool), Memory(pool)


def room(supervisor: Supervisor, memory: Any, blocks: int, **how: Any) -> int | None:
    return supervisor.make_room(memory, how.pop("running", []), ([blocks], 1), how.pop("keep", set()), **how)


# ---- dividing the budget


@settings(max_examples=50, deadline=None)
@given(st.integers(-1000, 200_000_000), st.sampled_from([FULL, MIXED]))
def test_a_pool_never_takes_more_than_it_was_given(nbytes: int, spec: ModelCacheSpec) -> None:
    sizes = pool_sizes(spec, SCHEME, nbytes)
    assert sizes.nbytes <= max(0, nbytes)
    assert sizes.nbytes == sizes.pages * spec.page_bytes + sum(
        count * group.block_bytes(SCHEME) for count, group in zip(sizes.group_slots, spec.groups, strict=True)
    )


def test_most_of_a_large_budget_is_used() -> None:
    assert pool_sizes(MIXED, SCHEME, 200_000_000).nbytes > 0.97 * 200_000_000


def test_window_layers_get_slots_for_what_they_keep_and_full_ones_for_all() -> None:
    full, window = pool_sizes(MIXED, SCHEME, 200_000_000).group_slots
    assert full > 2 * window


# ---- what can never fit


def test_a_turn_that_could_never_fit_is_refused_and_the_longest_that_could_is_named() -> None:
    supervisor, _ = made(slots=4, pages=12)
    longest = supervisor.longest()
    assert longest == 4 * BLOCK + SCHEME.tail + 63
    supervisor.refuse_impossible(("a", ""), longest)
    with pytest.raises(ContextTooLarge, match=str(longest)):
        supervisor.refuse_impossible(("a", ""), longest + 1)


def test_pages_may_be_what_is_missing() -> None:
    supervisor, _ = made(slots=100, pages=2)
    with pytest.raises(ContextTooLarge):
        supervisor.refuse_impossible(("a", ""), 300)


# ---- who gives way


def test_nobody_leaves_while_there_is_room() -> None:
    supervisor, memory = made()
    memory.add("a", 900)
    assert room(supervisor, memory, 4) == 0
    assert memory.evicted == []


def test_the_agent_idle_for_longest_leaves_first_and_only_as_many_as_it_takes() -> None:
    supervisor, memory = made(slots=9)
    for age, agent in enumerate(("newest", "older", "oldest")):
        memory.add(agent, 900)
        supervisor.touch((agent, ""))
        supervisor.idle[agent, ""].used -= 100 * (age + 1)
    assert room(supervisor, memory, 3) == 1
    assert memory.evicted == ["oldest"]


@pytest.mark.parametrize(("ages", "first"), [((60, 30), "short"), ((6000, 30), "long")])
def test_what_is_dear_to_bring_back_stays_longer_than_what_is_cheap(
    ages: tuple[int, int], first: str
) -> None:
    """Without a store it is a prefill: long memory leaves before short only if idle for very much longer."""
    supervisor, memory = made(slots=16, pages=12)
    for age, (agent, tokens) in zip(ages, (("long", 2500), ("short", 900)), strict=True):
        memory.add(agent, tokens)
        supervisor.touch((agent, ""))
        supervisor.idle[agent, ""].used -= age
    assert room(supervisor, memory, memory.pool.groups[0].free + 1) == 1
    assert memory.evicted == [first]


def test_what_the_disk_gives_back_quickly_leaves_by_its_idle_time() -> None:
    """From disk 2500 tokens cost hardly more than 900: the one idle for longer leaves, whichever it is."""
    supervisor, memory = made(slots=16, pages=12)
    memory.store = object()
    for age, (agent, tokens) in zip((60, 30), (("long", 2500), ("short", 900)), strict=True):
        memory.add(agent, tokens)
        supervisor.touch((agent, ""))
        supervisor.idle[agent, ""].used -= age
    assert room(supervisor, memory, memory.pool.groups[0].free + 1) == 1
    assert memory.evicted == ["long"]


def test_an_agent_whose_message_waits_leaves_last() -> None:
    supervisor, memory = made(slots=6)
    for agent in ("waited for", "fresh"):
        memory.add(agent, 900)
        supervisor.touch((agent, ""))
    supervisor.idle["waited for", ""].used -= 1000
    supervisor.expect(("waited for", ""))
    assert room(supervisor, memory, 3) == 1
    assert memory.evicted == ["fresh"]


def test_gently_an_agent_whose_message_waits_does_not_leave_at_all() -> None:
    supervisor, memory = made(slots=3)
    memory.add("waited for", 900)
    supervisor.expect(("waited for", ""))
    assert room(supervisor, memory, 3, gentle=True) is None
    assert memory.evicted == []


def test_pinned_kept_loading_and_speaking_agents_stay() -> None:
    supervisor, memory = made(slots=12)
    tables = {agent: memory.add(agent, 900) for agent in ("pinned", "kept", "loading", "speaking")}
    supervisor.idle.setdefault(("pinned", ""), supervisor._idle(("pinned", ""))).pinned = True
    memory.loading["loading", ""] = object()
    running = [Running(("speaking", ""), tables["speaking"], 900)]
    assert room(supervisor, memory, 3, keep={("kept", "")}, running=running) is None
    assert memory.evicted == []


def test_nobody_leaves_in_vain() -> None:
    supervisor, memory = made(slots=8)
    speaking = memory.add("speaking", 900)
    memory.add("idle", 900)
    running = [Running(("speaking", ""), speaking, 900)]
    assert room(supervisor, memory, 7, running=running) is None
    assert memory.evicted == []


def test_what_running_turns_were_promised_is_not_given_away() -> None:
    supervisor, memory = made(slots=8)
    speaking = memory.add("speaking", 900)
    growing = [Running(("speaking", ""), speaking, 900 + 4 * BLOCK)]
    assert room(supervisor, memory, 3) == 0
    assert room(supervisor, memory, 3, running=growing) is None


def test_agents_that_share_blocks_free_them_by_leaving_together() -> None:
    supervisor, memory = made(slots=4)
    table = memory.add("a", 900)
    fork = AgentTable("b", "", FULL.groups, SCHEME, tokens=900, sealed=table.sealed)
    fork.slots[0] = list(table.slots[0])
    for slot in fork.slots[0]:
        memory.pool.groups[0].retain(slot)
    memory.tables["b", ""] = fork
    assert room(supervisor, memory, 4) == 2
    memory.pool.check()
    assert memory.pool.groups[0].used == 0


def test_every_eviction_is_explained() -> None:
    supervisor, memory = made(slots=3)
    memory.add("a", 900)
    room(supervisor, memory, 3)
    [why] = supervisor.decisions
    assert why.startswith("evicted a: room for others (3 blocks, 1 pages)")
    assert "idle for" in why


def test_evictions_say_for_whom_and_whether_it_was_pinned_and_the_latest_are_kept() -> None:
    supervisor, memory = made(slots=3)
    for i in range(120):
        memory.add(f"a{i}", 900)
        supervisor.touch((f"a{i}", ""), pinned=True)
        room(supervisor, memory, 3, whom="b")
    assert len(supervisor.decisions) == 100
    assert supervisor.decisions[-1].startswith("evicted a119: room for b")
    assert supervisor.decisions[-1].endswith("pinned")


def test_a_forgotten_agent_is_not_remembered() -> None:
    supervisor, _ = made()
    supervisor.touch(("a", ""))
    supervisor.forget(("a", ""))
    assert supervisor.idle == {}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 2500), max_size=8),
    st.integers(0, 12),
    st.integers(0, 10),
)
def test_room_made_is_room_and_room_refused_was_not_there(
    lengths: list[int], blocks: int, pages: int
) -> None:
    supervisor, memory = made(slots=12, pages=10)
    for i, length in enumerate(lengths):
        need, need_pages = supervisor.need(("x", ""), length)
        if memory.pool.fits(need, need_pages):
            memory.add(f"a{i}", length)
    evicted = supervisor.make_room(memory, [], ([blocks], pages), set())  # type: ignore[arg-type]  # a stand-in
    assert (evicted is None) is (not memory.pool.could_fit([blocks], pages))
    if evicted is not None:
        assert memory.pool.fits([blocks], pages)
        assert evicted == len(memory.evicted)
