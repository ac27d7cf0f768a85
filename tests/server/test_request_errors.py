"""How a request is refused: every failure at once, in the words that clients compare."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.actors.errors import InvalidRequest
from offbook.actors.request import CompletionRequest, from_fields


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        from_fields({"model": "m", "prompt": "p", **fields})
    return caught.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "Input should be less than or equal to 2, field: 'temperature', value: 3"),
        ({"top_k": -1}, "Input should be greater than or equal to 0, field: 'top_k', value: -1"),
        ({"max_tokens": 1.0}, "Input should be a valid integer, field: 'max_tokens', value: 1.0"),
        ({"temperature": True}, "Input should be a valid number, field: 'temperature', value: True"),
        ({"stream": "yes"}, "Input should be a valid boolean, field: 'stream', value: 'yes'"),
        ({"user": 5}, "Input should be a valid string, field: 'user', value: 5"),
        ({"prompt": None}, "Field required, field: 'prompt'"),
        ({"prompt": []}, "List should have at least 1 item after validation, not 0, field: 'prompt'"),
        ({"prompt": [[1], []]}, "List should have at least 1 item after validation, not 0, field: 'prompt[1]'"),
        ({"prompt": [1, "a"]}, "Input should be a valid integer, field: 'prompt[1]', value: 'a'"),
        ({"prompt": ["a", 1]}, "Input should be a valid string, as the first prompt is, field: 'prompt[1]', value: 1"),
        ({"prompt": [[1], [-2]]}, "Input should be greater than or equal to 0, field: 'prompt[1][0]', value: -2"),
        ({"stop": ["a"] * 5}, "List should have at most 4 items after validation, not 5, field: 'stop'"),
        ({"stop": [""]}, "String should have at least 1 character, field: 'stop[0]', value: ''"),
        ({"logit_bias": {"7": 101}}, "Input should be less than or equal to 100, field: 'logit_bias.7', value: 101"),
        ({"metadata": {"a": 1}}, "Input should be a valid string, field: 'metadata.a', value: 1"),
        ({"stream_options": 1}, "Input should be an object, field: 'stream_options', value: 1"),
        (
            {"max_tokens": 1, "max_completion_tokens": 1},
            "Cannot be given together with 'max_tokens', field: 'max_completion_tokens'",
        ),
        ({"speculation": "a", "prediction": "b"}, "Cannot be given together with 'speculation', field: 'prediction'"),
        ({"response_format": {"type": "grammar"}}, "Field required, field: 'response_format.grammar'"),
        (
            {"response_format": {"type": "text", "grammar": "x"}},
            "Has no meaning with type 'text', field: 'response_format.grammar'",
        ),
        (
            {"thinking": {"budget_tokens": 3}},
            "Input should be greater than or equal to 1024, field: 'thinking.budget_tokens', value: 3",
        ),
        ({"mirostat_target": math.inf}, "Input should be a finite number, field: 'mirostat_target', value: inf"),
        (
            {"service_tier": "gold"},
            "Input should be 'auto', 'default', 'flex' or 'priority', field: 'service_tier', value: 'gold'",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_one_failure_is_one_sentence(fields: dict[str, Any], message: str) -> None:
    error = refusal(**fields)
    assert (error.status, str(error)) == (422, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zzz": 1}, "Extra inputs are not permitted, field: 'zzz'"),
        ({"routing_matrix_format": "parquet_v1"}, "Extra inputs are not permitted, field: 'routing_matrix_format'"),
        (
            {"routing_matrix_format": "parquet_v1", "zzz": 1, "n": 0},
            "Extra inputs are not permitted, field: 'routing_matrix_format'",
        ),
        ({"sampling_mask": "parquet_v1"}, "Extra inputs are not permitted, field: 'sampling_mask'"),
        ({"stream_options": {"x": 1}}, "Extra inputs are not permitted, field: 'stream_options.x'"),
        ({"thinking": {"type": "disabled", "keep": "all"}}, "Extra inputs are not permitted, field: 'thinking.keep'"),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_do_not_exist_are_400(fields: dict[str, Any], message: str) -> None:
    error = refusal(**fields)
    assert (error.status, str(error)) == (400, message)


def test_all_failures_come_at_once_and_a_broken_schema_outweighs_unknown_fields() -> None:
    error = refusal(temperature=3, n=0, zzz=1, prompt=[], max_tokens=2, max_completion_tokens=3)
    assert error.status == 422
    assert {f.loc for f in error.failures} == {
        ("temperature",), ("n",), ("zzz",), ("prompt",), ("max_completion_tokens",)
    }  # fmt: skip
    assert str(error).startswith("5 request validation errors: ")


def test_a_union_speaks_for_the_branch_that_was_meant_or_for_all() -> None:
    assert [f.loc for f in refusal(logprobs=-1).failures] == [("logprobs",)]
    assert [f.loc for f in refusal(logprobs="x").failures] == [("logprobs", "int"), ("logprobs", "bool")]
    paths = [f.loc[1] for f in refusal(reasoning_effort="loud").failures]
    assert paths[1:] == ["int", "bool"] and str(paths[0]).startswith("literal['")


def test_null_and_absent_are_the_same() -> None:
    nulls = dict.fromkeys(CompletionRequest.__struct_fields__)
    assert from_fields({**nulls, "model": "m", "prompt": "p"}) == from_fields({"model": "m", "prompt": "p"})


@pytest.mark.parametrize("prompt", ["p", ["p", "q"], [1, 2], [[1], [2, 3]], (1, 2), ""])
def test_the_forms_of_a_prompt(prompt: Any) -> None:
    from_fields({"model": "m", "prompt": prompt})


def test_huge_wrong_bodies_make_small_errors() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    wrong = {"logit_bias": {str(i): 999 for i in range(50_000)}, "metadata": deep, "stop": "x" * 10**6, "zzz": deep}
    unknown = {f"k{i}": 1 for i in range(50_000)}
    error = refusal(prompt=["a", *range(50_000)], images=5, **wrong, **unknown)
    assert len(str(error)) < 20_000


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*CompletionRequest.__struct_fields__, "zzz"]), JUNK, max_size=5))
def test_the_slow_path_finds_a_failure_wherever_the_decoder_does(fields: dict[str, Any]) -> None:
    """Two independent readings of one schema: they must agree on what is wrong at all."""
    body = {"model": "m", "prompt": "p", **fields}
    try:
        msgspec.convert(body, CompletionRequest)
        decodes = True
    except msgspec.ValidationError:
        decodes = False
    try:
        from_fields(body)
        accepted = True
    except InvalidRequest as error:
        accepted = False
        assert error.failures and error.status in (400, 422)
    assert decodes or not accepted


def test_every_range_is_enforced_at_its_edges() -> None:
    edges = {"temperature": 2, "top_k": 100, "top_p": 1, "min_p": 1, "typical_p": 1, "frequency_penalty": 2, "n": 128,
             "repetition_penalty": 2, "presence_penalty": 2}  # fmt: skip
    for name, most in edges.items():
        assert getattr(from_fields({"model": "m", "prompt": "p", name: most}), name) == most
        assert refusal(**{name: most + 1}).failures[0].loc == (name,)


def test_ids_are_checked_in_bulk_and_one_by_one_alike() -> None:
    pick = random.Random(4)
    for _ in range(200):
        ids = [pick.choice([0, 5, 2**31 - 1, 2**31, -1, True, 1.5, "x", 10**30]) for _ in range(3)]
        fine = all(type(t) is int and 0 <= t < 2**31 for t in ids)
        try:
            from_fields({"model": "m", "prompt": ids if type(ids[0]) is int else [[*ids]]})
            assert fine, ids
        except InvalidRequest:
            assert not fine, ids
