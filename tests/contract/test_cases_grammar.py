"""Fault reports about other servers over HTTP, ids in the names: grammars and schemas.

Hostile constraints are also tried without HTTP (tests/actors): here it counts that the door answers in bounded time,
with a 4xx that names the field or with text that is valid, and that nobody else notices.
"""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

import jsonschema
import pytest
from live import Body, Live, grammar, schema

GREEDY: dict[str, Any] = {"temperature": 0}
ANSWER_S = 10.0  # the report wants 5 s; this machine may be busy


def valid(choice: Body, wanted: Any) -> Any:
    """The value of a finished answer, which fits its schema; of an unfinished one, nothing."""
    if choice["finish_reason"] == "length":
        return None
    value = json.loads(choice["text"])
    jsonschema.validate(value, wanted)
    return value


def refused_or_valid(live: Live, wanted: Any, **fields: Any) -> None:
    """4xx that names the field, or an answer that fits; in bounded time, and the canary sings."""
    before, began = live.canary(), time.monotonic()
    answer = live.ask(response_format=schema(wanted), **fields)
    assert time.monotonic() - began < ANSWER_S
    if answer.status == 200:
        valid(answer.json["choices"][0], wanted)
    else:
        assert 400 <= answer.status < 500 and "response_format" in answer.json["error"]["message"]
    assert live.canary() == before


# -- what is no schema, no grammar -----------------------------------------------------------------------------------

NO_SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"foo": "bar"}}, {"type": "banana"}, {"type": ["string", 5]},
    {"required": "a", "type": "object"}, {"enum": []}, {"minimum": "x", "type": "integer"}, [], "not json", 7,
]  # fmt: skip


@pytest.mark.parametrize("wanted", NO_SCHEMAS, ids=str)
def test_b172_what_is_no_schema(tiny: Live, wanted: Any) -> None:
    before = tiny.canary()
    assert "response_format" in tiny.refused("j", max_tokens=8, response_format=schema(wanted))
    assert tiny.canary() == before


NO_GRAMMARS = [
    'Root ::= "a"', "root ::= missing", "root ::=", "", 'root ::= "a', "root ::= [z-a]", 'root ::= "\\u12"', "\u0000",
    "root ::= (", 'root ::= "a"{7,2}', 'root ::= "a"{,}', 'root ::= "a"{-1,2}', "root ::= root",
    'root ::= "a"{2,1}{2,1}',
]  # fmt: skip


@pytest.mark.parametrize("text", NO_GRAMMARS)
def test_b173_b179_what_is_no_grammar(tiny: Live, text: str) -> None:
    """A rule without a body is no grammar either; the refusal names the field."""
    before = tiny.canary()
    form = {"type": "grammar", "grammar": text}
    assert "grammar" in tiny.refused(max_tokens=3, response_format=form)
    assert tiny.canary() == before


@pytest.mark.parametrize("count", ["{0,0}", "{1000000000}", "{0,4294967296}", "{3}", "{2,}", "{0,3}{0,2}"])
def test_b179_repetitions_of_any_size(tiny: Live, count: str) -> None:
    before, began = tiny.canary(), time.monotonic()
    form = {"type": "grammar", "grammar": f'root ::= "a"{count}'}
    answer = tiny.ask(max_tokens=8, **GREEDY, response_format=form)
    assert time.monotonic() - began < ANSWER_S and answer.status in (200, 400)
    if answer.status == 200:
        assert set(answer.json["choices"][0]["text"]) <= {"a"}
    assert tiny.canary() == before


FORMS: list[tuple[Any, bool]] = [
    ({"type": "json_schema"}, False), ({"type": "json_schema", "schema": {"type": "object"}}, True),
    ({"type": "json_schema", "json_schema": None}, False),
    ({"type": "json_schema", "json_schema": '{"type":"object"}'}, True), ({"type": "grammar"}, False),
    ({"type": "grammar", "grammar": None}, False), ({"type": "nope"}, False), ({}, False), (None, True),
    ("json_object", False), ({"type": "text"}, True), ({"type": "json_object", "schema": {"type": "object"}}, True),
    ({"type": "json_object", "extra": 1}, False), ([], False), ({"type": "grammar", "grammar": 5}, False),
]  # fmt: skip


@pytest.mark.parametrize(("form", "fine"), FORMS, ids=str)
def test_b198_missing_pieces(tiny: Live, form: Any, fine: bool) -> None:
    before = tiny.canary()
    if fine:
        tiny.both(max_tokens=4, **GREEDY, response_format=form)
    else:
        assert "response_format" in tiny.refused(max_tokens=4, response_format=form)
    assert tiny.canary() == before


