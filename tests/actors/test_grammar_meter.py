"""What a grammar may cost: the account of one answer on a clock of our own, and whole engines with an answer that is
too dear. Of real times only what lies orders of magnitude apart is asked."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from byte_tokens import TABLE, ByteTokens, byte_vocabulary, grammar, schema
from sim_device import loaded_with
from sim_executor import SimExecutor

from offbook.actors import grammar_meter
from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import CompletionError, EngineOverloaded, InvalidRequest
from offbook.actors.grammar import Constraint
from offbook.actors.grammar_matcher import ConstraintError
from offbook.actors.grammar_meter import BURST_TOKENS, LOOP_WEIGHT, Meter
from offbook.actors.request import from_fields
from offbook.actors.steps import Step

VOCABULARY = byte_vocabulary()
BUDGET_MS = EngineConfig().grammar_token_ms
ANY: dict[str, Any] = {"response_format": {"type": "grammar", "grammar": "root ::= [a-z]*"}}


class FakeClock:
    """``call_s``: what everything that is timed takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.call_s = 0.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        if self.calls % 2 == 0:
            self.now += self.call_s
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    fake = FakeClock()
    monkeypatch.setattr(grammar_meter, "clock", fake)
    yield fake
    assert fake.calls % 2 == 0


def spend(meter: Meter, clock: FakeClock, ms: float, *, on_loop: bool = False) -> None:
    clock.call_s = ms / 1e3
    meter.charge(clock(), on_loop=on_loop)


@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_average_that_counts(clock: FakeClock, seed: int, on_loop: bool) -> None:
    rng, weight = random.Random(seed), LOOP_WEIGHT if on_loop else 1
    within, beyond = Meter(10.0), Meter(10.0)
    for _ in range(200):
        spend(within, clock, rng.uniform(2, 14) / weight, on_loop=on_loop)
        within.earn()
    assert not within.overspent
    tokens = 0
    while not beyond.overspent:
        spend(beyond, clock, rng.uniform(12, 28) / weight, on_loop=on_loop)
        beyond.earn()
        tokens += 1
    assert BURST_TOKENS / 3 < tokens <= 4 * BURST_TOKENS
    spend(beyond, clock, 0.0)
    for _ in range(100):
        beyond.earn()
    assert beyond.overspent, "for good"


def test_one_dear_token_is_forgiven_and_savings_are_not_kept(clock: FakeClock) -> None:
    meter = Meter(10.0)
    for _ in range(1000):
        meter.earn()
    spend(meter, clock, 10.0 * BURST_TOKENS * 0.9)
    assert not meter.overspent
    for _ in range(BURST_TOKENS):
        meter.earn()
    spend(meter, clock, 10.0 * BURST_TOKENS * 0.9)
    assert not meter.overspent
    spend(meter, clock, 10.0 * BURST_TOKENS * 0.2)
    assert meter.overspent


# -- grammars of both kinds, in real processor time --------------------------------------------------------------------

AMBIGUOUS = {
    "both sides": 'root ::= s\ns ::= s s | "a"',
    "two and three": 'root ::= s\ns ::= s s | "a" | s s s',
    "of classes": "root ::= s\ns ::= s s | [a-z] | s s s",
    "of runs": "root ::= [ab]* | root root root",
    "of words": 'root ::= s\ns ::= s s | "a" | "aa" | "aaa" | s s s',
    "nullable": 'root ::= s\ns ::= s s s s | "a"?',
    "palindromes": 'root ::= p\np ::= "a" p "a" | "a" | p p',
    "through another": 'root ::= s\ns ::= t t | "a"\nt ::= s | s s',
}
HONEST: dict[str, tuple[Any, str]] = {
    "properties": ({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(400)}}, '{"k7":'),
    "a long enum": ({"enum": [f"word {i:04d}" for i in range(2000)]}, '"word 0'),
    "deep": ({"type": "array", "items": {"type": "array"}}, "[" * 60),
    "kinds": ({"anyOf": [{"type": "object", "properties": {"k": {"const": i}}} for i in range(100)]}, '{"k":7'),
    "a list": ('root ::= item root | item\nitem ::= [a-z]+ " "', "ab " * 100),
    "sums": ('root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [0-9]+', "1+(2*3)*4" * 3),
    "many lines": ("root ::= " + " ".join(f'"f{i}: " [^\\n]* "\\n"' for i in range(200)), "f0: abc\nf1: x\n"),
}  # fmt: skip


