"""Folders are private, plaintext TCP is refused, and only known keys get in."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq

from offbook.bus import Broker, KeyPair, ServerKeys, connect, endpoint_for, new_key_pair, run_dir
from offbook.bus.curve import load_or_make
from offbook.bus.errors import ConnectionLost, InvalidAddress, InvalidRequest, ProtocolError
from offbook.bus.security import MAX_IPC_PATH, private_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home for runtimes, deep enough that a socket could not be in it, and a private socket folder."""
    deep = tmp_path / ("d" * 100)
    monkeypatch.setenv("OFFBOOK_HOME", str(deep))
    return deep


async def test_a_runtime_is_found_by_its_name(home: Path, kit: Any) -> None:
    async with (
        Broker("village") as broker,
        kit.serving("village", "v/*", kit.echo),
        connect("village") as bus,
    ):
        assert await bus.ask("v/a", {"n": 1}) == {"n": 1}
        path = Path(broker.endpoints[0].removeprefix("ipc://"))
        assert mode(path.parent) == 0o700
        assert mode(path) == 0o600
        assert len(os.fsencode(path)) <= MAX_IPC_PATH


def test_run_folders_are_private(home: Path) -> None:
    folder = run_dir("village")
    assert folder == home / "village"
    assert mode(folder) == 0o700
    folder.chmod(0o755)
    assert mode(run_dir("village")) == 0o700


def test_runtimes_of_other_homes_have_other_sockets(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = endpoint_for("village")
    monkeypatch.setenv("OFFBOOK_HOME", str(home / "other"))
    assert endpoint_for("village") != first


def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ProtocolError, match="link"):
        private_folder(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(ProtocolError, match="12345"):
        private_folder(folder)


@pytest.mark.parametrize("target", ["ipc://", "udp://x", "ipc:///" + "x" * 200])
async def test_endpoints_that_cannot_be_are_refused(target: str) -> None:
    with pytest.raises(InvalidRequest):
        Broker(target)
    with pytest.raises(InvalidRequest):
        async with connect(target):
            pass


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b"])
async def test_names_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(InvalidAddress):
        run_dir(name)
    with pytest.raises(InvalidAddress):
        Broker(name)
    with pytest.raises(InvalidAddress):
        async with connect("ipc:///tmp/x", name=name):
            pass


async def test_plaintext_tcp_is_refused_on_both_sides() -> None:
    with pytest.raises(InvalidRequest, match="plaintext"):
        Broker("tcp://127.0.0.1:*")
    with pytest.raises(InvalidRequest, match="plaintext"):
        async with connect("tcp://127.0.0.1:1"):
            pass
    with pytest.raises(InvalidRequest, match="40 characters"):
        async with connect("tcp://127.0.0.1:1", server_key="short"):
            pass


class Door:
    """A broker's keys and who is on its list."""

    def __init__(self) -> None:
        self.pair = new_key_pair()
        self.friend = new_key_pair()
        self.admitted = {self.friend.public}
        self.keys = ServerKeys(self.pair, lambda: frozenset(self.admitted))


async def test_known_keys_talk_over_tcp_with_peers_on_ipc(endpoint: str, kit: Any) -> None:
    door = Door()
    async with Broker("tcp://127.0.0.1:*", endpoint, keys=door.keys) as broker:
        ipc, tcp = broker.endpoints
        assert (ipc, tcp.startswith("tcp://127.0.0.1:")) == (endpoint, True)
        async with (
            kit.serving(ipc, "v/*", kit.echo),
            connect(tcp, server_key=door.pair.public, keys=door.friend) as bus,
        ):
            assert await bus.ask("v/a", {"n": 1}) == {"n": 1}
            assert await bus.publish("t", 1) == 1


async def test_strangers_are_refused_over_tcp(kit: Any) -> None:
    door = Door()
    async with Broker("tcp://127.0.0.1:*", keys=door.keys) as broker:
        (tcp,) = broker.endpoints

        async def refused(server_key: str, keys: KeyPair) -> None:
            with pytest.raises(ConnectionLost):
                async with connect(tcp, server_key=server_key, keys=keys, timeout=0.5):
                    pass

        await refused(door.pair.public, new_key_pair())  # not on the list
        await refused(new_key_pair().public, door.friend)  # not the broker it takes us for
        plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        with plain:
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(tcp)
            with contextlib.suppress(zmq.Again):  # the handshake may have failed already: nobody to send to
                plain.send_multipart([b"\x01", b""], zmq.NOBLOCK)
            await kit.eventually(lambda: broker.statistics().refused >= 2)
        assert broker.statistics().received == 0
        door.admitted.add((late := new_key_pair()).public)
        async with connect(tcp, server_key=door.pair.public, keys=late) as bus:
            assert await bus.publish("t", 1) == 1


async def test_an_asker_lost_over_tcp_is_noticed_at_once(endpoint: str, kit: Any) -> None:
    door = Door()
    gone = anyio.Event()

    async with Broker(endpoint, "tcp://127.0.0.1:*", keys=door.keys) as broker:

        async def handler(delivery: Any) -> None:
            await delivery.cancelled.wait()
            gone.set()

        async with kit.serving(endpoint, "v/*", handler):
            async with connect(broker.endpoints[1], server_key=door.pair.public, keys=door.friend) as bus:
                with anyio.move_on_after(0.1):
                    await bus.ask("v/a", {})
            with anyio.fail_after(5):
                await gone.wait()


def test_key_files_are_private_and_kept(home: Path) -> None:
    keys = ServerKeys.of_runtime("village")
    path = home / "village" / "keys" / "server.key"
    assert mode(path) == 0o600
    assert ServerKeys.of_runtime("village").pair == keys.pair
    assert keys.pair.secret not in repr(keys.pair)
    assert keys.authorized() == frozenset()
    friend = new_key_pair().public
    (path.parent / "authorized").write_text(f"# friends\n\n{friend} the laptop\n")
    assert keys.authorized() == {friend}
    path.chmod(0o644)
    with pytest.raises(ProtocolError, match="chmod 600"):
        load_or_make(path)
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(ProtocolError, match="no key pair"):
        load_or_make(path)
