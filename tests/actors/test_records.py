"""Ids and clocks: small promises that much rests on."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from offbook.actors import BadMessage, InvalidRequest, Message, Request, VirtualClock
from offbook.actors.actor import turn_random
from offbook.actors.clock import seconds
from offbook.actors.message import decode, derive_id, encode, reply_type, tag_of


class Heard(Message):
    text: str


class Renamed(Message, tag="village.heard"):
    text: str


class Ask(Request[list[int]]):
    pass


class Deeper(Ask):
    more: int = 0


def test_tags_are_stable_names() -> None:
    assert tag_of(Heard) == "Heard"
    assert tag_of(Renamed("x")) == "village.heard"
    assert msgspec.msgpack.decode(encode(Renamed("x"))) == {"type": "village.heard", "text": "x"}


def test_a_body_decodes_with_or_without_its_tag_but_not_with_another() -> None:
    assert decode(msgspec.msgpack.encode({"text": "a"}), Heard) == Heard("a")
    assert decode(encode(Heard("a")), Heard) == Heard("a")
    with pytest.raises(BadMessage):
        decode(encode(Renamed("a")), Heard)
    with pytest.raises(BadMessage, match="text"):
        decode(b"\x80", Heard)
    with pytest.raises(BadMessage):
        decode(b"\xff\xff", Heard)


def test_reply_types_are_found_through_subclasses() -> None:
    assert reply_type(Ask) == reply_type(Deeper) == list[int]


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        encode(Heard(object()))  # type: ignore[arg-type]


def test_ids_are_derived_from_all_parts() -> None:
    assert derive_id("a", 1) == derive_id("a", 1)
    assert len({derive_id("a", 1), derive_id("a", 2), derive_id("a1"), derive_id("a", "1", "")}) == 4


def test_a_turn_draws_the_same_numbers_again() -> None:
    first = [turn_random(1, "a/b", "m").random() for _ in range(2)]
    assert first[0] == first[1]
    assert turn_random(2, "a/b", "m").random() != first[0]


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock(start=100.0)
    clock.advance_to(150.0)
    clock.advance_to(120.0)
    assert clock.now() == 150.0
    assert seconds(timedelta(minutes=2)) == seconds(120) == 120.0
