"""What tests of KV memory share. ``native_pool`` beside this file is found by its folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbook.runtime.kv import native

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["plain", "avx2", "avx512"])
def every_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run with each instruction set this machine has."""
    try:
        native.instruction_set(request.param)
    except ValueError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    native.instruction_set()
