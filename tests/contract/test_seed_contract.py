"""The contracts nobody else offers, on the real CPU device: an answer's ids and log-probability bits are those of its
lone cold run, whatever the crowd, the chunks, the cache, preemption, drafts and cancellations around it.

``SEED_CONTRACT_ROUNDS=200 pytest tests/contract/test_seed_contract.py`` runs longer; a failing seed is in the test's
id.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Literal

import pytest
import trio
from host_cuda import HostCuda, use_small_tiles

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.events import Delta, Usage
from offbook.kernels import cuda_device, devices

ROUNDS = int(os.environ.get("SEED_CONTRACT_ROUNDS", "6"))
TEXTS = (
    "The sky is", "Once upon a time there was a small", "def fibonacci(n):\n    ", "Paris is the capital of",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,", "The quick brown fox jumps over the lazy dog. " * 12,
)  # fmt: skip
Body = dict[str, object]
Answers = list[Delta]
Device = Literal["cpu", "cuda"]


def random_body(rng: random.Random, context: int) -> Body:
    """A request that uses a random handful of everything that can decide a token."""
    text = rng.choice(TEXTS) + rng.choice(("", "", " and", "\n\n", rng.choice(TEXTS)))
    body: Body = {"prompt": text[: context * 2], "max_tokens": rng.choice((1, 5, 17, 40)), "seed": rng.randrange(2**40)}
    options: list[Body] = [
        {"temperature": 0}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"typical_p": 0.9},
        {"frequency_penalty": 0.8, "presence_penalty": 0.3}, {"repetition_penalty": 1.3},
        {"mirostat_target": 4.0, "mirostat_lr": 0.2}, {"logit_bias": {str(rng.randrange(200)): 4.0}},
        {"logprobs": 4}, {"logprobs": True, "top_logprobs": 2}, {"echo": True, "logprobs": 1}, {"n": 3},
        {"stop": [" the", "e"]}, {"ignore_eos": True}, {"min_tokens": 1},
        {"response_format": {"type": "grammar", "grammar": "root ::= [a-z ]{4,30} [.]"}},
        {"speculation": rng.choice(TEXTS)}, {"stream": False},
    ]  # fmt: skip
    for option in rng.sample(options, rng.randrange(1, 5)):
        body |= option
    return body


async def ask(engine: Engine, body: Body) -> tuple[Answers, Usage]:
    async with engine.complete(**body) as answer:  # type: ignore[arg-type]
        return await answer.choices(), answer.usage


async def lone_runs(model: Path, device: Device, bodies: list[Body]) -> list[tuple[Answers, Usage]]:
    """Each request by itself, nothing cached, prefilled in one piece."""
    config = EngineConfig(model=str(model), device=device, kv_bytes=64 * 2**20, prefix_cache=False)
    async with open_engine(config) as engine:
        return [await ask(engine, body) for body in bodies]


async def crowded(
    rng: random.Random, model: Path, device: Device, bodies: list[Body]
) -> tuple[dict[int, tuple[Answers, Usage]], int]:
    """All at once, twice over, in a random order, in an engine too small for them, with neighbours that leave."""
    got: dict[int, tuple[Answers, Usage]] = {}

    async def one(i: int) -> None:
        got[i] = await ask(engine, bodies[i % len(bodies)])

    async def deserter(tokens: int) -> None:
        async with engine.complete(prompt=rng.choice(TEXTS), max_tokens=200, ignore_eos=True) as answer:
            async for delta in answer:
                tokens -= len(delta.token_ids)
                if tokens <= 0:
                    break

    config = EngineConfig(
        model=str(model), device=device, kv_bytes=rng.choice((1, 2, 8)) * small_pool(model),
        running_max=rng.choice((3, 8, 32)), step_tokens_max=rng.choice((7, 33, 512)), threads=rng.choice((1, 2)),
        step_busy_ms=rng.choice((1.0, 50.0)), prompt_lookup=rng.random() < 0.3,
    )  # fmt: skip
    async with open_engine(config) as engine:
        async with trio.open_nursery() as nursery:
            for i in rng.sample(range(2 * len(bodies)), 2 * len(bodies)):
                nursery.start_soon(one, i)
                if rng.random() < 0.3:
                    nursery.start_soon(deserter, rng.randrange(20))
                for _ in range(rng.randrange(3)):
                    await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.05)
        snapshot = engine.snapshot()
        assert snapshot["running"] == snapshot["waiting"] == 0
        return got, sum(usage.cached_tokens for _, usage in got.values())


def small_pool(model: Path) -> int:
    """KV bytes that hold about 450 positions: less than a crowd needs."""
    return 450 * (23_040 if model.suffix == ".gguf" else 1_024)


async def compare(seed: int, model: Path, device: Device, context: int) -> None:
    rng = random.Random(seed)
    bodies = [random_body(rng, context) for _ in range(8)]
    lone = await lone_runs(model, device, bodies)
    got, _ = await crowded(rng, model, device, bodies)
    for i, (choices, usage) in got.items():
        body, (expected, expected_usage) = bodies[i % len(bodies)], lone[i % len(bodies)]
        assert choices == expected, f"seed {seed}: {body}"
        assert usage.completion_tokens == expected_usage.completion_tokens
        assert usage.prompt_tokens == expected_usage.prompt_tokens


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_every_answer_equals_its_lone_cold_run(seed: int, default_model_path: Path) -> None:
    trio.run(compare, seed, default_model_path, "cpu", 200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(max(ROUNDS // 3, 1)))
def test_so_it_does_on_the_cuda_device(seed: int, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole engine over the CUDA device, whose kernels run on fibers: all but the GPU itself."""
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(devices, "cuda_available", lambda: True)
    monkeypatch.setattr(cuda_device, "Cuda", HostCuda)
    trio.run(compare, seed, tiny_model_dir, "cuda", 60)
