"""From what was asked to what is done: fitting, defaults, prompts, seeds, biases and namespaces, for a known model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_device import VOCABULARY, LetterTokenizer

from offbook.actors.choice import Wants
from offbook.actors.config import EngineConfig
from offbook.actors.errors import InvalidRequest
from offbook.actors.events import Context
from offbook.actors.request import CompletionRequest, from_fields
from offbook.actors.resolve import (
    Limits,
    PromptPlan,
    check_request,
    effective_options,
    estimate_tokens,
    list_prompts,
    namespace_of,
    plan_prompts,
    predicted_ids,
    sampling_params,
    stop_strings,
    text_bytes,
    wants_of,
)

LETTERS = LetterTokenizer()
CONTEXT = 100
LIMITS = Limits(CONTEXT, VOCABULARY, {})
CONFIG = EngineConfig(default_max_tokens=40, prompts_max=4, choices_max=6)


def asked(**fields: object) -> CompletionRequest:
    return from_fields({"model": "m", "prompt": "abc", **fields})


def plans(**fields: object) -> list[PromptPlan]:
    return plan_prompts(asked(**fields), LETTERS, CONFIG, LIMITS)  # type: ignore[arg-type]


def refused(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        request = asked(**fields)
        check_request(request, CONFIG, LIMITS)
        plan_prompts(request, LETTERS, CONFIG, LIMITS)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("abc", ["abc"]),
        (["abc"], ["abc"]),
        (["abc", "d"], ["abc", "d"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: object, prompts: list[object]) -> None:
    assert list_prompts(asked(prompt=prompt)) == prompts
    infos = [plan.info for plan in plans(prompt=prompt)]
    assert [list(i.token_ids) for i in infos] == [LETTERS.encode(p) if isinstance(p, str) else p for p in prompts]
    assert [i.fragments for i in infos] == [(p,) if isinstance(p, str) else tuple(p) for p in prompts]  # type: ignore[arg-type]


@given(st.integers(1, 120), st.none() | st.integers(0, 2**31 - 1), st.sampled_from([None, "error", "truncate"]))
def test_every_length_is_fitted_or_refused_by_name(length: int, tokens: int | None, behaviour: str | None) -> None:
    fields: dict[str, object] = {"prompt": [1] * length, "max_tokens": tokens}
    fields["context_length_exceeded_behavior"] = behaviour
    wanted = CONFIG.default_max_tokens if tokens is None else tokens
    if length + min(wanted, 1) > CONTEXT:
        assert str(length) in refused(**fields).message
        assert str(CONTEXT) in refused(**fields).message
    elif behaviour == "error" and tokens is not None and length + tokens > CONTEXT:
        error = refused(**fields)
        assert error.param == "max_tokens"
        assert all(str(number) in error.message for number in (length, tokens, CONTEXT))
    else:
        (plan,) = plans(**fields)
        assert plan.max_tokens == min(wanted, CONTEXT - length)


def test_max_completion_tokens_is_the_same_thing() -> None:
    assert plans(max_completion_tokens=7)[0].max_tokens == 7
    fields = {"max_completion_tokens": 99, "context_length_exceeded_behavior": "error"}
    assert refused(**fields).param == "max_completion_tokens"
    assert refused(max_tokens=1, max_completion_tokens=1).status == 422


def test_every_bad_prompt_is_reported() -> None:
    error = refused(prompt=[[1], [71], [2, 99], [1] * 101])
    assert [f.loc for f in error.failures] == [("prompt", 1, 0), ("prompt", 2, 1), ("prompt", 3)]
    assert error.status == 400


@pytest.mark.parametrize(
    ("fields", "loc"),
    [
        ({"prompt": ["a"] * 5}, ("prompt",)),
        ({"prompt": ["a"] * 3, "n": 3}, ("n",)),
        ({"n": 7}, ("n",)),
        ({"logprobs": 6}, ("logprobs",)),
        ({"top_logprobs": 6, "logprobs": True}, ("top_logprobs",)),
        ({"logit_bias": {"01": 1}}, ("logit_bias", "01")),
        ({"logit_bias": {"-1": 1}}, ("logit_bias", "-1")),
        ({"logit_bias": {"\u0661": 1}}, ("logit_bias", "\u0661")),
        ({"logit_bias": {"71": 1}}, ("logit_bias", "71")),
        ({"seed": 2**64}, ("seed",)),
        ({"seed": -(2**63) - 1}, ("seed",)),
        ({"min_tokens": 3, "max_tokens": 2}, ("min_tokens",)),
        ({"images": ["data:,"]}, ("images",)),
        ({"include_routing_matrix": True}, ("include_routing_matrix",)),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
         ("stream_options", "continuous_usage_stats")),
        ({"speculation": [1, 71]}, None),
    ],
)  # fmt: skip
def test_refusals_name_the_field(fields: dict[str, object], loc: tuple[str, ...] | None) -> None:
    if loc is not None:
        assert refused(**fields).failures[0].loc == loc
    else:
        with pytest.raises(InvalidRequest) as caught:
            predicted_ids(asked(**fields), LETTERS, LIMITS)  # type: ignore[arg-type]
        assert caught.value.failures[0].loc == ("speculation", 1)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds_of_sixty_four_bits(seed: int) -> None:
    check_request(asked(seed=seed), CONFIG, LIMITS)
    params = sampling_params(asked(seed=seed), {}, seed % 2**64, Wants())
    assert 0 <= params.seed < 2**64


def test_options_are_the_requests_then_the_models_then_neutral() -> None:
    limits = Limits(CONTEXT, VOCABULARY, {"temperature": 0.6, "top_k": 20.0})
    options = effective_options(asked(temperature=0.9, frequency_penalty=0.5), limits)
    assert options == {
        "temperature": 0.9, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "frequency_penalty": 0.5,
    }  # fmt: skip
    assert effective_options(asked(temperature=0), limits)["temperature"] == 0
    assert effective_options(asked(mirostat_target=3), LIMITS)["mirostat_lr"] == 0.1
    assert "mirostat_target" not in effective_options(asked(mirostat_target=0), LIMITS)


def test_biases_are_sorted_and_zero_is_none() -> None:
    params = sampling_params(asked(logit_bias={"9": 1, "2": -3, "4": 0}), {}, 1, Wants())
    assert params.logit_bias == ((2, -3.0), (9, 1.0))
    assert not sampling_params(asked(logit_bias={"4": 0}), {}, 1, Wants()).uses_slot


@pytest.mark.parametrize(
    ("fields", "rows", "top", "echo"),
    [
        ({}, False, 0, 0),
        ({"logprobs": False}, False, 0, 0),
        ({"logprobs": 0}, True, 0, 0),
        ({"logprobs": 3}, True, 3, 0),
        ({"logprobs": True}, True, 0, 0),
        ({"logprobs": True, "top_logprobs": 2}, True, 2, 0),
        ({"logprobs": 3, "echo": True}, True, 3, 3),
        ({"echo": True, "echo_last": 2}, False, 0, 2),
        ({"echo_last": 99}, False, 0, 3),
        ({"echo_last": 0, "echo": True}, False, 0, 0),
    ],
)
def test_what_comes_back(fields: dict[str, object], rows: bool, top: int, echo: int) -> None:
    wants = wants_of(asked(**fields), plans(**fields)[0])
    assert (wants.rows, wants.top, wants.echo) == (rows, top, echo)
    assert wants.echo_text == ("abc" if echo == 3 else None)


def test_namespaces_prefer_the_body_and_an_empty_key_is_a_key() -> None:
    header = Context(isolation_key="header")
    assert namespace_of(asked(), Context()) is None
    assert namespace_of(asked(), header) == "header"
    assert namespace_of(asked(prompt_cache_isolation_key="body"), header) == "body"
    assert namespace_of(asked(prompt_cache_isolation_key=""), header) == ""
    assert namespace_of(asked(prompt_cache_key="k", user="k"), Context(client="k", session="k")) is None


def test_sizes_before_tokenizing() -> None:
    assert estimate_tokens(asked(prompt=["abcd" * 5, "x"])) == 6 + 1
    assert estimate_tokens(asked(prompt=[1] * 9)) == 9
    assert text_bytes(asked(prompt=["abc", "de"])) == 5
    assert text_bytes(asked(prompt=[1, 2])) == 0
    assert text_bytes(asked(prompt=[1, 2], speculation="abc")) == 3
    assert text_bytes(asked(prompt="a", prediction={"content": [{"type": "text", "text": "bcd"}]})) == 4
    assert text_bytes(asked(prompt="a", thinking={"effort": 2, "budget_end_str": "xy"})) == 3


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_strings(stop: object, strings: tuple[str, ...]) -> None:
    assert stop_strings(asked(stop=stop)) == strings


@pytest.mark.parametrize(
    "fields",
    [
        {"speculation": "hey"},
        {"speculation": [8, 5, 25]},
        {"prediction": "hey"},
        {"prediction": {"type": "content", "content": "hey"}},
        {"prediction": {"content": [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]}},
    ],
)
def test_the_forms_of_a_prediction(fields: dict[str, object]) -> None:
    assert predicted_ids(asked(**fields), LETTERS, LIMITS) == [8, 5, 25]  # type: ignore[arg-type]