def cost(constraint: Constraint, text: bytes) -> tuple[ConstraintError | None, float]:
    """What came of following the text under the default budget, and the seconds that it took."""
    matcher, row = constraint.matcher(Meter(BUDGET_MS)), np.zeros((1, VOCABULARY.words), np.uint32)
    began = time.thread_time()
    for byte in text:
        try:
            matcher.fill_ahead(row, [])
        except ConstraintError:
            break
        matcher.forced_tokens()
        matcher.accepts([byte] * 4)
        if matcher.failure is not None or not matcher.consume(byte):
            break
    return matcher.failure, time.thread_time() - began


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_is_ambiguous_ends_before_it_hurts(name: str) -> None:
    """Without a bound, 400 tokens take the library minutes."""
    failure, spent_s = cost(grammar(VOCABULARY, AMBIGUOUS[name]), b"a" * 400)
    assert failure is not None and failure.loc == ("response_format",)
    assert "too long" in failure.message and "item*" in failure.message
    assert spent_s < 20 * BURST_TOKENS * BUDGET_MS / 1e3


@pytest.mark.parametrize("name", HONEST)
def test_what_is_only_large_does_not(name: str) -> None:
    made, text = HONEST[name]
    constraint = grammar(VOCABULARY, made) if isinstance(made, str) else schema(VOCABULARY, made)
    assert cost(constraint, text.encode())[0] is None


def test_drafts_are_not_looked_at_beyond_the_budget(clock: FakeClock) -> None:
    matcher = grammar(VOCABULARY, 'root ::= "a"*').matcher(Meter(10.0))
    drafts, rows = [TABLE.index(b"a")] * 60, np.zeros((61, VOCABULARY.words), np.uint32)
    assert matcher.accepts(drafts) == 60
    assert matcher.fill_ahead(rows, drafts) == 60
    clock.call_s = 10.0 / LOOP_WEIGHT
    assert matcher.accepts(drafts) <= BURST_TOKENS + 1
    assert matcher.failure is not None
    with pytest.raises(ConstraintError, match="too long"):  # it may not have come back: no token is to follow
        matcher.fill_ahead(rows, drafts)


