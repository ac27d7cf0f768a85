"""Hypothesis strategies for requests: valid ones, nearly valid ones, and JSON of any kind in any place.

Rules of this file: everything is small (a fuzzing run is many requests), and every field of the API is here; a test
compares the names with the schema, so that a new field cannot be forgotten.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
FLAG = st.booleans()


def prompts(vocabulary: int) -> Strategy:
    """All four forms, now and then with an id that is out of range."""
    ids = st.lists(st.integers(0, vocabulary), min_size=1, max_size=20)
    words = TEXT | st.text("the sky", min_size=1, max_size=40)
    return words | st.lists(words, min_size=1, max_size=3) | ids | st.lists(ids, min_size=1, max_size=3)


def schemas() -> Strategy:
    """JSON schemas: mostly of known keywords, sometimes contradictory, sometimes nonsense."""
    leaf = st.sampled_from([
        {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {}, True,
        {"enum": ["a", 1, None]}, {"const": "x"}, {"type": "string", "maxLength": 3}, {"pattern": "^a+$"},
        {"type": "integer", "minimum": 3, "maximum": 1}, {"$ref": "#"}, {"type": "string", "pattern": "(("},
        {"not": {}}, {"type": "string", "pattern": "^[a-c]{2,3}$"},
    ])  # fmt: skip

    def larger(inner: Strategy) -> Strategy:
        parts = st.dictionaries(st.sampled_from(["a", "b", "é", ""]), inner, max_size=3)
        return (
            st.builds(
                lambda p, r: {"type": "object", "properties": p, "required": r}, parts, st.lists(TEXT, max_size=2)
            )
            | st.builds(lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(-1, 4))
            | st.builds(lambda k, v: {k: v}, st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, max_size=3))
            | st.builds(lambda k, v: {k: v}, TEXT, inner)
        )

    return st.recursive(leaf, larger, max_leaves=6)


def grammars() -> Strategy:
    """GBNF: rules put together from pieces that may fit, loop, lack or contradict."""
    piece = st.sampled_from([
        '"a"', '"é"', '""', "[a-z]", "[^a]", "[]", "[z-a]", "root", "item", "missing", "(", ")", "|", "*", "+", "?",
        "{2}", "{2,1}", "{0,99999}", ".", "\\x41", "# note", "\n", "::=", '"', "\u0000",
    ])  # fmt: skip
    body = st.lists(piece, min_size=1, max_size=8).map(" ".join)
    return st.builds(lambda a, b: f"root ::= {a}\nitem ::= {b}\n", body, body) | body | TEXT


def response_formats() -> Strategy:
    return (
        st.builds(lambda g: {"type": "grammar", "grammar": g}, grammars())
        | st.builds(lambda s: {"type": "json_schema", "json_schema": {"schema": s}}, schemas())
        | st.builds(lambda s: {"type": "json_object", "schema": s}, schemas())
        | st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "nonsense"}])
    )


def _fields() -> dict[str, Strategy]:
    """A strategy for each optional field; its values reach a little beyond what is allowed."""
    number: Callable[[float, float], Strategy] = lambda a, b: st.floats(a - 0.1, b + 0.1)  # noqa: E731
    count = st.integers(-1, 12)
    effort = st.sampled_from(["low", "none", "max", "no such"]) | st.integers(0, 5000) | FLAG
    options = st.fixed_dictionaries({}, optional={
        "include_usage": FLAG, "include_internal_content": FLAG, "buffer_tokens": count, "buffer_ms": number(0, 5),
        "buffer_mode": st.sampled_from(["any", "all", "x"]), "continuous_usage_stats": FLAG,
    })  # fmt: skip
    thinking = st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["enabled", "disabled", "adaptive"]), "budget_tokens": st.integers(1000, 2000),
        "keep": st.just("all"), "effort": effort, "budget_end_str": TEXT,
    })  # fmt: skip
    return {
        "max_tokens": count, "max_completion_tokens": count, "min_tokens": count, "n": st.integers(0, 4),
        "context_length_exceeded_behavior": st.sampled_from(["error", "truncate"]),
        "stop": TEXT | st.lists(TEXT, max_size=5), "ignore_eos": FLAG, "temperature": number(0, 2),
        "top_k": st.integers(-1, 101), "top_p": number(0, 1), "min_p": number(0, 1), "typical_p": number(0, 1),
        "frequency_penalty": number(-2, 2), "presence_penalty": number(-2, 2), "repetition_penalty": number(0, 2),
        "mirostat_target": number(0, 8), "mirostat_lr": number(0, 1), "seed": st.integers(-(2**64), 2**64),
        "logit_bias": st.dictionaries(st.integers(-1, 301).map(str) | TEXT, number(-100, 100), max_size=4),
        "stream": FLAG, "stream_options": options, "logprobs": FLAG | st.integers(-1, 6), "top_logprobs": count,
        "sampling_mask": st.sampled_from(["count", "non_zero_list", "non_zero_buffer"]), "echo": FLAG,
        "echo_last": count, "return_token_ids": FLAG, "raw_output": FLAG, "perf_metrics_in_response": FLAG,
        "include_routing_matrix": FLAG, "response_format": response_formats(),
        "speculation": TEXT | st.lists(st.integers(0, 301), max_size=5),
        "prediction": TEXT | st.builds(lambda t: {"type": "content", "content": t}, TEXT), "reasoning_effort": effort,
        "reasoning_history": st.sampled_from(["disabled", "interleaved", "preserved"]), "thinking": thinking,
        "user": TEXT, "prompt_cache_key": TEXT, "prompt_cache_isolation_key": TEXT, "prompt_cache_max_len": count,
        "service_tier": st.sampled_from(["auto", "default", "flex", "priority"]),
        "metadata": st.dictionaries(TEXT, TEXT, max_size=3), "images": st.lists(TEXT, max_size=2),
    }  # fmt: skip


FIELDS = _fields()


@st.composite
def requests(draw: st.DrawFn, model: str, vocabulary: int) -> dict[str, Any]:
    """A body: a few fields with sensible values; in one of four, something of any kind somewhere."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=7))
    body = {"model": model, "prompt": draw(prompts(vocabulary)), "max_tokens": 4}
    body |= {name: draw(FIELDS[name]) for name in names}
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from(["model", "prompt", *sorted(FIELDS)]) | TEXT)] = draw(JSON)
    return body


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A few bytes flipped, lost, doubled or put in; now and then cut short or cut into another place."""
    out = bytearray(data)
    marks = [b"\r\n", b"\0", b":", b"{", b'"', b"\xff", b"0", b"\r\n\r\n", b"chunked", b"HTTP/1.1", b" ", b"9" * 20]
    for _ in range(chance.choice([1, 1, 2, 3, 8, 30])):
        at = chance.randrange(len(out) + 1)
        end = min(at + chance.randint(1, 12), len(out))
        match chance.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at:end]
            case 2:
                out[at:at] = out[at:end]
            case 3:
                out[at:at] = chance.choice(marks)
            case _ if chance.random() < 0.2:
                del out[at:]
    return bytes(out)
