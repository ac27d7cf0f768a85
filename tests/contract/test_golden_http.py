"""The default model over HTTP against what another implementation computed: log-probabilities, greedy texts, tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from live import Body, Live

pytestmark = pytest.mark.model


@pytest.fixture(params=["exact", "smollm2"])
def scored(request: pytest.FixtureRequest) -> tuple[Live, bool]:
    live: Live = request.getfixturevalue(request.param)
    return live, request.param == "exact"


def test_scores_of_prompts_and_continuations(scored: tuple[Live, bool], golden: dict[str, Any]) -> None:
    live, exact = scored
    cases = golden["cases"]
    prompts = [case["prompt_token_ids"] + case["greedy_token_ids"] for case in cases]
    body = live.plain(prompts, max_tokens=0, echo=True, logprobs=True, top_logprobs=5)
    off, best = [], []
    for choice, case in zip(body["choices"], cases, strict=True):
        first, *rows = choice["logprobs"]["content"]
        assert (first["logprob"], first["top_logprobs"]) == (0.0, [])
        assert len(rows) == len(case["rows"])
        for row, truth in zip(rows, case["rows"], strict=True):
            assert row["token_id"] == truth["token_id"]
            off.append(abs(row["logprob"] - truth["logprob"]))
            told = {one["token_id"]: one["logprob"] for one in row["top_logprobs"]}
            best += [abs(told[i] - value) for i, value in truth["top5"][:2] if i in told]
    assert max(off) < 1e-3 if exact else np.mean(off) < 0.01
    assert max(best) < 1e-3 if exact else np.mean(best) < 0.02


def test_the_legacy_format_says_the_same(scored: tuple[Live, bool], golden: dict[str, Any]) -> None:
    live, _ = scored
    for case in golden["cases"][:6]:
        fields: Body = {"max_tokens": 0, "echo": True}
        new = live.choice(case["prompt_token_ids"], **fields, logprobs=True, top_logprobs=5)["logprobs"]["content"]
        old = live.choice(case["prompt_token_ids"], **fields, logprobs=5)["logprobs"]
        assert old["token_logprobs"] == [row["logprob"] for row in new]
        for top, row in zip(old["top_logprobs"][1:], new[1:], strict=True):
            assert max(top.values()) == row["top_logprobs"][0]["logprob"]


def test_greedy_continuations_and_tokens(scored: tuple[Live, bool], golden: dict[str, Any]) -> None:
    """Where the truth prefers one token by less than the arithmetic's error, another choice is no fault."""
    live, exact = scored
    cases = golden["cases"]
    asked = {"max_tokens": 32, "temperature": 0, "return_token_ids": True}
    answers = live.together([{"prompt": case["prompt"], **asked} for case in cases])
    for answer, case in zip(answers, cases, strict=True):
        (choice,) = answer.json["choices"]
        assert choice["prompt_token_ids"] == case["prompt_token_ids"]
        got, truth = choice["token_ids"], case["greedy_token_ids"]
        if got == truth:
            assert choice["text"] == case["greedy_text"].removesuffix("<|im_end|>").rstrip("�")
            continue
        at = next(i for i, (a, b) in enumerate(zip(got, truth, strict=False)) if a != b)
        top = dict(map(tuple, case["rows"][len(case["prompt_token_ids"]) - 1 + at]["top5"]))
        assert not exact and top[truth[at]] - top[got[at]] < 0.05, (case["prompt"], at)
