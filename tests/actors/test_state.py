"""Durable state: what is stored, what is refused, and how old state is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from offbook.actors import Actor, Agent, InvalidRequest, Message, StateNotLoadable, StateNotStorable, on
from offbook.actors.actor import make, spec_of
from offbook.actors.testing import stored_state, team


class Note(msgspec.Struct):
    text: str


class LongNote(Note):
    more: str = ""


@dataclass
class Point:
    x: int
    y: Any


class Base(Actor):
    name: str
    count: int = 0


class Sample(Base):
    notes: list[Note] = []
    table: dict[str, list[int]] = {}
    anything: Any = None
    points: list[Point] = []
    marks: set[str] = set()
    limit: ClassVar[int] = 3
    _client: object


def sample(**values: Any) -> Sample:
    spec = spec_of(Sample)
    state = spec.schema.load(spec.schema.initial({"name": "n"}), 1, "sample/a")
    actor = make(spec, "sample/a", 0, state)
    assert isinstance(actor, Sample)
    for name, value in values.items():
        setattr(actor, name, value)
    return actor


def dump(actor: Sample) -> Any:
    schema = spec_of(Sample).schema
    return schema.dump(schema.capture(actor))


def test_annotated_fields_of_all_bases_are_state_and_others_are_not() -> None:
    assert spec_of(Sample).schema.names == {
        "name", "count", "notes", "table", "anything", "points", "marks"
    }  # fmt: skip


def test_state_comes_back_as_it_was() -> None:
    values: dict[str, Any] = {
        "notes": [Note("a")],
        "table": {"z": [1], "a": [2]},
        "anything": {"k": [1, None, 2.5]},
        "points": [Point(1, "y")],
        "marks": {"x", "y", "z"},
    }
    raw, again = dump(sample(**values))
    assert {name: getattr(again, name) for name in values} == values
    assert list(again.table) == ["z", "a"], "order is kept"
    assert spec_of(Sample).schema.load(raw, 1, "sample/a") == again


def test_mutable_defaults_are_not_shared() -> None:
    one, other = sample(), sample()
    one.notes.append(Note("x"))
    assert other.notes == []
    assert Sample.notes == []


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"notes": [Note("a"), Note("b"), "c"]}, "$.notes[2]"),
        ({"notes": [Note("a"), Note(object())]}, "$.notes[1].text"),  # type: ignore[arg-type]
        ({"count": "three"}, "$.count"),
        ({"count": 2**70}, "$.count"),
        ({"name": "\ud800"}, "$.name"),
        ({"anything": {"a": [1, lambda: None]}}, "$.anything['a'][1]"),
        ({"anything": [object()]}, "$.anything[0]"),
        ({"table": {"a": [1], "b": [1, "x"]}}, "$.table[...][1]"),
        ({"points": [Point(1, open)]}, "$.points[0].y"),
        ({"notes": [LongNote("a", more="lost")]}, "$.notes[0].more"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(values: dict[str, Any], path: str) -> None:
    with pytest.raises(StateNotStorable) as caught:
        dump(sample(**values))
    assert caught.value.details["path"] == path
    assert path in caught.value.message


def test_a_cycle_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateNotStorable, match=r"\$\.anything"):
        dump(sample(anything=loop))


def test_a_deleted_field_is_refused() -> None:
    actor = sample()
    del actor.count
    # The class default shows through; an annotated field without one does not.
    dump(actor)
    del actor.name
    with pytest.raises(StateNotStorable, match=r"\$\.name was deleted"):
        dump(actor)


def test_an_undeclared_attribute_is_refused_at_once() -> None:
    actor = sample()
    with pytest.raises(AttributeError, match="no state field 'cuont'"):
        actor.cuont = 1
    actor._client = object()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "needs a value for 'name'"),
        ({"name": "n", "nmae": "x"}, "no state field 'nmae'"),
        ({"name": 3}, r"\$\.name"),
    ],
)
def test_a_new_actor_with_bad_state_is_refused(state: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        spec_of(Sample).schema.initial(state)


# -- evolution ---------------------------------------------------------------------------------------------


def test_added_fields_take_their_defaults_and_removed_ones_are_ignored() -> None:
    class V1(Actor):
        kind = "thing"
        a: int = 1
        gone: str = ""

    class V2(Actor):
        kind = "thing"
        a: int = 0
        b: list[str] = ["new"]

    raw = spec_of(V1).schema.initial({"a": 5, "gone": "x"})
    state: Any = spec_of(V2).schema.load(raw, 1, "thing/x")
    assert (state.a, state.b) == (5, ["new"])


def test_a_field_that_the_class_does_not_have_is_kept_for_one_that_has_it() -> None:
    class New(Actor):
        kind = "thing"
        a: int = 1
        extra: dict[str, list[int]] = {}

    class Old(Actor):
        kind = "thing"
        a: int = 0

    new, old = spec_of(New).schema, spec_of(Old).schema
    raw = new.initial({"a": 5, "extra": {"x": [1, 2]}})
    for turn in range(3):  # turns of the older release
        actor: Any = make(spec_of(Old), "thing/x", turn, old.load(raw, 1, "thing/x"))
        assert not hasattr(actor, "extra")
        actor.a += 1
        raw, state = old.dump(old.capture(actor))
        old.install(actor, state)  # as after a commit
        assert old.dump(old.capture(actor))[0] == raw  # nothing changed, nothing to write
    back: Any = new.load(raw, 1, "thing/x")
    assert (back.a, back.extra) == (8, {"x": [1, 2]})
    assert new.load(old.initial({"a": 1}, like=actor), 1, "thing/fork") == new.load(
        new.initial({"a": 1, "extra": {"x": [1, 2]}}), 1, "thing/fork"
    )


def test_what_migrate_from_leaves_out_is_gone_and_what_it_leaves_in_is_kept() -> None:
    class V1(Actor):
        kind = "thing"
        dropped: str = "d"
        kept: str = "k"

    class V2(Actor):
        kind = "thing"
        state_version = 2

        @classmethod
        def migrate_from(cls, version: int, state: dict[str, Any]) -> dict[str, Any]:
            del state["dropped"]
            return state

    schema = spec_of(V2).schema
    raw, _ = schema.dump(schema.load(spec_of(V1).schema.initial({}), 1, "thing/x"))
    assert msgspec.msgpack.decode(raw) == {"kept": "k"}


def test_a_field_that_comes_back_with_another_type_is_an_error_not_a_loss() -> None:
    class V1(Actor):
        kind = "thing"
        a: str = "text"

    class V2(Actor):
        kind = "thing"

    class V3(Actor):
        kind = "thing"
        a: int = 0

    schema = spec_of(V2).schema
    raw, _ = schema.dump(schema.load(spec_of(V1).schema.initial({}), 1, "thing/x"))
    with pytest.raises(StateNotLoadable, match=r"\$\.a.*migrate_from"):
        spec_of(V3).schema.load(raw, 1, "thing/x")


def test_an_added_field_without_default_names_version_and_field() -> None:
    class V1(Actor):
        kind = "thing"
        a: int = 1

    class V2(Actor):
        kind = "thing"
        a: int = 0
        b: str

    raw = spec_of(V1).schema.initial({})
    with pytest.raises(StateNotLoadable, match=r"thing/x: stored state of version 1.*`b`") as caught:
        spec_of(V2).schema.load(raw, 1, "thing/x")
    assert caught.value.details["path"] == "$.b"


def test_migrate_from_upgrades_old_state() -> None:
    class V1(Actor):
        kind = "thing"
        full_name: str = ""

    class V3(Actor):
        kind = "thing"
        state_version = 3
        first: str
        last: str

        @classmethod
        def migrate_from(cls, version: int, state: dict[str, Any]) -> dict[str, Any]:
            assert version == 1
            first, last = state["full_name"].split(" ")
            return {"first": first, "last": last}

    raw = spec_of(V1).schema.initial({"full_name": "Ann Baker"})
    state: Any = spec_of(V3).schema.load(raw, 1, "thing/x")
    assert (state.first, state.last) == ("Ann", "Baker")
    bad = spec_of(V1).schema.initial({"full_name": "Ann"})
    with pytest.raises(StateNotLoadable, match="check migrate_from for version 1"):
        spec_of(V3).schema.load(bad, 1, "thing/x")


def test_state_of_a_newer_class_is_refused() -> None:
    with pytest.raises(StateNotLoadable, match="version 7, but the class knows only 1"):
        spec_of(Sample).schema.load(b"\x80", 7, "sample/a")


def test_garbage_is_refused_as_a_typed_error() -> None:
    with pytest.raises(StateNotLoadable):
        spec_of(Sample).schema.load(b"\xc1\x00", 1, "sample/a")


# -- class definitions -------------------------------------------------------------------------------------


class Ping(Message):
    pass


def test_a_field_may_not_hide_a_method() -> None:
    with pytest.raises(TypeError, match=r"Bad\.memory: this name belongs to Agent"):

        class Bad(Agent):
            memory: str  # type: ignore[assignment]


def test_init_is_refused() -> None:
    with pytest.raises(TypeError, match="use on_start"):

        class Bad(Actor):
            def __init__(self) -> None: ...


def test_a_handler_must_be_async_and_take_a_message() -> None:
    class NotAsync(Actor):
        @on  # type: ignore[type-var]
        def ping(self, msg: Ping) -> None: ...

    class NoMessage(Actor):
        @on
        async def ping(self, msg: str) -> None: ...

    class NoArgument(Actor):
        @on
        async def ping(self) -> None: ...

    class Twice(Actor):
        @on
        async def one(self, msg: Ping) -> None: ...

        @on
        async def two(self, msg: Ping) -> None: ...

    for cls, words in (
        (NotAsync, "async"), (NoMessage, "not a message class"), (NoArgument, "one annotated"),
        (Twice, "both take"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=words):
            spec_of(cls)


def test_an_annotation_that_is_not_known_at_run_time_is_named() -> None:
    class Lost(Actor):
        field: Nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match="'Nowhere', which is not known at run time"):
        spec_of(Lost)


def test_a_message_that_no_body_decodes_to_is_refused() -> None:
    class Odd(Message):
        either: list[int] | set[str]

    class Taker(Actor):
        @on
        async def take(self, msg: Odd) -> None: ...

    with pytest.raises(TypeError, match=r"Taker\.take: 'Odd' cannot be sent"):
        spec_of(Taker)


def test_properties_may_be_set() -> None:
    class Tank(Actor):
        litres: float = 0.0

        @property
        def gallons(self) -> float:
            return self.litres / 4.5

        @gallons.setter
        def gallons(self, value: float) -> None:
            self.litres = value * 4.5

    spec = spec_of(Tank)
    tank: Any = make(spec, "tank/t", 0, spec.schema.load(spec.schema.initial({}), 1, "tank/t"))
    tank.gallons = 2
    assert tank.litres == 9.0


def test_messages_and_handlers_may_be_local_to_a_function() -> None:
    class Local(Message):
        text: str

    class Other(Message):
        pass

    class Here(Actor):
        seen: list[Local] = []

        @on
        async def hear(self, msg: Local | Other) -> None: ...

    class Sub(Here):
        more: int = 0

    assert set(spec_of(Sub).handlers) == {"Local", "Other"}
    assert spec_of(Sub).schema.names == {"seen", "more"}
    assert spec_of(Here).kind == "here"


async def test_rolling_a_release_back_and_forth_loses_no_field(tmp_path: Path) -> None:
    class Count(Message):
        pass

    class Newer(Actor):
        kind = "thing"
        count: int = 0
        extra: list[str] = []

        @on
        async def go(self, msg: Count) -> None:
            self.count += 1

    class Older(Actor):
        kind = "thing"
        count: int = 0

        @on
        async def go(self, msg: Count) -> None:
            self.count += 1

    for release in (Newer, Older, Newer):
        async with team(tmp_path, engine=False) as (host, _):
            await host.spawn(release, "t", **({"extra": ["kept"]} if release is Newer else {}))
            for _turn in range(2):
                await host.tell("thing/t", Count())
            await host.idle()
            assert (await stored_state(host, "thing/t"))["extra"] == ["kept"]
    async with team(tmp_path, engine=False) as (host, _):
        assert await stored_state(host, "thing/t") == {"count": 6, "extra": ["kept"]}
