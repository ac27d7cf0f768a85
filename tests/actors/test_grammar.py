"""Constraints: whatever a matcher lets through satisfies the format, and whatever cannot be enforced is refused.

The judge is independent: ``jsonschema`` for schemas, ``re`` for grammars. The writer is a random walk through the masks
over a vocabulary of single bytes and a few longer pieces.
"""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.actors.grammar import Constraint, Vocabulary, compile_constraint
from offbook.actors.grammar_matcher import ConstraintError, Matcher
from offbook.actors.request import ResponseFormat

PIECES = ['{"', '":', '", "', "null", "true", "false", "[]", "{}", "12", "ab", '":"', "  ", "é", "日本"]
BYTES = [bytes([i]) for i in range(256)]
TABLE = [*BYTES, *(p.encode() for p in PIECES), b"<end>", b""]
EOS = len(TABLE) - 2
ROWS = len(TABLE) + 3  # a padded vocabulary


class ByteTokens:
    bos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return TABLE[token_id] if token_id < len(TABLE) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


VOCABULARY = Vocabulary(ByteTokens(), (EOS,), ROWS)


def compiled(fmt: dict[str, Any], **options: Any) -> Constraint:
    kwargs = {("schema" if k == "schema" else k): v for k, v in fmt.items()}
    made = compile_constraint(ResponseFormat(**kwargs), VOCABULARY, **options)
    assert made is not None
    return made


def allowed(matcher: Matcher) -> list[int]:
    row = np.zeros(VOCABULARY.words, np.uint32)
    matcher.fill(row)
    return [i for i in range(32 * VOCABULARY.words) if row[i >> 5] >> np.uint32(i & 31) & np.uint32(1)]


def walk(constraint: Constraint, rng: random.Random, limit: int = 400) -> tuple[str, bool]:
    """A random answer, and whether it is complete; towards the end it closes whatever it can."""
    matcher, out = constraint.matcher(), b""
    for i in range(limit):
        ids = allowed(matcher)
        assert ids, "a matcher that is not finished always leaves a way on"
        assert max(ids) < len(TABLE) - 1, "no padding and no empty token"
        assert (EOS in ids) <= matcher.accepting
        closing = [t for t in ids if TABLE[t] in (b'"', b"}", b"]", b"<end>")]
        token = rng.choice(closing if closing and (i > 60 or rng.random() < 0.15) else ids)
        if token == EOS:
            return out.decode("utf-8", "replace"), True
        assert matcher.consume(token)
        out += TABLE[token]
        if matcher.finished:
            return out.decode("utf-8", "replace"), True
    return out.decode("utf-8", "replace"), False


SCALARS = st.sampled_from([
    {"type": "string"}, {"type": "string", "maxLength": 5}, {"type": "integer"}, {"type": "boolean"}, {"type": "null"},
    {"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["cat", "dog", 3]}, {"const": "x"}, {"type": "number"},
])  # fmt: skip


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)
    return properties.flatmap(
        lambda p: st.lists(st.sampled_from(sorted(p)), unique=True).map(
            lambda required: {"type": "object", "properties": p, "required": required, "additionalProperties": False}
        )
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        objects(inner),
        inner.map(lambda s: {"type": "array", "items": s, "maxItems": 3}),
        st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s}),
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_every_complete_answer_satisfies_its_schema(schema: dict[str, Any], seed: int) -> None:
    text, complete = walk(compiled({"type": "json_schema", "json_schema": schema}), random.Random(seed))
    if complete:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("seed", range(20))
def test_json_object_is_an_object_of_json(seed: int) -> None:
    text, complete = walk(compiled({"type": "json_object"}), random.Random(seed))
    if complete:
        assert isinstance(json.loads(text), dict)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "fmt",
    [
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": json.dumps(SCHEMA)},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
def test_every_way_to_give_a_schema_means_the_same(fmt: dict[str, Any]) -> None:
    for seed in range(8):
        text, complete = walk(compiled(fmt), random.Random(seed))
        if complete:
            assert json.loads(text).keys() == {"a"}, "properties that are listed are all there are"


GRAMMARS = [
    ('root ::= "yes" | "no"', "yes|no"),
    ("root ::= [0-9]{1,3} ( [.] [0-9]+ )?", r"[0-9]{1,3}(\.[0-9]+)?"),
    ("root ::= item+\nitem ::= [a-c] ws\nws ::= | [ ]  # nothing or a space", "([a-c] ?)+"),
    ('root ::= "\\x41" "\\u00e9" [^a-zA-Z\\n]', "Aé[^a-zA-Z\\n]"),
    ('root ::= (\n  "a"\n  | "b"\n)* "!"', "[ab]*!"),
]


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS)
def test_gbnf_means_what_it_says(grammar: str, pattern: str) -> None:
    constraint = compiled({"type": "grammar", "grammar": grammar})
    assert constraint.source == grammar
    complete = [t for t, done in (walk(constraint, random.Random(s), 60) for s in range(40)) if done]
    assert complete
    for text in complete:
        assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize(
    "fmt",
    [
        {"type": "grammar", "grammar": ""},
        {"type": "grammar", "grammar": "root ::= ("},
        {"type": "grammar", "grammar": 'toor ::= "x"'},
        {"type": "grammar", "grammar": "root ::= missing"},
        {"type": "grammar", "grammar": "root ::= root"},
        {"type": "grammar", "grammar": "root ::= [a]{99999999999}"},
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": "{"},
        {"type": "json_schema", "json_schema": "[1]"},
        {"type": "json_schema", "json_schema": {"type": "nonsense"}},
        {"type": "json_schema", "json_schema": {"type": "array", "minItems": 2**64}},
        {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 10**12}},
        {"type": "json_schema", "json_schema": {"uniqueItems": True, "type": "array"}},
        {"type": "json_schema", "json_schema": {"not": {"type": "string"}}},
        {"type": "json_schema", "json_schema": {"$ref": "#/nowhere"}},
        {"type": "json_object", "grammar": "root ::= [a]"},
        {"type": "text", "schema": {}},
    ],
)
def test_what_cannot_be_enforced_is_refused_quickly_and_by_name(fmt: dict[str, Any]) -> None:
    began = time.process_time()
    with pytest.raises(ConstraintError) as caught:
        compiled(fmt)
    assert caught.value.loc[0] == "response_format"
    assert caught.value.message
    assert time.process_time() - began < 2


