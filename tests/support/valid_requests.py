"""Hypothesis strategies for requests that every server of the tiny model must answer with 200.

Rules of this file: each field of the API that this model can serve is here, within its range; fields that exclude one
another never come together; every request has a seed, so that asking twice means the same.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]

WORDS = st.sampled_from(
    ["the sky is of the sea", "x", "a and b", "\n\n", "日本語 😀", "<|im_start|>user\nhi<|im_end|>", "in on at er re"]
)
TEXT = WORDS | st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
GRAMMARS = ["root ::= [a-z ]{4,9} [.]", 'root ::= ("日本" | "the ")+', "root ::= [^a]*", 'root ::= "a"{0,3} "b"']
SCHEMAS = [
    {"type": "integer"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, {"enum": ["é", "b", 7, None]},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]},
]  # fmt: skip


def fields(vocabulary: int) -> dict[str, Strategy]:
    """Each optional field of its own."""
    ids = st.lists(st.integers(0, vocabulary - 1), max_size=12)
    penalty = st.floats(-2, 2)
    return {
        "n": st.integers(1, 3), "min_tokens": st.integers(0, 1), "stop": _stops(), "ignore_eos": st.booleans(),
        "context_length_exceeded_behavior": st.sampled_from(["error", "truncate"]),
        "temperature": st.sampled_from([0, 0.0, 1, 2, 0.7]) | st.floats(0, 2), "top_k": st.integers(0, 100),
        "top_p": st.floats(0, 1), "min_p": st.floats(0, 1), "typical_p": st.floats(0, 1),
        "frequency_penalty": penalty, "presence_penalty": penalty, "repetition_penalty": st.floats(0, 2),
        "mirostat_target": st.floats(0, 6), "mirostat_lr": st.floats(0, 1),
        "logit_bias": st.dictionaries(st.integers(0, vocabulary - 1).map(str), st.floats(-100, 100), max_size=4),
        "stream_options": _stream_options(),
        "logprobs": st.sampled_from([True, False, 0, 1, 5]), "top_logprobs": st.integers(0, 5),
        "sampling_mask": st.sampled_from(["count", "non_zero_list", "non_zero_buffer"]),
        "echo": st.booleans(), "echo_last": st.integers(0, 20), "return_token_ids": st.booleans(),
        "raw_output": st.booleans(), "perf_metrics_in_response": st.booleans(),
        "response_format": st.builds(lambda g: {"type": "grammar", "grammar": g}, st.sampled_from(GRAMMARS))
        | st.builds(lambda s: {"type": "json_schema", "json_schema": s}, st.sampled_from(SCHEMAS))
        | st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
        "guess": st.builds(lambda v: ("speculation", v), TEXT | ids)
        | st.builds(lambda v: ("prediction", v), TEXT)
        | st.builds(lambda v: ("prediction", {"type": "content", "content": v}), TEXT),
        "reasoning_effort": st.sampled_from(["none", False]), "thinking": st.just({"type": "disabled"}),
        "reasoning_history": st.just("preserved"), "user": TEXT, "prompt_cache_key": TEXT,
        "prompt_cache_isolation_key": TEXT, "prompt_cache_max_len": st.integers(0, 40),
        "service_tier": st.sampled_from(["auto", "default", "flex", "priority"]),
        "metadata": st.dictionaries(TEXT, TEXT, max_size=2), "images": st.just([]),
        "include_routing_matrix": st.just(False),
    }  # fmt: skip


def _stops() -> Strategy:
    stop = st.sampled_from(["e", "th", " ", "�", "333", "<|im_end|>", "never there"]) | TEXT
    return stop | st.lists(stop, max_size=4)


def _stream_options() -> Strategy:
    return st.fixed_dictionaries({}, optional={
        "include_usage": st.booleans(), "include_internal_content": st.just(False),
        "buffer_tokens": st.integers(0, 5), "buffer_ms": st.sampled_from([0, 0.5, 3]),
        "buffer_mode": st.sampled_from(["any", "all"]), "continuous_usage_stats": st.just(False),
    })  # fmt: skip


@st.composite
def valid_requests(draw: st.DrawFn, model: str, vocabulary: int) -> dict[str, Any]:
    """A body without ``stream``; ``include_internal_content`` is left out because only a stream obeys it."""
    strategies = fields(vocabulary)
    ids = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=40)
    prompt = draw(TEXT | st.lists(TEXT, min_size=1, max_size=3) | ids | st.lists(ids, min_size=1, max_size=3))
    names = draw(st.lists(st.sampled_from(sorted(strategies)), unique=True, max_size=10))
    body = {"model": model, "prompt": prompt, "seed": draw(st.integers(-(2**63), 2**64 - 1))}
    body[draw(st.sampled_from(["max_tokens", "max_completion_tokens"]))] = draw(st.integers(1, 24))
    for name in names:
        value = draw(strategies[name])
        if name == "guess":
            name, value = value
        body[name] = value
    if draw(st.integers(0, 9)) == 0:
        body.pop("max_completion_tokens", None)
        body.pop("min_tokens", None)
        body["max_tokens"] = 0
    return body
