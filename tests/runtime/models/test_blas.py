"""MLX's CPU backend computes with a fast BLAS where there is one; each source gives right products."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbook.runtime.models import blas_shim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux wheels link the reference BLAS")

PROBE = """
import json, sys
from offbook.runtime.models import blas
if "--no-system" in sys.argv:
    blas.SYSTEM_LIBRARIES = ("libnothing-of-this-name.so.0",)
if "--late" in sys.argv:
    import mlx.core
active = blas.preload_blas()
assert blas.preload_blas() is active
import mlx.core as mx
import numpy as np
worst = 0.0
for dtype in (mx.float32, mx.complex64):
    a = mx.random.normal((67, 129)).astype(dtype)
    b = mx.random.normal((31, 129)).astype(dtype)
    got, x, y = np.array(a @ b.T), np.array(a), np.array(b)
    worst = max(worst, float(np.abs(got - x.astype(complex) @ y.astype(complex).T).max()))
q = mx.linalg.qr(mx.random.normal((8, 8)), stream=mx.cpu)[0]
worst = max(worst, float(mx.abs(q @ q.T - mx.eye(8)).max()))
with open("/proc/self/maps") as maps:
    loaded = sorted({line.split()[-1] for line in maps if "blas" in line})
print(json.dumps([active.source, active.fast, active.why, worst, loaded]))
"""


def probe(*arguments: str, **environment: str) -> tuple[str, bool, str, float, list[str]]:
    command = [sys.executable, "-c", PROBE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.returncode == 0, done.stderr
    answer: Any = json.loads(done.stdout)
    return tuple(answer)


def test_the_products_are_right_with_what_this_system_has() -> None:
    source, fast, _, worst, loaded = probe()
    assert source in ("system", "numpy", "builtin")
    assert fast == (source != "builtin")
    assert worst < 1e-4
    if source == "system":
        assert any("openblas" in path for path in loaded)


def test_without_a_system_library_numpys_openblas_serves(cache: Path) -> None:
    try:
        bundled = blas_shim.bundled_openblas()
        blas_shim._compiled()
    except blas_shim.ShimUnavailable as exc:
        pytest.skip(str(exc))
    source, fast, _, worst, loaded = probe("--no-system")
    assert (source, fast) == ("numpy", True)
    assert worst < 1e-4
    assert any(Path(path).name == bundled.name for path in loaded)


def test_without_any_source_it_works_slowly_and_says_how_to_mend_it(cache: Path) -> None:
    if blas_shim.installed() is not None:
        pytest.skip("the forwarder was compiled when offbook was installed")
    source, fast, why, worst, _ = probe("--no-system", PATH="/nowhere")
    assert (source, fast) == ("builtin", False)
    assert "libopenblas0-pthread" in why
    assert worst < 1e-4


def test_after_mlx_it_is_too_late_and_said(cache: Path) -> None:
    source, fast, why, _, _ = probe("--late")
    assert (source, fast) == ("late", False)
    assert "before" in why or "first" in why
