"""Bodies: what callers may pass, and what comes out on the other side."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from offbook.bus import MAX_BODY
from offbook.bus.body import decode_as, decode_body, encode_body
from offbook.bus.errors import BadMessage, InvalidRequest, MessageTooLarge, UnknownMessageType


class Plain(msgspec.Struct):
    n: int


class Tagged(msgspec.Struct, tag="tagged.v1"):
    n: int


def test_a_dict_gives_its_type_to_the_envelope() -> None:
    body = {"type": "Ask", "question": "Plans?"}
    assert encode_body(body) == ("Ask", msgspec.msgpack.encode({"question": "Plans?"}))
    assert body["type"] == "Ask"


def test_a_struct_travels_under_its_tag_or_its_name() -> None:
    assert encode_body(Plain(1))[0] == "Plain"
    assert encode_body(Tagged(1))[0] == "tagged.v1"


def test_bytes_are_packed_already() -> None:
    assert encode_body(b"\x01", "T") == ("T", b"\x01")


@pytest.mark.parametrize("value", [None, True, 3, "text", [1, {"a": None}], {"no": "type"}])
def test_plain_values_come_back(value: Any) -> None:
    name, data = encode_body(value)
    assert (name, decode_body(data)) == ("", value)


def test_decode_by_name() -> None:
    name, data = encode_body({"type": "tagged.v1", "n": 3})
    assert decode_as(name, data, (Plain, Tagged)) == Tagged(3)
    with pytest.raises(UnknownMessageType, match="known: Plain"):
        decode_as(name, data, (Plain,))


def test_a_body_that_does_not_fit_its_type_is_refused_with_its_path() -> None:
    with pytest.raises(BadMessage, match=r"\$\.n"):
        decode_body(msgspec.msgpack.encode({"n": "x"}), Plain)
    with pytest.raises(BadMessage):
        decode_body(b"\xc1")


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="object"):
        encode_body({"type": "T", "x": object()})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidRequest):
        encode_body(loop)


def test_too_large_is_refused_with_both_sizes() -> None:
    with pytest.raises(MessageTooLarge) as caught:
        encode_body(bytes(MAX_BODY + 1))
    assert caught.value.details == {"size": MAX_BODY + 1, "limit": MAX_BODY}
    assert encode_body(bytes(MAX_BODY))
