"""Real processes die, brokers go away and come back: everybody waiting learns it at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from offbook.bus import Broker, Delivery, connect, endpoint_for, run_dir
from offbook.bus.errors import ConnectionLost, EndpointInUse, NoSuchActor, OffbookError, ProtocolError


async def test_killing_the_server_fails_its_askers_at_once(endpoint: str, kit: Any) -> None:
    errors: list[OffbookError] = []
    async with Broker(endpoint) as broker, kit.child("silent", endpoint) as server, connect(endpoint) as bus:
        assert await server.line() == "ready"

        async def ask(number: int) -> None:
            send = bus.ask if number % 2 else bus.tell
            with pytest.raises(ConnectionLost, match="'silent'") as caught:
                await send("silent/a", {}, timeout=60)
            errors.append(caught.value)

        with anyio.fail_after(5):  # far below the patience of heartbeats
            async with anyio.create_task_group() as tasks:
                for number in range(10):
                    tasks.start_soon(ask, number)
                for _ in range(10):
                    await server.line()
                server.kill()
            assert len(errors) == 10
            with pytest.raises(NoSuchActor):
                await bus.ask("silent/a", {})
        assert broker.statistics().pending == 0
        assert broker.statistics().peers == 1


async def test_killing_the_asker_cancels_its_asks_at_the_server(endpoint: str, kit: Any) -> None:
    arrived, cancelled = anyio.Event(), anyio.Event()

    async def handler(delivery: Delivery) -> None:
        arrived.set()
        await delivery.cancelled.wait()
        cancelled.set()
        await delivery.reply("to nobody")

    async with Broker(endpoint) as broker, kit.serving(endpoint, "v/*", handler):
        async with kit.child("ask", endpoint, "v/a") as asker:
            assert await asker.line() == "asking"
            await arrived.wait()
            asker.kill()
            with anyio.fail_after(5):
                await cancelled.wait()
        assert broker.statistics().pending == 0


async def test_a_last_reply_before_the_end_of_a_process_arrives(endpoint: str, kit: Any) -> None:
    async with Broker(endpoint), connect(endpoint) as bus:
        for _ in range(3):
            async with kit.child("last_words", endpoint) as server:
                assert await server.line() == "ready"
                assert await bus.ask("last/a", {}, timeout=20) == "farewell"
                await server.process.wait()
            await kit.eventually(lambda: True)


async def test_a_server_that_comes_back_is_found_again(endpoint: str, kit: Any) -> None:
    async with Broker(endpoint), connect(endpoint) as bus:
        for number in range(3):
            async with kit.child("echo", endpoint) as server:
                assert await server.line() == "ready"
                assert await bus.ask("echo/a", {"n": number}, timeout=20) == {"n": number}
                server.kill()
                await server.process.wait()


async def test_a_stopped_process_is_given_up_after_the_patience(endpoint: str, kit: Any) -> None:
    """SIGSTOP: the connection stays, only heartbeats tell."""
    broker = Broker(endpoint, heartbeat=0.1, patience=0.5)
    async with broker, kit.child("silent", endpoint) as server, connect(endpoint) as bus:
        assert await server.line() == "ready"
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(ConnectionLost, match="silent for"):
                    await bus.ask("silent/a", {})

            tasks.start_soon(ask)
            await server.line()
            server.process.send_signal(signal.SIGSTOP)
        assert broker.statistics().lost == 1
        server.process.send_signal(signal.SIGCONT)  # it comes back, and says hello anew
        await kit.eventually(lambda: broker.statistics().patterns == 1)


async def test_killing_the_broker_fails_what_is_pending_and_clients_come_back(
    endpoint: str, kit: Any
) -> None:
    ended = anyio.Event()

    async def handler(delivery: Delivery) -> None:
        if delivery.envelope.type == "Hang":
            await delivery.cancelled.wait()
            ended.set()
        else:
            await delivery.reply("here")

    async with kit.child("broker", endpoint) as broker:
        assert await broker.line() == "ready"
        async with (
            kit.serving(endpoint, "v/*", handler),
            connect(endpoint) as bus,
            bus.subscribe("t") as events,
        ):
            assert await bus.publish("t", 1) == 1
            assert (await events.__anext__()).decode() == 1
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    with pytest.raises(ConnectionLost):
                        await bus.ask("v/a", {"type": "Hang"}, timeout=60)

                tasks.start_soon(ask)
                assert await bus.ask("v/a", {}) == "here"
                broker.kill()
                with anyio.fail_after(5):
                    await bus.wait_lost()
                    await ended.wait()
            assert not bus.connected
            async with kit.child("broker", endpoint) as second:
                assert await second.line() == "ready"
                # Waits for the connection; by then the pattern is served and the topic read again.
                with anyio.fail_after(20):
                    while True:
                        try:
                            assert await bus.ask("v/a", {}, timeout=20) == "here"
                            break
                        except (NoSuchActor, ConnectionLost):  # we were back before the server was
                            await anyio.sleep(0.01)
                    assert bus.reconnects == 1
                    assert await bus.publish("t", 2) == 1  # this broker keeps topics in memory: a new log
                    assert (await events.__anext__()).decode() == 2


async def test_publishing_goes_on_over_a_lost_connection_with_one_effect(endpoint: str, kit: Any) -> None:
    from offbook.bus import MemoryTopicStore

    store = MemoryTopicStore()
    numbers: list[int] = []
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def first() -> None:
            with scope:
                await Broker(endpoint, topic_store=store).run()

        tasks.start_soon(first)
        async with connect(endpoint) as bus, bus.subscribe("t") as events:

            async def publish() -> None:
                for number in range(300):
                    numbers.append(await bus.publish("t", number, timeout=30))
                    if number == 150:
                        scope.cancel()

            tasks.start_soon(publish)
            await bus.wait_lost()
            async with Broker(endpoint, topic_store=store):
                with anyio.fail_after(20):
                    got = [(await events.__anext__()).decode() for _ in range(300)]
    assert got == list(range(300))
    assert numbers == list(range(1, 301))


async def test_stopping_the_broker_with_asks_in_flight_fails_them(endpoint: str, kit: Any) -> None:
    arrived = anyio.Event()
    running = anyio.CancelScope()

    async def run() -> None:
        with running:
            await Broker(endpoint).run()

    async def handler(delivery: Delivery) -> None:
        arrived.set()
        await delivery.cancelled.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        async with kit.serving(endpoint, "v/*", handler), connect(endpoint) as bus:

            async def stop() -> None:
                await arrived.wait()
                running.cancel()

            tasks.start_soon(stop)
            with anyio.fail_after(5):
                # Its last word is lost if the connection's end is heard of before that was read.
                with pytest.raises(ConnectionLost, match=r"broker stopped|closed the connection"):
                    await bus.ask("v/a", {})
                await bus.wait_lost(0.05)
            with pytest.raises(ConnectionLost, match="no broker"):
                await bus.ask("v/a", {}, timeout=0.1)


async def test_leaving_the_client_with_asks_in_flight_fails_them(endpoint: str, kit: Any) -> None:
    arrived, cancelled = anyio.Event(), anyio.Event()

    async def handler(delivery: Delivery) -> None:
        arrived.set()
        await delivery.cancelled.wait()
        cancelled.set()

    async with Broker(endpoint), kit.serving(endpoint, "v/*", handler), anyio.create_task_group() as tasks:
        async with connect(endpoint) as bus:

            async def ask() -> None:
                with pytest.raises(ConnectionLost, match="closed"):
                    await bus.ask("v/a", {})
                with pytest.raises(ConnectionLost, match="closed"):
                    await bus.ask("v/a", {})

            tasks.start_soon(ask)
            await arrived.wait()
        with anyio.fail_after(5):
            await cancelled.wait()


async def test_no_broker_is_a_clear_error(endpoint: str) -> None:
    with pytest.raises(ConnectionLost, match="is it running"):
        async with connect(endpoint, timeout=0.1):
            pass


async def test_a_runtime_that_does_not_run_is_named_with_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))
    with pytest.raises(ConnectionLost, match=r"runtime 'nope': .*no other is running"):
        async with connect("nope", timeout=0.1):
            pass
    run_dir("stopped")
    for name in ("town", "village"):
        run_dir(name)
    async with Broker(endpoint_for("town")), Broker(endpoint_for("village")):
        with pytest.raises(ConnectionLost, match=r"runtime 'nope': .*running are: town, village$"):
            async with connect("nope", timeout=0.1):
                pass


async def test_a_client_may_start_before_its_broker(endpoint: str, kit: Any) -> None:
    async with anyio.create_task_group() as tasks:
        done = anyio.Event()

        async def client() -> None:
            async with connect(endpoint, timeout=20) as bus:
                assert await bus.publish("t", 1) == 1
            done.set()

        tasks.start_soon(client)
        await anyio.sleep(0.05)
        async with Broker(endpoint):
            with anyio.fail_after(20):
                await done.wait()


async def test_a_second_broker_on_the_same_endpoint_is_refused(endpoint: str, kit: Any) -> None:
    async with Broker(endpoint), kit.serving(endpoint, "v/*", kit.echo), connect(endpoint) as bus:
        with pytest.raises(EndpointInUse, match=str(os.getpid())):
            async with Broker(endpoint):
                pass
        assert await bus.ask("v/a", {"n": 1}) == {"n": 1}
    folder = Path(endpoint.removeprefix("ipc://")).parent
    for _ in range(50):  # free again at once, and nothing is left behind
        assert list(folder.iterdir()) == []
        async with Broker(endpoint), connect(endpoint) as bus:
            assert await bus.publish("t", 1) == 1


async def test_a_second_peer_of_the_same_name_is_refused_and_the_first_unharmed(
    endpoint: str, kit: Any
) -> None:
    async with Broker(endpoint), kit.serving(endpoint, "v/*", kit.echo, "host"), connect(endpoint) as bus:
        with pytest.raises(ProtocolError, match="'host'"):
            async with connect(endpoint, name="host"):
                pass
        assert await bus.ask("v/a", {"n": 1}) == {"n": 1}


async def test_many_connections_come_and_go_without_leaving_anything(endpoint: str, kit: Any) -> None:
    """Descriptors are used again at once: the end of one connection must not end the next."""
    async with Broker(endpoint) as broker, kit.serving(endpoint, "v/*", kit.echo):
        for number in range(60):
            async with connect(endpoint) as bus:
                assert await bus.ask("v/a", {"n": number}, timeout=20) == {"n": number}
        await kit.eventually(lambda: broker.statistics().peers == 1)
        assert broker.statistics().pending == 0
        assert broker.statistics().malformed == 0
