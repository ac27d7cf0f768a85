"""JSON schemas, by the public fault reports (ids in the names), by composition, and by hostile ones.

Long, since it begins with one table of what each schema lets through and what not.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from typing import Any

import jsonschema
import pytest
from byte_tokens import TABLE, accepts, allowed, byte_vocabulary, schema

from offbook.actors.grammar import compile_constraint
from offbook.actors.grammar_matcher import ConstraintError
from offbook.actors.grammar_schema import normalise
from offbook.actors.request import ResponseFormat

VOCABULARY = byte_vocabulary()
NOT_JSON_NUMBERS = ["", "-", "01", "1.", ".5", "+1", "0x1", "NaN"]
TREE = {
    "type": "object",
    "properties": {"kids": {"$ref": "#/definitions/kids"}},
    "required": ["kids"],
    "additionalProperties": False,
    "definitions": {
        "kids": {"type": "array", "items": {"$ref": "#/definitions/node"}},
        "node": {
            "type": "object",
            "properties": {"n": {"type": "string", "pattern": "^[k-p]+$"}, "kids": {"$ref": "#/definitions/kids"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
QUOTED = json.dumps('line1\nline2 "q" \\ é 漢', ensure_ascii=False)

CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("b176", TREE, ['{"kids":[{"n":"kp","kids":[{"n":"m"}]}]}', '{"kids":[]}'], ['{"kids":[{"n":"z"}]}', "{}"]),
    ("b185", {"type": "object", "properties": {}, "additionalProperties": False}, ["{}", "{ }", "{\n}"],
     ["{} ", "{}\n", " {}", "{\n\n}", "{  }"]),
    ("b186", {"type": "string", "pattern": "^[a-z ]+$", "minLength": 1, "maxLength": 8}, ['"abcdefgh"'],
     ['""', '"abcdefghi"', '"A"']),
    ("b187-open", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5", "0.001", "0.999"],
     ["0", "1", "0.0", "1.0", "-0.5", "2"]),
    ("b187-closed", {"type": "number", "minimum": 2, "maximum": 7}, ["2", "7", "5.7", "7.0", "2.0001"],
     ["1.9", "7.1", "70", "-3"]),
    ("b187-below", {"type": "integer", "minimum": -8}, ["-8", "-1", "0", "100"], ["-9", "-80", "-"]),
    ("b187-above", {"type": "integer", "minimum": 3}, ["3", "10", "999"], ["2", "-3", "0"]),
    ("b187-one", {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 11}, ["10"], ["9", "11", "1", "100"]),
    ("b188", {"type": "number", "minimum": -3, "maximum": 3}, ["-0.5", "0.5", "-3", "3"], ["-3.1", "3.5", "-30"]),
    ("b189", {"type": "string", "maxLength": 12}, ['"\\n\\t\\"\\\\"', '"é漢😀"'],
     ['"\t"', '"\n"', '"\x00"', '"\\q"', '"\\u12"', '"\\ud800"', '"a', '"0123456789abc"']),
    ("b190", {"const": json.loads(QUOTED)}, [QUOTED], ['"line1"']),
    ("b191", {"enum": ["http://a.example/p", "café/日本", "<b>&\u2028", 3, None]},
     ['"http://a.example/p"', '"café/日本"', '"<b>&\u2028"', "3", "null"], ['"http:\\/\\/a.example/p"', "4"]),
    ("numbers", {"type": "number"}, ["0", "-0.0", "1e5", "1E+5", "12.25"], NOT_JSON_NUMBERS),
    ("integers", {"type": "integer"}, ["0", "-7", "123456789012345678901234567890"], [*NOT_JSON_NUMBERS, "1.5"]),
    ("multiples", {"type": "integer", "multipleOf": 7}, ["14", "-7", "0"], ["15", "7.5"]),
    ("listed-properties-only", {"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"a":1}', "{}"],
     ['{"b":1}', '{"a":1,"b":2}', '{"a":"x"}']),
    ("no-properties-listed", {"type": "object"}, ["{}", '{"a":[1,{"b":null}]}'], ["[]", '{"a"}', '{"a":1,}']),
    ("more-properties", {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True,
                         "required": ["z"]}, ['{"a":1,"z":2}', '{"z":1}'], ['{"a":1}', "{}"]),
    ("property-counts", {"type": "object", "minProperties": 1, "maxProperties": 2}, ['{"a":1}', '{"a":1,"b":2}'],
     ["{}", '{"a":1,"b":2,"c":3}']),
    ("pattern-properties", {"type": "object", "patternProperties": {"^a": {"type": "integer"}},
                            "additionalProperties": False}, ['{"a":1,"ab":2}', "{}"], ['{"b":1}', '{"ab":"x"}']),
    ("tuple", {"type": "array", "prefixItems": [{"type": "string"}], "items": False}, ["[]", '["a"]'],
     ['["a",1]', "[1]"]),
    ("lengths", {"type": "string", "minLength": 2, "maxLength": 3}, ['"é漢"', '"\\n\\n\\n"', '"\\"\\\\a"'],
     ['"a"', '"abcd"', '"\\"\\\\aa"']),
    ("items", {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, ["[true]", "[true, true]"],
     ["[]", "[true,true,true]", "[1]"]),
    ("all-of", {"type": "object", "allOf": [{"properties": {"a": {"type": "integer"}}},
                                             {"properties": {"b": {"type": "integer"}}}]}, ['{"a":1,"b":2}'],
     ['{"a":"x"}', '{"b":"x"}']),
    ("inherited", {"$defs": {"B": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
                   "allOf": [{"$ref": "#/$defs/B"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]},
     ['{"a":1,"b":2}'], ['{"a":1}', '{"a":"x","b":2}']),
    ("any-of", {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                          {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]},
     ['{"a":1}', '{"b":null}'], ['{"a":1,"b":null}', "{}", '{"a":1,"c":1}']),
    ("one-of-apart", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["1", '"a"'], ["1.5", "null"]),
    ("beside-a-reference", {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 2}, ['"ab"'],
     ['"abc"', "1"]),
    ("without-a-type", {"minimum": 3}, ["3", '"any"', "[]"], ["2"]),
    ("types", {"type": ["string", "null"]}, ["null", '"a"'], ["1", "true"]),
    ("dates", {"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"', '"2021-04-30"'],
     ['"2021-02-29"', '"1900-02-29"', '"2021-04-31"', '"2021-13-01"', '"21-01-01"', '"2021-1-1"', '""']),
    ("times", {"type": "string", "format": "time"}, ['"23:59:59Z"', '"08:00:00.123+05:30"'],
     ['"23:59:60Z"', '"24:00:00Z"', '"08:00:00"', '"08:00Z"']),
    ("dates-and-times", {"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59Z"'],
     ['"2023-02-29T23:59:59Z"', '"2024-02-29 23:59:59Z"', '"2024-02-29"']),
    ("dates-beside-a-pattern", {"type": "string", "format": "date", "pattern": "^2"}, ['"2024-02-29"'],
     ['"2021-02-29"', '"1999-12-31"']),
    ("white-space", {"type": "array", "items": {"type": "integer"}}, ["[1, 2]", "[\n  1,\n  2\n]", "[ 1 ]"],
     ["[1,  2]", "[1\n\n]", "[1]\n", "[\t1]"]),
]  # fmt: skip


@pytest.mark.parametrize(("value", "good", "bad"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_a_schema_lets_through(value: Any, good: list[str], bad: list[str]) -> None:
    constraint = schema(VOCABULARY, value)
    assert [t for t in good if not accepts(constraint, t)] == []
    assert [t for t in bad if accepts(constraint, t)] == []
    for text in good:
        jsonschema.validate(json.loads(text), value)


def test_b189_bytes_that_are_not_utf8_are_never_let_through() -> None:
    constraint = schema(VOCABULARY, {"type": "string"})
    for data in (b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xff"', b'"\xe2\x82"', b'"\xf5\x80\x80\x80"'):
        assert not accepts(constraint, data)


def test_b188_minus_zero_is_a_way_to_go_on() -> None:
    matcher = schema(VOCABULARY, {"type": "number", "minimum": -3, "maximum": 3}).matcher()
    for byte in b"-0":
        assert bytes([byte]) in allowed(VOCABULARY, matcher)
        assert matcher.consume(byte)
    assert b"." in allowed(VOCABULARY, matcher)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"type": "object", "properties": {"foo": "bar"}}, "must be an object or a boolean"),
        ({"type": "banana"}, "type must be"),
        ({"type": ["string", 5]}, "type must be"),
        ({"required": "a", "type": "object"}, "required must be"),
        ({"enum": []}, "at least one value"),
        ({"minimum": "x", "type": "integer"}, "must be a number"),
        ({"exclusiveMinimum": True, "minimum": 1}, "must be a number"),
        ([], "a schema must be a JSON object"),
        ("not json", "a schema must be a JSON object"),
        (7, "a schema must be a JSON object"),
        ({"type": "string", "maxLength": -1}, "whole number"),
        ({"type": "string", "maxLength": 1.5}, "whole number"),
        ({"type": "string", "maxLength": 2**64}, "at most"),
        ({"type": "array", "minItems": 10**9}, "at most"),
        ({"type": "integer", "maximum": 2**64}, "64 bits"),
        ({"type": "string", "pattern": "a{1000000000}"}, "repetition counts"),
        ({"type": "string", "pattern": "a{99999999999999999999999}"}, "repetition counts"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "banana"}, "format"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"not": {}}, "'not' is not supported"),
        ({"if": {}, "then": {}}, "'if' is not supported"),
        ({"type": "string", "requird": ["a"]}, "'requird' is not supported"),
        ({"x-guidance": {"lenient": True}, "type": "string"}, "'x-guidance' is not supported"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "nsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "nsatisfiable"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "http://a.example/s"}, "a.example"),
        ({"anyOf": []}, "not empty"),
        ({"properties": []}, "must be an object"),
    ],
)
def test_b172_refusals_say_why(value: Any, why: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        schema(VOCABULARY, value)
    assert why in caught.value.message, caught.value.message
    assert caught.value.loc[:2] == ("response_format", "json_schema")


def test_the_path_of_a_refusal_leads_to_the_keyword() -> None:
    inner = {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "array", "contains": {}}]}}
    wrapped = {"name": "n", "schema": {"properties": {"a": inner}}}
    with pytest.raises(ConstraintError) as caught:
        schema(VOCABULARY, wrapped)
    assert caught.value.loc == (
        "response_format", "json_schema", "schema", "properties", "a", "items", "anyOf", 1, "contains",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "loc"),
    [
        ({"type": "json_schema"}, ("response_format", "json_schema")),
        ({"type": "json_schema", "schema": {}, "json_schema": {}}, ("response_format", "json_schema")),
        ({"type": "json_schema", "json_schema": {}, "grammar": "x"}, ("response_format", "grammar")),
        ({"type": "json_object", "json_schema": {}}, ("response_format", "json_schema")),
        ({"type": "text", "grammar": "x"}, ("response_format", "grammar")),
        ({"type": "grammar"}, ("response_format", "grammar")),
        ({"type": "json_schema", "schema": {"name": 3, "schema": {}}}, ("response_format", "schema", "name")),
        ({"type": "json_schema", "schema": "{" * 5000}, ("response_format", "schema")),
        ({"type": "json_schema", "schema": '{"a":' * 5000 + "1" + "}" * 5000}, ("response_format", "schema")),
        ({"type": "json_schema", "schema": '{"const": NaN}'}, ("response_format", "schema")),
        ({"type": "json_schema", "schema": {"const": "\ud800"}}, ("response_format", "schema")),
    ],
)
def test_b198_missing_and_misplaced_pieces_are_named(fields: dict[str, Any], loc: tuple[str, ...]) -> None:
    with pytest.raises(ConstraintError) as caught:
        compile_constraint(ResponseFormat(**fields), VOCABULARY)
    assert caught.value.loc == loc


def test_b175_a_bad_one_after_a_good_one_changes_nothing() -> None:
    first = schema(VOCABULARY, {"type": "string", "pattern": "^(z.*)$"})
    second = schema(VOCABULARY, {"type": "string", "pattern": "^(|z.*)$"})
    with pytest.raises(ConstraintError):
        schema(VOCABULARY, {"type": "string", "pattern": "("})
    assert accepts(first, '"zz"') and not accepts(first, '""')
    assert accepts(second, '"zz"') and accepts(second, '""')


def test_b196_drafts_beyond_the_end_of_the_answer_are_left_alone() -> None:
    matcher = schema(
        VOCABULARY,
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    ).matcher()
    drafts = list(b'{"a": 1} and more text after the end')
    assert matcher.accepts(drafts) == len('{"a": 1}')
    assert matcher.accepts([*b'{"a": 1}', len(TABLE) - 1, *b"x"]) == len('{"a": 1}')
    for byte in b'{"a": 1}':
        assert matcher.consume(byte)
    assert matcher.finished and matcher.accepts(list(b" and")) == 0 and matcher.forced_tokens() == []


def test_lenient_leaves_out_by_name_and_says_so() -> None:
    value = {"type": "array", "uniqueItems": True, "items": {"not": {}, "oneOf": [{"type": "number"}, {"minimum": 1}]}}
    made = schema(VOCABULARY, value, lenient=True)
    assert {w.split()[0] for w in made.warnings} >= {"uniqueItems", "items.not"}
    assert "uniqueItems" not in made.source


def test_closing_does_not_change_what_was_given_and_stays_out_of_compositions() -> None:
    given: dict[str, Any] = {"properties": {"a": {"properties": {"b": {}}}}, "$defs": {"c": {"properties": {"d": {}}}}}
    text = json.dumps(given)
    closed, _ = normalise(given, lenient=False)
    assert json.dumps(given) == text
    assert closed["additionalProperties"] is closed["properties"]["a"]["additionalProperties"] is False
    assert closed["$defs"]["c"]["additionalProperties"] is False
    composed, _ = normalise({**given, "allOf": [{"$ref": "#/$defs/c"}]}, lenient=False)
    assert "additionalProperties" not in composed and "additionalProperties" not in composed["$defs"]["c"]
    data, _ = normalise({"const": {"properties": {"a": 1}}, "enum": [{"properties": 5}]}, lenient=False)
    assert data == {"const": {"properties": {"a": 1}}, "enum": [{"properties": 5}]}, "values are not schemas"


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Schemas with composition, references, patterns and ranges."""
    leaves: list[dict[str, Any]] = [
        {"type": "string", "minLength": rng.randrange(3), "maxLength": 4},
        {"type": "string", "pattern": rng.choice(["^[ab]+$", "b", "^a", "x$", "^(é|ü)*$"]), "maxLength": 6},
        {"type": "integer", "minimum": rng.randrange(-20, 5), "maximum": rng.randrange(5, 2000)},
        {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
        {"type": "integer", "multipleOf": rng.randrange(2, 9), "minimum": 1},
        {"enum": [1, "one", None, [1], {"a": 1}]}, {"const": {"k": ["v", 2.5]}}, {"type": ["boolean", "null"]},
        {"$ref": "#/$defs/leaf"}, {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
    ]  # fmt: skip
    if depth == 0:
        return rng.choice(leaves)

    def sub() -> dict[str, Any]:
        return random_schema(rng, depth - 1)

    names = rng.sample(["a", "b", "c", "é", 'q"'], rng.randrange(1, 4))
    properties = {name: sub() for name in names}
    required = [name for name in names if rng.random() < 0.5]
    kinds: list[dict[str, Any]] = [
        {"type": "object", "properties": properties, "required": required},
        {"type": "object", "properties": properties, "required": required, "additionalProperties": sub()},
        {"type": "object", "patternProperties": {"^[ab]$": sub()}, "additionalProperties": False},
        {"type": "object", "properties": {"a": sub()}, "allOf": [{"properties": {"b": sub()}, "required": ["b"]}]},
        {"type": "array", "items": sub(), "minItems": rng.randrange(2), "maxItems": 2},
        {"type": "array", "prefixItems": [sub(), sub()], "items": False, "minItems": 1},
        {"anyOf": [sub(), sub()]},
        {"allOf": [{"$ref": "#/$defs/leaf"}, {"type": "integer"}]},
        {"$ref": "#/$defs/tree"},
    ]
    return rng.choice(kinds)


@pytest.mark.parametrize("seed", range(150))
def test_every_complete_answer_satisfies_its_schema(seed: int) -> None:
    rng = random.Random(seed)
    value = random_schema(rng, 3)
    value["$defs"] = {
        "leaf": {"type": "integer", "maximum": 40},
        "tree": {"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}, "n": {"type": "null"}}},
    }
    try:
        constraint = schema(VOCABULARY, value)
    except ConstraintError as error:
        assert "oneOf" in error.message or "nsatisfiable" in error.message, (seed, error.message)
        return
    checker = jsonschema.validators.validator_for(value)(value)
    complete = 0
    for _ in range(3):
        matcher, out = constraint.matcher(), b""
        for step in range(300):
            ways = allowed(VOCABULARY, matcher)
            assert ways, (seed, value, out)
            ending = [w for w in ways if w in (b"<end>", b'"', b"}", b"]")]
            way = rng.choice(ending if ending and (step > 40 or rng.random() < 0.3) else ways)
            if way == b"<end>":
                break
            assert matcher.consume(TABLE.index(way))
            out += way
        if matcher.accepting:
            complete += 1
            problems = [e.message for e in checker.iter_errors(json.loads(out))]
            assert not problems, (seed, value, out, problems)
    assert complete or seed, "none of the walks came to an end"


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"oneOf": [{"type": "object", "properties": {n: value}, "required": [n]} for n in "ab"]}
    return value


HOSTILE: dict[str, str] = {
    "b180 powers": '{"type": "string", "pattern": "(a{9999}){9999}"}',
    "b180 nested powers": '{"type": "string", "pattern": "((a{100}){100}){100}"}',
    "b180 backtracking": '{"type": "string", "pattern": "(x+x+)+y"}',
    "b180 states": '{"type": "string", "pattern": "[ab]*a[ab]{20}"}',
    "b180 mixed": '{"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}',
    "b181 oneOf 6": json.dumps(nested(6)),
    "b181 oneOf 12": json.dumps(nested(12)),
    "deep arrays": '{"items":' * 3000 + "{}" + "}" * 3000,
    "a long chain of references": json.dumps(
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)} | {"d5000": {"type": "null"}},
         "$ref": "#/$defs/d0"}),
    "a chain of references within the limit": json.dumps(
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(250)} | {"d250": {"type": "null"}},
         "$ref": "#/$defs/d0"}),
    "a chain of properties within the limit": json.dumps(
        {"$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(250)}
         | {"d250": {"type": "null"}}, "$ref": "#/$defs/d0"}),
    "an endless reference": '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
    "composition that doubles": json.dumps(
        {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
         | {"d60": {"type": "null"}}, "$ref": "#/$defs/d0"}),
    "alternatives that multiply": json.dumps(
        {"allOf": [{"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(3)]}
                   for i in range(14)]}),
    "many values": json.dumps({"enum": [f"word{i:05d}" for i in range(12_000)]}),
    "many properties": json.dumps({"type": "object", "properties": {f"k{i}": {} for i in range(2000)}}),
    "a long value": json.dumps({"const": "ab" * 50_000}),
    "many items": '{"type": "array", "minItems": 9999, "maxItems": 10000, "items": {"enum": [1, 2, "x"]}}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_b180_b181_hostile_schemas_are_bounded(name: str) -> None:
    """Refused, or compiled and masked within a few seconds and half a gigabyte; never the end of the
    process, even where threads have small stacks."""
    script = textwrap.dedent(f"""
        import resource, sys, threading, time
        sys.path[:0] = {sys.path!r}
        import numpy as np
        from byte_tokens import byte_vocabulary
        from offbook.actors.grammar import compile_constraint
        from offbook.actors.grammar_matcher import ConstraintError
        from offbook.actors.request import ResponseFormat
        vocabulary = byte_vocabulary()
        def main():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                fmt = ResponseFormat(type="json_schema", json_schema={HOSTILE[name]!r})
                matcher = compile_constraint(fmt, vocabulary).matcher()
                row = np.zeros(vocabulary.words, np.uint32)
                for byte in b'"aaaaaaaaaaaaaaa':
                    matcher.fill(row)
                    if not matcher.consume(byte):
                        break
            except ConstraintError as error:
                assert error.message
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024, "memory"
            assert time.process_time() < 8, "time"
            done.append(True)
        done = []
        threading.stack_size(512 * 1024)
        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
        assert done
    """)
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
