"""A test that is killed leaves no helper process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

PARENT = """
import subprocess, sys
helper = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
print(helper.stdout.readline().decode().strip() or helper.wait(), helper.pid, flush=True)
helper.wait()
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # a short path, for the socket
        os.chmod(folder, 0o700)
        yield f"ipc://{folder}/s"


def orphan(*command: str) -> int:
    """The pid of a helper process that was ready when its parent was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, sys.executable, *command], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        said, pid = parent.stdout.readline().rsplit(" ", 1)
        os.kill(int(pid), 0)
        assert not said.isdigit(), f"the helper ended with {said}"
        parent.send_signal(signal.SIGKILL)
    return int(pid)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False
    return state == "Z"  # dead, and nobody here collects it


def ends(pid: int) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if gone(pid):
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


def test_a_broker_of_a_killed_test_ends(endpoint: str) -> None:
    assert ends(orphan(str(TESTS / "bus" / "child.py"), "broker", endpoint))


def test_a_team_of_a_killed_test_ends_with_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_HOME", str(tmp_path))
    team = orphan("-m", "offbook.runtime.cli", "run", str(TESTS / "runtime" / "team_script.py"))
    engine = int((tmp_path / "team" / "engine.lock").read_text().split()[0])
    assert ends(team)
    assert ends(engine)


def test_a_fake_engine_ends_with_its_host_though_the_broker_lives_on(endpoint: str) -> None:
    code = (
        "import os, runpy, sys; os.environ['OFFBOOK_PARENT_PID'] = str(os.getppid()); "
        "print('up', flush=True); del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    broker = subprocess.Popen(
        [sys.executable, str(TESTS / "bus" / "child.py"), "broker", endpoint], stdout=subprocess.PIPE
    )
    with broker:
        try:
            assert broker.stdout is not None
            assert broker.stdout.readline() == b"ready\n"
            engine = [str(TESTS / "runtime" / "fake_engine.py"), "--config"]
            assert ends(orphan("-c", code, *engine, json.dumps({"endpoint": endpoint, "model": "fake"})))
        finally:
            broker.kill()
