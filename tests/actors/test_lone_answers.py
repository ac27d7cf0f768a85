"""Requests whose answer a neighbour, a draft or a failure elsewhere once changed, each beside its lone cold answer
(tests/support/sim_oracle.py)."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from sim_device import THINK, LetterTokenizer, SimDevice, loaded_with
from sim_executor import SimExecutor
from sim_requests import check_answer, expected

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import StepFailed
from offbook.actors.events import Delta
from offbook.actors.request import CompletionRequest, from_fields
from offbook.actors.schedule import Work
from offbook.actors.steps import Step
from offbook.kernels.step import ERROR_NAN, StepResult

LETTERS = LetterTokenizer()
CONTEXT = 4096  # no answer here comes near it


@asynccontextmanager
async def engine_on(executor: SimExecutor, **config: object) -> AsyncIterator[Engine]:
    config = {"grammar_compile_s": math.inf, "default_max_tokens": 30, **config}  # the virtual clock would jump
    async with open_engine(EngineConfig(**config), loaded=loaded_with(executor, executor.device)) as engine:  # type: ignore[arg-type]
        yield engine


def asked(**fields: object) -> CompletionRequest:
    return from_fields({"model": "simulated", "prompt": "abc", "seed": 1, "stream": True, **fields})


def grammar(text: str) -> dict[str, object]:
    return {"response_format": {"type": "grammar", "grammar": text}}


def truth(request: CompletionRequest, choice: int = 0) -> list[int]:
    return expected(request, CONTEXT)[0][choice].truth.tokens


def predicted(**fields: object) -> CompletionRequest:
    """The request with its first choice's own answer as its prediction."""
    return asked(**fields, speculation=truth(asked(**fields)))


async def judge(engine: Engine, request: CompletionRequest) -> None:
    async with engine.complete(request) as answer:
        check_answer(request, [delta async for delta in answer], answer.usage, engine.card.context_length)


