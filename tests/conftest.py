"""What all tests share: offbook runs on asyncio, so tests do."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
