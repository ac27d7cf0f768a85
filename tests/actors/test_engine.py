"""The four actors together, on the simulated device in virtual time: answers, endings, abandonment and failures.

Long, since each of these is tried on the same engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from sim_device import LetterTokenizer, expected, loaded_with, logprob_of
from sim_executor import SimExecutor

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import (
    ClientOverShare,
    DeadlineExceeded,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    StepFailed,
)
from offbook.actors.events import Context, Delta
from offbook.actors.execution import StepError
from offbook.actors.request import from_fields
from offbook.actors.steps import Step
from offbook.actors.thinking import BRIDGE
from offbook.kernels.params import SamplingParams
from offbook.kernels.step import StepResult

LETTERS = LetterTokenizer()


@asynccontextmanager
async def engine_on(executor: SimExecutor | None = None, **config: object) -> AsyncIterator[Engine]:
    executor = executor or SimExecutor()
    config.setdefault("grammar_compile_s", math.inf)  # the virtual clock would jump over a thread at work
    async with open_engine(EngineConfig(**config), loaded=loaded_with(executor, executor.device)) as engine:  # type: ignore[arg-type]
        yield engine
        with trio.fail_after(1000):
            for _ in range(100_000):
                if not engine.snapshot()["blocks_held"]:
                    break
                await trio.sleep(0.01)
        assert engine.snapshot()["running"] == engine.snapshot()["waiting"] == 0


async def ask(engine: Engine, **fields: object) -> list[Delta]:
    async with engine.complete(from_fields({"model": "simulated", "stream": True, **fields})) as answer:
        return await answer.choices()


def text_of(ids: list[int]) -> str:
    return b"".join(LETTERS.token_bytes(t) for t in ids if not LETTERS.is_special(t)).decode()


async def test_a_greedy_answer(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        (choice,) = await ask(engine, prompt="hello", temperature=0, max_tokens=9)
    ids, reason = expected(LETTERS.encode("hello"), SamplingParams(temperature=0), 9)
    assert (list(choice.token_ids), choice.finish_reason) == (ids, reason)
    assert choice.text == text_of(ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_n_and_prompts_are_prompt_major(autojump_clock: trio.testing.MockClock, stream: bool) -> None:
    async with engine_on() as engine:
        choices = await ask(engine, prompt=["ab", "cd"], n=3, seed=5, max_tokens=6, stream=stream)
    assert [c.index for c in choices] == list(range(6))
    for c in choices:
        prompt = LETTERS.encode(["ab", "cd"][c.index // 3])
        ids, _ = expected(prompt, SamplingParams(seed=5, choice=c.index % 3), 6)
        assert list(c.token_ids) == ids


async def test_usage_and_timings_add_up(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        for cached in (0, 32):
            async with engine.complete(prompt=[*range(1, 41)], ignore_eos=True, max_tokens=7, n=2) as answer:
                await answer.choices()
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (40, 14)
            assert answer.usage.cached_tokens >= cached
            t = answer.timings
            prefill = t.tokenizer_queue_s + t.tokenizer_s + t.prefill_queue_s + t.prefill_s
            assert prefill + t.generation_queue_s + t.generation_s == pytest.approx(t.processing_s)
            assert t.first_token_s == pytest.approx(0.01)
            assert t.processing_s == pytest.approx(0.07, abs=0.02)


async def test_echo_scores_every_prompt_token(autojump_clock: trio.testing.MockClock) -> None:
    prompt = LETTERS.encode("scoring")
    async with engine_on() as engine:
        (choice,) = await ask(engine, prompt="scoring", echo=True, logprobs=2, max_tokens=0)
        (last,) = await ask(engine, prompt="scoring", echo_last=3, logprobs=True, max_tokens=2)
    assert (choice.text, choice.finish_reason, choice.token_ids) == ("scoring", "length", ())
    assert [r.logprob for r in choice.rows] == [0.0, *(logprob_of(prompt[:q], prompt[q]) for q in range(1, 7))]
    assert [len(r.top) for r in choice.rows] == [0, 2, 2, 2, 2, 2, 2]
    assert [r.text_offset for r in choice.rows] == list(range(7))
    assert last.text.startswith("ing")
    assert [r.token_id for r in last.rows[:3]] == prompt[-3:]
    assert len(last.rows) == 3 + len(last.token_ids)


async def test_a_stop_string_ends_one_choice(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        (whole,) = await ask(engine, prompt="a stop", temperature=0, max_tokens=30, ignore_eos=True)
        text = whole.text
        stop = text[7:9]
        at = text.index(stop)
        async with engine.complete(prompt="a stop", temperature=0, max_tokens=30, ignore_eos=True, stop=stop) as answer:
            (cut,) = await answer.choices()
    assert (cut.text, cut.finish_reason) == (text[:at], "stop")
    assert answer.usage.completion_tokens == len(cut.token_ids) < 30


async def test_leaving_frees_everything_within_a_step(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        async with engine.complete(prompt="leave", ignore_eos=True, max_tokens=500, n=4) as answer:
            async for _ in answer:
                break
        await trio.sleep(0.021)  # the step that was out, at most
        assert engine.snapshot()["blocks_held"] == 0


async def test_leaving_while_waiting(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on(running_max=1) as engine, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(lambda: ask(engine, prompt="busy", ignore_eos=True, max_tokens=50))
        await trio.sleep(0.05)
        with trio.move_on_after(0.1):
            await ask(engine, prompt="gone")


async def test_a_full_queue_refuses_with_an_honest_time(autojump_clock: trio.testing.MockClock) -> None:
    refused: list[float] = []

    async def one(engine: Engine) -> None:
        try:
            await ask(engine, prompt="x", ignore_eos=True, max_tokens=20)
        except EngineOverloaded as error:
            assert error.retry_after_s is not None
            refused.append(error.retry_after_s)

    async with engine_on(running_max=1, queue_max=4) as engine, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(one, engine)
    assert len(refused) == 20 - 4 - 2
    assert all(1 <= r <= 60 for r in refused)


async def test_priority_overtakes_and_evicts(autojump_clock: trio.testing.MockClock) -> None:
    order: list[str] = []

    async def one(engine: Engine, name: str, tier: str) -> None:
        try:
            await ask(engine, prompt="x", ignore_eos=True, max_tokens=20, service_tier=tier)
            order.append(name)
        except EngineOverloaded:
            order.append(f"{name} refused")

    async with engine_on(running_max=1, queue_max=3) as engine, trio.open_nursery() as nursery:
        for name in "abcde":
            nursery.start_soon(one, engine, name, "default")
            await trio.sleep(0.001)
        nursery.start_soon(one, engine, "urgent", "priority")
    assert order == ["e refused", "a", "b", "urgent", "c", "d"]


async def test_one_clients_share(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on(client_share_max=1) as engine:
        async with engine.complete(prompt="a", context=Context(client="k"), max_tokens=500, ignore_eos=True):
            with pytest.raises(ClientOverShare):
                async with engine.complete(prompt="b", context=Context(client="k")):
                    pass
            async with engine.complete(prompt="b", context=Context(client="other"), max_tokens=1) as answer:
                await answer.choices()
        await trio.sleep(0.05)
        async with engine.complete(prompt="b", context=Context(client="k"), max_tokens=1) as answer:
            await answer.choices()


async def test_a_deadline_passes(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        soon = Context(deadline_s=0.2)
        async with engine.complete(prompt="a", context=soon, max_tokens=900, ignore_eos=True) as answer:
            with pytest.raises(DeadlineExceeded):
                await answer.choices()


async def test_a_closed_engine_says_so(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        pass
    with pytest.raises(EngineUnavailable, match=r"^the engine is closed$"):
        await ask(engine, prompt="x")


async def test_what_is_no_request_is_told_what_is_wanted(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        with pytest.raises(TypeError, match=r"fields by name \(prompt=...\), not 'str'"):
            engine.complete("The sea")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("kv_bytes", "256M", "kv_bytes: wanted int, not '256M'"),
        ("device", "gpu", "device: wanted Literal['auto', 'cpu', 'torch-cpu', 'cuda'], not 'gpu'"),
        ("model_aliases", "a", "model_aliases: wanted tuple[str, ...], not 'a'"),
    ],
)
def test_a_configuration_of_the_wrong_kind(field: str, value: object, told: str) -> None:
    with pytest.raises(TypeError) as raised:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    assert str(raised.value) == told


async def test_draining_refuses_and_finishes(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine, engine.complete(prompt="a", max_tokens=20, ignore_eos=True) as answer:
        engine.begin_drain()
        with pytest.raises(EngineUnavailable):
            await ask(engine, prompt="b")
        (choice,) = await answer.choices()
        assert len(choice.token_ids) == 20


async def test_the_end_of_a_drain_is_told_after_what_has_been_made(autojump_clock: trio.testing.MockClock) -> None:
    """To one who reads and to one who waits for his first token; once."""
    told: list[int] = []

    async def reader(engine: Engine, prompt: str) -> None:
        got = 0
        with pytest.raises(EngineUnavailable, match="the server stops"):
            async with engine.complete(prompt=prompt, max_tokens=200, ignore_eos=True) as answer:
                async for delta in answer:
                    got += len(delta.token_ids)
        told.append(got)

    async with engine_on(running_max=1) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(reader, engine, "first")
        await trio.sleep(0.05)
        nursery.start_soon(reader, engine, "second")
        await trio.sleep(0.05)
        engine.begin_drain()
        engine.end_answers()
        engine.end_answers()
        await trio.testing.wait_all_tasks_blocked()
    assert min(told) == 0 and max(told) > 5 and len(told) == 2


async def test_figures_of_an_answer_that_was_left(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        async with engine.complete(prompt="hello", max_tokens=50, ignore_eos=True) as answer:
            got = 0
            async for delta in answer:
                got += len(delta.token_ids)
                if got >= 3:
                    break
        assert answer.usage.prompt_tokens == 5 and got <= answer.usage.completion_tokens < 50
        assert answer.timings.first_token_s > 0


async def test_a_failing_step_fails_only_its_requests(autojump_clock: trio.testing.MockClock) -> None:
    executor = SimExecutor()

    def fail_once(step: Step) -> None:
        executor.before = None
        raise StepError("out of memory")

    async with engine_on(executor) as engine:
        async with engine.complete(prompt=[*range(1, 60)], max_tokens=50) as answer:
            executor.before = fail_once
            with pytest.raises(StepFailed, match="out of memory"):
                await answer.choices()
        (choice,) = await ask(engine, prompt=[*range(1, 60)], temperature=0, max_tokens=5)
    assert list(choice.token_ids) == expected(range(1, 60), SamplingParams(temperature=0), 5)[0]


async def test_a_poisoned_row_hurts_nobody_else(autojump_clock: trio.testing.MockClock) -> None:
    executor = SimExecutor()

    def poison(result: StepResult) -> None:
        if len(result.token) == 2:
            result.error[1] = 1
            result.token[1] = -1

    async with engine_on(executor) as engine:
        async with engine.complete(prompt="good", temperature=0, max_tokens=20, ignore_eos=True) as good:
            async with engine.complete(prompt=[*range(1, 21)], max_tokens=20, ignore_eos=True) as bad:
                executor.after = poison
                with pytest.raises(StepFailed):
                    await bad.choices()
            (choice,) = await good.choices()
        async with engine.complete(prompt=[*range(1, 21)], max_tokens=1) as again:
            await again.choices()
        assert again.usage.cached_tokens == 0, "what gave a NaN is not served from the cache"
    ids, _ = expected(LETTERS.encode("good"), SamplingParams(temperature=0), 20, frozenset())
    assert list(choice.token_ids) == ids


async def test_a_dead_executor_ends_the_engine(autojump_clock: trio.testing.MockClock) -> None:
    executor = SimExecutor()

    def die(step: Step) -> None:
        raise OSError("the device is gone")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with engine_on(executor) as engine:
            executor.before = die
            await ask(engine, prompt="x")
    assert caught.value.subgroup(OSError) is not None


async def test_a_result_of_the_wrong_shape_ends_the_engine(autojump_clock: trio.testing.MockClock) -> None:
    executor = SimExecutor()

    def shrink(result: StepResult) -> None:
        result.token = result.token[:0]

    executor.after = shrink
    with pytest.raises(BaseExceptionGroup) as caught:
        async with engine_on(executor) as engine:
            await ask(engine, prompt="x")
    assert caught.value.subgroup(ValueError) is not None


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"logprobs": 6}, 422, "logprobs must be between 0 and 5: 6"),
        ({"logprobs": True, "top_logprobs": 20}, 422, "top_logprobs must be between 0 and 5: 20"),
        ({"logit_bias": {"x": 1}}, 422, "logit_bias.x"),
        ({"logit_bias": {"71": 1}}, 400, "vocabulary of 71"),
        ({"seed": 2**70}, 422, "seed"),
        ({"prompt": [1, 71]}, 400, "prompt[1]"),
        ({"prompt": [[1], [99]]}, 400, "prompt[1][0]"),
        ({"prompt": ["a", ""]}, 400, "prompt[1]"),
        ({"prompt": [1] * 1024}, 400, "The prompt is too long: 1024, model maximum context length: 1024"),
        ({"max_tokens": 2000, "context_length_exceeded_behavior": "error"}, 400, "maximum context length"),
        ({"images": ["data:image/png;base64,AA"]}, 400, "images"),
        ({"min_tokens": 5, "max_tokens": 4}, 400, "min_tokens"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, object], status: int, words: str) -> None:
    async with engine_on() as engine:
        with pytest.raises(InvalidRequest) as caught:
            await ask(engine, **{"prompt": "x", **fields})
    assert caught.value.status == status
    assert words in caught.value.message


async def test_unknown_model_and_names_that_are_known() -> None:
    async with engine_on(model_aliases=("other",)) as engine:
        with pytest.raises(ModelNotFound):
            await ask(engine, prompt="x", model="nope")
        for name in ("simulated", "other", "accounts/a/models/simulated", "accounts/a/models/other"):
            engine.check_model(name)


async def test_buffering_by_tokens_and_time(autojump_clock: trio.testing.MockClock) -> None:
    async def sizes(engine: Engine, **options: object) -> list[int]:
        async with engine.complete(prompt="b", ignore_eos=True, max_tokens=10, stream_options=options) as answer:
            return [len(d.token_ids) async for d in answer]

    async with engine_on() as engine:
        assert await sizes(engine) == [1] * 10
        assert await sizes(engine, buffer_tokens=4) == [4, 4, 2]
        assert await sizes(engine, buffer_ms=35) == [4, 4, 2]
        assert await sizes(engine, buffer_tokens=2, buffer_ms=55, buffer_mode="any") == [2] * 5
        assert await sizes(engine, buffer_tokens=2, buffer_ms=55, buffer_mode="all") == [6, 4]
        assert await sizes(engine, buffer_tokens=8, buffer_ms=15, buffer_mode="all") == [8, 2]


async def test_the_callers_own_error_comes_out_unwrapped() -> None:
    with pytest.raises(KeyError):
        async with engine_on():
            raise KeyError("mine")


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"n": 3}, {"frequency_penalty": 1.0}, {"logprobs": 3}])
@pytest.mark.parametrize("wrong", [(), (3,), (0, 9, 10), tuple(range(40))])
async def test_a_prediction_never_shows_in_the_answer(
    autojump_clock: trio.testing.MockClock, fields: dict[str, object], wrong: tuple[int, ...]
) -> None:
    body: dict[str, object] = {"prompt": "predict", "seed": 3, "max_tokens": 40, "ignore_eos": True, **fields}
    plain, drafted = SimExecutor(), SimExecutor()
    async with engine_on(plain) as engine:
        choices = await ask(engine, **body)
    guess = [t if i not in wrong else (t + 1) % 71 for i, t in enumerate(choices[0].token_ids)]
    async with engine_on(drafted) as engine:
        async with engine.complete(from_fields({"model": "simulated", **body, "speculation": guess})) as answer:
            assert await answer.choices() == choices
    figures = answer.speculation
    assert figures is not None
    assert figures.prompt_tokens == 40
    assert figures.drafted_tokens == sum(tried for _, tried in figures.accepted)
    if not wrong and "n" not in fields:
        assert figures.matched_tokens > 25
        assert drafted.device.steps_run < plain.device.steps_run / 3


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no"', "yes|no"),
        ("root ::= [a-c]{3,5} [0-9]", "[a-c]{3,5}[0-9]"),
        ('root ::= "all of it"', None),
    ],
)
@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_grammar_is_obeyed_and_ends_the_answer(
    autojump_clock: trio.testing.MockClock, grammar: str, pattern: str | None, ignore_eos: bool
) -> None:
    fmt = {"type": "grammar", "grammar": grammar}
    async with engine_on() as engine:
        choices = await ask(engine, prompt="say", response_format=fmt, n=4, seed=1, ignore_eos=ignore_eos)
    for choice in choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern or "all of it", choice.text)


async def test_a_bad_grammar_is_refused_and_hurts_nobody(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on() as engine:
        for fmt in (
            {"type": "grammar", "grammar": "root ::= ("},
            {"type": "json_schema", "schema": {"minItems": 2**64}},
        ):
            with pytest.raises(InvalidRequest) as caught:
                await ask(engine, prompt="say", response_format=fmt)
            assert caught.value.status == 400
        assert len(await ask(engine, prompt="say", max_tokens=1)) == 1


@pytest.mark.parametrize("prediction", [None, "hmm hmm hmm", "the same"])
async def test_a_thinking_budget_holds_with_and_without_drafts(
    autojump_clock: trio.testing.MockClock, prediction: str | None
) -> None:
    """B205, B207: the budget is kept to the token whoever opened the block, and drafts change nothing."""
    body: dict[str, object] = {"prompt": "whyA", "max_tokens": 60, "ignore_eos": True, "seed": 4, "reasoning_effort": 5}
    async with engine_on(think_start="A", think_end="Z") as engine:
        (plain,) = await ask(engine, **body)
        guess = plain.text if prediction == "the same" else prediction
        (drafted,) = await ask(engine, **body, **({} if guess is None else {"speculation": guess}))
    assert drafted == plain
    closing = [*LETTERS.encode(BRIDGE), LETTERS.encode("Z")[0]]
    assert list(plain.token_ids[5 : 5 + len(closing)]) == closing


async def test_a_grammar_waits_for_the_end_of_thinking(autojump_clock: trio.testing.MockClock) -> None:
    async with engine_on(think_start="A", think_end="Z") as engine:
        fmt = {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}
        (choice,) = await ask(engine, prompt="A", reasoning_effort=3, response_format=fmt, seed=2, ignore_eos=True)
    assert choice.text.partition("Z")[2] in ("yes", "no")
    assert choice.finish_reason == "stop"
