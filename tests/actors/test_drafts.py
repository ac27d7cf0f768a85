"""Drafts: how many model steps they save when right, and how little they waste when wrong.

A run here is the real protocol with the model played by a fixed answer: each step takes the accepted drafts and one
token more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.actors.drafts import FREE_WASTE, WASTE_PERIOD, Drafter, Prediction, PromptLookup


def run(drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], most: int = 16) -> tuple[int, int, int]:
    """Steps taken, drafts fed, drafts accepted, while the answer is written."""
    tokens = list(prompt)
    steps = fed = accepted = 0
    while len(tokens) < len(prompt) + len(answer):
        left = answer[len(tokens) - len(prompt) :]
        drafts = drafter.propose(tokens, len(prompt), min(most, len(left) - 1))
        assert len(drafts) <= max(0, min(most, len(left) - 1))
        right = 0
        while right < len(drafts) and drafts[right] == left[right]:
            right += 1
        tokens += left[: right + 1]
        steps, fed, accepted = steps + 1, fed + len(drafts), accepted + right
    drafter.settle(tokens, len(prompt))
    assert (drafter.drafted, drafter.matched) == (fed, accepted)
    return steps, fed, accepted


def words(seed: int, n: int, vocabulary: int = 1000) -> list[int]:
    """Tokens drawn as unevenly as words are, so that wrong predictions share frequent tokens with the answer."""
    rng = random.Random(seed)
    return [int(vocabulary ** rng.random()) for _ in range(n)]


def test_b201_a_right_prediction_takes_few_steps() -> None:
    answer = words(1, 512)
    steps, _, accepted = run(Prediction(answer), [1, 2, 3], answer)
    assert steps <= 36 and accepted >= 470


@pytest.mark.parametrize("seed", range(5))
def test_a_prediction_with_edits_keeps_its_speed(seed: int) -> None:
    rng = random.Random(seed)
    prediction = words(seed, 512)
    answer: list[int] = []
    for token in prediction:  # 5 % of the tokens replaced, left out, or with others put before them
        roll = rng.random()
        answer += [token] if roll > 0.05 else [[], [5000 + rng.randrange(99)], [6000, 6001, token]][rng.randrange(3)]
    steps, fed, _ = run(Prediction(prediction), [7], answer)
    assert steps < len(answer) / 3.2, seed
    assert fed < 2 * len(answer), seed


def test_a_replaced_token_does_not_stop_the_drafts() -> None:
    answer = words(3, 512)
    prediction = [9000 + i if i % 20 == 10 else token for i, token in enumerate(answer)]
    steps, fed, _ = run(Prediction(prediction), [7], answer, most=32)
    assert steps < 4 * 512 / 20  # each replaced token costs its own step, a shared one and a rare wrong guess
    assert fed < 1.5 * len(answer)


@pytest.mark.parametrize("period", [512, 11], ids=["text", "a text that repeats itself"])
def test_a_passage_that_is_wrong_costs_its_own_steps_and_few_more(period: int) -> None:
    answer = (words(4, period) * 50)[:512]
    prediction = [*answer[:200], *range(9000, 9026), *answer[226:]]
    steps, fed, _ = run(Prediction(prediction), [7], answer, most=64)
    assert steps < 26 + 32
    assert fed < 1.5 * len(answer)


def test_it_finds_its_place_after_a_long_insertion_and_a_long_deletion() -> None:
    prediction = list(range(1000, 1400))
    answer = prediction[:100] + list(range(3000, 3100)) + prediction[100:200] + prediction[300:]
    steps, *_ = run(Prediction(prediction), [], answer)
    assert steps < 100 + 45


@pytest.mark.parametrize("seed", range(5))
def test_b201_a_wholly_wrong_prediction_wastes_little(seed: int) -> None:
    answer = words(seed, 512)
    steps, fed, accepted = run(Prediction(words(seed + 100, 512)), [], answer)
    assert fed - accepted <= 0.1 * len(answer) + FREE_WASTE, seed
    assert steps <= len(answer)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 17)
)
def test_waste_is_bounded_for_any_prediction(prediction: list[int], answer: list[int], most: int) -> None:
    for drafter in (Prediction(prediction), PromptLookup(prediction)):
        prompt = prediction if isinstance(drafter, PromptLookup) else [9]
        _, fed, accepted = run(drafter, prompt, answer, most)
        assert fed - accepted <= FREE_WASTE + len(answer) + len(answer) // WASTE_PERIOD
        assert drafter.propose([*prompt, *answer], len(prompt), 0) == []


def test_b203_a_prediction_far_longer_than_the_answer_or_empty() -> None:
    assert run(Prediction(words(3, 20_000)), [1], words(3, 4))[0] <= 4
    assert run(Prediction([]), [1], words(3, 4)) == (4, 0, 0)
    assert Prediction([1, 2]).propose([5], 1, 0) == []


def test_preemption_does_not_matter_since_only_tokens_count() -> None:
    answer = words(4, 64)
    drafter = Prediction(answer)
    first = drafter.propose([], 0, 8)
    assert first and first == answer[: len(first)] and drafter.propose([], 0, 8) == first
    assert drafter.drafted == len(first)


def test_choices_share_the_index_but_not_the_place() -> None:
    answer = words(5, 64)
    one = Prediction(answer)
    other = one.fresh()
    run(one, [], answer)
    assert run(other, [], answer)[0] < 20


def test_prompt_lookup_copies_a_repeated_passage() -> None:
    passage = words(6, 200)
    prompt = [*words(7, 50), *passage, *words(8, 50)]
    steps, *_ = run(PromptLookup(prompt), prompt, passage)
    assert steps < 40
    repeated = [*passage[:50]] * 4  # and one that only the answer itself holds
    steps, *_ = run(PromptLookup([1]), [1], repeated)
    assert steps < 50 + 40


def test_prompt_lookup_wastes_little_on_new_text() -> None:
    for seed in range(5):
        prompt, answer = words(seed, 300), words(seed + 50, 512)
        _, fed, accepted = run(PromptLookup(prompt), prompt, answer)
        assert fed - accepted <= 0.1 * len(answer) + FREE_WASTE, seed
