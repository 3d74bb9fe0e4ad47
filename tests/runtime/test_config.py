"""Settings: sizes as people write them, and the one value an engine process is started with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.runtime import config as config_module
from offbook.runtime.config import (
    MIN_BUDGET_BYTES,
    EngineConfig,
    InvalidConfig,
    check_budget,
    default_budget_bytes,
    format_bytes,
    parse_memory,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2 GiB", 2 << 30),
        ("2GiB", 2 << 30),
        ("900MiB", 900 << 20),
        ("1.5g", 3 << 29),
        (" 10 MB ", 10_000_000),
        ("4096", 4096),
        (12345, 12345),
        (".5 GiB", 1 << 29),
    ],
)
def test_sizes_are_read_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "bad", ["", "two", "2 GiBs", "-1", "1e9", "0", 0, -5, "GiB", "2 GiB 3", True, None, 1.5, "9" * 40]
)
def test_what_is_no_size_is_refused_and_named(bad: object) -> None:
    with pytest.raises(InvalidConfig, match="memory") as caught:
        parse_memory(bad)  # type: ignore[arg-type]  # the point of the test
    assert repr(bad) in str(caught.value)


@given(st.integers(1, 1 << 45))
def test_a_formatted_size_reads_back_within_rounding(size: int) -> None:
    assert abs(parse_memory(format_bytes(size)) - size) <= 0.006 * size


def test_a_budget_that_forgot_its_unit_is_refused_with_the_likely_meaning() -> None:
    with pytest.raises(InvalidConfig, match="did you mean '2 GiB'"):
        check_budget(2)
    with pytest.raises(InvalidConfig, match="too small"):
        EngineConfig(name="x", endpoint="ipc:///x", budget_bytes=MIN_BUDGET_BYTES - 1)


def test_a_configuration_survives_json() -> None:
    config = EngineConfig(
        name="village", endpoint="ipc:///tmp/x.sock", budget_bytes=1 << 30, kv_bits=None, trace="/tmp/t.json"
    )
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "JSON"),
        ("{}", "name"),
        ('{"name": "x", "endpoint": "e", "colour": 1}', "colour"),
        ('{"name": "x", "endpoint": "e", "budget_bytes": "1 GiB"}', "budget_bytes"),
        ('{"name": "x", "endpoint": "e", "kv_bits": 3}', "kv_bits"),
        ('{"name": "x", "endpoint": "e", "model": " "}', "model"),
        ('{"name": "x", "endpoint": "e", "disk_cap_bytes": -1}', "disk_cap_bytes"),
    ],
)
def test_a_wrong_configuration_names_the_field(text: str, names: str) -> None:
    with pytest.raises(InvalidConfig, match=names):
        EngineConfig.from_json(text)


def test_the_default_budget_is_within_what_the_machine_has() -> None:
    assert default_budget_bytes() >= MIN_BUDGET_BYTES
    assert default_budget_bytes(working_set_bytes=1 << 30) <= 1 << 30


def test_a_container_limits_the_budget_and_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "machine_bytes", lambda: 24 << 30)
    monkeypatch.setattr(config_module, "available_bytes", lambda: 20 << 30)
    monkeypatch.setattr(config_module, "cgroup_limit_bytes", lambda: 2 << 30)
    monkeypatch.setattr(config_module, "cgroup_headroom_bytes", lambda: 1 << 30)
    assert check_budget(2 << 30) == 2 << 30
    with pytest.raises(InvalidConfig, match="control group of this process allows \\(2 GiB\\)"):
        check_budget((2 << 30) + 1)
    with pytest.raises(InvalidConfig, match="control group"):
        EngineConfig(name="x", endpoint="ipc:///x", budget_bytes=3 << 30)
    assert default_budget_bytes() <= 1 << 30


def test_a_limit_above_what_the_machine_has_leaves_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "machine_bytes", lambda: 4 << 30)
    monkeypatch.setattr(config_module, "cgroup_limit_bytes", lambda: 8 << 30)
    for size in (5 << 30, 9 << 30):
        with pytest.raises(InvalidConfig, match="this machine has \\(4 GiB\\)"):
            check_budget(size)
