"""JSON schemas as decoding can be held to them.

Owns the rewriting of a schema into one that llguidance enforces in full, and the refusal, by name, of what
cannot be enforced. The rewritten schema is never wider than the given one. It is narrower where JSON would
let a model ramble or say what a reader cannot take: numbers have at most 15 digits before and 9 behind the
point and no exponent, objects have the properties that are named and no others.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NoReturn

from offbook.bus.errors import InvalidRequest

Schema = dict[str, Any]

BOUND = 10**15 - 1
"""The largest number: what is below is exact in a float, and is short."""

DECIMALS = 1e-9
"""Numbers are multiples of this unless the schema says otherwise."""

UNSUPPORTED = frozenset((
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "additionalItems",
    "contentMediaType", "contentSchema", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
    "$recursiveAnchor", "$anchor", "$vocabulary",
))  # fmt: skip

_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRING = ("minLength", "maxLength", "pattern", "format", "contentEncoding")
_ARRAY = ("items", "prefixItems", "minItems", "maxItems", "uniqueItems")
_OBJECT = (
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
)
_VALUES = ("$ref", "enum", "const")
_COMBINERS = ("anyOf", "oneOf", "allOf")
_KEPT = frozenset(("type", "$defs", "definitions", "$schema", *_NUMERIC, *_STRING, *_ARRAY, *_OBJECT,
                   *_VALUES, *_COMBINERS))  # fmt: skip
"""Keywords that go into the rewritten schema; others describe and do not constrain."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

ANY = "offbook.any"
"""The definition that stands for any value."""

_ANY_SCHEMA: Schema = {
    "anyOf": [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "number", "minimum": -BOUND, "maximum": BOUND, "multipleOf": DECIMALS},
        {"type": "string"},
        {"type": "array", "items": {"$ref": f"#/$defs/{ANY}"}},
        {"type": "object", "additionalProperties": {"$ref": f"#/$defs/{ANY}"}},
    ]
}

_DATE = "[1-9][0-9]{3}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = "(Z|[+-](0[0-9]|1[0-2]):[0-5][0-9])"
_CLOCK = r"([0-9]{1,4}H([0-9]{1,2}M)?([0-9]{1,2}S)?|[0-9]{1,4}M([0-9]{1,2}S)?|[0-9]{1,6}(\.[0-9]{1,6})?S)"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}{_ZONE}$",
    "partial-time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}{_ZONE}$",
    "duration": f"^P([0-9]{{1,5}}D(T{_CLOCK})?|T{_CLOCK})$",
    "decimal": r"^-?[0-9]{1,15}(\.[0-9]{1,9})?$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
}
"""Patterns of formats that readers check: no 31st of April, no duration in weeks."""

OTHER_FORMATS = frozenset({"email", "hostname", "ipv4", "ipv6", "uri"})
"""Formats that llguidance has patterns of."""

_BASE64 = "^([A-Za-z0-9+/]{4})*$"


def enforceable(schema: Schema) -> Schema:
    """The schema as it is enforced.

    Raises:
        InvalidRequest: names the keyword that cannot be enforced, and where it stands.
    """
    rewriter = _Rewriter(schema)
    out = rewriter.schema(schema, "the reply", closed=True)
    if rewriter.any_used:
        out.setdefault("$defs", {})[ANY] = _ANY_SCHEMA
    return out