@pytest.mark.parametrize("drafts", [1, 2, 64])
@pytest.mark.parametrize("least", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("bound", [{}, grammar('root ::= ("a" | "ab" | "b")*')], ids=["free", "grammar"])
async def test_a_minimum_length_and_drafts(
    autojump_clock: trio.testing.MockClock, bound: dict[str, object], least: int, drafts: int
) -> None:
    """Where the answer may end is decided row by row, whatever is drafted."""
    async with engine_on(SimExecutor(), draft_tokens_max=drafts) as engine:
        for seed in range(20):
            await judge(engine, predicted(seed=seed, min_tokens=least, **bound))


@pytest.mark.parametrize("effort", [None, "low", 3])
async def test_a_grammar_waits_for_a_block_that_the_prompt_opened(
    autojump_clock: trio.testing.MockClock, effort: object
) -> None:
    fields = {"prompt": [1, 2, THINK, 5], "reasoning_effort": effort, "max_tokens": 1000, **grammar('root ::= "XY"')}
    request = asked(**fields)
    async with engine_on(SimExecutor()) as engine:
        await judge(engine, request)
        await judge(engine, predicted(**fields))
        await judge(engine, asked(**fields, speculation=[*truth(request)[:-2], 1, 2]))
    said = "".join(LETTERS.token_bytes(t).decode() for t in truth(request))
    assert len(said.partition("</think>")[0]) > 2
    assert said.partition("</think>")[2] == "XY"


@pytest.mark.parametrize("drafts", [1, 64])
async def test_what_a_grammar_spells_opens_no_thinking_block(
    autojump_clock: trio.testing.MockClock, drafts: int
) -> None:
    """The markers may be ordinary text, which a string in JSON may hold: the grammar goes on behind it."""
    async with engine_on(SimExecutor(), think_start="ab", think_end="c", draft_tokens_max=drafts) as engine:
        request = asked(reasoning_effort=2, **grammar('root ::= "xaby" [d-f] "abz"'))
        async with engine.complete(request) as answer:
            (choice,) = await answer.choices()
    assert choice.text[:4] + choice.text[5:] == "xabyabz"
    assert choice.finish_reason == "stop"


async def test_prompts_of_unlike_lengths_look_up_their_own(autojump_clock: trio.testing.MockClock) -> None:
    rng = random.Random(0)
    long = "".join(rng.choice("abcd") for _ in range(300))
    async with engine_on(SimExecutor(), prompt_lookup=True) as engine:
        for seed in range(6):
            await judge(engine, asked(prompt=[long, "ab"], seed=seed, max_tokens=60, **grammar("root ::= [a-d]{60}")))


async def test_a_guess_takes_nobodys_place(autojump_clock: trio.testing.MockClock) -> None:
    """Two answers fill the pool to its last block: the older one drafts as far as its own blocks reach."""
    seed = next(seed for seed in range(999) if len(truth(asked(seed=seed))) == 12)
    older = asked(seed=seed, speculation=[*truth(asked(seed=seed))[:11], *[1] * 40])
    executor = SimExecutor(SimDevice(3))
    async with engine_on(executor) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(judge, engine, older)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(judge, engine, asked(prompt="x" * 17, ignore_eos=True, max_tokens=12))
        assert engine._scheduler.preemptions == 0


# -- failures ----------------------------------------------------------------------------------------------------------


def poisoned_after(tokens: int, choice: int = 0) -> SimExecutor:
    """A device that has a NaN in every row that comes after so many tokens of a choice."""
    executor, steps = SimExecutor(), list[Step]()

    def spoil(result: StepResult) -> None:
        step = steps.pop()
        for r, work in enumerate(step.runs):
            if work.sequence.params.choice == choice:
                _spoil_run(step, r, work, result)

    def _spoil_run(step: Step, r: int, work: Work, result: StepResult) -> None:
        begin, end = step.batch.run_start[r], step.batch.run_start[r + 1]
        first = begin + max(tokens - work.sequence.n_output, 0)
        if first < end and (first == begin or result.token[first - 1] >= 0):
            result.token[first:end], result.error[first] = -1, ERROR_NAN

    executor.before, executor.after = steps.append, spoil
    return executor


@pytest.mark.parametrize("request_", [asked, predicted])
@pytest.mark.parametrize("good", [0, 1, 3, 8])
async def test_tokens_from_before_a_failure_are_told(
    autojump_clock: trio.testing.MockClock, good: int, request_: object
) -> None:
    """As many as there were, drafted together with the failing row or not."""
    request = (predicted if request_ is predicted else asked)(ignore_eos=True)
    got: list[Delta] = []
    async with engine_on(poisoned_after(good)) as engine:
        with pytest.raises(StepFailed, match="not a number"):
            async with engine.complete(request) as answer:
                async for delta in answer:
                    got.append(delta)  # noqa: PERF401  # what came before the error counts
    assert [t for d in got for t in d.token_ids] == truth(request)[:good]


@pytest.mark.parametrize("request_", [asked, predicted])
@pytest.mark.parametrize("end", ["a stop string", "the end token", "the length", "the grammar"])
async def test_an_answer_that_is_complete_cannot_fail(
    autojump_clock: trio.testing.MockClock, end: str, request_: object
) -> None:
    """A row behind its end is nobody's, whether it was drafted or begun before the end was seen."""
    free = truth(asked(ignore_eos=True, max_tokens=6))
    fields: dict[str, object] = {
        "a stop string": {"ignore_eos": True, "stop": LETTERS.token_bytes(free[5]).decode()},
        "the end token": {"seed": next(s for s in range(999) if 3 < len(truth(asked(seed=s, max_tokens=30))) < 30)},
        "the length": {"ignore_eos": True, "max_tokens": 6},
        "the grammar": grammar('root ::= "a" [a-z]{4} "z"'),
    }[end]  # type: ignore[assignment]
    request = asked(**fields)
    length = len(truth(request))
    if request_ is predicted:
        more = [
            *truth(request),
            *truth(asked(**fields | {"stop": None, "ignore_eos": True, "max_tokens": 60}))[length:],
        ]
        request = asked(**fields, speculation=more)
    async with engine_on(poisoned_after(length)) as engine:
        await judge(engine, request)


async def test_a_choice_that_had_ended_does_not_fail_the_others(autojump_clock: trio.testing.MockClock) -> None:
    """A stop string is seen when the next step is out already; what breaks there for that choice breaks nothing."""
    letter = LETTERS.token_bytes(truth(asked(ignore_eos=True, n=2, max_tokens=9))[2]).decode()
    request = asked(ignore_eos=True, n=2, max_tokens=9, stop=letter)
    assert len(truth(request, 0)) < len(truth(request, 1))
    async with engine_on(poisoned_after(len(truth(request, 0)))) as engine:
        await judge(engine, request)
        with pytest.raises(StepFailed):
            await judge(engine, asked(ignore_eos=True, n=2, max_tokens=9))
        with trio.fail_after(5):
            while engine.snapshot()["blocks_held"]:  # noqa: ASYNC110  # its sister goes too
                await trio.sleep(0.01)
