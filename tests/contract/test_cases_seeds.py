"""Fault reports about other servers over HTTP, ids in the names: biases, seeds and numbers of samples."""

from __future__ import annotations

from typing import Any

import pytest
from live import Body, Live, schema

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
FREE: dict[str, Any] = {"temperature": 1, "ignore_eos": True}


# -- logit_bias ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["$V", "$V+5", "4294967296", "-1", "x", "1.0", "", "01", "٣"])
def test_b099_an_id_out_of_range_hurts_nobody(tiny: Live, key: str) -> None:
    key = key.replace("$V+5", str(tiny.vocabulary + 5)).replace("$V", str(tiny.vocabulary))
    good = {"prompt": "good", "max_tokens": 16, **GREEDY}
    alone = tiny.lone(**good)["choices"]
    bad = {"prompt": "bad", "max_tokens": 16, **GREEDY, "logit_bias": {key: 100}}
    refused, answer = tiny.together([bad, good])
    assert 400 <= refused.status < 500 and "logit_bias" in refused.json["error"]["message"]
    assert answer.json["choices"] == alone


@pytest.mark.parametrize("value", [101, -100.5, "1", None, True])
def test_a_bias_is_a_number_of_the_right_size(tiny: Live, value: Any) -> None:
    assert "logit_bias" in tiny.refused(logit_bias={"5": value})


def test_b101_the_highest_id_and_the_end_can_be_banned(live: Live) -> None:
    assert live.choice(max_tokens=3, **GREEDY, logit_bias={str(live.vocabulary - 1): -100})
    banned = {"0": -100, str(live.eos_id): -100}
    body = live.both("x", max_tokens=20, temperature=0, logit_bias=banned, return_token_ids=True)
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 20)
    assert not {0, live.eos_id} & set(body["choices"][0]["token_ids"])


def test_b102_a_banned_token_does_not_come(live: Live) -> None:
    fields = {"max_tokens": 20, **GREEDY, "return_token_ids": True}
    base = live.choice("Wow", **fields)
    assert live.choice("Wow", **fields, logit_bias=dict.fromkeys(map(str, base["token_ids"]), 0)) == base
    banned = live.choice("Wow", **fields, logit_bias=dict.fromkeys(map(str, base["token_ids"]), -100))
    assert not set(banned["token_ids"]) & set(base["token_ids"])


# -- seeds and n -----------------------------------------------------------------------------------------------------


def test_b049_samples_differ_and_repeat(live: Live) -> None:
    fields = {"max_tokens": 8, "n": 6, "temperature": 1.5, "seed": 11}
    texts = [choice["text"] for choice in live.both("Once", **fields)["choices"]]
    assert len(set(texts)) > 4
    assert [choice["text"] for choice in live.plain("Once", **fields)["choices"]] == texts
    few = live.plain("Once", **{**fields, "n": 3})["choices"]
    assert [choice["text"] for choice in few] == texts[:3]


def test_b050_every_sample_arrives_whole(live: Live) -> None:
    body = live.both("Hello", n=10, max_tokens=6, **FREE, seed=2, logprobs=1)
    assert [choice["index"] for choice in body["choices"]] == list(range(10))


def test_b054_equal_requests_at_once_are_equal(live: Live) -> None:
    live.company_changes_nothing(*[{"prompt": "dice:", "seed": 123, **FREE, "max_tokens": 8, "logprobs": 1}] * 8)


def test_b055_different_seeds_at_once_differ(live: Live) -> None:
    bodies = [{"prompt": "Roll:", "seed": i, **FREE, "top_p": 1, "max_tokens": 16} for i in range(1, 6)]
    answers = live.company_changes_nothing(*bodies)
    assert len({answer["choices"][0]["text"] for answer in answers}) == 5


def test_b057_a_seed_starts_anew_each_time(live: Live) -> None:
    fields = {"max_tokens": 12, **FREE}
    first, again, other = (live.text("go", seed=seed, **fields) for seed in (42, 42, 43))
    assert first == again != other


@pytest.mark.parametrize(
    ("seed", "fine"),
    [(-1, True), (0, True), (2**31, True), (2**63 - 1, True), (2**63, True), (2**64 - 1, True), (-(2**63), True),
     (2**64, False), (-(2**63) - 1, False), (1.5, False), ("7", False), (True, False), (10**40, False)],
)  # fmt: skip
def test_b058_seeds_of_any_size(tiny: Live, seed: Any, fine: bool) -> None:
    before = tiny.canary()
    if fine:
        answer = tiny.ask(max_tokens=4, **FREE, seed=seed)
        assert (answer.status, int(answer.headers["fireworks-seed"])) == (200, seed)
        assert tiny.choice(max_tokens=4, **FREE, seed=seed)["text"] == answer.json["choices"][0]["text"]
    else:
        assert "field: 'seed'" in tiny.refused(max_tokens=2, **FREE, seed=seed)
    assert tiny.canary() == before


def test_b060_more_samples_than_a_batch_holds(tiny: Live) -> None:
    before = tiny.canary()
    body = tiny.both(n=128, max_tokens=2, **FREE, seed=1)
    assert [choice["index"] for choice in body["choices"]] == list(range(128))
    for n in (129, 0, -1, 1.5, "2", True):
        assert "field: 'n'" in tiny.refused(n=n, max_tokens=2)
    assert tiny.canary() == before


def test_b062_greedy_samples_are_equal(live: Live) -> None:
    body = live.both("same", n=3, temperature=0, max_tokens=6, logprobs=0)
    assert len({str({**choice, "index": 0}) for choice in body["choices"]}) == 1


@pytest.mark.model
def test_the_seed_in_the_header_replays(smollm2: Live) -> None:
    fields: Body = {"max_tokens": 8, "temperature": 1.2, "response_format": schema({"type": "string"})}
    answer = smollm2.ask("Once", **fields)
    again = smollm2.plain("Once", **fields, seed=int(answer.headers["fireworks-seed"]))
    assert again["choices"] == answer.json["choices"]