def test_lenient_leaves_out_and_says_so() -> None:
    made = compiled({"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}, lenient=True)
    assert made.warnings


def test_text_constrains_nothing() -> None:
    assert compile_constraint(ResponseFormat(type="text"), VOCABULARY) is None


def test_masks_ahead_are_the_masks_of_each_step_and_move_nothing() -> None:
    constraint = compiled({"type": "grammar", "grammar": 'root ::= "abc" [0-9] "z"'})
    matcher = constraint.matcher()
    drafts = [ord(c) for c in "abcX"]
    rows = np.zeros((5, VOCABULARY.words), np.uint32)
    assert matcher.fill_ahead(rows, drafts) == 3
    assert matcher.accepts(drafts) == 3
    for i in range(4):
        row = np.zeros(VOCABULARY.words, np.uint32)
        matcher.fill(row)
        assert row.tobytes() == rows[i].tobytes()
        if i < 3:
            assert matcher.consume(drafts[i])


def test_the_answer_may_end_from_a_row_on() -> None:
    """Below a minimum length only where nothing else may follow, and at the minimum also among the rows of drafts."""
    matcher = compiled({"type": "grammar", "grammar": 'root ::= "a"{1,5}'}).matcher()
    rows = np.zeros((6, VOCABULARY.words), np.uint32)
    for end_from, rows_that_end in ((0, [1, 2, 3, 4, 5]), (3, [3, 4, 5]), (9, [5]), (None, [5])):
        matcher.fill_ahead(rows, [ord("a")] * 5, end_from=end_from)
        assert [i for i in range(6) if rows[i, EOS >> 5] >> np.uint32(EOS & 31) & np.uint32(1)] == rows_that_end


def too_complex_soon() -> tuple[Constraint, int]:
    """A grammar of which the library has enough after so many tokens."""
    from llguidance import LLParserLimits

    vocabulary = Vocabulary(ByteTokens(), (EOS,), ROWS)
    vocabulary.limits = LLParserLimits(max_items_in_row=100)
    made = compile_constraint(ResponseFormat(type="grammar", grammar='root ::= s\ns ::= s s | "a" | s s s'), vocabulary)
    assert made is not None
    matcher, taken = made.matcher(), 0
    while matcher.consume(ord("a")):
        taken += 1
    return made, taken


def test_what_becomes_too_complex_is_not_complete() -> None:
    constraint, _ = too_complex_soon()
    matcher = constraint.matcher()
    while matcher.consume(ord("a")):
        assert not matcher.finished
    assert not matcher.finished
    with pytest.raises(ConstraintError, match="too complex"):
        matcher.fill(np.zeros(VOCABULARY.words, np.uint32))


@pytest.mark.parametrize("how", ["accepts", "fill_ahead"])
def test_looking_ahead_at_what_is_too_complex_changes_nothing(how: str) -> None:
    """Drafts are guesses: what only they would meet is not to fail a request, let alone the engine."""
    constraint, most = too_complex_soon()
    matcher, drafts = constraint.matcher(), [ord("a")] * 8
    rows = np.zeros((9, VOCABULARY.words), np.uint32)
    for _ in range(most - 3):
        assert matcher.consume(ord("a"))
    if how == "accepts":
        assert matcher.accepts(drafts) == 3
    else:
        assert matcher.fill_ahead(rows, drafts) == 3
        assert all(rows[i].any() for i in range(3))
        assert not rows[4:].any()
    assert matcher.accepts(drafts) == 0  # it does not look again
    assert matcher.forced_tokens() == []
    row = np.zeros(VOCABULARY.words, np.uint32)
    for _ in range(3):
        matcher.fill(row)
        assert matcher.consume(ord("a"))
    assert not matcher.consume(ord("a"))


def test_forced_tokens_are_what_the_grammar_leaves() -> None:
    matcher = compiled({"type": "grammar", "grammar": 'root ::= "fixed" [0-9]'}).matcher()
    assert b"".join(TABLE[t] for t in matcher.forced_tokens()).startswith(b"f")
    for token in b"fixed":
        assert matcher.consume(token)
    assert matcher.forced_tokens() == []
    assert matcher.consume(ord("7"))
    assert matcher.finished
    assert not matcher.consume(ord("8"))


def test_copies_of_a_constraint_do_not_meet() -> None:
    constraint = compiled({"type": "grammar", "grammar": 'root ::= "a" "b" | "c"'})
    first, second = constraint.matcher(), constraint.matcher()
    assert first.consume(ord("a"))
    assert allowed(first) == [ord("b")]
    assert set(allowed(second)) >= {ord("a"), ord("c")}