def test_b175_a_bad_one_after_a_good_one(tiny: Live) -> None:
    before = tiny.canary()
    for pattern in ("^(z.*)$", "^(|z.*)$"):
        refused_or_valid(tiny, {"type": "string", "pattern": pattern}, max_tokens=8)
    assert "grammar" in tiny.refused(max_tokens=4, response_format={"type": "grammar", "grammar": "root ::= ("})
    assert tiny.text(max_tokens=4, **GREEDY, response_format=grammar("fine")) == "fine"
    assert tiny.canary() == before


# -- hostile ones ----------------------------------------------------------------------------------------------------

KIDS = {"type": "array", "items": {"$ref": "#/definitions/node"}}
NODE = {
    "type": "object", "required": ["n"], "additionalProperties": False,
    "properties": {"n": {"type": "string", "pattern": "^[k-p]+$"}, "kids": {"$ref": "#/definitions/kids"}},
}  # fmt: skip
TREE = {
    "type": "object", "properties": {"kids": {"$ref": "#/definitions/kids"}}, "required": ["kids"],
    "additionalProperties": False, "definitions": {"kids": KIDS, "node": NODE},
}  # fmt: skip


def test_b176_schemas_that_refer_to_each_other(live: Live) -> None:
    for seed in range(4):
        choice = live.choice("tree", max_tokens=40, temperature=1, seed=seed, response_format=schema(TREE))
        valid(choice, TREE)
        assert choice["text"].startswith("{")


