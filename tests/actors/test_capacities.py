"""Every capacity at its least: nothing deadlocks, nothing overflows, and what is refused is refused on purpose.

``EngineConfig`` says that a full mailbox is the advertised refusal or a bug; here all of them are as small as they can
be while everybody talks at once.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from functools import partial

import msgspec
import pytest
import trio
import trio.testing
from sim_device import LetterTokenizer, SimDevice, loaded_with
from sim_executor import SimExecutor

from offbook.actors.config import AT_LEAST_ONE, EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import CompletionError, EngineOverloaded, EngineUnavailable
from offbook.actors.request import from_fields
from offbook.kernels.step import StepResult

LEAST: dict[str, object] = {
    "running_max": 1, "step_tokens_max": 1, "queue_max": 1, "queue_tokens_max": 1, "prompts_max": 1, "choices_max": 1,
    "applies_max": 1, "step_busy_ms": 0.001, "draft_tokens_max": 1,
}  # fmt: skip


async def one(engine: Engine, endings: Counter[str], **fields: object) -> None:
    try:
        async with engine.complete(from_fields({"model": "simulated", "stream": True, **fields})) as answer:
            async for _ in answer:
                pass
            endings["done"] += 1
    except CompletionError as error:
        endings[type(error).__name__] += 1


async def idle(engine: Engine) -> None:
    await engine.idle()
    while engine.snapshot()["blocks_held"]:  # noqa: ASYNC110  # blocks are freed by the next step: nothing tells
        await trio.sleep(0.01)


@pytest.mark.parametrize("least", [{}, *({k: v} for k, v in LEAST.items()), LEAST], ids=lambda d: "+".join(d) or "none")
async def test_small_bounds_refuse_and_never_hang(
    autojump_clock: trio.testing.MockClock, least: dict[str, object]
) -> None:
    device = SimDevice(blocks=4, slots=1)
    endings: Counter[str] = Counter()
    rng = random.Random(1)
    with trio.fail_after(10_000):
        async with open_engine(EngineConfig(**least), loaded=loaded_with(SimExecutor(device), device)) as engine:  # type: ignore[arg-type]
            async with trio.open_nursery() as nursery:
                for i in range(60):
                    fields = {"prompt": "abc" * rng.randrange(1, 9), "max_tokens": rng.randrange(12), "seed": i}
                    nursery.start_soon(partial(one, engine, endings, **fields))
                    if i % 7 == 0:
                        await trio.sleep(rng.choice((0.001, 0.1)))
            await idle(engine)
            await one(engine, endings, prompt="x", max_tokens=3)
    assert sum(endings.values()) == 61
    assert endings["done"] >= 5
    assert set(endings) <= {"done", EngineOverloaded.__name__, EngineUnavailable.__name__}


@pytest.mark.parametrize("crowd", [3, 8, 12, 100])
async def test_a_burst_cannot_take_the_room_of_those_inside(autojump_clock: trio.testing.MockClock, crowd: int) -> None:
    """Applications at the very instant at which a step ends: the burst is refused, the endings find room."""
    device = SimDevice(blocks=64, slots=4)
    executor = SimExecutor(device)
    config = EngineConfig(applies_max=2, queue_max=1, running_max=1, choices_max=4)
    endings: Counter[str] = Counter()
    bursts = 0
    with trio.fail_after(10_000):
        async with open_engine(config, loaded=loaded_with(executor, device)) as engine, trio.open_nursery() as nursery:

            def burst(result: StepResult) -> None:
                nonlocal bursts
                bursts += 1
                for _ in range(crowd):
                    nursery.start_soon(partial(one, engine, endings, prompt="x", max_tokens=1))

            for _ in range(10):
                executor.after = burst
                await one(engine, endings, prompt="inside", max_tokens=3, n=4, seed=2, ignore_eos=True)
                executor.after = None
                await idle(engine)
    assert sum(endings.values()) == bursts * crowd + 10
    assert endings["done"] >= 10


@pytest.mark.parametrize("choices", [1, 5, 64])
async def test_one_request_may_be_larger_than_all_the_places(
    autojump_clock: trio.testing.MockClock, choices: int
) -> None:
    device = SimDevice(blocks=16, slots=2)
    config = EngineConfig(running_max=2, choices_max=choices, queue_max=3)
    endings: Counter[str] = Counter()
    with trio.fail_after(10_000):
        async with open_engine(config, loaded=loaded_with(SimExecutor(device), device)) as engine:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(
                        partial(one, engine, endings, prompt="large", n=choices, max_tokens=20, frequency_penalty=0.5)
                    )
                    await trio.sleep(0.02)
            await idle(engine)
    assert endings["done"] == 3


async def test_many_leave_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Every sequence that batching may own ends in one sweep: all the notices find room."""
    device = SimDevice(blocks=512, slots=8)
    config = EngineConfig(running_max=8, choices_max=64, queue_max=8, applies_max=8)
    endings: Counter[str] = Counter()
    async with open_engine(config, loaded=loaded_with(SimExecutor(device), device)) as engine:
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as nursery:
                for n in (64, 16, 1, 1, 8, 8):
                    nursery.start_soon(
                        partial(one, engine, endings, prompt="gone", n=n, max_tokens=900, ignore_eos=True)
                    )
        assert not endings
        await trio.sleep(0.03)
        assert engine.snapshot()["blocks_held"] == 0
        await one(engine, endings, prompt="next", max_tokens=2)
    assert endings["done"] == 1


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_a_limit_under_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0 is less than 1"):
        msgspec.structs.replace(EngineConfig(), **{name: 0})


async def test_what_all_prompts_share_is_made_once(autojump_clock: trio.testing.MockClock) -> None:
    """A bias for each of 50 000 tokens takes 40 ms to convert: not once for each of hundreds of prompts."""
    executor = SimExecutor()
    async with open_engine(loaded=loaded_with(executor, executor.device)) as engine:
        async with engine.complete(prompt=["a", "b", "c"], n=2, logit_bias={"5": 1}, reasoning_effort=3):
            (ticket,) = engine._tickets.values()
            assert len({id(sequence.params) for sequence in ticket.sequences[::2]}) == 1
            thinking = [sequence.thinking for sequence in ticket.sequences]
            assert len(set(map(id, thinking))) == len(thinking)


@pytest.mark.parametrize(
    "long",
    [{"prompt": "a" * 40}, {"prediction": "a" * 40}, {"thinking": {"effort": 2, "budget_end_str": "a" * 40}}],
    ids=lambda fields: next(iter(fields)),
)
async def test_long_texts_are_tokenized_beside_the_loop(long: dict[str, object]) -> None:
    """A megabyte takes a second, wherever in the request it stands."""
    places: dict[int, threading.Thread] = {}

    class Watched(LetterTokenizer):
        def encode(self, text: str, *, bos: bool = True) -> list[int]:
            places[len(text)] = threading.current_thread()
            return super().encode(text, bos=bos)

    executor = SimExecutor()
    config = EngineConfig(thread_tokenize_bytes=20)
    async with open_engine(config, loaded=loaded_with(executor, executor.device)) as engine:
        vars(engine)["tokenizer"] = Watched()
        for fields in ({"prompt": "a" * 10}, long):
            body = {"model": "simulated", "prompt": [1], "max_tokens": 1, **fields}
            async with engine.complete(from_fields(body)) as answer:
                await answer.choices()
    assert places[10] is threading.main_thread()
    assert places[40] is not threading.main_thread()
