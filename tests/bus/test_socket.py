"""One task owns a socket; nothing is lost and nothing stalls."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest
import zmq

from offbook.bus.socket import MessageSocket


@pytest.fixture
def pair(endpoint: str) -> Iterator[tuple[MessageSocket, MessageSocket]]:
    context = zmq.Context.instance()
    left: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    right: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    left.bind(endpoint)
    right.connect(endpoint)
    yield MessageSocket(left), MessageSocket(right)
    left.close(linger=0)
    right.close(linger=0)


async def test_receiving_with_short_cancel_scopes_loses_none_of_5000(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    left, right = pair
    total = 5000
    got: list[int] = []
    cancelled = 0

    async def produce() -> None:
        for number in range(total):
            await left.send([str(number).encode()])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(produce)
        with anyio.fail_after(60):
            while len(got) < total:
                # Deadlines in the past, at once, and just about when a message comes.
                with anyio.move_on_after((len(got) + cancelled) % 7 * 0.00005) as scope:
                    while len(got) < total:
                        got.append(int((await right.receive())[0]))
                cancelled += scope.cancelled_caught
    assert got == list(range(total))
    assert cancelled > 10


async def test_concurrent_sends_and_receives_deliver_everything(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    total = 3000

    async def own(socket: MessageSocket, tag: bytes, got: list[bytes]) -> None:
        """Sends and receives in one task, as owners do."""
        sent = 0
        while sent < total or len(got) < total:
            progress = False
            while sent < total and socket.send_nowait([tag, str(sent).encode()]):
                sent += 1
                progress = True
                if sent % 50 == 0:
                    break
            while (frames := socket.receive_nowait()) is not None:
                got.append(frames[1])
                progress = True
            if not progress:
                await socket.wait()
            await socket.breathe()

    left_got: list[bytes] = []
    right_got: list[bytes] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(own, pair[0], b"l", left_got)
            tasks.start_soon(own, pair[1], b"r", right_got)
    wanted = [str(number).encode() for number in range(total)]
    assert left_got == wanted
    assert right_got == wanted


async def test_wake_ends_a_wait_and_is_remembered(pair: tuple[MessageSocket, MessageSocket]) -> None:
    socket = pair[0]
    socket.wake()
    with anyio.fail_after(5):
        await socket.wait()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(socket.wait)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            socket.wake()


async def test_two_tasks_cannot_wait_on_one_socket(pair: tuple[MessageSocket, MessageSocket]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pair[0].wait)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        with pytest.raises(RuntimeError, match="two tasks"):
            await pair[0].wait()
        tasks.cancel_scope.cancel()
