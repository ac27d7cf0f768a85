"""Fault reports about other servers over HTTP, ids in the names: stop strings, characters, lengths.

Every request runs plain and streamed (``Live.both``). Known text comes from a bias towards one token or from a grammar
that allows one text, so that nothing depends on what a model likes to say. Decided by the design: the token that
completes a stop string keeps its id and row; the stop that starts earliest wins; a cut character is dropped.
"""

from __future__ import annotations

import codecs
from typing import Any

import pytest
from live import Live, grammar

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


# -- stop ------------------------------------------------------------------------------------------------------------


def test_b003_a_stop_over_the_joint_of_two_tokens(live: Live) -> None:
    fields = {"max_tokens": 8, "temperature": 0, "logit_bias": live.only("er")}
    assert live.text(**fields) == "er" * 8
    body = live.both(**fields, stop=["re"])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("e", "stop")
    assert body["usage"]["completion_tokens"] == 2


def test_b005_the_cut_is_at_the_character(live: Live) -> None:
    fields = {"max_tokens": 4, "temperature": 0, "logit_bias": live.only("ll")}
    body = live.both("wait", **fields, stop=["l"], return_token_ids=True, logprobs=1)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stop", [["e", "h"], ["h", "e"], ["he", "e", "h", "zz"]])
def test_b006_the_earliest_stop_wins_in_any_order(live: Live, stop: list[str]) -> None:
    choice = live.choice("say", max_tokens=2, temperature=0, logit_bias=live.only("the"), stop=stop)
    assert (choice["text"], choice["finish_reason"]) == ("t", "stop")


def test_b010_the_stop_is_not_in_the_text_of_any_choice(live: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "response_format": grammar("one two three")}
    for stop in ("tw", "o t", " ", "one", "ee"):
        for choice in live.both("count:", n=2, **fields, stop=stop)["choices"]:
            assert choice["text"] == "one two three"[: "one two three".index(stop)]
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("logprobs", [True, 2])
def test_b012_the_token_that_completes_a_stop_keeps_its_row(live: Live, logprobs: Any) -> None:
    base = live.choice("sun moon", max_tokens=12, **GREEDY, logprobs=logprobs, return_token_ids=True)
    stop = next(c for c in base["text"][3:] if c not in base["text"][:3] and c != "�")
    body = live.both("sun moon", max_tokens=12, **GREEDY, logprobs=logprobs, return_token_ids=True, stop=[stop])
    (choice,) = body["choices"]
    count = body["usage"]["completion_tokens"]
    assert choice["text"] == base["text"][: base["text"].index(stop)]
    assert choice["token_ids"] == base["token_ids"][:count] and count < 12
    rows = choice["logprobs"]
    assert len(rows["content"] if logprobs is True else rows["tokens"]) == count


@pytest.mark.parametrize("logprobs", [None, True, 2])
def test_b013_b014_text_held_for_a_stop_owes_nothing_at_the_end(live: Live, logprobs: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "response_format": grammar("Say hello there")}
    fields |= {"logprobs": logprobs, "return_token_ids": True}
    base = live.choice("Say:", **fields)
    for stop in ("\u0001never\u0001", "Say hQQQ", "hello there.", "theremin", "Say hello thereQ"):
        assert live.choice("Say:", **fields, stop=[stop]) == base
    if logprobs == 2:
        assert "".join(base["logprobs"]["tokens"]) == base["text"]


def test_b013_the_chunks_rows_and_ids_belong_together(live: Live) -> None:
    options = {"include_internal_content": True}
    fields: dict[str, Any] = {"max_tokens": 10, "logprobs": True, "stream_options": options, "stop": ["\u0001no"]}
    for event in live.ask("alpha beta", **GREEDY, **fields, stream=True).events:
        for choice in event["choices"]:
            assert [row["token_id"] for row in choice["logprobs"]["content"]] == choice["token_ids"]


def test_b015_a_written_special_token_is_a_stop_string_and_never_text(live: Live) -> None:
    fields = {"max_tokens": 8, **GREEDY, "logit_bias": {str(live.eos_id): 100}, "return_token_ids": True}
    stopped = live.choice("hi", **fields, stop=[live.eos_text])
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    assert stopped["token_ids"] == [live.eos_id]
    free = live.choice("hi", **fields)
    assert (free["text"], free["finish_reason"], free["token_ids"]) == ("", "length", [live.eos_id] * 8)


def test_b016_a_stop_that_begins_with_a_space(live: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "response_format": grammar("was not any more")}
    assert live.text("there", **fields, stop=[" any"]) == "was not"


@pytest.mark.model
def test_b017_a_stop_counts_in_streams_too(smollm2: Live) -> None:
    body = smollm2.both("Q: 2+2\nA:", max_tokens=24, temperature=0, stop=["\n"])
    assert body["choices"][0]["finish_reason"] == "stop" and "\n" not in body["choices"][0]["text"]
    free = smollm2.text("Q: 2+2\nA:", max_tokens=24, temperature=0)
    assert body["choices"][0]["text"] == free.split("\n")[0]


def test_a_stop_in_the_prompt_or_its_echo_is_no_stop(live: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "response_format": grammar("yes no"), "echo": True}
    assert live.text("a no b no", **fields, stop=["no"]) == "a no b noyes "


# -- characters ------------------------------------------------------------------------------------------------------


