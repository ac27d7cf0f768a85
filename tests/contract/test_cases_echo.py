"""Fault reports about other servers over HTTP, ids in the names: echo, log-probabilities, scoring from a cached prefix.

Decided by the design: the first echoed token has ``0.0`` and no alternatives (not null: strict clients lose the whole
object); ``text_offset`` counts code points of the returned text; ``logprobs: 0`` tells of the chosen token alone.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from live import Body, Live, grammar

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def check_legacy(rows: Body, text: str, top: int, *, echo: bool) -> None:
    """What a reader of the legacy format relies on."""
    tokens, offsets = rows["tokens"], rows["text_offset"]
    lengths = {len(rows[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids")}
    assert lengths == {len(tokens)}
    assert offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets)
    if "�" not in "".join(tokens):
        assert "".join(tokens) == text
        assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    for i, (value, alternatives) in enumerate(zip(rows["token_logprobs"], rows["top_logprobs"], strict=True)):
        if echo and i == 0:
            assert (value, alternatives) == (0.0, {})
            continue
        assert math.isfinite(value) and -9999 <= value <= 0
        assert 1 <= len(alternatives) <= top + 1 and alternatives[tokens[i]] >= value
        assert max(alternatives.values()) >= value


def check_new(rows: list[Body], top: int) -> None:
    """What a reader of the new format relies on."""
    for row in rows:
        best = row["top_logprobs"]
        assert len(best) <= top
        assert [a["logprob"] for a in best] == sorted((a["logprob"] for a in best), reverse=True)
        assert all(math.isfinite(a["logprob"]) and a["logprob"] <= 0 for a in [row, *best])
        for one in [row, *best]:
            assert one["token"] == bytes(one["bytes"]).decode("utf-8", "replace")


# -- echo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["\n\n2) tea, 30", "日本語 😀", " two  spaces", "<|im_start|>user\nhi<|im_end|>"])
def test_b028_pieces_and_offsets_of_an_echo(live: Live, prompt: str) -> None:
    fields: dict[str, Any] = {"temperature": 0, "echo": True, "max_tokens": 0 if "<|" in prompt else 3}
    choice = live.choice(prompt, **fields, logprobs=1)
    assert choice["text"].startswith(prompt)
    check_legacy(choice["logprobs"], choice["text"], 1, echo=True)
    new = live.choice(prompt, **fields, logprobs=True, top_logprobs=1)
    content = new["logprobs"]["content"]
    check_new(content, 1)
    assert [row["token_id"] for row in content] == choice["logprobs"]["token_ids"]
    assert [row["logprob"] for row in content] == choice["logprobs"]["token_logprobs"]
    assert [row["text_offset"] for row in content] == choice["logprobs"]["text_offset"]
    assert b"".join(bytes(row["bytes"]) for row in content).startswith(prompt.encode())


def test_b030_offsets_start_at_the_returned_text(live: Live) -> None:
    choice = live.choice("Blue sky", max_tokens=4, temperature=0, logprobs=1, response_format=grammar("a big sea"))
    assert choice["logprobs"]["text_offset"][0] == 0
    check_legacy(choice["logprobs"], choice["text"], 1, echo=False)
    echoed = live.choice("Blue sky", max_tokens=4, temperature=0, logprobs=1, echo=True)
    assert len("Blue sky") in echoed["logprobs"]["text_offset"]


def test_b033_scoring_prompts_of_ids(live: Live) -> None:
    prompts = [[11, 12, 13], [14, 15]]
    body = live.both(prompts, max_tokens=0, temperature=0, logprobs=5, echo=True, seed=1, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0, "prompt_tokens_details": 0,
    }  # fmt: skip
    for choice, prompt in zip(body["choices"], prompts, strict=True):
        assert choice["prompt_token_ids"] == choice["logprobs"]["token_ids"] == prompt
        assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
        check_legacy(choice["logprobs"], choice["text"], 5, echo=True)


def test_b034_no_hidden_token(tiny: Live) -> None:
    for prompt in ("hi", tiny.long_ids(tiny.context)):
        body = tiny.both(prompt, max_tokens=0, echo=True, temperature=0, return_token_ids=True)
        assert body["choices"][0]["token_ids"] == [] and body["usage"]["completion_tokens"] == 0
        without = tiny.both(prompt, max_tokens=0, temperature=0, return_token_ids=True, logprobs=True)["choices"][0]
        assert (without["text"], without["token_ids"], without["logprobs"]["content"]) == ("", [], [])
    assert "too long" in tiny.refused(tiny.long_ids(tiny.context), max_tokens=5, echo=True)


def test_b035_echo_by_logprobs_by_stream(live: Live) -> None:
    for echo in (True, False):
        texts = set()
        for logprobs in (None, False, 0, 1, True, ...):
            wanted = {} if logprobs is ... else {"logprobs": logprobs}
            choice = live.choice("pick one", max_tokens=3, **GREEDY, echo=echo, **wanted)
            texts.add(choice["text"])
            assert (choice["logprobs"] is None) == any(logprobs is none for none in (None, False, ...))
        assert len(texts) == 1 and texts.pop().startswith("pick one") is echo


def test_b036_the_prompt_comes_once_in_a_stream(live: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 1, "seed": 3, "top_p": 1, "logprobs": 1, "echo": True}
    events = live.ask("Oslo is", **fields, stream=True).events
    assert events[0]["choices"][0]["text"].startswith("Oslo is")
    assert sum("Oslo is" in choice["text"] for event in events for choice in event["choices"]) == 1
    assert events[-1]["choices"] == [] and events[-1]["usage"]["prompt_tokens"] == len(live.ids("Oslo is"))
    live.both("Oslo is", **fields)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"typical_p": 0.1, "top_k": 1}])
def test_b037_prompt_rows_are_the_models_own_whatever_the_filters(live: Live, filters: Body) -> None:
    fields = {"max_tokens": 2, "temperature": 1, "seed": 1, "echo": True, "logprobs": 2}
    prompt = "purple kettle orbit lamp"
    n = len(live.ids(prompt))
    filtered, free = (live.choice(prompt, **fields, **extra)["logprobs"] for extra in (filters, {}))
    for key in ("token_logprobs", "top_logprobs"):
        assert filtered[key][:n] == free[key][:n]
    biased = live.choice(prompt, **fields, logit_bias={"5": 50}, repetition_penalty=1.8)["logprobs"]
    assert biased["token_logprobs"][:n] == free["token_logprobs"][:n]


@pytest.mark.parametrize("last", [0, 1, 2, 10_000])
def test_the_last_tokens_of_a_prompt(live: Live, last: int) -> None:
    prompt = "one two three four"
    ids = live.ids(prompt)
    n = min(last, len(ids))
    full = live.choice(prompt, max_tokens=2, **GREEDY, echo=True, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    part = live.choice(prompt, max_tokens=2, **GREEDY, echo_last=last, logprobs=True, top_logprobs=2)
    kept = full[len(full) - n - 2 :]
    assert [{**row, "text_offset": 0} for row in part["logprobs"]["content"]] == [{**r, "text_offset": 0} for r in kept]
    shown = b"".join(bytes(row["bytes"]) for row in kept[:n]).decode()
    assert part["text"].startswith(shown) and prompt.endswith(shown)
    both = live.choice(prompt, max_tokens=2, **GREEDY, echo=True, echo_last=last, logprobs=True, top_logprobs=2)
    assert both == part


# -- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [5, True])
def test_b106_under_a_mask_of_one_token(live: Live, logprobs: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 1, "top_k": 1, "top_logprobs": 5}
    choice = live.choice("abc", **fields, logprobs=logprobs, response_format=grammar("xyz"))
    assert choice["text"] == "xyz"
    if logprobs is True:
        check_new(choice["logprobs"]["content"], 5)
        assert all(row["sampling_logprob"] == 0.0 for row in choice["logprobs"]["content"])
    else:
        assert all(math.isfinite(v) for top in choice["logprobs"]["top_logprobs"] for v in top.values())


@pytest.mark.parametrize("top", [6, 900_001, -1, 2**31, 1.5, True, "2"])
def test_b108_numbers_of_alternatives(tiny: Live, top: Any) -> None:
    """``top_logprobs`` without ``logprobs`` is checked too, and has no effect."""
    before = tiny.canary()
    assert "top_logprobs" in tiny.refused(max_tokens=1, logprobs=True, top_logprobs=top)
    assert "top_logprobs" in tiny.refused(max_tokens=1, top_logprobs=top)
    assert tiny.choice(max_tokens=1, **GREEDY, top_logprobs=5)["logprobs"] is None
    if top is not True:
        tiny.refused(max_tokens=1, logprobs=top)
    assert tiny.canary() == before


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_b109_b110_the_legacy_lists(live: Live, count: int) -> None:
    choice = live.choice("Say hi", max_tokens=4, **GREEDY, logprobs=count)
    rows = choice["logprobs"]
    assert len(rows["tokens"]) == 4
    check_legacy(rows, choice["text"], count, echo=False)
    if count == 0:
        assert [list(top) for top in rows["top_logprobs"]] == [[token] for token in rows["tokens"]]
    other = live.choice("Say hi", max_tokens=4, **GREEDY, logprobs=0, top_logprobs=count)
    assert other == choice


def test_b111_bytes_of_a_character_over_several_tokens(live: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    choice = live.choice(**fields, response_format=grammar("🦊🦊"))
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(row["bytes"]) for row in content).decode() == choice["text"] == "🦊🦊"
    assert all(row["bytes"] != [239, 191, 189] for row in content)
    check_new(content, 3)


def test_b112_alternatives_are_tokens_of_their_own(live: Live) -> None:
    prompts = [[i] for i in range(min(live.vocabulary, 256))]
    shown = live.plain(prompts, max_tokens=0, echo=True, logprobs=True)["choices"]
    of_id = {i: choice["logprobs"]["content"][0]["bytes"] for i, choice in enumerate(shown)}
    content = live.choice("“", max_tokens=4, **GREEDY, logprobs=True, top_logprobs=5)["logprobs"]["content"]
    for one in itertools.chain.from_iterable([row, *row["top_logprobs"]] for row in content):
        assert one["bytes"] and one["token"]
        assert of_id.get(one["token_id"], one["bytes"]) == one["bytes"]


def test_b113_control_characters_among_the_alternatives(live: Live) -> None:
    choice = live.choice("\u0000\u0001x", max_tokens=6, temperature=2, seed=1, logprobs=5, echo=True)
    check_legacy(choice["logprobs"], choice["text"], 5, echo=True)


def test_b117_requests_with_and_without_rows_in_one_batch(live: Live) -> None:
    live.company_changes_nothing(
        {"prompt": "a", "max_tokens": 20, **GREEDY, "logprobs": 5, "echo": True},
        {"prompt": "b", "max_tokens": 20, **GREEDY},
        {"prompt": "c", "max_tokens": 20, **GREEDY, "logprobs": True, "top_logprobs": 1, "echo_last": 1},
    )


# -- scoring from a cached prefix ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 112, 117, 500])
def test_b163_scores_from_a_cached_prefix(tiny: Live, length: int) -> None:
    prompt = tiny.long_ids(length, seed=163)
    fields = {"max_tokens": 1, **GREEDY, "echo": True}
    cold = tiny.lone(prompt, **fields, logprobs=1)["choices"][0]["logprobs"]
    for _ in range(2):
        body = tiny.both(prompt, **fields, logprobs=2)
        warm = body["choices"][0]["logprobs"]
        assert warm["token_logprobs"] == cold["token_logprobs"] and len(warm["tokens"]) == length + 1
        for one, two in zip(cold["top_logprobs"], warm["top_logprobs"], strict=True):
            assert {k: v for k, v in one.items() if k != "�"}.items() <= two.items()  # half characters share a key
    for logprobs in (2, 5, 5, 1):
        body = tiny.plain(prompt, **fields, logprobs=logprobs)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= (length - 1) // 16 * 16 - 1


def test_b164_scores_are_never_a_former_requests(live: Live) -> None:
    shared, fields = live.long_ids(100, seed=5), {"max_tokens": 1, **GREEDY, "echo": True, "logprobs": 1}
    live.plain(shared + live.long_ids(40, seed=1), **fields)
    other = shared + live.long_ids(40, seed=2)
    warm = live.plain(other, **fields)
    assert warm["choices"] == live.lone(other, **fields)["choices"]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 100, 480])
def test_b168_b170_scores_of_a_prompt_in_chunks(tiny: Live, length: int) -> None:
    """In company of a stream the prompt comes in other chunks than alone; the numbers are the same bits."""
    prompt, fields = tiny.long_ids(length, seed=168), {"max_tokens": 4, **GREEDY, "echo": True, "logprobs": 1}
    others = [{"prompt": tiny.long_ids(400, seed=i), "max_tokens": 30, **GREEDY} for i in range(3)]
    body, *_ = tiny.company_changes_nothing({"prompt": prompt, **fields}, *others)
    rows = body["choices"][0]["logprobs"]
    assert [i for i, top in enumerate(rows["top_logprobs"]) if not top] == [0]
