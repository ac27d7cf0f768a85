"""Fault reports about other servers over HTTP, ids in the names: sampling and penalties.

The ``whole`` server tells the raw log-probability of every token, so what a filter keeps and what a token's sampling
log-probability is are worked out here in float64 from the documented formulas, and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from live import Body, Live

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
FREE: dict[str, Any] = {"temperature": 1, "ignore_eos": True}
F64 = npt.NDArray[np.float64]


def raw(row: Body, vocabulary: int) -> F64:
    """The whole raw distribution of one row: log-probabilities by id."""
    values = np.full(vocabulary, np.nan)
    for one in row["top_logprobs"]:
        values[one["token_id"]] = one["logprob"]
    assert not np.isnan(values).any()
    return values


def normal(logits: F64) -> F64:
    top = logits.max()
    out: F64 = logits - top - math.log(float(np.exp(logits - top).sum()))
    return out


def by_top_p(logprobs: F64, p: float) -> set[int]:
    """The fewest likeliest ids whose probabilities reach p; at least one."""
    order = np.argsort(-logprobs, kind="stable")
    reached = np.cumsum(np.exp(logprobs[order]))
    return set(order[: int(np.searchsorted(reached, p - 1e-9)) + 1].tolist())


def by_typical_p(logprobs: F64, p: float) -> set[int]:
    entropy = -float((np.exp(logprobs) * logprobs).sum())
    order = np.argsort(np.abs(-logprobs - entropy), kind="stable")
    reached = np.cumsum(np.exp(logprobs[order]))
    return set(order[: int(np.searchsorted(reached, p - 1e-9)) + 1].tolist())


KEPT: dict[str, tuple[Body, Callable[[F64], set[int]]]] = {
    "nothing": ({}, lambda x: set(range(len(x)))),
    "top_k": ({"top_k": 7}, lambda x: set(np.argsort(-x, kind="stable")[:7].tolist())),
    "top_p": ({"top_p": 0.8}, lambda x: by_top_p(x, 0.8)),
    "tiny top_p": ({"top_p": 0.0001}, lambda x: by_top_p(x, 0.0001)),
    "min_p": ({"min_p": 0.1}, lambda x: set(np.flatnonzero(x >= x.max() + math.log(0.1)).tolist())),
    "typical_p": ({"typical_p": 0.6}, lambda x: by_typical_p(x, 0.6)),
}


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
@pytest.mark.parametrize("name", KEPT)
def test_b074_b076_the_mask_is_what_the_formula_keeps(whole: Live, name: str, temperature: float) -> None:
    """Temperature comes before the filters, on the first token as on later ones; what is drawn is in the mask, and its
    sampling log-probability is its share of the mask."""
    filters, keep = KEPT[name]
    for seed in range(4):
        choice = whole.choice(
            "It was", max_tokens=12, temperature=temperature, ignore_eos=True, seed=seed, logprobs=True,
            top_logprobs=300, sampling_mask="non_zero_list", **filters,
        )  # fmt: skip
        for row in choice["logprobs"]["content"]:
            scaled = normal(raw(row, whole.vocabulary) / temperature)
            expected, told = keep(scaled), set(row["sampling_mask"])
            assert row["sampling_mask_count"] == len(row["sampling_mask"])
            assert row["token_id"] in told
            # a token on the very edge may fall on either side of it in float32
            assert all(edge(scaled, i, filters) for i in expected ^ told), (expected ^ told, filters)
            kept = np.array(sorted(told))
            share = scaled[row["token_id"]] - math.log(float(np.exp(scaled[kept]).sum()))
            assert row["sampling_logprob"] == pytest.approx(share, abs=2e-4)


def edge(logprobs: F64, token: int, filters: Body) -> bool:
    """Whether a filter's limit passes within float32's error of a token."""
    if "min_p" in filters:
        return abs(float(logprobs[token] - logprobs.max()) - math.log(filters["min_p"])) < 1e-4
    mass = float(np.exp(logprobs[logprobs > logprobs[token]]).sum())
    return "top_p" in filters and abs(mass - filters["top_p"]) < 1e-4


@pytest.mark.model
def test_b074_no_garbage_beyond_top_p(smollm2: Live) -> None:
    fields = {"max_tokens": 24, "temperature": 0.7, "top_p": 0.8, "ignore_eos": True, "logprobs": True}
    body = smollm2.plain("Write a short note.", n=8, seed=74, sampling_mask="non_zero_list", **fields)
    rows = [row for choice in body["choices"] for row in choice["logprobs"]["content"]]
    assert all(row["sampling_mask_count"] > 1000 or row["token_id"] in row["sampling_mask"] for row in rows)
    assert min(row["logprob"] for row in rows) > -9


# -- greedy and its neighbours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.0001}, {"temperature": 0.0001}, {"top_k": 1}, {"top_p": 0, "temperature": 2}, {"min_p": 1}]
)
def test_b064_b067_all_ways_to_be_greedy(live: Live, filters: Body) -> None:
    greedy = live.text("My name is", max_tokens=16, **GREEDY)
    choice = live.choice(
        "My name is", max_tokens=16, seed=5, logprobs=True, sampling_mask="count", **{**FREE, **filters}
    )
    assert choice["text"] == greedy
    if "temperature" not in filters or "top_p" in filters:
        assert {row["sampling_mask_count"] for row in choice["logprobs"]["content"]} == {1}


def test_b065_greedy_masked_and_free_rows_in_one_batch(live: Live) -> None:
    bias = {str(live.id_of("the")): -100}
    live.company_changes_nothing(
        {"prompt": "a", "max_tokens": 20, "temperature": 0, "response_format": {"type": "json_object"}, "logprobs": 1},
        {"prompt": "b", "max_tokens": 20, **GREEDY, "logit_bias": bias},
        {"prompt": "c", "max_tokens": 20, **FREE, "top_p": 0.9, "seed": 4},
    )


def test_b066_ties_go_to_the_lowest_id(whole: Live) -> None:
    """A bias that makes two ids exactly equal in float32: the difference of their raw values, tried at both."""
    row = whole.choice("tie", max_tokens=1, **GREEDY, logprobs=True, top_logprobs=300)["logprobs"]["content"][0]
    first, second = (row["top_logprobs"][i] for i in (0, 1))
    fields = {"max_tokens": 1, "temperature": 0, "top_p": 0.9, "ignore_eos": True, "return_token_ids": True}
    for steps in range(-3, 4):
        gap = np.float32(first["logprob"] - second["logprob"])
        bias = float(gap + steps * np.spacing(np.float32(16)))
        body = {"prompt": "tie", **fields, "logit_bias": {str(second["token_id"]): bias}}
        alone = whole.lone(**body)["choices"][0]["token_ids"]
        others = [{"prompt": "z", "max_tokens": 6, "temperature": 1.5, "seed": i, "ignore_eos": True} for i in range(3)]
        for answer in whole.together([*others, body, body]):
            choice = answer.json["choices"][0]
            assert "token_ids" not in choice or choice["token_ids"] == alone
        assert alone[0] in (first["token_id"], second["token_id"])


def test_b068_each_row_has_its_own_top_k(live: Live) -> None:
    fields = {"prompt": "p", "max_tokens": 12, **FREE, "logprobs": True, "sampling_mask": "count"}
    bodies = [{**fields, "seed": 1, "top_k": 1}, {**fields, "seed": 2}, {**fields, "seed": 3, "top_k": 50}]
    answers = live.company_changes_nothing(*bodies)
    for answer, count in zip(answers, (1, live.vocabulary, 50), strict=True):
        counts = {row["sampling_mask_count"] for row in answer["choices"][0]["logprobs"]["content"]}
        assert counts == {count}


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 4_000_000}, {"top_k": 101}, {"top_k": -1}, {"top_k": 1.5}, {"temperature": 1_000_000}, {"top_p": 1.01},
     {"temperature": -0.1}, {"typical_p": 1.0000001}, {"min_p": -1}, {"repetition_penalty": 3}],
)  # fmt: skip
def test_b069_b079_values_out_of_range(tiny: Live, fields: Body) -> None:
    before = tiny.canary()
    assert f"field: '{next(iter(fields))}'" in tiny.refused("p q r", max_tokens=4, **fields)
    tiny.company_changes_nothing(
        {"prompt": "1 2", "max_tokens": 6, **GREEDY}, {"prompt": "3 4", "max_tokens": 6, **FREE, "top_k": 5, "seed": 1}
    )
    assert tiny.canary() == before


def test_b079_temperature_matters(live: Live) -> None:
    hot = live.text("Hi", max_tokens=24, temperature=2, seed=1, ignore_eos=True)
    assert hot != live.text("Hi", max_tokens=24, **GREEDY)


@pytest.mark.parametrize("p", [0, 1e-9, 0.5, 0.99, 1])
def test_b080_typical_p_over_its_range(tiny: Live, p: float) -> None:
    fields = {"max_tokens": 12, **FREE, "typical_p": p, "seed": 1, "sampling_mask": "count", "logprobs": True}
    counts = [row["sampling_mask_count"] for row in tiny.choice(**fields)["logprobs"]["content"]]
    assert min(counts) >= 1
    assert p < 1 or set(counts) == {tiny.vocabulary}
    assert p > 1e-9 or set(counts) == {1}


def test_b082_without_top_k_temperature_counts(live: Live) -> None:
    texts = {live.plain("Pick", max_tokens=12, temperature=1.5, seed=i)["choices"][0]["text"] for i in range(8)}
    assert len(texts) > 5


def test_b078_mirostat_keeps_its_state_through_company(tiny: Live) -> None:
    fields = {"max_tokens": 20, "temperature": 0.7, "mirostat_target": 4, "mirostat_lr": 0.1, "ignore_eos": True}
    bodies = [{"prompt": "A", **fields, "seed": i, "logprobs": 1} for i in range(3)]
    tiny.company_changes_nothing(*bodies)
    other = tiny.lone("A", **{**fields, "temperature": 1.4}, seed=0)
    assert other["choices"][0]["text"] != tiny.lone("A", **fields, seed=0)["choices"][0]["text"]


def test_b078_mirostat_follows_its_formula(whole: Live) -> None:
    """Version 2 in nats: mu starts at twice the target; a token stays while its surprise is at most mu; after each draw
    mu moves by the rate times the target less the surprise of what was drawn."""
    for target, rate in ((0.6, 0.1), (1.5, 0.4)):
        fields = {"max_tokens": 60, "temperature": 0.9, "mirostat_target": target, "mirostat_lr": rate, "seed": 3}
        wanted = {"logprobs": True, "top_logprobs": 300, "sampling_mask": "non_zero_list", "ignore_eos": True}
        mu = 2 * target
        for row in whole.choice("A", **fields, **wanted)["logprobs"]["content"]:
            scaled = normal(raw(row, whole.vocabulary) / 0.9)
            kept = {*np.flatnonzero(-scaled <= mu).tolist(), int(scaled.argmax())}
            assert all(abs(scaled[i] + mu) < 1e-3 for i in kept ^ set(row["sampling_mask"]))
            mu += rate * (target + row["sampling_logprob"])


# -- penalties -------------------------------------------------------------------------------------------------------


def draws(whole: Live, prompt: Any, **fields: Any) -> tuple[F64, dict[int, float]]:
    """At one position: the raw distribution, and the sampling log-probability of each token that 128 samples drew."""
    body = whole.plain(
        prompt, n=128, max_tokens=1, temperature=1, seed=9, ignore_eos=True, logprobs=True, top_logprobs=300, **fields
    )
    rows = [choice["logprobs"]["content"][0] for choice in body["choices"]]
    return raw(rows[0], whole.vocabulary), {row["token_id"]: row["sampling_logprob"] for row in rows}


def test_b089_repetition_counts_the_prompt_once_and_the_others_do_not(whole: Live) -> None:
    """A logit l of a token in the prompt becomes l / 1.1. The logits are the raw values plus one unknown number, which
    the two repeated tokens must tell alike, though one came four times and the other once."""
    prompt = [70, 70, 70, 70, 90]
    raws, plain = draws(whole, prompt)
    for penalties in ({"frequency_penalty": 2, "presence_penalty": 2}, {"repetition_penalty": 1}):
        assert draws(whole, prompt, **penalties)[1] == plain
    bias = {70: float(raws.max() - raws[70]) + 1.5, 90: float(raws.max() - raws[90]) + 2}
    _, punished = draws(whole, prompt, repetition_penalty=1.1, logit_bias={str(k): v for k, v in bias.items()})
    shifts = [punished[i] - raws[i] for i in punished if i not in bias]
    assert set(bias) <= set(punished) and max(shifts) - min(shifts) < 1e-4
    unknown = [((raws[i] + bias[i]) / 1.1 - (punished[i] - shifts[0])) / (1 - 1 / 1.1) for i in bias]
    assert unknown[0] == pytest.approx(unknown[1], abs=0.01)
    assert all(raws[i] + bias[i] + unknown[0] > 1 for i in bias)


def test_b090_presence_punishes_nothing_that_was_not_generated(live: Live) -> None:
    fields = {"max_tokens": 1, **GREEDY, "logprobs": True, "top_logprobs": 3}
    prompt = "yes yes yes yes yes"
    assert live.choice(prompt, **fields, presence_penalty=2) == live.choice(prompt, **fields)


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0), (0.5, 1.5), (-0.7, 0), (0, 2), (2, -2)])
def test_b091_subtractive_penalties_follow_the_plain_formula(whole: Live, frequency: float, presence: float) -> None:
    bias = {"70": 30.0, "90": 29.2}
    choice = whole.choice(
        max_tokens=14, **GREEDY, logit_bias=bias, frequency_penalty=frequency, presence_penalty=presence,
        return_token_ids=True, logprobs=True, top_logprobs=300,
    )  # fmt: skip
    counts = np.zeros(whole.vocabulary)
    for row, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
        logits = raw(row, whole.vocabulary)
        for key, value in bias.items():
            logits[int(key)] += value
        logits -= frequency * counts + presence * (counts > 0)
        best = np.argsort(-logits)[:2]
        assert token == best[0] or logits[best[0]] - logits[token] < 1e-3
        counts[token] += 1


PENALTIES: list[Body] = [
    {"repetition_penalty": 2}, {"repetition_penalty": 1.2}, {"frequency_penalty": 1.05}, {"presence_penalty": -1.5},
]  # fmt: skip


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_b088_b092_b097_penalties_of_a_neighbour_change_nothing(tiny: Live, penalty: Body) -> None:
    """In both orders of arrival; beside a longer prompt, and beside rows without a penalty."""
    bodies: list[Body] = [
        {"prompt": "la la la", "max_tokens": 8, **GREEDY, **penalty},
        {"prompt": "la la la", "max_tokens": 6, **FREE, "seed": 99, "top_k": 1},
        {"prompt": tiny.long_ids(60), "max_tokens": 8, **GREEDY, **penalty, "logprobs": 1},
    ]
    alone = tiny.company_changes_nothing(*bodies)
    for order in (bodies[::-1], bodies[1:] + bodies[:1]):
        for answer, body in zip(tiny.together(order), order, strict=True):
            assert answer.json["choices"] == alone[bodies.index(body)]["choices"]


@pytest.mark.model
def test_b088_penalties_in_a_mixed_batch(smollm2: Live) -> None:
    bodies = [{"prompt": "la la la", "max_tokens": 6, **GREEDY, **penalty} for penalty in ({}, *PENALTIES)]
    smollm2.company_changes_nothing(*bodies)
