"""PROTOCOL.md is enough to write a peer: this one knows ZeroMQ and msgpack, and nothing of offbook."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbook.bus import Broker, Kind, connect
from offbook.bus.errors import OffbookError

PROTOCOL = Path(__file__).parents[2] / "bus" / "PROTOCOL.md"

FOREIGN_PEER = """
import sys, uuid
import msgspec, zmq

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
HELLO, WELCOME, PING, PONG, ASK, REPLY, SERVE, STREAM, PROGRESS = 1, 2, 3, 4, 11, 14, 20, 12, 15
PUBLISH, SUBSCRIBE, EVENT, TELL, ACCEPT, FAIL = 30, 31, 33, 10, 13, 16

socket = zmq.Context().socket(zmq.DEALER)
socket.RCVTIMEO = 30_000
socket.connect(sys.argv[1])
queue = []

def send(kind, body=b"", id="", to="", correlation="", type="", seq=0):
    envelope = [kind, id, to, "", correlation, 0.0, [], "", type, seq]
    socket.send_multipart([b"\\x01" + pack(envelope), body])

def receive():
    while not queue:
        frames = socket.recv_multipart()
        queue.extend((unpack(frames[i][1:]), frames[i + 1]) for i in range(0, len(frames), 2))
    return queue.pop(0)

def request(kind, to, body=b"", **more):
    id = uuid.uuid4().hex
    send(kind, body, id=id, to=to, **more)
    while True:
        envelope, answer = receive()
        if envelope[4] == id:
            return envelope, answer

send(HELLO, pack({"name": "foreign", "instance": "x"}), id="h")
envelope, body = receive()
assert envelope[0] == WELCOME and envelope[4] == "h", envelope
assert unpack(body)["max_body"] == 16777216
send(PING)
assert receive()[0][0] == PONG
assert request(SERVE, "foreign/*")[0][0] == REPLY
envelope, body = request(ASK, "native/a", pack({"n": 20}), type="Double")
assert envelope[0] == REPLY and unpack(body) == 40, (envelope, body)
envelope, body = request(ASK, "nobody/a", pack({}))
assert envelope[0] == FAIL and unpack(body)["code"] == "NoSuchActor"
envelope, _ = request(SUBSCRIBE, "square", seq=-1)
assert envelope[0] == REPLY and envelope[9] == 0
subscription = envelope[4]
envelope, _ = request(PUBLISH, "square", pack({"text": "hello"}), correlation="once", type="Heard")
assert envelope[9] == 1
while True:  # serve until told to stop
    envelope, body = receive()
    kind, id, to = envelope[:3]
    if kind == EVENT:
        assert envelope[4] == subscription and envelope[9] == 1 and unpack(body) == {"text": "hello"}
    elif kind == STREAM:
        for piece in unpack(body)["words"]:
            send(PROGRESS, pack(piece), correlation=id)
        send(REPLY, pack(len(unpack(body)["words"])), correlation=id)
    elif kind == TELL:
        send(ACCEPT, correlation=id)
        send(5)
        break
socket.close(linger=1000)
"""


async def test_a_peer_written_from_the_page_speaks_with_ours(endpoint: str, kit: Any) -> None:
    import anyio

    async def double(delivery: Any) -> None:
        assert delivery.envelope.type == "Double"
        await delivery.reply(2 * delivery.decode()["n"])

    async with (
        Broker(endpoint) as broker,
        kit.serving(endpoint, "native/*", double),
        connect(endpoint) as bus,
        bus.subscribe("square") as events,
    ):
        process = await anyio.open_process([sys.executable, "-c", FOREIGN_PEER, endpoint], stderr=None)
        async with process:
            with anyio.fail_after(30):
                event = await events.__anext__()
                assert (event.id, event.type, event.decode()) == ("once", "Heard", {"text": "hello"})
                async with bus.stream("foreign/any", {"type": "Say", "words": ["a", "b"]}) as reply:
                    assert [piece async for piece in reply] == ["a", "b"]
                    assert reply.result == 2
                await bus.tell("foreign/any", {"type": "Stop"})
                assert await process.wait() == 0
        assert broker.statistics().malformed == 0


def test_the_page_names_every_kind_with_its_number() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([A-Z]+) \|", PROTOCOL.read_text(), flags=re.M))
    assert rows == {str(kind.value): kind.name for kind in Kind}


def test_every_error_the_page_names_exists() -> None:
    names = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", PROTOCOL.read_text()))
    assert names <= set(OffbookError.known)


@pytest.mark.parametrize("module", ["offbook.bus"])
def test_a_plain_client_imports_nothing_of_actors_or_models(module: str) -> None:
    code = (
        f"import sys, {module}; bad = [m for m in sys.modules if m.startswith(('offbook.actors', "
        "'offbook.runtime', 'mlx', 'numpy'))]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
