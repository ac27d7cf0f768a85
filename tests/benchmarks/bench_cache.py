"""What the prefix cache saves: the same work with it and without it, on the default model, through the embedded engine.

``python tests/benchmarks/bench_cache.py`` prints, for each of three workloads, total time, median time to first token,
and the share of prompt tokens that came from the cache. Compare the two columns of one run, never two runs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable

import trio

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine

Figures = tuple[list[float], int, int]  # times to first token, prompt tokens, cached tokens


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]


async def ask(engine: Engine, figures: list[Figures], **fields: object) -> list[int]:
    """One request; its generated ids."""
    out: list[int] = []
    async with engine.complete(ignore_eos=True, temperature=0, **fields) as answer:  # type: ignore[arg-type]
        async for delta in answer:
            out += delta.token_ids
        figures.append(([answer.timings.first_token_s], answer.usage.prompt_tokens, answer.usage.cached_tokens))
    return out


async def shared_prefix(engine: Engine, figures: list[Figures]) -> None:
    """16 clients at once, 3 requests each: 480 shared tokens, 32 of their own, 16 generated."""
    stem = ids(random.Random(1), 480)

    async def client(i: int) -> None:
        rng = random.Random(100 + i)
        for _ in range(3):
            await ask(engine, figures, prompt=[*stem, *ids(rng, 32)], max_tokens=16)

    async with trio.open_nursery() as nursery:
        for i in range(16):
            nursery.start_soon(client, i)


async def endings(engine: Engine, figures: list[Figures]) -> None:
    """200 endings of 8 tokens scored after one stem of 400, 50 to a request."""
    rng = random.Random(2)
    stem = ids(rng, 400)
    for _ in range(4):
        prompts = [[*stem, *ids(rng, 8)] for _ in range(50)]
        await ask(engine, figures, prompt=prompts, max_tokens=0, echo_last=8, logprobs=1)


async def conversations(engine: Engine, figures: list[Figures]) -> None:
    """4 conversations of 8 turns, 40 new tokens and 24 generated ones a turn."""

    async def talk(i: int) -> None:
        rng = random.Random(i)
        history: list[int] = []
        for _ in range(8):
            history += ids(rng, 40)
            history += await ask(engine, figures, prompt=history, max_tokens=24)

    async with trio.open_nursery() as nursery:
        for i in range(4):
            nursery.start_soon(talk, i)


async def main() -> None:
    works: tuple[Callable[[Engine, list[Figures]], Awaitable[None]], ...] = (shared_prefix, endings, conversations)
    print(f"{'workload':16}{'cache':>7}{'total s':>9}{'ttft ms':>9}{'hits':>7}")
    for work in works:
        for caching in (False, True):
            figures: list[Figures] = []
            async with open_engine(EngineConfig(prefix_cache=caching)) as engine:
                began = time.perf_counter()
                await work(engine, figures)
                total = time.perf_counter() - began
            ttft = 1e3 * statistics.median(t for f in figures for t in f[0])
            hits = sum(f[2] for f in figures) / sum(f[1] for f in figures)
            name = getattr(work, "__name__", "")
            print(f"{name:16}{'on' if caching else 'off':>7}{total:9.2f}{ttft:9.0f}{hits:7.0%}")


if __name__ == "__main__":
    trio.run(main)
