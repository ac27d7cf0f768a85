"""JSON schemas: checked and normalised before the grammar library sees them.

Rules of this file: every keyword is enforced, is an annotation, or is refused by name (left out with a warning when
lenient); depth, counts and patterns are bounded here, since a count of 2**64 is 20 characters to write and gigabytes
to expand; objects that list ``properties`` allow no others, as the service documents it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

Loc = tuple[str | int, ...]

DEPTH_MAX = 48  # nested subschemas; the library's JSON reader stops at 128 levels of brackets
REFS_MAX = 256  # distinct targets; the library follows chains of references recursively
LENGTH_MAX = 100_000  # minLength, maxLength
ITEMS_MAX = 10_000  # minItems, maxItems, minProperties, maxProperties, and {n,m} in a pattern

_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COUNTS = {
    "minLength": LENGTH_MAX, "maxLength": LENGTH_MAX, "minItems": ITEMS_MAX, "maxItems": ITEMS_MAX,
    "minProperties": ITEMS_MAX, "maxProperties": ITEMS_MAX,
}  # fmt: skip
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_TEXTS = frozenset({"pattern", "format", "$ref"})
_PLAIN = frozenset({"type", "enum", "const", "required"})
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "contentEncoding", "contentMediaType", "markdownDescription",
    "enumDescriptions", "markdownEnumDescriptions", "defaultSnippets", "deprecationMessage", "errorMessage",
})  # fmt: skip
_KNOWN = _ONE | _LISTS | _MAPS | _COUNTS.keys() | _NUMBERS | _TEXTS | _PLAIN | _ANNOTATIONS
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_COMPOSING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# Dates and times of RFC 3339 as patterns, since the library's own let 2021-02-29 and stray leap seconds through.
# Narrower than the standard where that costs nothing: years from 1000 on, capital letters, no leap second.
_DAY = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_FORMATS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}T{_TIME}$"}
_PATTERN_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


class SchemaError(Exception):
    """The schema is not one, or asks for something that cannot be enforced. ``loc`` is the path inside it."""

    def __init__(self, message: str, loc: Loc) -> None:
        super().__init__(message)
        self.message = message
        self.loc = loc


def normalise(schema: dict[str, Any], *, lenient: bool) -> tuple[dict[str, Any], list[str]]:
    """The schema that is enforced, and what was left out of it. Raises SchemaError; the input is not changed."""
    walker = _Walker(lenient)
    out = walker.schema(schema, (), 0, closes=True)
    assert isinstance(out, dict)
    for target in walker.composed_refs:
        _open(out, target)
    return out, walker.warnings


class _Walker:
    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.warnings: list[str] = []
        self.refs: set[str] = set()
        self.composed_refs: set[str] = set()

    def schema(self, schema: object, loc: Loc, depth: int, *, closes: bool) -> object:
        """A checked copy. ``closes``: an object here with ``properties`` allows no others; false inside compositions,
        where closing a part would forbid the other parts' properties."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError("a schema must be an object or a boolean", loc)
        if depth == DEPTH_MAX:
            raise SchemaError(f"the schema is nested more than {DEPTH_MAX} deep", loc)
        if "$ref" in schema:
            self._reference(schema, loc, closes)
        whole = closes and not (_COMPOSING & schema.keys() and "properties" in schema) and "allOf" not in schema
        out: dict[str, Any] = {}
        for key, value in schema.items():
            at = (*loc, key)
            if (key not in _KNOWN and not key.startswith("x-")) or key == "x-guidance":
                self._unknown(key, value, at)
            elif key in _ONE and not isinstance(value, list):
                out[key] = self.schema(value, at, depth + 1, closes=True)
            elif key in _LISTS or key in _ONE:
                inner = whole or key in ("prefixItems", "items")
                out[key] = [self.schema(s, (*at, i), depth + 1, closes=inner) for i, s in enumerate(_list(value, at))]
            elif key in _MAPS:
                if not isinstance(value, dict):
                    raise SchemaError(f"{key} must be an object", at)
                out[key] = {name: self.schema(s, (*at, name), depth + 1, closes=True) for name, s in value.items()}
            else:
                _check_value(key, value, at)
                out[key] = value
        if out.get("format") in _FORMATS:
            pattern = {"pattern": _FORMATS[out.pop("format")]}
            out |= {"allOf": [*out.get("allOf", []), pattern]} if "pattern" in out else pattern
        if whole and "properties" in out:
            out.setdefault("additionalProperties", False)
        return out

    def _reference(self, schema: dict[str, Any], loc: Loc, closes: bool) -> None:
        target = schema["$ref"]
        if not isinstance(target, str):
            raise SchemaError("$ref must be a string", (*loc, "$ref"))
        self.refs.add(target)
        if len(self.refs) > REFS_MAX:
            raise SchemaError(f"the schema refers to more than {REFS_MAX} definitions", loc)
        if not closes or "properties" in schema:
            self.composed_refs.add(target)

    def _unknown(self, key: str, value: object, at: Loc) -> None:
        if key == "uniqueItems" and value is False:
            return  # says nothing
        if not self.lenient:
            raise SchemaError(f"the keyword '{key}' is not supported", at)
        self.warnings.append(f"{'.'.join(map(str, at))} is not enforced")


def _open(root: dict[str, Any], pointer: str) -> None:
    """Undo the closing of a definition that is composed with others somewhere."""
    node: object = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and "properties" in node and node.get("additionalProperties") is False:
        del node["additionalProperties"]


def _list(value: object, at: Loc) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise SchemaError("must be a list of schemas, and not empty", at)
    return value


def _check_value(key: str, value: object, at: Loc) -> None:
    """Shapes and bounds of the keywords that hold no schema."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if key in _COUNTS:
        if not number >= 0 or number % 1:
            raise SchemaError(f"{key} must be a whole number, at least 0", at)
        if number > _COUNTS[key]:
            raise SchemaError(f"{key} may be at most {_COUNTS[key]}", at)
    elif key in _NUMBERS:
        if not abs(number) < 2**63:
            raise SchemaError(f"{key} must be a number of at most 64 bits", at)
    elif key in _TEXTS:
        if not isinstance(value, str):
            raise SchemaError(f"{key} must be a string", at)
        if key == "pattern":
            _check_pattern(value, at)
    else:
        _check_plain(key, value, at)


def _check_plain(key: str, value: object, at: Loc) -> None:
    if key == "type":
        names = value if isinstance(value, list) and value else [value]
        if not all(isinstance(n, str) and n in _TYPES for n in names):
            raise SchemaError(f"type must be one or more of {', '.join(sorted(_TYPES))}", at)
    elif key == "enum" and not (isinstance(value, list) and value):
        raise SchemaError("enum must be a list with at least one value", at)
    elif key == "required" and not (isinstance(value, list) and all(isinstance(n, str) for n in value)):
        raise SchemaError("required must be a list of names", at)


def _check_pattern(pattern: str, at: Loc) -> None:
    for found in _PATTERN_COUNT.finditer(pattern):
        counts = [int(c) for c in found.groups() if c and len(c) < 20]
        if len(counts) < sum(bool(c) for c in found.groups()) or max(counts) > ITEMS_MAX:
            raise SchemaError(f"repetition counts in a pattern are limited to {ITEMS_MAX}", at)


def from_text(text: str, fail: Callable[[str], Exception]) -> object:
    """Parse JSON text that somebody sent; ``fail`` makes the exception to raise."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise fail(f"the schema is not valid JSON: {reason}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
