"""Schemas as they are enforced: never wider than given, and refused by name where that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from offbook.bus.errors import InvalidRequest
from offbook.runtime.engine.schema import ANY, BOUND, DECIMALS, enforceable

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "feature"),
    [
        ({"not": TEXT}, "not"),
        ({"if": TEXT, "then": TEXT}, "if"),
        ({"type": "array", "contains": WHOLE}, "contains"),
        ({"type": "array", "items": WHOLE, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": [WHOLE]}, "items"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "minProperties": 2}, "minProperties=2"),
        (
            {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
            "required 'a'",
        ),
        ({"type": "object", "propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "format": "json-pointer"}, "format='json-pointer'"),
        ({"type": "string", "format": "date", "maxLength": 3}, "format='date'"),
        ({"type": "string", "contentEncoding": "base32"}, "contentEncoding='base32'"),
        ({"type": "string", "contentEncoding": "base64", "maxLength": 9}, "contentEncoding"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength=5 and maxLength=2"),
        ({"type": "string", "maxLength": -1}, "maxLength=-1"),
        ({"type": "string", "pattern": 3}, "pattern=3"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum 3 and maximum 1"),
        ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "minimum 1 and maximum 0"),
        ({"type": "integer", "minimum": 2 * BOUND}, f"minimum {2 * BOUND} and maximum {BOUND}"),
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum=True"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf=0.1"),
        ({"type": "number", "multipleOf": 0}, "multipleOf=0"),
        ({"type": "text"}, "type 'text'"),
        ({"anyOf": []}, "anyOf"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_enforced_is_refused_by_name_wherever_it_stands(schema: Any, feature: str) -> None:
    deep = {"type": "object", "properties": {"plan": {"type": "array", "items": schema}}}
    for whole, where in ((schema, "the reply"), (deep, "the reply.plan[]")):
        with pytest.raises(InvalidRequest) as caught:
            enforceable(whole)
        assert f": {where}: {feature}: " in str(caught.value)
        assert caught.value.details == {"feature": feature, "where": where}


@pytest.mark.parametrize(
    ("schema", "enforced"),
    [
        ({"type": "integer"}, {"minimum": -BOUND, "maximum": BOUND}),
        ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 7.5}, {"minimum": 3, "maximum": 7}),
        ({"type": "integer", "minimum": 2.5}, {"minimum": 3, "maximum": BOUND}),
        ({"type": "number", "minimum": 0}, {"minimum": 0, "maximum": BOUND, "multipleOf": DECIMALS}),
        ({"type": "number", "multipleOf": 0.5}, {"minimum": -BOUND, "maximum": BOUND, "multipleOf": 0.5}),
        ({"minimum": 4}, {"type": "number", "minimum": 4, "maximum": BOUND, "multipleOf": DECIMALS}),
    ],
)
def test_numbers_have_bounds_on_both_sides(schema: Any, enforced: Any) -> None:
    out = enforceable(schema)
    assert out == {"type": out["type"], **enforced}


@pytest.mark.parametrize("bound", [0, 0.5, 1.5, -3, 1e-3, 123456.789, -1e9, 1e14])
def test_no_number_that_is_drawn_is_rounded_to_an_excluded_bound(bound: float) -> None:
    above = enforceable({"type": "number", "exclusiveMinimum": bound})
    below = enforceable({"type": "number", "exclusiveMaximum": bound})
    assert above["minimum"] > bound > below["maximum"]


def test_an_object_has_the_properties_that_are_named_unless_it_says_otherwise() -> None:
    def more(**said: Any) -> Any:
        return enforceable({"type": "object", **said})["additionalProperties"]

    anything = {"$ref": f"#/$defs/{ANY}"}
    assert more(properties={"a": TEXT}) is False
    assert more(properties={"a": TEXT}, additionalProperties=True) == anything
    assert more() == anything
    assert more(additionalProperties=TEXT) == TEXT
    assert more(propertyNames={"enum": ["a", "b"]}, additionalProperties=TEXT) is False


def test_members_that_hold_together_are_not_closed_one_by_one() -> None:
    parts = [{"type": "object", "properties": {name: TEXT}} for name in "ab"]
    assert enforceable({"allOf": parts})["allOf"] == parts
    closed = enforceable({"anyOf": parts})["anyOf"]
    assert all(part["additionalProperties"] is False for part in closed)


def test_what_only_describes_is_left_out() -> None:
    said = {"type": "boolean", "title": "t", "default": True, "x-guidance": {"lenient": True}, "widget": 1}
    assert enforceable(said) == {"type": "boolean"}
