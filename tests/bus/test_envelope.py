"""The header's bytes: what is encoded comes back, and nothing else gets in."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.bus import Envelope, Kind, new_id
from offbook.bus.envelope import MAX_HEADER, VERSION, decode_header, encode_header
from offbook.bus.errors import ProtocolError

texts = st.text(max_size=30)
envelopes = st.builds(
    Envelope,
    kind=st.sampled_from(Kind),
    id=texts,
    to=texts,
    sender=texts,
    correlation=texts,
    deadline=st.floats(allow_nan=False),
    chain=st.lists(texts, max_size=5).map(tuple),
    traceparent=texts,
    type=texts,
    seq=st.integers(-(2**63), 2**63 - 1),
)


@given(envelopes)
def test_round_trip(envelope: Envelope) -> None:
    assert decode_header(encode_header(envelope)) == envelope


@given(envelopes, st.data())
def test_a_truncated_header_is_refused(envelope: Envelope, data: st.DataObject) -> None:
    header = encode_header(envelope)
    cut = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(ProtocolError):
        decode_header(header[:cut])


@given(st.binary(max_size=200))
def test_random_bytes_are_decoded_or_refused(data: bytes) -> None:
    for header in (data, bytes([VERSION]) + data):
        try:
            decode_header(header)
        except ProtocolError:
            continue


@given(envelopes, st.data())
def test_a_damaged_header_is_decoded_or_refused(envelope: Envelope, data: st.DataObject) -> None:
    header = bytearray(encode_header(envelope))
    at = data.draw(st.integers(0, len(header) - 1))
    header[at] ^= data.draw(st.integers(1, 255))
    try:
        decode_header(bytes(header))
    except ProtocolError:
        return


def test_golden_bytes() -> None:
    """The example of PROTOCOL.md: other implementations are built on it."""
    envelope = Envelope(kind=Kind.ASK, id="a1", to="villager/ann", sender="peer/x", deadline=2.0, type="Ask")
    expected = (
        "01 9a 0b a26131 ac76696c6c616765722f616e6e a6706565722f78 a0"  # version, kind, id, to, sender, -
        "cb4000000000000000 90 a0 a341736b 00"  # deadline, chain, traceparent, type, seq
    )
    assert encode_header(envelope) == bytes.fromhex(expected.replace(" ", ""))


def test_fields_of_later_versions_are_ignored() -> None:
    fields = msgspec.msgpack.decode(encode_header(Envelope(kind=Kind.PING))[1:])
    assert decode_header(bytes([VERSION]) + msgspec.msgpack.encode([*fields, "new", 7])) == Envelope(
        kind=Kind.PING
    )


def test_short_headers_get_the_defaults() -> None:
    assert decode_header(bytes([VERSION]) + msgspec.msgpack.encode([3, "x"])) == Envelope(
        kind=Kind.PING, id="x"
    )


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x01",
        b"\x02" + encode_header(Envelope(kind=Kind.PING))[1:],
        bytes([VERSION]) + msgspec.msgpack.encode([99]),
        bytes([VERSION]) + msgspec.msgpack.encode(["ASK"]),
        bytes([VERSION]) + msgspec.msgpack.encode({"kind": 3}),
        bytes([VERSION]) + msgspec.msgpack.encode([3, "x" * 129]),
        bytes([VERSION]) + msgspec.msgpack.encode([3, "", "", "", "", 0.0, [""] * 257]),
        bytes([VERSION]) + b"\x91" * 5000,
        bytes([VERSION]) * (MAX_HEADER + 1),
    ],
)
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(header)


def test_ids_are_uuid7_unique_and_sorted() -> None:
    ids = [new_id() for _ in range(20_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert all(len(i) == 32 and i[12] == "7" and i[16] in "89ab" for i in ids)
