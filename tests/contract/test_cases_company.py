"""Fault reports about other servers over HTTP, ids in the names: what company, a full pool, a shared cache, a
prediction or a thinking budget must not change, and pictures, which this server refuses.

The truth is always the same request alone with a cold cache (``Live.lone``).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from door import joined
from live import Body, Live, ended_well, schema

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
FREE: dict[str, Any] = {"temperature": 1, "ignore_eos": True}


def cached(body: Body) -> int:
    found: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


# -- isolation -------------------------------------------------------------------------------------------------------


def test_b160_a_cache_namespace_is_one_tenants_alone(tiny: Live) -> None:
    prompt, fields = tiny.long_ids(200, seed=160), {"max_tokens": 1, "temperature": 0}
    first = tiny.plain(prompt, **fields, prompt_cache_isolation_key="t1")
    others = [tiny.plain(prompt, **fields, prompt_cache_isolation_key=key) for key in ("t2", None, "", "T1", "t1 ")]
    again = tiny.plain(prompt, **fields, prompt_cache_isolation_key="t1")
    assert [cached(answer) for answer in others] == [0] * 5
    assert cached(again) > 150
    assert all(answer["choices"] == first["choices"] for answer in (*others, again))


def test_b160_the_header_is_the_same_key_and_the_body_wins(tiny: Live) -> None:
    prompt, header = tiny.long_ids(100, seed=1600), {"x-prompt-cache-isolation-key": "h1"}
    fields = {"max_tokens": 1, "temperature": 0}
    assert cached(tiny.ask(prompt, header, **fields).json) == 0
    assert cached(tiny.plain(prompt, **fields, prompt_cache_isolation_key="h1")) > 80
    assert cached(tiny.ask(prompt, header, **fields, prompt_cache_isolation_key="h2").json) == 0
    assert cached(tiny.ask(prompt, header, **fields).json) > 80


def test_b162_keys_of_different_kinds_do_not_collide(tiny: Live) -> None:
    prompt, fields = tiny.long_ids(100, seed=162), {"max_tokens": 1, "temperature": 0}
    assert cached(tiny.plain(prompt, **fields, prompt_cache_isolation_key="SAME")) == 0
    assert cached(tiny.plain(prompt, **fields, prompt_cache_key="SAME")) == 0
    other = tiny.long_ids(100, seed=1620)
    assert cached(tiny.plain(other, **fields, user="SAME", prompt_cache_isolation_key="ab", prompt_cache_key="c")) == 0
    assert cached(tiny.plain(other, **fields, user="SAME", prompt_cache_isolation_key="a", prompt_cache_key="bc")) == 0
    assert cached(tiny.plain(other, **fields, user="SAME")) == 0
    assert cached(tiny.plain(other, **fields, user="ANOTHER")) > 80  # neither user nor prompt_cache_key isolates


@pytest.mark.parametrize("header", ["x-request-id", "x-session-affinity", "x-multi-turn-session-id"])
def test_b217_equal_headers_cross_nothing(tiny: Live, header: str) -> None:
    bodies = [{"prompt": f"story {name}", "max_tokens": 100, **GREEDY, "stream": True} for name in "AB"]
    alone = [tiny.lone(**body) for body in bodies]
    answers = tiny.together([{**body, "headers": {header: "same"}} for body in bodies * 3])
    wholes = [joined(answer.events) for answer in answers]
    assert len({whole["id"] for whole in wholes}) == 6
    for i, whole in enumerate(wholes):
        assert whole["choices"] == alone[i % 2]["choices"]


def test_b229_no_prompt_turns_up_in_anothers_answer(live: Live) -> None:
    rounds, tokens = (1, 4) if live.vocabulary > 300 else (5, 20)
    bodies = [{"prompt": f"marker {i}: repeat it:", "max_tokens": tokens, **GREEDY, "logprobs": 1} for i in range(16)]
    alone = [live.lone(**body)["choices"] for body in bodies]
    for _ in range(rounds):
        assert [answer.json["choices"] for answer in live.together(bodies)] == alone


# -- little room -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cramped(tiny_model_dir: Path) -> Iterator[Live]:
    """Context 128, and KV blocks for about one and a half requests of that length."""
    small = ("--context", "128", "--kv-memory", "200K", "--threads", "1")
    with ended_well("--model", str(tiny_model_dir), *small) as server:
        with Live(server.url, vocabulary=300, eos=(2, "<|im_end|>")) as live:
            yield live
            metrics = live.client.get("/metrics").text
            preempted = [line for line in metrics.splitlines() if line.startswith("offbook_preemptions_total")]
            assert float(preempted[0].split()[1]) > 0, "the pool was not small enough to mean anything"


@pytest.mark.parametrize("stream", [False, True])
def test_b231_equal_requests_up_to_the_end_of_a_small_context(cramped: Live, stream: bool) -> None:
    body = {"prompt": "Why do cats purr?", "max_tokens": 128, **GREEDY, "stream": stream}
    lone = cramped.lone(**body)
    assert lone["usage"]["total_tokens"] == 128
    for answer in cramped.together([body] * 4):
        whole = joined(answer.events) if stream else answer.json
        assert whole["choices"] == lone["choices"] and whole["usage"]["total_tokens"] == 128


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1, "logprobs": 2, "echo": True},
        {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.1},
        {"temperature": 0.7, "mirostat_target": 2, "mirostat_lr": 0.1},
        {"temperature": 1, "top_p": 0.9, "stop": ["\u0001\u0002"], "logprobs": True},
        {"temperature": 0, "response_format": {"type": "grammar", "grammar": "root ::= [a-z]{210,220}"}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_b155_b156_b157_b078_preempted_requests_lose_nothing(cramped: Live, fields: Body, stream: bool) -> None:
    bodies: list[Body] = [
        {"prompt": f"p p {i}", "max_tokens": 100, "ignore_eos": True, "seed": i, "stream": stream, **fields}
        for i in range(4)
    ]
    alone = [cramped.lone(**body) for body in bodies]
    for answer, lone in zip(cramped.together(bodies), alone, strict=True):
        whole = joined(answer.events) if stream else answer.json
        assert whole["choices"] == lone["choices"]
        assert whole["usage"]["completion_tokens"] == lone["usage"]["completion_tokens"] > 60


# -- predictions -----------------------------------------------------------------------------------------------------


def test_b201_a_prediction_changes_no_bit(live: Live) -> None:
    fields = {"max_tokens": 16, **GREEDY, "logprobs": 1}
    free = live.lone("I will", **fields, return_token_ids=True)["choices"]
    ids, text = free[0].pop("token_ids"), free[0]["text"]
    free[0].pop("prompt_token_ids")
    for guess in (
        {"speculation": ids}, {"speculation": text}, {"speculation": "utterly wrong words"}, {"speculation": ""},
        {"speculation": [*ids[:9], 5, *ids[9:]]}, {"prediction": {"type": "content", "content": text[:20]}},
    ):  # fmt: skip
        assert live.both("I will", **fields, **guess)["choices"] == free
    drawn = {**fields, "temperature": 1.0, "seed": 4}
    assert live.both("I will", **drawn, speculation=text)["choices"] == live.lone("I will", **drawn)["choices"]


def test_b201_a_right_prediction_is_counted_and_saves_steps(live: Live) -> None:
    fields = {"max_tokens": 32, **GREEDY, "perf_metrics_in_response": True}
    ids = live.plain("I will", **fields, return_token_ids=True)["choices"][0]["token_ids"]
    right = live.plain("I will", **fields, speculation=ids)["perf_metrics"]
    wrong = live.plain("I will", **fields, speculation=[t ^ 1 for t in ids])["perf_metrics"]
    assert right["speculation-prompt-tokens"] == 32 and right["speculation-prompt-matched-tokens"] > 20
    assert wrong["speculation-prompt-matched-tokens"] == 0
    assert "speculation-prompt-tokens" not in live.plain("I will", **fields)["perf_metrics"]


def test_b203_predictions_are_no_part_of_the_prompt(tiny: Live) -> None:
    before = tiny.canary()
    fields: dict[str, Any] = {"max_tokens": 4, **GREEDY}
    free = tiny.both(**fields)
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    long = "word " * 3 * tiny.context
    for guess in (long, {"type": "content", "content": parts}, {"type": "content", "content": ""}):
        guessed = tiny.both(**fields, prediction=guess)
        assert (guessed["choices"], guessed["usage"]) == (free["choices"], {**guessed["usage"], **_counts(free)})
    for bad in ([-1], [tiny.vocabulary], [2**31], ["a"]):
        assert "speculation" in tiny.refused(**fields, speculation=bad)
    assert "together" in tiny.refused(**fields, speculation="a", prediction="b")
    image = {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "prediction" in tiny.refused(**fields, prediction=image)
    assert tiny.canary() == before


def _counts(body: Body) -> Body:
    return {key: body["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}


# -- thinking --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(make_tiny_model: Any) -> Iterator[Live]:
    """A model of a longer context whose thinking goes from one special token to another."""
    folder = make_tiny_model(max_position_embeddings=4096)
    markers = ("--think-start", "<|im_start|>", "--think-end", "<|endoftext|>")
    with ended_well("--model", str(folder), "--kv-memory", "64M", "--threads", "1", *markers) as server:
        with Live(server.url, vocabulary=300, eos=(2, "<|im_end|>")) as live:
            yield live


OPEN, CLOSE = 1, 0
BUDGET: Body = {"type": "enabled", "budget_tokens": 1024, "budget_end_str": "in"}
NEVER_CLOSES: Body = {"logit_bias": {str(CLOSE): -100}}


@pytest.mark.parametrize("guess", [None, "hmm hmm hmm", [40] * 2000])
@pytest.mark.parametrize(
    ("prompt", "extra"),
    [
        ([OPEN], {}),
        ([9, OPEN, 10], {}),
        ([9], {"logit_bias": {str(OPEN): 30, str(CLOSE): -100}, "frequency_penalty": 2}),
    ],
    ids=["opened", "opened before", "opened by the model"],
)
def test_b205_b207_a_budget_holds_whoever_opens_the_block(
    thinker: Live, prompt: list[int], extra: Body, guess: Any
) -> None:
    """So many thinking tokens, then the phrase and the end are forced; the same with any prediction."""
    budget = 1024 if prompt == [OPEN] and guess else 100
    thinking: Body = {"thinking": BUDGET, "reasoning_effort": budget, "return_token_ids": True}
    fields = {"max_tokens": budget + 40, **GREEDY, **NEVER_CLOSES, **thinking, **extra}
    lone = thinker.lone(prompt, **fields)["choices"][0]
    ids = lone["token_ids"]
    assert OPEN in prompt or ids[0] == OPEN
    thought = ids if OPEN in prompt else ids[1:]
    closing = [*thinker.ids("in"), CLOSE]
    assert thought[budget : budget + len(closing)] == closing and CLOSE not in thought[:budget]
    if guess is not None:
        assert thinker.plain(prompt, **fields, speculation=guess)["choices"][0] == lone


def test_b209_nothing_is_forced_after_the_model_has_closed_its_block(thinker: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 200, **GREEDY, "return_token_ids": True}
    fields["logit_bias"] = {str(OPEN): -100, str(CLOSE): -100}
    prompt = [OPEN, 9, 10, CLOSE, 11, 12]
    limited = thinker.plain(prompt, **fields, thinking=BUDGET, reasoning_effort=50)["choices"]
    assert limited == thinker.plain(prompt, **fields)["choices"]


def test_b209_an_empty_phrase_and_values_out_of_range(thinker: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 20, **GREEDY, **NEVER_CLOSES, "return_token_ids": True}
    ids = thinker.choice([OPEN], **fields, reasoning_effort=5, thinking={**BUDGET, "budget_end_str": ""})["token_ids"]
    assert ids.index(CLOSE) == 5
    none = thinker.choice([OPEN], **fields, reasoning_effort="none")["token_ids"]
    assert none[0] == CLOSE
    for budget in (1023, -1, 0, 1.5, "1024"):
        assert "budget_tokens" in thinker.refused([OPEN], thinking={"type": "enabled", "budget_tokens": budget})


# -- pictures --------------------------------------------------------------------------------------------------------

PNG = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\6\0\0\0\x1f\x15\xc4\x89\0\0\0\rIDATx\x9cc\xf8\xcf\xc0\xf0\x1f\0\5"
    b"\0\1\xff\x89\x99=\x1d\0\0\0\0IEND\xaeB`\x82"
)
BOMB = PNG[:16] + (100_000).to_bytes(4, "big") * 2 + PNG[24:]
GOOD = "data:image/png;base64," + base64.b64encode(PNG).decode()
PICTURES = {
    "empty": "data:image/png;base64,", "garbage": "data:image/png;base64,!!!!",
    "short": "data:image/png;base64,iVBORw0KGgo",
    "unpadded": GOOD.rstrip("="), "cut": GOOD[:-28], "good": GOOD, "no image": "data:image/png;base64,aGVsbG8=",
    "bomb": "data:image/png;base64," + base64.b64encode(BOMB).decode(), "http": "http://127.0.0.1:1/x.png",
    "file": "file:///etc/hostname", "null": None, "number": 5,
}  # fmt: skip


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES.keys())
def test_b219_no_picture_breaks_anything_or_is_fetched(tiny: Live, picture: Any) -> None:
    """This server serves no model that sees: every picture is refused by name before a byte of it is looked at."""
    before = tiny.canary()
    assert "images" in tiny.refused("<image> what", max_tokens=1, images=[picture])
    assert tiny.canary() == before


def test_b220_placeholders_and_pictures(tiny: Live) -> None:
    for prompt, images in (
        ("<image>", [None]), ("<image> <image>", [GOOD]), ("no mark", [GOOD]), (["<image>", "x"], [[GOOD]]),
    ):  # fmt: skip
        assert "images" in tiny.refused(prompt, max_tokens=1, images=images)
    plain = tiny.both("<image>", max_tokens=4, **GREEDY)
    assert tiny.both("<image>", max_tokens=4, **GREEDY, images=[])["choices"] == plain["choices"]


# -- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_crowd_of_all_kinds_on_the_default_model(smollm2: Live) -> None:
    answer = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    smollm2.company_changes_nothing(
        {"prompt": "The sky is", "max_tokens": 12, **GREEDY, "logprobs": 2, "echo": True},
        {"prompt": "The sky is", "max_tokens": 12, **FREE, "seed": 1, "n": 2, "top_p": 0.9, "logprobs": True},
        {"prompt": "{", "max_tokens": 12, "temperature": 0, "response_format": schema(answer)},
        {"prompt": "I will", "max_tokens": 12, **GREEDY, "speculation": " be there at the end of the day"},
        {"prompt": "la la la", "max_tokens": 12, **GREEDY, "repetition_penalty": 1.3, "stream": True},
        {"prompt": smollm2.long_ids(150, seed=3), "max_tokens": 4, **FREE, "seed": 2, "mirostat_target": 3},
    )