PATTERNS = [
    "(a{9999}){9999}", "((a{100}){100}){100}", "(x+x+)+y", "[ab]*a[ab]{20}", "^(([a-z])+.)+[A-Z]([a-z])+$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_b180_patterns_that_explode(tiny: Live, pattern: str) -> None:
    refused_or_valid(tiny, {"type": "string", "pattern": pattern}, max_tokens=4)


@pytest.mark.parametrize("pattern", PATTERNS[:2])
def test_b180_a_compilation_holds_nobody_up(tiny: Live, pattern: str) -> None:
    before = tiny.canary()
    hostile = {"max_tokens": 4, "response_format": schema({"type": "string", "pattern": pattern + "z"})}
    small = {"prompt": "ok", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answers = tiny.together([hostile, *[small] * 5])
    assert [answer.json["choices"][0]["text"] for answer in answers[1:]] == [before] * 5


@pytest.mark.parametrize("depth", [4, 8, 16, 60])
def test_b181_nested_choices(tiny: Live, depth: int) -> None:
    wanted: Any = {"type": "null"}
    for i in range(depth):
        one, other = (
            {"type": "object", "properties": {f"{name}{i}": wanted}, "required": [f"{name}{i}"]} for name in "ab"
        )
        wanted = {"oneOf": [one, other]} if depth < 10 or i > depth - 4 else {"oneOf": [one, {"type": "integer"}]}
    refused_or_valid(tiny, wanted, max_tokens=4)


# -- what is allowed, and nothing else -------------------------------------------------------------------------------


def test_b185_nothing_follows_the_end(live: Live) -> None:
    wanted = {"type": "object", "properties": {}, "additionalProperties": False}
    bias = live.only("\n", bias=80)
    choice = live.choice(max_tokens=80, **GREEDY, logit_bias=bias, response_format=schema(wanted))
    assert (choice["finish_reason"], json.loads(choice["text"])) == ("stop", {})
    assert choice["text"].endswith("}") and len(choice["text"]) < 40


def test_b186_pattern_and_length_together(live: Live) -> None:
    items = {"type": "string", "pattern": "^[a-z ]+$", "minLength": 1, "maxLength": 8}
    wanted = {"type": "array", "items": items, "minItems": 2, "maxItems": 2}
    choice = live.choice("long text please", max_tokens=80, temperature=1, seed=1, response_format=schema(wanted))
    assert valid(choice, wanted) is not None


RANGES: list[tuple[Body, str]] = [  # and what some answer is to look like
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, r"0?\.\d*[1-9]"),
    ({"type": "number", "minimum": 2, "maximum": 7}, r"[2-6]\.\d*[1-9]"),
    ({"type": "integer", "minimum": -8}, "-[1-8]"),
    ({"type": "integer", "minimum": 3}, r"[1-9]\d+"),
    ({"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 11}, "10$"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "interior"), RANGES)
def test_b187_number_ranges(tiny: Live, wanted: Body, interior: str) -> None:
    body = tiny.both("n:", n=50, max_tokens=24, temperature=1.5, seed=3, response_format=schema(wanted))
    values = [valid(choice, wanted) for choice in body["choices"]]
    assert all(value is None or math.isfinite(value) for value in values)
    texts = [choice["text"] for choice in body["choices"]]
    assert any(re.match(interior, text) for text in texts), texts


def test_b188_a_range_across_zero(tiny: Live) -> None:
    wanted = {"type": "number", "minimum": -3, "maximum": 3}
    bias = {str(tiny.id_of(text)): value for text, value in (("-", 60), ("0", 50), (".", 55), ("5", 40))}
    choice = tiny.choice(max_tokens=8, **GREEDY, logit_bias=bias, response_format=schema(wanted))
    assert choice["text"].startswith("-0")


@pytest.mark.parametrize("data", [[9], [10], [0], [0x5C], [0x71], [0x22], [0xC0], [0xED, 0xA0, 0x80], [0xFF]], ids=str)
def test_b189_b190_strings_that_a_strict_parser_takes(tiny: Live, data: list[int]) -> None:
    shown = tiny.plain([[i] for i in range(3, 259)], max_tokens=0, echo=True, logprobs=True)["choices"]
    of_byte = {choice["logprobs"]["content"][0]["bytes"][0]: i + 3 for i, choice in enumerate(shown)}
    wanted = {"type": "string", "maxLength": 12}
    fields: dict[str, Any] = {"max_tokens": 60, "logit_bias": {str(of_byte[byte]): 60 for byte in data}}
    for temperature in (0, 1):
        body = tiny.both("s:", n=4, temperature=temperature, seed=3, **fields, response_format=schema(wanted))
        for choice in body["choices"]:
            value = valid(choice, wanted)
            assert value is None or not re.search("[\ud800-\udfff]", value)


CONSTANTS = ['line1\nline2 "q" \\ é 漢', "http://a.example/p", "café/日本", "<b>& ", "\u0001\u007f\u2028", "😀", ""]


@pytest.mark.parametrize("value", CONSTANTS)
def test_b190_b191_constants_come_as_they_are(live: Live, value: str) -> None:
    choice = live.choice("s:", max_tokens=60, **GREEDY, response_format=schema({"const": value}))
    assert (json.loads(choice["text"]), choice["finish_reason"]) == (value, "stop")
    assert "\\/" not in choice["text"]


def test_b191_enums(live: Live) -> None:
    choice = live.choice("url:", max_tokens=60, **GREEDY, response_format=schema({"enum": CONSTANTS}))
    assert json.loads(choice["text"]) in CONSTANTS


def test_b194_the_end_of_a_grammar_is_a_stop(live: Live) -> None:
    choice = live.choice(max_tokens=20, **GREEDY, response_format=grammar("abc"))
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    form = {"type": "grammar", "grammar": 'root ::= "a" | "aa"'}
    body = live.both(n=6, max_tokens=20, temperature=1, seed=1, top_p=0.5, response_format=form)
    for choice in body["choices"]:
        assert choice["text"] in ("a", "aa") and choice["finish_reason"] == "stop"


def test_b194_a_cut_answer_says_so(live: Live) -> None:
    choice = live.choice(max_tokens=2, **GREEDY, response_format=grammar("abc def ghi jkl"))
    assert choice["finish_reason"] == "length" and "abc def ghi jkl".startswith(choice["text"])


@pytest.mark.parametrize("guess", ['{"a": 1} and more text after the end', '{"a": ', "nothing like it", '{"b": 2}'])
def test_b196_predictions_beyond_the_end(live: Live, guess: str) -> None:
    wanted = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {"max_tokens": 20, **GREEDY, "response_format": schema(wanted), "logprobs": 1}
    assert live.both(**fields, speculation=guess)["choices"] == live.lone(**fields)["choices"]


@pytest.mark.model
def test_the_default_model_fills_in_a_form(smollm2: Live) -> None:
    wanted = {
        "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
        },
    }  # fmt: skip
    body = smollm2.both(
        "A person as JSON: ", n=2, max_tokens=80, seed=5, temperature=0.8, response_format=schema(wanted)
    )
    assert [valid(choice, wanted) is not None for choice in body["choices"]] == [True, True]
