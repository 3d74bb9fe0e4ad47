"""SIGKILL at any instant of saving: what was acknowledged is there, and right; nothing is half."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("OFFBOOK_KILLS", "30"))
"""How many; set OFFBOOK_KILLS=300 for a longer trial."""


def test_sigkill_at_random_instants_of_saving_loses_nothing_acknowledged(tmp_path):
    command = [
        sys.executable,
        str(Path(__file__).with_name("killed_saver.py")),
        str(tmp_path / "kv"),
        "0",
        str(KILLS),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{KILLS} kills")
