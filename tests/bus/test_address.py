"""What may be an address, and that everything else is refused before any work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.bus import parse_address, parse_pattern
from offbook.bus.address import check_name, check_topic
from offbook.bus.errors import InvalidAddress


@pytest.mark.parametrize(
    ("text", "kind", "key"),
    [
        ("villager/ann", "villager", "ann"),
        ("villager/user@example.com", "villager", "user@example.com"),
        ("a.b-c_9/x/y/z", "a.b-c_9", "x/y/z"),
        ("v/../x", "v", "../x"),
        ("v/Zoë 小林", "v", "Zoë 小林"),
        ("v/" + "k" * 512, "v", "k" * 512),
        ("K" * 64 + "/k", "K" * 64, "k"),
    ],
)
def test_legal_addresses(text: str, kind: str, key: str) -> None:
    assert parse_address(text) == (kind, key)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "villager",
        "/ann",
        "villager/",
        "9lives/x",
        "vill ager/x",
        "K" * 65 + "/k",
        "v/" + "k" * 513,
        "v/" + "ö" * 257,
        "v/a\nb",
        "v/a\x00",
        "v/\ud800",
        "v/*",
        "v/" + "x" * 10_000,
    ],
)
def test_illegal_addresses_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidAddress) as caught:
        parse_address(text)
    assert len(caught.value.message) < 300


def test_an_address_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidAddress, match="int"):
        parse_address(7)  # type: ignore[arg-type]  # what an untyped caller may do


def test_a_pattern_is_an_address_or_all_keys_of_a_kind() -> None:
    assert parse_pattern("villager/*").key == "*"
    assert parse_pattern("engine/main").key == "main"
    with pytest.raises(InvalidAddress):
        parse_pattern("*")


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except InvalidAddress:
        return
    assert str(address) == text


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "a b", "x" * 129, "ä"])
def test_illegal_names(name: str) -> None:
    with pytest.raises(InvalidAddress):
        check_name(name)


def test_topics_are_any_printable_text() -> None:
    assert check_topic("the square / north") == "the square / north"
    for topic in ("", "a\nb", "t" * 513):
        with pytest.raises(InvalidAddress):
            check_topic(topic)
