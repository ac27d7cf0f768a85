"""Bytes to fields: what is JSON, what is not, and that no body takes long to find out."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.server.body import BadBody, check_media, parse

KEYS = st.text(max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=6), st.booleans(), st.sampled_from([None, 2]))
def test_what_is_json_is_read(fields: dict[str, object], escaped: bool, indent: int | None) -> None:
    data = json.dumps(fields, ensure_ascii=escaped, indent=indent).encode()
    assert parse(data) == json.loads(data)


@given(st.binary(max_size=200))
def test_any_bytes_give_fields_or_a_refusal(data: bytes) -> None:
    try:
        fields = parse(data)
    except BadBody as error:
        assert error.status == 400 and error.message
    else:
        assert fields == json.loads(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"[1]", "a JSON object"),
        (b'{"a":1,"a":2}', "'a' appears twice"),
        (b'{"x":":","o":{"a":1,"b":{"a":1,"a":1}}}', "'a' appears twice"),
        (b'{"a":NaN}', "not valid JSON"),
        (b'{"a":1}x', "trailing"),
        (rb'{"a":"\ud83d"}', "surrogate"),
        (b'\xff\xfe{"a":1}', "byte order mark"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":1e999}', "out of range"),
    ],
)
def test_a_refusal_says_why(data: bytes, words: str) -> None:
    with pytest.raises(BadBody, match=words):
        parse(data)


def test_colons_in_text_are_no_keys() -> None:
    assert parse(b'{"a":"x:y:z","b":{"a":1}}') == {"a": "x:y:z", "b": {"a": 1}}


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":"' + b"x:" * 2_000_000 + b'"}',
        b'{"a":[' + b"1," * 2_000_000 + b"1]}",
        b'{"a":' + b'{"b":' * 800_000,
        b'{"a":"' + rb"\u0041" * 600_000 + b'"}',
        b"{" + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}",
    ],
    ids=["text", "ids", "deep", "escapes", "keys"],
)
def test_four_megabytes_of_anything_are_read_or_refused_soon(data: bytes) -> None:
    began = time.perf_counter()
    try:
        parse(data)
    except BadBody:
        pass
    assert time.perf_counter() - began < 2.0


PLAIN = [None, "application/json", "Application/JSON; charset=UTF-8", "application/x+json", 'text/json;charset="utf-8"']


@pytest.mark.parametrize("media", PLAIN)
def test_media_types_that_are_json(media: str | None) -> None:
    check_media(media, None)
    check_media(media, "identity")


@pytest.mark.parametrize(
    ("media", "encoding"),
    [("text/plain", None), ("json", None), ("application/json; charset=utf-16", None), ("application/json", "br")],
)
def test_media_types_that_are_not(media: str, encoding: str | None) -> None:
    with pytest.raises(BadBody) as refusal:
        check_media(media, encoding)
    assert refusal.value.status == 415
