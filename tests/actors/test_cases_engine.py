"""Public fault reports about other engines, as tests of this one; ids in the names. On the simulated device, so every
answer is known: the lone run is the truth. Long, since it is one list."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from sim_device import LetterTokenizer, SimDevice, expected, loaded_with, logprob_of
from sim_executor import SimExecutor
from sim_requests import check_answer

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import InvalidRequest
from offbook.actors.events import Context, Delta, Usage
from offbook.actors.request import from_fields
from offbook.actors.steps import Step
from offbook.kernels.params import SamplingParams

LETTERS = LetterTokenizer()
CANARY = {"prompt": "ok", "max_tokens": 1, "temperature": 0}
Clock = trio.testing.MockClock


def ids_of_length(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 64) for _ in range(length)]


@asynccontextmanager
async def engine_on(*, blocks: int = 256, slots: int = 64, **config: Any) -> AsyncIterator[tuple[Engine, SimExecutor]]:
    device = SimDevice(blocks, slots=slots)
    executor = SimExecutor(device)
    config = {"grammar_compile_s": math.inf, **config}
    async with open_engine(EngineConfig(**config), loaded=loaded_with(executor, device)) as engine:
        yield engine, executor
        with trio.fail_after(100):
            while engine.snapshot()["blocks_held"]:  # noqa: ASYNC110  # blocks are freed by the next step
                await trio.sleep(0.01)


async def ask(engine: Engine, /, *, context: Any = None, **fields: object) -> tuple[list[Delta], Usage]:
    """An answer, held against its lone run."""
    request = from_fields({"model": "simulated", "stream": True, "seed": 0, **fields})
    async with engine.complete(request, context=context) as answer:
        deltas = [delta async for delta in answer]
    check_answer(request, deltas, answer.usage, engine.card.context_length)
    return deltas, answer.usage


async def at_once(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """All at the same time; their results in order."""
    results: dict[int, Any] = {}

    async def run(i: int, call: Callable[[], Awaitable[Any]]) -> None:
        results[i] = await call()

    async with trio.open_nursery() as nursery:
        for i, call in enumerate(calls):
            nursery.start_soon(run, i, call)
    return [results[i] for i in range(len(calls))]


def text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(d.text for d in deltas if d.index == index)


# -- prefix cache and isolation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 112, 117, 512])
async def test_b163_echo_scores_are_the_same_from_the_cache(autojump_clock: Clock, length: int) -> None:
    async with engine_on() as (engine, _):
        body = {"prompt": ids_of_length(length), "max_tokens": 1, "temperature": 0, "echo": True}
        cold, _ = await ask(engine, **body, logprobs=1)
        warm, _ = await ask(engine, **body, logprobs=2)
        again, usage = await ask(engine, **body, logprobs=2)
    rows = [[r for d in deltas for r in d.rows] for deltas in (cold, warm, again)]
    assert len(rows[0]) == len(rows[1]) == length + 1
    assert [r.logprob for r in rows[0]] == [r.logprob for r in rows[1]]
    assert [r.top[:1] for r in rows[0]] == [r.top[:1] for r in rows[1]]
    assert rows[1] == rows[2]
    assert usage.cached_tokens >= (length - 1) // 16 * 16 - 1  # the row before the first new score runs again


async def test_b164_scores_at_cached_positions_are_this_requests_own(autojump_clock: Clock) -> None:
    stem, body = ids_of_length(200), {"max_tokens": 1, "echo": True, "logprobs": 1}
    async with engine_on() as (engine, _):
        await ask(engine, prompt=[*stem, *ids_of_length(60, 1)], **body)
        other = [*stem, *ids_of_length(60, 2)]
        warm, _ = await ask(engine, prompt=other, **body)
        cold, usage = await ask(engine, prompt=other, prompt_cache_isolation_key="fresh", **body)
    assert usage.cached_tokens == 0
    assert [r for d in warm for r in d.rows] == [r for d in cold for r in d.rows]


async def test_b160_no_tenant_hits_anothers_blocks(autojump_clock: Clock) -> None:
    body = {"prompt": ids_of_length(400), "max_tokens": 1}
    async with engine_on() as (engine, _):
        cached = [
            (await ask(engine, **body, prompt_cache_isolation_key=key))[1].cached_tokens
            for key in ("t1", "t2", None, "t1", "", "t2")
        ]
        header = (await ask(engine, context=Context(isolation_key="t1"), **body))[1].cached_tokens
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 380
    assert cached[4] == 0
    assert cached[5] == header == cached[3]


async def test_b162_keys_of_different_kinds_never_collide(autojump_clock: Clock) -> None:
    body = {"prompt": ids_of_length(100), "max_tokens": 1}
    async with engine_on() as (engine, _):
        await ask(engine, **body, prompt_cache_isolation_key="SAME")
        _, usage = await ask(engine, **body, prompt_cache_key="SAME")
        assert usage.cached_tokens == 0
        _, usage = await ask(engine, **body, prompt_cache_isolation_key="ab", user="c")
        assert usage.cached_tokens == 0
        _, usage = await ask(engine, **body, prompt_cache_isolation_key="a", user="bc")
        assert usage.cached_tokens == 0
        other = {**body, "prompt": ids_of_length(100, 5)}
        await ask(engine, **other, prompt_cache_isolation_key="SAME")
        _, usage = await ask(engine, **other, user="SAME")
        assert usage.cached_tokens == 0


async def test_b217_two_requests_of_one_id(autojump_clock: Clock) -> None:
    async def one(engine: Engine, prompt: str, context: Context) -> str:
        request = from_fields({"model": "simulated", "prompt": prompt, "max_tokens": 200, "ignore_eos": True,
                               "stream": True, "seed": 1})  # fmt: skip
        async with engine.complete(request, context=context) as answer:
            deltas = [d async for d in answer]
        check_answer(request, deltas, answer.usage, engine.card.context_length)
        return answer.id

    async with engine_on() as (engine, _):
        for context in (Context(request_id="same"), Context(session="same")):
            ids = await at_once(partial(one, engine, "storyA", context), partial(one, engine, "storyB", context))
            assert ids[0] != ids[1]
        await ask(engine, **CANARY)


async def test_b229_sixteen_at_once_for_twenty_rounds(autojump_clock: Clock) -> None:
    async with engine_on(blocks=64) as (engine, _):
        for round_ in range(20):
            await at_once(
                *(partial(ask, engine, prompt=f"marker{i}x{round_}", max_tokens=30, temperature=0) for i in range(16))
            )


async def test_b231_four_equal_requests_in_a_small_context(autojump_clock: Clock) -> None:
    body = {"prompt": "WhyDoCatsPurr", "max_tokens": 128, "temperature": 0, "ignore_eos": True}
    async with engine_on(blocks=8) as (engine, _):
        answers = await at_once(*(lambda: ask(engine, **body) for _ in range(4)))
        assert {text(deltas) for deltas, _ in answers} == {text(answers[0][0])}
        assert {usage.completion_tokens for _, usage in answers} == {128 - 13}


# -- preemption and chunks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prompts", "fields"),
    [
        ("b155", ["p0", "p1", "p2", "p3"], {"temperature": 0}),
        ("b156", ["p"] * 4, {"temperature": 1}),
        ("b157", ["ppp"] * 4, {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.4,
                               "repetition_penalty": 1.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
async def test_b155_b156_b157_preempted_answers(
    autojump_clock: Clock, name: str, prompts: list[str], fields: dict[str, object]
) -> None:
    body = {"max_tokens": 200, "ignore_eos": True, **fields}
    async with engine_on(blocks=20) as (engine, _):
        answers = await at_once(*(partial(ask, engine, prompt=p, seed=i, **body) for i, p in enumerate(prompts)))
        assert engine._scheduler.preemptions > 0
        assert all(usage.completion_tokens == 200 for _, usage in answers)
        assert all(usage.prompt_tokens == len(prompts[0]) for _, usage in answers)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 100])
async def test_b168_a_prompt_scored_in_chunks(autojump_clock: Clock, length: int) -> None:
    prompt = ids_of_length(length)
    async with engine_on(step_tokens_max=16) as (engine, _):
        deltas, _ = await ask(engine, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1)
    rows = [r for d in deltas for r in d.rows]
    assert len(rows) == length + 1
    assert [r.logprob for r in rows[1:length]] == [logprob_of(prompt[:q], prompt[q]) for q in range(1, length)]
    assert [not r.top for r in rows] == [True] + [False] * length


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_b170_chunks_do_not_show(autojump_clock: Clock, chunk: int, temperature: int) -> None:
    async with engine_on(step_tokens_max=chunk, blocks=64) as (engine, executor):
        await ask(engine, prompt=ids_of_length(500), max_tokens=64, temperature=temperature, seed=9)
        assert executor.device.steps_run >= 500 // chunk


# -- seeds and n -----------------------------------------------------------------------------------------------------


async def test_b049_b055_samples_differ_and_repeat(autojump_clock: Clock) -> None:
    body = {"prompt": "Once", "max_tokens": 24, "n": 8, "temperature": 1.5, "seed": 11}
    async with engine_on() as (engine, _):
        first, _ = await ask(engine, **body)
        second, _ = await ask(engine, **body)
        seeds = await at_once(*(partial(ask, engine, prompt="Roll", seed=s, max_tokens=24) for s in range(1, 6)))
    texts = [text(first, i) for i in range(8)]
    assert len(set(texts)) >= 2
    assert texts == [text(second, i) for i in range(8)]
    assert len({text(deltas) for deltas, _ in seeds}) >= 4


async def test_b050_every_sample_survives(autojump_clock: Clock) -> None:
    body = {"prompt": "Hello", "max_tokens": 12, "temperature": 1, "seed": 2, "ignore_eos": True, "n": 10}
    async with engine_on() as (engine, _):
        plain, _ = await ask(engine, **body, stream=False)
        streamed, _ = await ask(engine, **body)
    assert sorted(d.index for d in plain) == list(range(10))
    assert [text(plain, i) for i in range(10)] == [text(streamed, i) for i in range(10)]
    assert sorted(d.index for d in streamed if d.finish_reason) == list(range(10))


async def test_b054_b057_a_seed_is_not_the_slot_nor_a_running_generator(autojump_clock: Clock) -> None:
    body = {"prompt": "dice", "seed": 123, "temperature": 1, "max_tokens": 16, "ignore_eos": True}
    async with engine_on() as (engine, _):
        crowd = await at_once(*(lambda: ask(engine, **body) for _ in range(16)))
        again, _ = await ask(engine, **body)
        other, _ = await ask(engine, **{**body, "seed": 124})
    assert {text(deltas) for deltas, _ in crowd} == {text(again)}
    assert text(other) != text(again)


@pytest.mark.parametrize(
    "seed", [-1, 0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 1.5, "7", True]
)
async def test_b058_every_seed_is_served_or_refused(autojump_clock: Clock, seed: object) -> None:
    served = isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**64
    async with engine_on() as (engine, _):
        if served:
            request = from_fields({"model": "simulated", "prompt": "x", "seed": seed, "max_tokens": 2})
            async with engine.complete(request) as answer:
                (choice,) = await answer.choices()
            params = SamplingParams(seed=int(seed) % 2**64)  # type: ignore[call-overload]
            assert list(choice.token_ids) == expected(LETTERS.encode("x"), params, 2)[0]
        else:
            with pytest.raises(InvalidRequest):
                await ask(engine, prompt="x", seed=seed, max_tokens=2)
        await ask(engine, **CANARY)


@pytest.mark.parametrize("n", [128, 129, 0])
async def test_b060_n_above_its_limit_is_refused_at_once(autojump_clock: Clock, n: int) -> None:
    async with engine_on(running_max=8, slots=8) as (engine, _):
        if n == 128:
            deltas, usage = await ask(engine, prompt="x", n=n, max_tokens=2, ignore_eos=True)
            assert {d.index for d in deltas} == set(range(128))
            assert usage.completion_tokens == 256
        else:
            with pytest.raises(InvalidRequest):
                await ask(engine, prompt="x", n=n, max_tokens=2)
        await ask(engine, **CANARY)


async def test_b062_greedy_samples_are_equal(autojump_clock: Clock) -> None:
    async with engine_on() as (engine, _):
        deltas, _ = await ask(engine, prompt="same", n=3, temperature=0, max_tokens=6, logprobs=0)
    choices = [(text(deltas, i), [r for d in deltas if d.index == i for r in d.rows]) for i in range(3)]
    assert choices[0] == choices[1] == choices[2]


# -- overload, lengths, usage ----------------------------------------------------------------------------------------


async def test_b061_one_small_body_cannot_take_everything(autojump_clock: Clock) -> None:
    async with engine_on(blocks=32) as (engine, _):
        with pytest.raises(InvalidRequest):
            await ask(engine, prompt="x", n=1_000_000, max_tokens=10**9)
        with pytest.raises(InvalidRequest, match="choices"):
            await ask(engine, prompt=["x"] * 100, n=128, max_tokens=2)
        await ask(engine, **CANARY)
        _, usage = await ask(engine, prompt="x", max_tokens=10**9, ignore_eos=True)
        assert usage.completion_tokens == 32 * 16 - 1


async def test_b104_too_many_stops_or_biases(autojump_clock: Clock) -> None:
    bias = {str(i): 1 for i in range(64 + 100_000)}
    async with engine_on() as (engine, _):
        with pytest.raises(InvalidRequest) as caught:
            await ask(engine, prompt="x", max_tokens=2, logit_bias=bias)
        assert len(caught.value.message) < 20_000
        with pytest.raises(InvalidRequest):
            await ask(engine, prompt="x", max_tokens=2, stop=["1", "2", "3", "4", "5"])
        await ask(engine, **CANARY)


async def test_b118_null_is_the_default_limit(autojump_clock: Clock) -> None:
    async with engine_on(default_max_tokens=20) as (engine, _):
        told = []
        for fields in ({}, {"max_tokens": None}, {"max_tokens": None, "stream": False}):
            request = from_fields(
                {"model": "simulated", "prompt": "test", "temperature": 0, "ignore_eos": True, **fields}
            )
            async with engine.complete(request) as answer:
                told += await answer.choices()
    assert len(told[0].token_ids) == 20
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("tokens", [2**31 - 1, 2**31, 2**32 + 1, 1e18, 2**63 - 1, 10**30, -1, 1.5, "16"])
async def test_b120_limits_that_overflow(autojump_clock: Clock, tokens: object) -> None:
    async with engine_on(blocks=8) as (engine, _):
        if tokens == 2**31 - 1:
            _, usage = await ask(engine, prompt="hi", max_tokens=tokens, temperature=0, ignore_eos=True)
            assert usage.completion_tokens == 126
        else:
            with pytest.raises(InvalidRequest):
                await ask(engine, prompt="hi", max_tokens=tokens, temperature=0)
        await ask(engine, **CANARY)


async def test_b121_b124_more_than_the_context(autojump_clock: Clock) -> None:
    async with engine_on(blocks=8) as (engine, _):
        body = {"prompt": "Hi", "max_tokens": 128 * 5, "temperature": 0, "ignore_eos": True}
        deltas, usage = await ask(engine, **body, context_length_exceeded_behavior="truncate")
        assert usage.completion_tokens == 126
        assert deltas[-1].finish_reason == "length"
        with pytest.raises(InvalidRequest):
            await ask(engine, **body, context_length_exceeded_behavior="error")
        with pytest.raises(InvalidRequest) as caught:
            await ask(engine, prompt=[1] * 100, max_tokens=128, context_length_exceeded_behavior="error")
    assert all(number in caught.value.message for number in ("100", "128"))


async def test_b123_the_end_of_the_context_with_and_without_drafts(autojump_clock: Clock) -> None:
    body = {"prompt": ids_of_length(125), "max_tokens": 50, "temperature": 0, "ignore_eos": True}
    async with engine_on(blocks=8) as (engine, _):
        plain, usage = await ask(engine, **body)
        guess = [t for d in plain for t in d.token_ids] + ids_of_length(200)
        drafted, _ = await ask(engine, **body, speculation=guess)
        assert usage.completion_tokens == 3
        assert text(plain) == text(drafted)
        await ask(engine, **CANARY)


async def test_b127_b128_b132_usage_is_told_once_and_whole(autojump_clock: Clock) -> None:
    async with engine_on() as (engine, _):
        _, usage = await ask(engine, prompt="x", max_tokens=100, temperature=0, ignore_eos=True, n=2)
        assert (usage.prompt_tokens, usage.completion_tokens) == (1, 200)
        told = [await ask(engine, prompt="fourWords", max_tokens=2, stream=stream) for stream in (True, False)]
        assert told[0][1].prompt_tokens == told[1][1].prompt_tokens == 9
        long = ids_of_length(400)
        await ask(engine, prompt=long, max_tokens=1)
        _, usage = await ask(engine, prompt=long, max_tokens=2)
        assert usage.cached_tokens >= 384


# -- leaving and slow readers ----------------------------------------------------------------------------------------


async def test_b146_ends_and_departures_are_counted_as_what_they_are(autojump_clock: Clock) -> None:
    async def leave(engine: Engine) -> None:
        async with engine.complete(prompt="x", max_tokens=2000, ignore_eos=True) as answer:
            await anext(answer)
            await anext(answer)

    async with engine_on(blocks=512, queue_max=300) as (engine, _):

        def outcome(name: str) -> float:
            return engine.registry.get_sample_value("offbook_requests_total", {"outcome": name}) or 0.0

        await at_once(*(partial(ask, engine, prompt="x", seed=i, max_tokens=3) for i in range(200)))
        assert (outcome("answered"), outcome("abandoned")) == (200, 0)
        await at_once(*(lambda: leave(engine) for _ in range(50)))
        await trio.sleep(0.03)
        assert (outcome("answered"), outcome("abandoned")) == (200, 50)
        assert engine.snapshot()["blocks_held"] == 0


async def test_b148_a_departure_during_a_long_prefill(autojump_clock: Clock) -> None:
    async with engine_on(step_tokens_max=32) as (engine, executor):
        with trio.move_on_after(0.025):
            await ask(engine, prompt=ids_of_length(engine.card.context_length - 5), max_tokens=4)
        began = trio.current_time()
        await ask(engine, **CANARY)
        assert trio.current_time() - began < 0.05
        assert executor.device.steps_run < 10


async def test_b150_half_of_a_crowd_leaves(autojump_clock: Clock) -> None:
    rng = random.Random(3)

    async def one(engine: Engine, i: int, leaves_s: float) -> str:
        options = rng.choice(({"frequency_penalty": 0.5}, {"stop": "q"}, {"logprobs": 2}, {}))
        with trio.move_on_after(leaves_s):
            await ask(engine, prompt=f"r{i}", max_tokens=60, ignore_eos=True, seed=i, temperature=1, **options)
            return "done"
        return "left"

    async with engine_on(blocks=80, running_max=32, slots=32, queue_max=200) as (engine, _):
        times = [math.inf if i % 2 else rng.random() * 3 for i in range(150)]
        endings = await at_once(*(partial(one, engine, i, times[i]) for i in range(150)))
        assert endings.count("done") >= 75
        assert "left" in endings
        await ask(engine, **CANARY)


async def test_b151_b152_a_reader_that_sleeps_holds_up_nobody(autojump_clock: Clock) -> None:
    """What piles up for it is bounded by its own answer, and is whole when it wakes; one that never wakes is let go."""
    body = {"model": "simulated", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5,
            "seed": 0}  # fmt: skip
    gaps: list[float] = []

    async def sleeper(engine: Engine, wakes: bool) -> None:
        request = from_fields(body)
        async with engine.complete(request) as answer:
            await trio.sleep(20)
            if wakes:
                deltas = [d async for d in answer]
                check_answer(request, deltas, answer.usage, engine.card.context_length)

    async def reader(engine: Engine) -> None:
        async with engine.complete(from_fields(body)) as answer:
            last = trio.current_time()
            async for _ in answer:
                gaps.append(trio.current_time() - last)
                last = trio.current_time()

    async with engine_on() as (engine, executor):
        longest = executor.step_s

        def slowest(step: Step) -> None:
            view = engine.inspect()
            assert all(t.undelivered <= 302 for t in view.tickets)

        executor.before = slowest
        await at_once(*(partial(sleeper, engine, w % 2 == 0) for w in range(10)), lambda: reader(engine))
    assert max(gaps) <= 3 * longest
