"""The schema of a type: a reply of that schema decodes, or the type is refused by name."""

from __future__ import annotations

import enum
import uuid
from datetime import datetime, time
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from offbook.actors.typed import schema_of
from offbook.bus.errors import InvalidRequest


class Mood(enum.Enum):
    GLAD = "glad"
    SAD = "sad"


class Visit(msgspec.Struct):
    at: datetime


class Diary(msgspec.Struct):
    visits: list[Visit]
    more: Diary | None = None


class Kin(msgspec.Struct):
    name: str
    children: list[Kin] = []


@pytest.mark.parametrize(
    "kind",
    [
        int,
        Kin,
        dict[str, Kin],
        dict[Literal["a", "b"], int],
        dict[Mood, int],
        dict[Annotated[str, Meta(max_length=3)], int],
        Annotated[datetime, Meta(tz=True)],
        Annotated[time, Meta(tz=False)],
        dict[str, Any],
    ],
    ids=str,
)
def test_a_type_that_its_schema_describes_in_full_is_taken(kind: Any) -> None:
    assert schema_of(kind) == msgspec.json.schema(kind)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Visit, "Visit.at: .* a datetime that may have no zone: use Annotated"),
        (Diary, "Diary.visits.at: .* a datetime"),
        (Annotated[datetime, Meta(tz=False)], "a datetime that may have no zone"),
        (time, "a time with or without zone"),
        (dict[int, str], "keys that are no texts"),
        (list[dict[uuid.UUID, str]], "keys that are no texts"),
        (complex, "no JSON schema"),
    ],
    ids=str,
)
def test_a_type_whose_schema_leaves_something_out_is_refused_by_name(kind: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        schema_of(kind)


def test_sets_may_come_with_repeated_items_unless_they_have_a_least_size() -> None:
    assert "uniqueItems" not in schema_of(set[int])
    assert "uniqueItems" not in schema_of(dict[str, frozenset[str]])["additionalProperties"]
    assert schema_of(Annotated[set[int], Meta(min_length=2)])["uniqueItems"] is True