def test_long_forced_text_is_not_spelled_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each token, 100 kB of it took 70 ms of the event loop."""
    text = "".join(f"{i} " for i in range(5000)).encode()
    matcher = schema(VOCABULARY, {"const": text.decode()}).matcher()
    spelled: list[int] = []

    def encode(_: ByteTokens, text: str) -> list[int]:
        spelled.append(len(text))
        return list(text.encode())

    monkeypatch.setattr(ByteTokens, "encode", encode)
    for at in (0, 1, 500):
        while at > len(matcher._taken):
            assert matcher.consume((b'"' + text)[len(matcher._taken)])
        forced = matcher.forced_tokens()
        assert forced == list((b'"' + text)[at : at + len(forced)]) and len(forced) > 200
    assert 0 < sum(spelled) < 2000


# -- in an engine ------------------------------------------------------------------------------------------------------


def engine_on(executor: SimExecutor, **config: Any) -> AbstractAsyncContextManager[Engine]:
    config["grammar_compile_s"] = math.inf  # the virtual clock would jump
    return open_engine(EngineConfig(**config), loaded=loaded_with(executor, executor.device))


def outcomes(engine: Engine) -> dict[str, float]:
    told = {
        name: engine.registry.get_sample_value("offbook_requests_total", {"outcome": name})
        for name in ("answered", "failed", "refused", "abandoned")
    }
    return {name: count for name, count in told.items() if count is not None}


async def answer_of(engine: Engine, got: list[int], **fields: Any) -> CompletionError | None:
    try:
        async with engine.complete(prompt="abc", seed=1, max_tokens=40, ignore_eos=True, **fields) as answer:
            async for delta in answer:
                got += delta.token_ids
    except CompletionError as error:
        return error
    return None


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_who_is_too_dear_ends_alone(
    autojump_clock: trio.testing.MockClock, clock: FakeClock, n: int, drafted: bool
) -> None:
    """With a message that says what to change, behind all that it had written; nobody else notices."""
    executor = SimExecutor()
    free: list[int] = []
    dear: list[int] = []
    beside: list[int] = []

    def start_charging(step: Step) -> None:
        if step.batch.step_id > 20:
            clock.call_s = 0.004

    more: dict[str, Any] = {"speculation": [1] * 30} if drafted else {}
    async with engine_on(executor, prefix_cache=False) as engine:
        assert await answer_of(engine, free, **ANY, n=n, **more) is None
        assert await answer_of(engine, beside) is None
        async with trio.open_nursery() as nursery:
            executor.before = start_charging
            again: list[int] = []
            nursery.start_soon(answer_of, engine, again)
            error = await answer_of(engine, dear, **ANY, n=n, **more)
        assert again == beside
        assert isinstance(error, InvalidRequest)
        assert (error.status, error.param, error.code) == (400, "response_format", "invalid_request_error")
        assert "too long" in error.message and "simplify" in error.message
        assert engine.snapshot()["blocks_held"] == 0
        assert outcomes(engine) == {"answered": 3, "failed": 1}
    if n == 1:
        assert dear == free[: len(dear)] and len(dear) < len(free)


async def test_a_complete_answer_is_not_too_dear(autojump_clock: trio.testing.MockClock, clock: FakeClock) -> None:
    clock.call_s = 10.0
    async with engine_on(SimExecutor()) as engine:
        async with engine.complete(prompt="abc", max_tokens=1, ignore_eos=True, **ANY) as answer:
            (choice,) = await answer.choices()
    assert choice.finish_reason == "length" and len(choice.token_ids) == 1


async def test_the_librarys_own_limit_is_told_as_what_it_is(autojump_clock: trio.testing.MockClock) -> None:
    from llguidance import LLParserLimits

    async with engine_on(SimExecutor()) as engine:
        constraints = engine._constraints
        constraints._vocabulary = constraints._make_vocabulary()
        constraints._vocabulary.limits = LLParserLimits(max_items_in_row=60)
        text = 'root ::= s\ns ::= s s | "a" | s s s'
        error = await answer_of(engine, [], response_format={"type": "grammar", "grammar": text})
    assert isinstance(error, InvalidRequest) and error.param == "response_format"
    assert "became too complex" in error.message


# -- refused after its acceptance --------------------------------------------------------------------------------------

LATE: dict[str, dict[str, Any]] = {
    "a prompt in a list": {"prompt": ["good", ""]},
    "a prompt too long": {"prompt": ["good", "x" * 5000]},
    "a grammar": {"response_format": {"type": "grammar", "grammar": "root ::= nowhere"}},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"type": "nothing"}}},
}


@pytest.mark.parametrize("name", LATE)
async def test_what_is_refused_late_was_not_abandoned(autojump_clock: trio.testing.MockClock, name: str) -> None:
    async with engine_on(SimExecutor(), client_share_max=1) as engine:
        for count in (1, 2, 3):
            with pytest.raises(InvalidRequest):
                async with engine.complete(
                    from_fields({"model": "simulated", "prompt": "a", "user": "u", **LATE[name]})
                ):
                    pass
            assert outcomes(engine) == {"refused": count}
        assert await answer_of(engine, [], user="u") is None
        assert outcomes(engine) == {"refused": 3, "answered": 1}


async def test_who_finds_no_compiler_is_refused_and_who_leaves_is_not(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_on(SimExecutor()) as engine:

        async def busy(_: object) -> None:
            raise EngineOverloaded("busy", 1.0)

        async def never(_: object) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(engine._constraints, "get", busy)
        assert isinstance(await answer_of(engine, []), EngineOverloaded)
        assert outcomes(engine) == {"refused": 1}
        monkeypatch.setattr(engine._constraints, "get", never)
        with trio.move_on_after(1):
            await answer_of(engine, [])
        monkeypatch.undo()
        assert await answer_of(engine, []) is None
        assert outcomes(engine) == {"refused": 1, "abandoned": 1, "answered": 1}
