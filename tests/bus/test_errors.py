"""Errors keep their class, message and details across the bus."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.bus import errors
from offbook.bus.control import pack_error
from offbook.bus.errors import CycleError, NoSuchActor, OffbookError, RemoteError, from_wire, to_wire


@pytest.mark.parametrize("code", sorted(OffbookError.known))
def test_every_known_error_comes_back_as_its_class(code: str) -> None:
    error = OffbookError.known[code]("no luck", {"what": ["a", 1]})
    back = from_wire(to_wire(error))
    assert type(back) is type(error)
    assert (back.code, back.message, back.details) == (code, "no luck", {"what": ["a", 1]})


def test_the_code_is_the_class_name() -> None:
    assert NoSuchActor.code == "NoSuchActor" == NoSuchActor("x").code
    assert str(NoSuchActor("nobody")) == "nobody"


def test_an_unknown_code_becomes_a_remote_error_that_keeps_it() -> None:
    error = from_wire({"code": "FromTheFuture", "message": "m", "details": {"a": 1}})
    assert type(error) is RemoteError
    assert error.details == {"a": 1, "code": "FromTheFuture"}


def test_a_foreign_exception_travels_with_its_name() -> None:
    error = from_wire(to_wire(KeyError("x")))
    assert type(error) is RemoteError
    assert error.details["code"] == "KeyError"
    assert "KeyError" in error.message


def test_details_that_cannot_be_packed_become_text() -> None:
    wire = msgspec.msgpack.decode(pack_error(NoSuchActor("x", thing=object())))
    assert wire["details"]["thing"].startswith("<object")


def test_an_error_is_never_too_large_to_travel() -> None:
    assert len(pack_error(NoSuchActor("x" * 10_000_000))) < 100_000


@given(st.binary(max_size=60))
def test_bytes_that_are_no_error_still_give_one(data: bytes) -> None:
    assert isinstance(from_wire(data), OffbookError)


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(CycleError.closing(["a/1"], "a/1")))
    assert error.details == {"chain": ["a/1", "a/1"]}


def test_a_users_error_does_not_take_over_a_name() -> None:
    class Taken(errors.OffbookError):
        pass

    Taken.__name__ = "Taken"
    first = OffbookError.known["Taken"]
    type("Taken", (OffbookError,), {})
    assert OffbookError.known.pop("Taken") is first
