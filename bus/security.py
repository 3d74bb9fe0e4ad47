"""Where a runtime's files and sockets are, and who may touch them.

Owns folders and endpoints: every folder is 0700 and belongs to us, or is refused; an endpoint is
``ipc://`` inside such a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from pathlib import Path
from types import TracebackType

from offbook.bus.address import check_name
from offbook.bus.errors import EndpointInUse, InvalidRequest, OffbookError, ProtocolError

MAX_IPC_PATH = 103
"""Bytes in the path of a Unix socket that every supported system takes (macOS 103, Linux 107)."""


def home() -> Path:
    """The folder that holds all runtimes: ``$OFFBOOK_HOME`` or ``~/.local/share/offbook``."""
    chosen = os.environ.get("OFFBOOK_HOME")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".local" / "share" / "offbook"


def private_folder(path: Path) -> Path:
    """Make ``path`` (and its parents) if needed and return it, private: 0700 and ours.

    Raises:
        ProtocolError: it is not a folder, belongs to somebody else, or is a link.
        InvalidRequest: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        pass  # said below
    except OSError as exc:
        raise InvalidRequest(
            f"the folder {path} cannot be made: {exc.strerror}; "
            "set OFFBOOK_HOME to a folder that may be written"
        ) from exc
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Raise ``ProtocolError`` unless ``path`` is a folder of ours; take others' rights to it away."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise ProtocolError(f"{path} is not a folder (or is a link); remove it", path=str(path))
    if info.st_uid != os.getuid():
        raise ProtocolError(
            f"{path} belongs to user {info.st_uid}, not to us ({os.getuid()}); use another folder",
            path=str(path),
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)


def run_dir(name: str) -> Path:
    """The private folder (0700, made if needed) of the runtime called ``name``.

    Raises:
        InvalidAddress: ``name`` is not 1 to 128 of ``A-Z a-z 0-9 _ . -``.
        ProtocolError: the folder belongs to somebody else.
    """
    check_name(name, "runtime name")
    return private_folder(home() / name)


def _socket_folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "offbook"
    return Path(f"/tmp/offbook-{os.getuid()}")


def socket_path(name: str) -> Path:
    """Path of the runtime's Unix socket. Short whatever the run folder is, and a function of it alone.

    Makes its folder (0700) if needed; refuses one that belongs to somebody else (``ProtocolError``).
    """
    check_name(name, "runtime name")
    digest = hashlib.sha256(os.fsencode(home() / name)).hexdigest()[:20]
    path = _socket_folder() / f"{digest}.sock"
    if len(os.fsencode(path)) > MAX_IPC_PATH:  # a deep XDG_RUNTIME_DIR
        path = Path(f"/tmp/offbook-{os.getuid()}") / f"{digest}.sock"
    private_folder(path.parent)
    return path


def running() -> list[str]:
    """The runtimes of this user whose broker listens now, by name: as well as can be told from outside."""
    names = []
    with contextlib.suppress(OSError):  # no runtime was ever started here
        for folder in sorted(home().iterdir()):
            with contextlib.suppress(OffbookError, OSError, ValueError):  # it is none, or does not run
                path = socket_path(folder.name)
                os.kill(int(path.with_name(path.name + ".lock").read_text()), 0)
                names.append(folder.name)
    return names


def endpoint_for(name: str) -> str:
    """The ``ipc://`` endpoint of the runtime called ``name``."""
    return f"ipc://{socket_path(name)}"


def resolve_endpoint(target: str) -> str:
    """An endpoint from what a caller passes to ``connect``: a runtime's name or an endpoint.

    Raises:
        InvalidAddress: not a legal name.
        InvalidRequest: an endpoint of another transport than ``ipc`` and ``tcp``, or a path too long.
    """
    scheme, sep, rest = target.partition("://")
    if not sep:
        return endpoint_for(target)
    if scheme not in ("ipc", "tcp") or not rest:
        raise InvalidRequest(f"endpoint {target!r}: use a runtime's name, ipc://PATH or tcp://HOST:PORT")
    if scheme == "ipc" and len(os.fsencode(rest)) > MAX_IPC_PATH:
        raise InvalidRequest(
            f"endpoint {target!r}: the path is longer than {MAX_IPC_PATH} bytes; use a shorter one"
        )
    return target


class EndpointLock:
    """Holds an ``ipc`` path for one broker: ZeroMQ would silently take it over from a live one."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._fd = -1

    def __enter__(self) -> EndpointLock:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    break
            except FileNotFoundError:
                pass
            except OSError:
                holder = os.read(fd, 20).decode("ascii", "replace").strip()
                os.close(fd)
                raise EndpointInUse(
                    f"process {holder or 'unknown'} already listens on {self._path.with_suffix('')}; stop it",
                    pid=holder,
                ) from None
            os.close(fd)  # its last holder removed the file between our two calls
        os.truncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        self._fd = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
