"""Peers that break the rules: refused, counted, disconnected; nobody else notices."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import zmq

from offbook.bus import Broker, Envelope, Kind, connect
from offbook.bus.envelope import MAX_BODY, VERSION, decode_header, encode_header
from offbook.bus.errors import from_wire
from offbook.bus.socket import MessageSocket


class Raw:
    """A DEALER that says whatever it likes."""

    def __init__(self, endpoint: str, identity: bytes = b"") -> None:
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.LINGER, 0)
        if identity:
            dealer.setsockopt(zmq.ROUTING_ID, identity)
        dealer.connect(endpoint)
        self.socket = MessageSocket(dealer)
        self._pairs: list[tuple[Envelope, bytes]] = []

    async def send(self, *frames: bytes) -> None:
        await self.socket.send(frames)

    async def say(self, envelope: Envelope, body: bytes = b"") -> None:
        await self.send(encode_header(envelope), body)

    async def next(self) -> tuple[Envelope, bytes]:
        with anyio.fail_after(10):
            while not self._pairs:
                frames = await self.socket.receive()
                self._pairs += [(decode_header(frames[i]), frames[i + 1]) for i in range(0, len(frames), 2)]
        return self._pairs.pop(0)

    async def hello(self, name: str = "raw", **more: Any) -> Envelope:
        body = msgspec.msgpack.encode({"name": name, "instance": "i", **more})
        await self.say(Envelope(kind=Kind.HELLO, id="h"), body)
        return (await self.next())[0]

    async def until_goodbye(self) -> Exception:
        while True:
            envelope, body = await self.next()
            if envelope.kind is Kind.BYE:
                return from_wire(body)


@asynccontextmanager
async def raw(endpoint: str, identity: bytes = b"") -> AsyncIterator[Raw]:
    peer = Raw(endpoint, identity)
    try:
        yield peer
    finally:
        peer.socket.close()


@asynccontextmanager
async def bystanders(endpoint: str, kit: Any, **options: Any) -> AsyncIterator[Broker]:
    """A broker with two well-behaved peers that talk all the time, and are never disturbed."""
    async with (
        Broker(endpoint, **options) as broker,
        kit.serving(endpoint, "v/*", kit.echo),
        connect(endpoint) as bus,
        anyio.create_task_group() as tasks,
    ):

        async def talk() -> None:
            number = 0
            while True:
                assert await bus.ask("v/a", {"n": number}) == {"n": number}
                number += 1

        tasks.start_soon(talk)
        yield broker
        assert await bus.ask("v/a", {"n": -1}) == {"n": -1}
        assert bus.reconnects == 0
        tasks.cancel_scope.cancel()


async def test_random_frames_are_counted_and_their_sender_disconnected(endpoint: str, kit: Any) -> None:
    rng = random.Random(7)
    async with bystanders(endpoint, kit) as broker, raw(endpoint) as peer:
        assert (await peer.hello()).kind is Kind.WELCOME
        for _ in range(8):
            await peer.send(*[rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 5))])
        assert await peer.until_goodbye()
        await kit.eventually(lambda: broker.statistics().peers == 2)
        assert broker.statistics().malformed == 8
        assert broker.statistics().disconnected == 1


async def test_truncated_messages_are_refused(endpoint: str, kit: Any) -> None:
    header = encode_header(Envelope(kind=Kind.ASK, id="x", to="v/a"))
    async with bystanders(endpoint, kit) as broker, raw(endpoint) as peer:
        await peer.hello()
        await peer.send(header)  # its body is missing
        await peer.send(header, b"", header)
        await peer.send(header[:-3], b"")
        await peer.send(b"", b"")
        await peer.say(Envelope(kind=Kind.PING, id="p"))
        while (answer := await peer.next())[0].kind is not Kind.PONG:
            pass
        assert answer[0].correlation == "p"  # four mistakes are forgiven
        assert broker.statistics().malformed == 4


async def test_bytes_that_are_not_even_zeromq_are_refused(endpoint: str, kit: Any) -> None:
    rng = random.Random(8)
    async with bystanders(endpoint, kit) as broker:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as plain:
                plain.connect(endpoint.removeprefix("ipc://"))
                plain.sendall(rng.randbytes(300))
        await kit.eventually(lambda: broker.statistics().refused > 0)
        assert broker.statistics().peers == 2


async def test_a_connection_that_never_says_hello_is_refused(endpoint: str, kit: Any) -> None:
    async with bystanders(endpoint, kit) as broker, raw(endpoint) as peer:
        for _ in range(8):
            await peer.say(Envelope(kind=Kind.ASK, id="x", to="v/a"))
        assert "did not say HELLO" in str(await peer.until_goodbye())
        await kit.eventually(lambda: broker.statistics().disconnected == 1)


async def test_a_second_connection_with_the_same_identity_is_refused(endpoint: str, kit: Any) -> None:
    async with bystanders(endpoint, kit) as broker, raw(endpoint, b"twin") as first:
        await first.hello("first")
        async with raw(endpoint, b"twin") as second:
            await second.say(Envelope(kind=Kind.HELLO, id="h"), msgspec.msgpack.encode({"name": "second"}))
            with anyio.move_on_after(0.2) as scope:
                await second.socket.receive()
            assert scope.cancelled_caught
        await first.say(Envelope(kind=Kind.PING))
        assert (await first.next())[0].kind is Kind.PONG
        assert broker.statistics().peers == 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"name": 3}),
        msgspec.msgpack.encode({"name": "a b", "instance": ""}),
    ],
)
async def test_a_hello_that_is_no_hello_is_refused(endpoint: str, kit: Any, body: bytes) -> None:
    async with bystanders(endpoint, kit) as broker, raw(endpoint) as peer:
        await peer.say(Envelope(kind=Kind.HELLO, id="h"), body)
        await kit.eventually(lambda: broker.statistics().malformed == 1)
        assert (await peer.next())[0].kind is Kind.FAIL
        assert (await peer.hello()).kind is Kind.WELCOME


async def test_a_flood_of_requests_without_credit_ends_in_a_disconnect(endpoint: str, kit: Any) -> None:
    async with bystanders(endpoint, kit) as broker, connect(endpoint) as sleeper, raw(endpoint) as peer:
        await sleeper.serve("sleepy/*")
        await peer.hello()
        for number in range(2000):
            await peer.say(Envelope(kind=Kind.TELL, id=f"f{number}", to="sleepy/a"))
        assert "without credit" in str(await peer.until_goodbye())
        await kit.eventually(lambda: broker.statistics().disconnected == 1)
        assert broker.statistics().queued == 0


async def test_a_flood_of_pings_ends_in_a_disconnect(endpoint: str, kit: Any) -> None:
    async with bystanders(endpoint, kit, heartbeat=60.0) as broker, raw(endpoint) as peer:
        await peer.hello()
        ping = encode_header(Envelope(kind=Kind.PING))
        for _ in range(220):
            await peer.send(*[ping, b""] * 100)
        assert "control messages" in str(await peer.until_goodbye())
        await kit.eventually(lambda: broker.statistics().disconnected == 1)


async def test_a_frame_that_announces_too_much_is_cut_off(endpoint: str, kit: Any) -> None:
    async with bystanders(endpoint, kit) as broker, raw(endpoint) as peer:
        await peer.hello()
        await peer.send(
            encode_header(Envelope(kind=Kind.TELL, id="x", to="v/a")), bytes(MAX_BODY + 1024 * 1024)
        )
        await kit.eventually(lambda: broker.statistics().peers == 2)


async def test_answers_to_what_was_never_asked_are_counted_and_dropped(endpoint: str, kit: Any) -> None:
    async with bystanders(endpoint, kit) as broker, raw(endpoint) as peer:
        await peer.hello()
        for kind in (Kind.REPLY, Kind.FAIL, Kind.ACCEPT, Kind.PROGRESS):
            await peer.say(Envelope(kind=kind, correlation="guess"), b"\xc0")
        for kind in (Kind.CANCEL, Kind.UNSUBSCRIBE, Kind.CREDIT):
            await peer.say(Envelope(kind=kind, correlation="guess", seq=10**9))
        await peer.say(Envelope(kind=Kind.PING))
        assert (await peer.next())[0].kind is Kind.PONG
        assert broker.statistics().late_replies == 4


async def test_a_peer_cannot_answer_for_another(endpoint: str, kit: Any) -> None:
    async with (
        bystanders(endpoint, kit),
        raw(endpoint) as peer,
        connect(endpoint) as bus,
        connect(endpoint) as host,
    ):
        await peer.hello()
        await host.serve("w/*")
        async with anyio.create_task_group() as tasks:
            got: list[Any] = []

            async def ask() -> None:
                got.append(await bus.ask("w/a", {}, id="known"))

            tasks.start_soon(ask)
            delivery = await host.deliveries().__anext__()
            await peer.say(Envelope(kind=Kind.REPLY, correlation="known"), msgspec.msgpack.encode("forged"))
            await peer.say(Envelope(kind=Kind.CANCEL, correlation="known"))
            await peer.say(Envelope(kind=Kind.PING))
            await peer.next()
            assert not delivery.cancelled.is_set()
            await delivery.reply("true")
        assert got == ["true"]


async def test_kinds_that_are_not_for_brokers_are_refused(endpoint: str, kit: Any) -> None:
    async with bystanders(endpoint, kit) as broker, raw(endpoint) as peer:
        await peer.hello()
        for kind in (Kind.WELCOME, Kind.EVENT, Kind.HELLO):
            await peer.say(Envelope(kind=kind))
        await peer.say(Envelope(kind=Kind.PING))
        await peer.next()
        assert broker.statistics().malformed == 3


async def test_raw_requests_are_checked_like_ours(endpoint: str, kit: Any) -> None:
    """The broker does not rely on clients for any rule."""
    async with bystanders(endpoint, kit), raw(endpoint) as peer:
        await peer.hello()
        wrong = {
            "InvalidAddress": Envelope(kind=Kind.ASK, id="1", to="../x"),
            "NoSuchActor": Envelope(kind=Kind.ASK, id="2", to="nobody/x"),
            "CycleError": Envelope(kind=Kind.ASK, id="3", to="v/a", chain=("v/a",)),
            "DeadlineExceeded": Envelope(kind=Kind.ASK, id="4", to="v/a", deadline=1.0),
            "InvalidRequest": Envelope(kind=Kind.TELL, to="v/a"),
        }
        for code, envelope in wrong.items():
            await peer.say(envelope)
            answer, body = await peer.next()
            assert answer.kind is Kind.FAIL
            assert answer.correlation == envelope.id
            assert msgspec.msgpack.decode(body)["code"] == code


async def test_another_version_is_refused(endpoint: str, kit: Any) -> None:
    async with bystanders(endpoint, kit) as broker, raw(endpoint) as peer:
        await peer.send(bytes([VERSION + 1]) + os.urandom(20), b"")
        await kit.eventually(lambda: broker.statistics().malformed == 1)