def test_b018_a_cut_character_is_dropped(live: Live) -> None:
    first = live.plain("😀", max_tokens=0, return_token_ids=True)["choices"][0]["prompt_token_ids"][0]
    fields = {"max_tokens": 1, "temperature": 0, "logit_bias": {str(first): 100}, "logprobs": True}
    body = live.both(**fields, return_token_ids=True)
    (choice,) = body["choices"]
    assert (choice["text"], choice["token_ids"], body["usage"]["completion_tokens"]) == ("", [first], 1)
    assert "😀".encode().startswith(bytes(choice["logprobs"]["content"][0]["bytes"]))


def test_b021_bytes_that_are_not_utf8(tiny: Live) -> None:
    """Id 3 + k is a byte of the tiny model's vocabulary, in the order of byte-level BPE."""
    rows = tiny.plain([[i] for i in range(3, 259)], max_tokens=0, echo=True, logprobs=True)["choices"]
    of_byte = {choice["logprobs"]["content"][0]["bytes"][0]: i + 3 for i, choice in enumerate(rows)}
    assert sorted(of_byte) == list(range(256))
    bias = {str(of_byte[0x27]): 40, str(of_byte[0xE2]): 60, str(of_byte[0xFF]): 60}
    before = tiny.canary()
    for seed in range(5):
        body = tiny.both(max_tokens=40, temperature=2, top_k=100, seed=seed, logit_bias=bias, logprobs=True)
        (choice,) = body["choices"]
        data = b"".join(bytes(row["bytes"]) for row in choice["logprobs"]["content"])
        assert codecs.getincrementaldecoder("utf-8")("replace").decode(data) == choice["text"]
        assert data.count(b"\xff") > 3
    assert tiny.canary() == before


@pytest.mark.parametrize("text", ["你 好 ש 😀 z", '{"a":1}', "🦊🦊", " two  spaces ", "é", "👩‍👩‍👧 x", "\n\n\t"])
def test_b022_b027_the_text_is_exact(live: Live, text: str) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "response_format": grammar(text), "logprobs": True}
    choice = live.choice("json:", **fields)
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    for event in live.ask("json:", **fields, stream=True).events:
        assert all("�" not in chunk["text"] for chunk in event["choices"])


@pytest.mark.model
def test_b025_no_space_is_lost(smollm2: Live) -> None:
    text = smollm2.text("The quick brown", max_tokens=16, **GREEDY)
    assert text.startswith(" ") and text.count(" ") > 5


@pytest.mark.parametrize("token", [" ", " t"])
def test_b026_leading_spaces_are_text(live: Live, token: str) -> None:
    fields = {"max_tokens": 4, "temperature": 0, "logit_bias": live.only(token)}
    assert live.text("x", **fields) == token * 4
    assert live.text("x", **fields, echo=True) == "x" + token * 4


# -- length ----------------------------------------------------------------------------------------------------------


def test_b118_null_is_the_default_limit(tiny: Live) -> None:
    """2048, lowered to the context."""
    for fields in ({"max_tokens": None}, {}):
        body = tiny.both("test", **GREEDY, **fields)
        assert body["usage"]["completion_tokens"] == tiny.context - body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("asked", [2**31 - 1, 2**31, 2**32 + 1, 1e18, 2**63 - 1, 10**30, -1, 1.5, "16", True, [1]])
def test_b120_limits_of_any_size(tiny: Live, asked: Any) -> None:
    before = tiny.canary()
    if asked == 2**31 - 1:
        body = tiny.both("hi", max_tokens=asked, **GREEDY)
        assert body["usage"]["total_tokens"] == tiny.context
    else:
        assert "field: 'max_tokens'" in tiny.refused("hi", max_tokens=asked, **GREEDY)
    assert tiny.canary() == before


def test_b121_a_limit_beyond_the_context(tiny: Live) -> None:
    asked = 5 * tiny.context
    body = tiny.both("Hi", max_tokens=asked, **GREEDY, context_length_exceeded_behavior="truncate")
    assert body["usage"]["completion_tokens"] == tiny.context - body["usage"]["prompt_tokens"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert str(asked) in tiny.refused("Hi", max_tokens=asked, context_length_exceeded_behavior="error")


def test_b123_the_end_of_the_context_with_and_without_a_prediction(tiny: Live) -> None:
    before, prompt = tiny.canary(), tiny.long_ids(tiny.context - 3)
    plain = tiny.both(prompt, max_tokens=50, **GREEDY, return_token_ids=True)
    assert plain["usage"]["completion_tokens"] == 3
    assert plain["choices"][0]["finish_reason"] == "length"
    first = plain["choices"][0]["token_ids"]
    for prediction in (tiny.long_ids(200), first + tiny.long_ids(200), [*first, *first]):
        guessed = tiny.both(prompt, max_tokens=50, **GREEDY, return_token_ids=True, speculation=prediction)
        assert guessed["choices"] == plain["choices"]
    assert tiny.canary() == before


def test_b124_a_refusal_names_the_true_numbers(tiny: Live) -> None:
    fields = {"max_tokens": tiny.context, "context_length_exceeded_behavior": "error"}
    message = tiny.refused(tiny.long_ids(100), **fields)
    assert "100 tokens" in message and message.count(str(tiny.context)) == 2
    too_long = tiny.refused(tiny.long_ids(tiny.context))
    assert f"{tiny.context}, model maximum context length: {tiny.context}" in too_long


@pytest.mark.model
def test_the_default_model_reaches_the_end_of_its_own_context(smollm2: Live) -> None:
    prompt = [504, 6376, 314] * 20
    body = smollm2.both(prompt, max_tokens=3, **GREEDY)
    assert body["usage"]["total_tokens"] == 63
    assert "too long" in smollm2.refused([504] * smollm2.context)
