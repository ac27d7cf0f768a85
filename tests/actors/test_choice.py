"""One choice while fan-out writes it: tokens into text and rows, echoes, stop strings, and how it ends.

Truth is the text that the tokens spell and the numbers that the step's result holds.
"""

from __future__ import annotations

import numpy as np
import pytest
from sim_device import EOS, LetterTokenizer

from offbook.actors.choice import Choice, Wants, join
from offbook.actors.events import Delta
from offbook.actors.sequence import Sequence
from offbook.actors.steps import Gain
from offbook.actors.text import Surfaces
from offbook.actors.ticket import Ticket
from offbook.kernels.params import SamplingParams
from offbook.kernels.step import StepResult

LETTERS = LetterTokenizer()
SURFACES = Surfaces(LETTERS.token_bytes, LETTERS.is_special)


def choice_of(
    prompt: str = "abc", *, stops: tuple[str, ...] = (), wants: Wants | None = None, max_tokens: int = 99,
    min_tokens: int = 0, eos: bool = True,
) -> Choice:  # fmt: skip
    sequence = Sequence(
        LETTERS.encode(prompt), SamplingParams(), max_tokens=max_tokens, min_tokens=min_tokens,
        eos_ids=frozenset({EOS} if eos else ()),
    )  # fmt: skip
    ticket = Ticket(
        id="t", reply=None, client=None, priority=False,  # type: ignore[arg-type]
        estimate=1, stream=True, asked_at=0.0,
    )  # fmt: skip
    return Choice(ticket, 0, sequence, SURFACES, stops, wants or Wants())


def result_for(tokens: list[int]) -> StepResult:
    k = len(tokens)
    numbers = np.arange(k, dtype=np.float32)
    top = np.array([[t, (t + 1) % 64] for t in tokens], np.int32).reshape(k, 2)
    return StepResult(
        step_id=0, token=np.array(tokens, np.int32), error=np.zeros(k, np.uint8),
        logprob=-numbers,
        sampling_logprob=numbers * np.float32(-0.5), kept=np.arange(1, k + 1, dtype=np.int32),
        run_mu=np.zeros(1, np.float32),
        top_ids=top, top_logprobs=np.zeros((k, 2), np.float32) - 1, kept_ids={0: np.array([3, 5], np.int32)},
    )  # fmt: skip


def feed(choice: Choice, text: str | list[int], *, together: bool = False) -> Delta:
    """Let a choice gain these tokens, one step each or all in one, as batching would: limits and EOS end it."""
    tokens = LETTERS.encode(text) if isinstance(text, str) else text
    sequence, deltas, result = choice.sequence, list[Delta](), result_for(tokens)
    steps = [range(len(tokens))] if together else [range(k, k + 1) for k in range(len(tokens))]
    for rows in steps:
        gain = Gain(sequence, first_row=rows.start)
        for k in rows:
            gain.tokens.append(tokens[k])
            gain.finish = sequence.take(tokens[k])
            if gain.finish:
                break
        delta = choice.gain(gain, result)
        if delta is not None:
            deltas.append(delta)
        if gain.finish or choice.finish_reason:
            break
    return join(deltas)


@pytest.mark.parametrize("together", [False, True])
def test_text_ids_and_the_limit(together: bool) -> None:
    choice = choice_of(max_tokens=5)
    delta = feed(choice, "hello!", together=together)
    assert (delta.text, delta.finish_reason) == ("hello", "length")
    assert list(delta.token_ids) == LETTERS.encode("hello")
    assert choice.completion_tokens == 5


@pytest.mark.parametrize("together", [False, True])
def test_eos_is_a_token_without_text(together: bool) -> None:
    choice = choice_of(wants=Wants(rows=True, raw_text=True))
    delta = feed(choice, [*LETTERS.encode("hi"), EOS, 9], together=together)
    assert (delta.text, delta.raw_text, delta.finish_reason) == ("hi", "hi<end>", "stop")
    assert delta.token_ids[-1] == EOS
    assert [row.token_id for row in delta.rows] == list(delta.token_ids)
    assert choice.gain(Gain(choice.sequence, tokens=[1]), result_for([1])) is None, "it is over"


