"""Timers: durable, fired once, coalesced when missed, whatever the clock does."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from offbook.actors import Actor, InvalidRequest, Message, Request, VirtualClock, WallClock, every, on
from offbook.actors.testing import stored_state, team

START = VirtualClock().start


class Ring(Message):
    name: str


class Arm(Request[str]):
    delay: float
    name: str = ""
    cancel: str = ""


class Sleeper(Actor):
    rings: list[str] = []
    at: list[float] = []

    @on
    async def arm(self, ask: Arm) -> str:
        if ask.cancel:
            self.cancel(ask.cancel)
            return ""
        return self.after(ask.delay, Ring(ask.name), name=ask.name or None)

    @on
    async def ring(self, msg: Ring) -> None:
        self.rings.append(msg.name)
        self.at.append(self.now())


class Hourly(Actor):
    ticks: int = 0
    at: list[float] = []

    @every(3600)
    async def tick(self) -> None:
        self.ticks += 1
        self.at.append(self.now())


class SetClock(WallClock):
    """A wall clock that a test can change."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0.0

    def now(self) -> float:
        return super().now() + self.offset


async def test_virtual_time_jumps_to_each_timer_and_to_the_end(tmp_path: Path) -> None:
    clock = VirtualClock(7)
    async with team(tmp_path, engine=False, clock=clock) as (host, _):
        await host.spawn(Hourly, "h")
        await host.register(Sleeper)
        await host.ask("sleeper/s", Arm(5000.0, "x"))
        report = await host.run(until=4 * 3600)
        assert report.now == clock.now() == START + 4 * 3600
        state = await stored_state(host, "hourly/h")
        assert state["at"] == [START + 3600 * hour for hour in (1, 2, 3, 4)]
        assert (await stored_state(host, "sleeper/s"))["at"] == [START + 5000.0]


async def test_a_restarted_simulation_goes_on_at_its_time(tmp_path: Path) -> None:
    for hours in (2, 2, 5):
        async with team(tmp_path, engine=False, clock=VirtualClock()) as (host, _):
            await host.spawn(Hourly, "h")
            await host.run(until=hours * 3600)
            assert (await stored_state(host, "hourly/h"))["ticks"] == hours


async def test_without_an_end_virtual_time_runs_until_no_timer_is_left(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False, clock=VirtualClock()) as (host, _):
        await host.register(Sleeper)
        await host.ask("sleeper/s", Arm(10.0, "a"))
        await host.ask("sleeper/s", Arm(5.0, "b"))
        report = await host.run()
        assert report.now == START + 10
        assert (await stored_state(host, "sleeper/s"))["rings"] == ["b", "a"]


@pytest.mark.parametrize("delay", [-1.0, float("inf"), float("nan"), 1e300])
async def test_a_delay_that_no_clock_has_is_refused(tmp_path: Path, delay: float) -> None:
    async with team(tmp_path, engine=False, clock=VirtualClock()) as (host, _):
        await host.register(Sleeper)
        with pytest.raises(InvalidRequest, match="a delay is zero to"):
            await host.ask("sleeper/s", Arm(delay))


async def test_a_timer_can_be_cancelled_and_replaced(tmp_path: Path) -> None:
    async with team(tmp_path, engine=False, clock=VirtualClock()) as (host, _):
        await host.register(Sleeper)
        name = await host.ask("sleeper/s", Arm(5.0))
        await host.ask("sleeper/s", Arm(0, cancel=name))
        await host.ask("sleeper/s", Arm(5.0, "alarm"))
        await host.ask("sleeper/s", Arm(50.0, "alarm"))
        await host.run()
        state = await stored_state(host, "sleeper/s")
        assert (state["rings"], state["at"]) == (["alarm"], [START + 50])


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf")])
async def test_an_impossible_delay_is_refused(tmp_path: Path, delay: float) -> None:
    async with team(tmp_path, engine=False, clock=VirtualClock()) as (host, _):
        await host.register(Sleeper)
        with pytest.raises(InvalidRequest, match="delay"):
            await host.ask("sleeper/s", Arm(delay))
    with pytest.raises(ValueError, match="positive"):
        every(0)


async def test_a_thousand_missed_periods_are_made_up_for_by_one_call(tmp_path: Path) -> None:
    clock = SetClock()
    async with team(tmp_path, engine=False, clock=clock) as (host, _):
        await host.spawn(Hourly, "h")
        await host.idle()
    clock.offset = 1000 * 3600.0 + 1
    async with team(tmp_path, engine=False, clock=clock) as (host, _):
        await host.spawn(Hourly, "h")
        while (await stored_state(host, "hourly/h"))["ticks"] == 0:
            await anyio.sleep(0.005)
        await host.idle()
        assert (await stored_state(host, "hourly/h"))["ticks"] == 1
        due = await host.journal.do("t", lambda db: db.execute("SELECT due FROM timers").fetchone()[0])
        assert 0 < due - clock.now() <= 3600, "the next one keeps to the grid"


