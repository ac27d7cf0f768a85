"""Thinking budgets: what is refused, what is resolved, and that a budget is kept to the token, drafts or not."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from sim_device import END_THINK, EOS, THINK, LetterTokenizer

from offbook.actors.errors import InvalidRequest
from offbook.actors.request import from_fields
from offbook.actors.thinking import BRIDGE, Markers, ThinkingPlan, ThinkingState, find_markers, plan_thinking


class Unmarked(LetterTokenizer):
    specials: ClassVar = {EOS: "<end>"}


LETTERS = LetterTokenizer()
MARKERS = Markers((1, 2), (3,))
BRIDGE_IDS = tuple(LETTERS.encode(BRIDGE))


def plan(markers: Markers | None = MARKERS, /, **fields: object) -> ThinkingPlan | None:
    return plan_thinking(from_fields({"model": "m", "prompt": "x", **fields}), markers, LETTERS)


@pytest.mark.parametrize(
    ("fields", "budget", "closing"),
    [
        ({}, None, ()),
        ({"reasoning_effort": "high"}, None, ()),
        ({"reasoning_effort": True}, None, ()),
        ({"reasoning_effort": 7}, 7, (*BRIDGE_IDS, 3)),
        ({"reasoning_effort": "none"}, 0, (3,)),
        ({"reasoning_effort": False}, 0, (3,)),
        ({"reasoning_effort": 7, "thinking": {"type": "disabled"}}, 0, (3,)),
        ({"thinking": {"type": "enabled"}}, None, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024, (*BRIDGE_IDS, 3)),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024, "budget_end_str": ""}}, 1024, (3,)),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024, "budget_end_str": "ab"}}, 1024, (1, 2, 3)),
        ({"reasoning_effort": 9, "thinking": {"type": "enabled", "effort": 5}}, 5, (*BRIDGE_IDS, 3)),
        ({"reasoning_effort": 9, "thinking": {"type": "enabled", "effort": "low"}}, None, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000, "effort": 5}}, 5, (*BRIDGE_IDS, 3)),
        ({"thinking": {"type": "enabled", "keep": "all"}, "reasoning_history": "preserved"}, None, ()),
        ({"response_format": {"type": "text"}}, None, ()),
    ],
)
def test_precedence(fields: dict[str, object], budget: int | None, closing: tuple[int, ...]) -> None:
    made = plan(**fields)
    assert (None if made is None else (made.budget, made.closing)) == (None if budget is None else (budget, closing))


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"reasoning_effort": 0}, 422, "reasoning_effort"),
        ({"reasoning_effort": -3}, 422, "reasoning_effort"),
        ({"thinking": {"budget_tokens": 1023}}, 422, "thinking.budget_tokens"),
        ({"thinking": {"budget_tokens": -1}}, 422, "thinking.budget_tokens"),
        ({"thinking": {"budget_end_str": "x"}}, 422, "thinking.budget_end_str"),
        ({"reasoning_effort": "adaptive"}, 400, "reasoning_effort"),
        ({"thinking": {"type": "adaptive"}}, 400, "thinking.type"),
        ({"reasoning_history": "disabled"}, 400, "reasoning_history"),
        ({"reasoning_history": "interleaved"}, 400, "reasoning_history"),
    ],
)
def test_refused_whatever_the_model(fields: dict[str, object], status: int, field: str) -> None:
    for markers in (MARKERS, None):
        with pytest.raises(InvalidRequest) as caught:
            plan(markers, **fields)
        assert caught.value.status == status
        assert caught.value.param == field


@pytest.mark.parametrize(
    "fields",
    [{}, {"reasoning_effort": "none"}, {"reasoning_effort": False}, {"thinking": {"type": "disabled"}},
     {"reasoning_history": "preserved"}],
)  # fmt: skip
def test_neutral_values_are_accepted_without_markers(fields: dict[str, object]) -> None:
    assert plan(None, **fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": 5},
        {"reasoning_effort": "low"},
        {"reasoning_effort": True},
        {"thinking": {"type": "enabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    ],
)
def test_effects_are_refused_without_markers(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(None, **fields)
    assert caught.value.status == 400


def test_markers_of_the_tokenizer_and_of_the_configuration() -> None:
    assert find_markers(LETTERS, None, None) == Markers((THINK,), (END_THINK,))
    assert find_markers(Unmarked(), None, None) is None
    assert find_markers(LETTERS, "ab", "c") == MARKERS
    with pytest.raises(ValueError, match="both"):
        find_markers(LETTERS, "ab", None)
    with pytest.raises(ValueError, match="empty"):
        find_markers(LETTERS, "ab", "")


def write(prompt: list[int], made: ThinkingPlan, free: list[int]) -> list[int]:
    """The answer of a model that would write ``free``."""
    state, out, source = ThinkingState(made, prompt), list[int](), iter(free)
    while (token := state.forced if state.forced is not None else next(source, None)) is not None:
        state.push(token)
        out.append(token)
    return out


def test_a_budget_counts_from_the_marker_whoever_opened_the_block() -> None:
    made = ThinkingPlan(MARKERS, 3, (8, 9, 3))
    assert write([5, 1, 2], made, [20] * 6) == [20, 20, 20, 8, 9, 3, 20, 20, 20]  # B207: the prompt
    assert write([5], made, [1, 2, *[20] * 6]) == [1, 2, 20, 20, 20, 8, 9, 3, 20, 20, 20]  # B207: the model


def test_ending_by_itself_forces_nothing() -> None:  # B209
    made = ThinkingPlan(MARKERS, 3, (8, 9, 3))
    assert write([1, 2], made, [20, 20, 3, 20, 20, 20]) == [20, 20, 3, 20, 20, 20]
    assert write([1, 2, 20, 3, 30], made, [20] * 5) == [20] * 5


def test_none_closes_a_block_at_once() -> None:
    assert write([1, 2], ThinkingPlan(MARKERS, 0, (3,)), [20, 20]) == [3, 20, 20]


def test_markers_in_the_bridge_do_not_end_the_closing() -> None:
    assert write([1, 2], ThinkingPlan(MARKERS, 1, (3, 9, 3)), [20, 20]) == [20, 3, 9, 3, 20]
    state = ThinkingState(ThinkingPlan(MARKERS, 0, (3, 9, 3)), [1, 2])
    for token in (3, 9, 3):
        assert state.inside and state.forced == token
        state.push(token)
    assert not state.inside


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [([], False), ([1], False), ([1, 2], True), ([1, 2, 8, 3], False), ([1, 2, 3, 1, 2, 9], True), ([3, 1, 2], True)],
)
def test_a_prompt_may_open_a_block(prompt: list[int], inside: bool) -> None:
    assert ThinkingState(ThinkingPlan(MARKERS, 5, (3,)), prompt).inside == inside


def test_a_marker_may_begin_in_the_prompt() -> None:
    state = ThinkingState(ThinkingPlan(MARKERS, 5, (3,)), [7, 1])
    state.push(2)
    assert state.inside


def test_a_second_block_has_what_is_left() -> None:
    made = ThinkingPlan(MARKERS, 3, (3,))
    assert write([], made, [1, 2, 20, 3, 1, 2, 20, 20, 20, 20]) == [1, 2, 20, 3, 1, 2, 20, 20, 3, 20, 20]


@pytest.mark.parametrize("seed", range(50))
def test_no_run_of_drafts_can_pass_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    made = ThinkingPlan(MARKERS, rng.randrange(6), (8, 3))
    state = ThinkingState(made, rng.choice([[], [1, 2]]))
    spent = 0
    for _ in range(60):
        run = 1 + rng.randrange(state.draft_limit + 1)
        forced = state.forced
        for i in range(run):
            assert i == 0 or state.forced is None, "a token of the run should have been forced"
            inside = state.inside
            token = forced if forced is not None else rng.choice([1, 2, 3, 20, 21])
            state.push(token)
            spent += forced is None and inside and state.inside
    assert spent <= made.budget