def test_an_ignored_eos_goes_on() -> None:
    delta = feed(choice_of(eos=False, max_tokens=4), [8, EOS, 9, EOS])
    assert (delta.text, delta.finish_reason, len(delta.token_ids)) == ("hi", "length", 4)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("stops", "text", "shown", "tokens"),
    [
        (("lo",), "hello you", "hel", 5),
        (("o", "lo"), "hello you", "hel", 5),
        (("zz", "you"), "hello you", "hello ", 9),
        (("hello",), "hello", "", 5),
        (("aab",), "aaab", "a", 4),
        (("nope", "never"), "nnonever", "nno", 8),
    ],
)
def test_stop_strings_cut_the_text_and_keep_the_token(
    stops: tuple[str, ...], text: str, shown: str, tokens: int, together: bool
) -> None:
    choice = choice_of(stops=stops, wants=Wants(rows=True, raw_text=True))
    delta = feed(choice, text + "more", together=together)
    assert (delta.text, delta.finish_reason) == (shown, "stop")
    assert len(delta.token_ids) == len(delta.rows) == choice.completion_tokens == tokens
    assert delta.raw_text == text[:tokens]


def test_text_that_may_become_a_stop_string_waits_and_is_let_go() -> None:
    choice = choice_of(stops=("abcd",), max_tokens=6)
    assert feed(choice, "xab").text == "x"
    assert feed(choice, "c").text == ""
    assert feed(choice, "e").text == "abce"
    last = feed(choice, "a")
    assert (last.text, last.finish_reason) == ("a", "length")


def test_below_the_minimum_a_stop_string_is_text() -> None:
    choice = choice_of(stops=("b",), min_tokens=2)
    delta = feed(choice, "abab")
    assert (delta.text, delta.finish_reason) == ("aba", "stop")


def test_rows_hold_what_the_step_gave() -> None:
    wants = Wants(rows=True, top=1, kept=True, kept_ids=True)
    delta = feed(choice_of(wants=wants, max_tokens=3), "xyz", together=True)
    assert [r.logprob for r in delta.rows] == [0, -1, -2]
    assert [r.sampling_logprob for r in delta.rows] == [0, -0.5, -1]
    assert [r.kept for r in delta.rows] == [1, 2, 3]
    assert [r.kept_ids for r in delta.rows] == [(3, 5), None, None]
    assert [r.top for r in delta.rows] == [((t, -1.0),) for t in LETTERS.encode("xyz")]
    assert [r.text_offset for r in delta.rows] == [0, 1, 2]


@pytest.mark.parametrize("echo", [1, 2, 3])
def test_the_echo_comes_once_and_first(echo: int) -> None:
    wants = Wants(rows=True, echo=echo, echo_text="abc" if echo == 3 else None)
    choice = choice_of(wants=wants, max_tokens=2)
    choice.sequence.scores = {1: (-0.5, ()), 2: (-0.25, ())}
    delta = feed(choice, "de")
    assert delta.text == "abc"[-echo:] + "de"
    assert list(delta.echoed_ids) == LETTERS.encode("abc"[-echo:])
    assert list(delta.token_ids) == LETTERS.encode("de")
    assert [r.logprob for r in delta.rows[:echo]] == [0.0, -0.5, -0.25][-echo:]
    assert [r.sampling_logprob for r in delta.rows[:echo]] == [None] * echo
    assert [r.text_offset for r in delta.rows] == list(range(echo + 2))


def test_scoring_only_ends_with_the_echo() -> None:
    choice = choice_of(wants=Wants(rows=True, echo=3, echo_text="abc"), max_tokens=0)
    delta = choice.gain(Gain(choice.sequence, finish="length"), result_for([]))
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", (), "length")
    assert choice.completion_tokens == 0


def test_a_step_without_news_says_nothing() -> None:
    choice = choice_of()
    assert choice.gain(Gain(choice.sequence), result_for([])) is None


def test_a_plain_answer_is_held_until_it_is_whole() -> None:
    choice = choice_of(max_tokens=3)
    shown = [choice.hold(feed(choice, letter)) for letter in "abc"]
    assert shown[:2] == [None, None]
    assert shown[2] is not None
    assert (shown[2].text, shown[2].finish_reason) == ("abc", "length")


def test_a_join_is_what_the_parts_say_together() -> None:
    parts = [Delta(index=1, text="a", echoed_ids=(1,)), Delta(index=1, token_ids=(2,)),
             Delta(index=1, text="c", token_ids=(3,), raw_text="c", finish_reason="stop")]  # fmt: skip
    assert join(parts[:1]) is parts[0]
    assert join(parts) == Delta(
        index=1, text="ac", echoed_ids=(1,), token_ids=(2, 3), raw_text="c", finish_reason="stop"
    )