async def test_a_timer_due_while_the_process_was_down_fires_once(tmp_path: Path) -> None:
    clock = SetClock()
    async with team(tmp_path, engine=False, clock=clock) as (host, _):
        await host.register(Sleeper)
        await host.ask("sleeper/s", Arm(100.0, "x"))
    clock.offset = 500
    for _ in range(2):
        async with team(tmp_path, engine=False, clock=clock) as (host, _engine):
            await host.register(Sleeper)
            while not (await stored_state(host, "sleeper/s"))["rings"]:
                await anyio.sleep(0.005)
            await host.idle()
            assert (await stored_state(host, "sleeper/s"))["rings"] == ["x"]


async def test_a_clock_set_forward_fires_once_and_set_back_loses_nothing(tmp_path: Path) -> None:
    clock = SetClock()
    async with team(tmp_path, engine=False, clock=clock) as (host, _):
        await host.spawn(Hourly, "h")
        clock.offset = 3700
        host._timers.wake()  # as its regular look at the clock would, some seconds later
        while (await stored_state(host, "hourly/h"))["ticks"] == 0:
            await anyio.sleep(0.005)
        clock.offset = 100  # an hour back: the next tick is now more than a period away
        host._timers.wake()
        while True:
            due = await host.journal.do("t", lambda db: db.execute("SELECT due FROM timers").fetchone()[0])
            if due - clock.now() <= 3600:
                break
            await anyio.sleep(0.005)
        await host.idle()
        assert (await stored_state(host, "hourly/h"))["ticks"] == 1, "nothing fires twice"


async def test_a_clock_that_was_set_back_while_down_loses_nothing(tmp_path: Path) -> None:
    clock = SetClock()
    clock.offset = 7200
    async with team(tmp_path, engine=False, clock=clock) as (host, _):
        await host.spawn(Hourly, "h")
        await host._timers.fire()
    clock.offset = 0
    async with team(tmp_path, engine=False, clock=clock) as (host, _):
        due = await host.journal.do("t", lambda db: db.execute("SELECT due FROM timers").fetchone()[0])
        assert due - clock.now() <= 3600


async def test_an_every_method_added_later_starts_and_a_removed_one_stops(tmp_path: Path) -> None:
    class Before(Actor):
        kind = "worker"
        seen: list[str] = []

        @every(10)
        async def old(self) -> None:
            self.seen.append("old")

    class After(Actor):
        kind = "worker"
        seen: list[str] = []

        @every(10)
        async def new(self) -> None:
            self.seen.append("new")

    async with team(tmp_path, engine=False, clock=VirtualClock()) as (host, _):
        await host.spawn(Before, "w")
        await host.run(until=15)
    async with team(tmp_path, engine=False, clock=VirtualClock()) as (host, _):
        await host.spawn(After, "w")
        await host.run(until=45)
        assert (await stored_state(host, "worker/w"))["seen"] == ["old", "new", "new"]
        assert not host.failures
        names = await host.journal.do("t", lambda db: db.execute("SELECT name FROM timers").fetchall())
        assert names == [("@new",)]


async def test_the_order_of_simultaneous_timers_is_fixed_by_the_seed(tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((1, 1, 2, 3, 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with team(folder, engine=False, clock=VirtualClock(seed)) as (host, _):
            await host.register(Sleeper)
            for name in "abcdef":
                await host.ask("sleeper/s", Arm(10.0, name))
            await host.run()
            orders.append((await stored_state(host, "sleeper/s"))["rings"])
    assert orders[0] == orders[1]
    assert any(order != orders[0] for order in orders[2:])
    assert all(sorted(order) == list("abcdef") for order in orders)


async def test_an_actor_that_its_first_message_creates_ticks_at_once(tmp_path: Path) -> None:
    class Pulse(Actor):
        beats: int = 0

        @on
        async def ring(self, msg: Ring) -> None:
            pass

        @every(0.02)
        async def beat(self) -> None:
            self.beats += 1

    async with team(tmp_path, engine=False, clock=WallClock()) as (host, _):
        await host.register(Pulse)
        await anyio.sleep(0.1)  # no timer is set: the host waits until one is
        await host.tell("pulse/p", Ring("begin"))
        with anyio.fail_after(10):
            while (await stored_state(host, "pulse/p"))["beats"] < 3:
                await anyio.sleep(0.01)