def refuse(where: str, feature: str, why: str) -> NoReturn:
    raise InvalidRequest(
        f"the reply's JSON schema cannot be enforced: {where}: {feature}: {why}", feature=feature, where=where
    )


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self.root = root if isinstance(root, dict) else {}
        self.any_used = False

    def any(self) -> Schema:
        self.any_used = True
        return {"$ref": f"#/$defs/{ANY}"}

    def schema(self, node: Any, where: str, *, closed: bool) -> Schema:
        """One subschema. ``closed``: whether an object without more said has just its own properties."""
        if node is True:
            return self.any()
        if not isinstance(node, dict):
            refuse(where, repr(node), "is not a schema")
        for keyword in node:
            if keyword in UNSUPPORTED:
                refuse(where, keyword, "is not supported")
        out = {key: value for key, value in node.items() if key in _KEPT}
        for name in ("$defs", "definitions"):
            if name in out:
                inner = self.mapping(out[name], f"{where}: {name}")
                out[name] = {
                    key: self.schema(value, f"{where}: {name}.{key}", closed=True)
                    for key, value in inner.items()
                }
        combined = any(key in node for key in (*_COMBINERS, "$ref"))
        kinds = self.kinds(node, where)
        if not kinds and not combined and not any(key in node for key in _VALUES):
            return {**{k: v for k, v in out.items() if k.startswith(("$", "def"))}, **self.any()}
        for name in _COMBINERS:
            if name in node:
                # Members that are to hold together with something else are left open.
                alone = closed and name != "allOf" and not any(
                    key in node for key in (*_OBJECT, *_COMBINERS) if key != name
                )  # fmt: skip
                if not isinstance(node[name], list) or not node[name]:
                    refuse(where, name, "takes a list of schemas")
                out[name] = [
                    self.schema(member, f"{where}: {name}[{i}]", closed=alone)
                    for i, member in enumerate(node[name])
                ]
        if kinds and "type" not in node and not combined and not any(key in node for key in _VALUES):
            out["type"] = kinds[0] if len(kinds) == 1 else list(kinds)
        if "integer" in kinds or "number" in kinds:
            self.number(out, where, whole="number" not in kinds, alone=not combined)
        if "string" in kinds:
            self.string(out, where)
        if "array" in kinds:
            self.array(out, where, closed=closed and not combined)
        if "object" in kinds:
            self.object(out, where, closed=closed and not combined)
        return out

    def mapping(self, value: Any, where: str) -> Schema:
        if not isinstance(value, dict):
            refuse(where, repr(value)[:60], "is not an object")
        return value

    def kinds(self, node: Schema, where: str) -> tuple[str, ...]:
        """The types a schema speaks of."""
        if "type" in node:
            given = node["type"]
            kinds = tuple(given) if isinstance(given, list) else (given,)
            for kind in kinds:
                if kind not in _TYPES:
                    refuse(where, f"type {kind!r}", f"is none of {', '.join(_TYPES)}")
            return kinds
        families = {"number": _NUMERIC, "string": _STRING, "array": _ARRAY, "object": _OBJECT}
        return tuple(kind for kind, words in families.items() if any(word in node for word in words))

    # ---- numbers

    def number(self, out: Schema, where: str, *, whole: bool, alone: bool) -> None:
        """Bounds on both sides, both of them included."""
        for keyword in _NUMERIC:
            value = out.get(keyword)
            if keyword in out and (not isinstance(value, int | float) or isinstance(value, bool)):
                refuse(where, f"{keyword}={value!r}", "takes a number")
        low, high = out.pop("minimum", -BOUND), out.pop("maximum", BOUND)
        if "exclusiveMinimum" in out:
            low = max(low, _beyond(out.pop("exclusiveMinimum"), +1, whole))
        if "exclusiveMaximum" in out:
            high = min(high, _beyond(out.pop("exclusiveMaximum"), -1, whole))
        low, high = max(low, -BOUND), min(high, BOUND)
        if whole:
            low, high = math.ceil(low), math.floor(high)
        if low > high:
            refuse(where, f"minimum {low} and maximum {high}", f"leave no number within ±{BOUND}")
        out["minimum"], out["maximum"] = low, high
        step = out.get("multipleOf")
        if step is not None and (step <= 0 or float(step).as_integer_ratio()[1] > 1024):
            refuse(where, f"multipleOf={step!r}", "use a whole number, or a binary fraction such as 0.25")
        if step is None and not whole and alone and high - low > 1e6 * DECIMALS:
            out["multipleOf"] = DECIMALS

    # ---- strings

    def string(self, out: Schema, where: str) -> None:
        self.sizes(out, where, "minLength", "maxLength")
        pattern = out.get("pattern")
        if pattern is not None and not isinstance(pattern, str):
            refuse(where, f"pattern={pattern!r}", "takes a text")
        encoding = out.pop("contentEncoding", None)
        if encoding is not None:
            if encoding != "base64":
                refuse(where, f"contentEncoding={encoding!r}", "only base64 is supported")
            if any(key in out for key in ("minLength", "maxLength", "pattern", "format")):
                refuse(where, "contentEncoding", "with a length, a pattern or a format is not supported")
            out["pattern"] = _BASE64
        form = out.get("format")
        if form is None:
            return
        if form in FORMATS:
            if any(key in out for key in ("minLength", "maxLength", "pattern")):
                refuse(where, f"format={form!r}", "with a length or a pattern is not supported")
            del out["format"]
            out["pattern"] = FORMATS[form]
        elif form not in OTHER_FORMATS:
            known = ", ".join(sorted({*FORMATS, *OTHER_FORMATS}))
            refuse(where, f"format={form!r}", f"is none of {known}")

    # ---- arrays

    def array(self, out: Schema, where: str, *, closed: bool) -> None:
        least, _ = self.sizes(out, where, "minItems", "maxItems")
        if out.pop("uniqueItems", False):
            refuse(where, "uniqueItems", "is not supported: items cannot be kept apart while they are drawn")
        first = out.get("prefixItems")
        if first is not None:
            if not isinstance(first, list):
                refuse(where, "prefixItems", "takes a list of schemas")
            out["prefixItems"] = [
                self.schema(item, f"{where}[{i}]", closed=True) for i, item in enumerate(first)
            ]
        items = out.get("items")
        if isinstance(items, list):
            refuse(where, "items", "as a list is not supported: use prefixItems")
        if items is None and first is not None and closed and least <= len(first):
            out["items"] = False
        elif items is None:
            if closed:
                out["items"] = self.any()
        elif items is not False:
            out["items"] = self.schema(items, f"{where}[]", closed=True)

    # ---- objects

    def object(self, out: Schema, where: str, *, closed: bool) -> None:
        least, _ = self.sizes(out, where, "minProperties", "maxProperties")
        named = {
            key: self.schema(value, f"{where}.{key}", closed=True)
            for key, value in self.mapping(out.get("properties", {}), f"{where}: properties").items()
        }
        patterns = {
            key: self.schema(value, f"{where}.{key}", closed=True)
            for key, value in self.mapping(
                out.get("patternProperties", {}), f"{where}: patternProperties"
            ).items()
        }
        more: Schema | Literal[False] | None = out.get("additionalProperties")
        if more is not None and more is not False:
            more = self.schema(more, f"{where}.*", closed=True)
        elif more is None and closed:
            more = False if named or patterns else self.any()
        names = out.pop("propertyNames", None)
        if names is not None:
            if named or patterns or more is False:
                refuse(where, "propertyNames", "with named properties is not supported")
            named, patterns = self.keys(names, self.any() if more is None else more, where)
            more = False if named or patterns else more
        for key in out.get("required", ()):
            if key not in named:
                if more is False and not patterns:
                    refuse(where, f"required {key!r}", "is no property")
                named[key] = more if isinstance(more, dict) else self.any()
        if least > 1 and (patterns or more is not False):
            refuse(where, f"minProperties={least}", "above 1 is not supported for free keys: they may repeat")
        if named or "properties" in out:
            out["properties"] = named
        if patterns:
            out["patternProperties"] = patterns
        if more is not None:
            out["additionalProperties"] = more

    def keys(self, names: Any, value: Schema, where: str) -> tuple[Schema, Schema]:
        """Named properties and patterns that stand for ``propertyNames``; both empty if any name will do."""
        names = self.mapping(names, f"{where}: propertyNames")
        if "$ref" in names:
            name = str(names["$ref"]).removeprefix("#/$defs/")
            names = self.mapping(self.root.get("$defs", {}).get(name, {}), f"{where}: propertyNames")
        said = {key: word for key, word in names.items() if key in _KEPT and key != "type"}
        listed = [said.pop("const")] if "const" in said else said.pop("enum", None)
        if listed is not None and not said and all(isinstance(key, str) for key in listed):
            return dict.fromkeys(listed, value), {}
        if set(said) == {"pattern"}:
            return {}, {said["pattern"]: value}
        if said and set(said) <= {"minLength", "maxLength"}:
            least, most = self.sizes(dict(said), f"{where}: propertyNames", "minLength", "maxLength")
            return {}, {f"^(.|\\n){{{least},{'' if most is None else most}}}$": value}
        if said or listed is not None:
            refuse(where, "propertyNames", "takes texts to choose from, a pattern, or lengths")
        return {}, {}

    def sizes(self, out: Schema, where: str, least: str, most: str) -> tuple[int, int | None]:
        """The two sizes, checked; 0 and None where nothing is said."""
        for keyword in (least, most):
            value = out.get(keyword, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                refuse(where, f"{keyword}={value!r}", "takes a whole number from 0")
        low, high = out.get(least, 0), out.get(most)
        if high is not None and low > high:
            refuse(where, f"{least}={low} and {most}={high}", "leave nothing")
        return low, high


def _beyond(bound: float, way: int, whole: bool) -> float:
    """The nearest bound on that side of an excluded one that may be included.

    Far enough away that no number between them would be rounded to the excluded one.
    """
    if whole:
        return math.floor(bound) + 1 if way > 0 else math.ceil(bound) - 1
    step = max(DECIMALS, 10.0 ** (math.floor(math.log10(abs(bound))) - 9)) if bound else DECIMALS
    return round(bound + way * step, 12)
