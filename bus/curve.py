"""Keys for ``tcp://``: CURVE encryption, and ZAP to admit known peers only.

Owns key pairs, their files, and the task that decides who may connect. Both sides prove who they are:
a client pins its broker's public key, a broker lists the public keys of its clients. Keys are the 40
characters of Z85 that ZeroMQ uses.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.utils.z85

from offbook.bus.errors import InvalidRequest, ProtocolError
from offbook.bus.security import home, private_folder, run_dir
from offbook.bus.socket import MessageSocket

_ZAP = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
DOMAIN = "offbook"


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair; ``secret`` never leaves the machine."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def check_key(key: str, what: str) -> str:
    """Return ``key`` if it is 40 characters of Z85, else raise ``InvalidRequest``."""
    try:
        if len(key) == 40:
            zmq.utils.z85.decode(key.encode("ascii"))
            return key
    except (ValueError, AttributeError, UnicodeEncodeError, KeyError, IndexError):
        pass
    raise InvalidRequest(f"{what} must be a CURVE key of 40 characters (Z85), got {key!r}"[:200])


def new_key_pair() -> KeyPair:
    """A fresh random pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def load_or_make(path: Path) -> KeyPair:
    """The pair in the file ``path`` (0600, ours), made on first use.

    Raises:
        ProtocolError: the file is readable by others, or holds no key pair.
    """
    private_folder(path.parent)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _load(path)
    pair = new_key_pair()
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(pair))
        file.flush()
        os.fsync(file.fileno())
    return pair


def _load(path: Path) -> KeyPair:
    with path.open("rb") as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise ProtocolError(f"{path} can be read by others; chmod 600 it", path=str(path))
        data = file.read()
    try:
        pair = msgspec.json.decode(data, type=KeyPair)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"{path} holds no key pair: {exc}; remove it to make a new one") from exc
    check_key(pair.public, f"the public key in {path}")
    check_key(pair.secret, f"the secret key in {path}")
    return pair


def client_keys() -> KeyPair:
    """This user's own pair, ``$OFFBOOK_HOME/keys/client.key``; made on first use."""
    return load_or_make(home() / "keys" / "client.key")


class ServerKeys:
    """What a broker needs to listen on ``tcp://``.

    Args:
        pair: the broker's own keys; clients pin ``pair.public``.
        authorized: gives the public keys that may connect; asked at each connection.
    """

    def __init__(self, pair: KeyPair, authorized: Callable[[], frozenset[str]]) -> None:
        self.pair = pair
        self.authorized = authorized

    @classmethod
    def of_runtime(cls, name: str) -> ServerKeys:
        """The keys of the runtime called ``name``: ``keys/server.key`` and ``keys/authorized`` in its folder.

        ``authorized`` has a public key per line, what follows it on the line is a comment. It is read at
        each connection, so a key added or removed counts for the next one.
        """
        folder = private_folder(run_dir(name) / "keys")
        return cls(load_or_make(folder / "server.key"), lambda: _read_authorized(folder / "authorized"))


def _read_authorized(path: Path) -> frozenset[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return frozenset()
    return frozenset(line.split()[0] for line in lines if line.split() and not line.startswith("#"))


class Doorkeeper:
    """Answers ZeroMQ's question who may connect. One per context, before any endpoint is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._keys = keys
        socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP)
        self._socket = MessageSocket(socket)
        self.refused = 0

    def arm(self, router: zmq.Socket[bytes]) -> None:
        """Demand CURVE on endpoints that ``router`` binds from now on."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._keys.pair.secret.encode())
        router.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.pair.public.encode())
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            frames = await self._socket.receive()
            await self._socket.send(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request = [*frames[:2], b"", b""][:2]
        user = b""
        if len(frames) == 7 and version == b"1.0" and frames[5] == b"CURVE" and len(frames[6]) == 32:
            key = zmq.utils.z85.encode(frames[6])
            if key.decode("ascii") in self._keys.authorized():
                user = key
        if user:
            return [b"1.0", request, b"200", b"OK", user, b""]
        self.refused += 1
        return [b"1.0", request, b"400", b"this key is not authorized", b"", b""]

    def close(self) -> None:
        """Stop answering: nobody more is admitted."""
        self._socket.close()


def arm_client(dealer: zmq.Socket[bytes], pair: KeyPair, server_key: str) -> None:
    """Make a client's socket speak CURVE with the broker whose public key is ``server_key``."""
    dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    dealer.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
