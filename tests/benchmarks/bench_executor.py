"""Where the device should live: in a thread of the server's process or in a process of its own, under load.

``python tests/benchmarks/bench_executor.py [seconds]`` runs 16 streams beside 32 clients that send long new prompts,
with the device in a thread and then behind a pipe, in turns. It prints the gap between a stream's tokens (median, 99th
percentile), tokens a second, and prompts a second. Only ratios within one run mean anything.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pydoc_data.topics import topics
from statistics import median

import msgspec
import trio

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.execution import ThreadExecutor
from offbook.actors.loading import load_model
from offbook.kernels.default_model import fetch_default_model
from offbook.kernels.devices import open_device
from offbook.kernels.model_files import open_model
from offbook.kernels.step import U32, StepBatch, StepLimits, StepResult

KV_BYTES = 512 << 20
SLOTS = 64
TEXT = " ".join(" ".join(topics[key] for key in sorted(topics)).split())
ROUNDS = 3


def serve_device(pipe: Connection) -> None:
    """The child: a forward pass and a sample for each batch that comes."""
    device = open_device(open_model(fetch_default_model()), kv_bytes=KV_BYTES, threads=2, slots=SLOTS,
                         limits=StepLimits(rows=4096))  # fmt: skip
    pipe.send((device.blocks_total, device.vocabulary_size, device.context_length))
    while (batch := pipe.recv()) is not None:
        device.forward(batch)
        pipe.send(device.sample(batch, pipe.recv()))


class RemoteDevice:
    """A ``Device`` in a child process; what it is told of memory is not asked for here."""

    name, weight_bytes, kv_bytes, slots_total = "behind a pipe", 0, KV_BYTES, SLOTS

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_device, args=(theirs,), daemon=True)
        self._process.start()
        self.blocks_total, self.vocabulary_size, self.context_length = self._pipe.recv()

    def forward(self, batch: StepBatch) -> None:
        self._pipe.send(batch)

    def sample(self, batch: StepBatch, masks: U32 | None) -> StepResult:
        self._pipe.send(masks)
        result: StepResult = self._pipe.recv()
        return result

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)


@asynccontextmanager
async def engine_with(where: str, config: EngineConfig) -> AsyncIterator[Engine]:
    if where == "thread":
        async with open_engine(config) as engine:
            yield engine
        return
    async with load_model(config, None) as loaded:
        executor = ThreadExecutor(RemoteDevice)
        await executor.open()
        try:
            async with open_engine(config, loaded=msgspec.structs.replace(loaded, executor=executor)) as engine:
                yield engine
        finally:
            await executor.aclose()


async def measure(where: str, seconds: float, seed: int) -> dict[str, float]:
    gaps: list[float] = []
    prompts = 0

    async def stream(engine: Engine, i: int, until: float) -> None:
        while time.perf_counter() < until:
            prompt = f"{seed} {i} Once upon a time"
            async with engine.complete(prompt=prompt, max_tokens=256, ignore_eos=True, stream=True) as answer:
                last = None
                async for _ in answer:
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                    if now > until:
                        break

    async def reader(engine: Engine, i: int, until: float) -> None:
        nonlocal prompts
        chance = random.Random(f"{seed} {i}")
        while time.perf_counter() < until:
            at = chance.randrange(len(TEXT) - 5000)
            async with engine.complete(prompt=f"{chance.random()} {TEXT[at : at + 4300]}", max_tokens=1) as answer:
                await answer.choices()
            prompts += 1

    config = EngineConfig(kv_bytes=KV_BYTES, running_max=SLOTS)
    async with engine_with(where, config) as engine:
        until = time.perf_counter() + seconds
        async with trio.open_nursery() as nursery:
            for i in range(16):
                nursery.start_soon(stream, engine, i, until)
            await trio.sleep(1)  # the streams are under way
            for i in range(32):
                nursery.start_soon(reader, engine, i, until)
    gaps.sort()
    return {
        "gap_ms": 1e3 * median(gaps), "gap_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))], "tok_s": len(gaps) / seconds,
        "prompts_s": prompts / seconds,
    }  # fmt: skip


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0
    table: dict[str, list[dict[str, float]]] = {"thread": [], "process": []}
    for number in range(ROUNDS):
        for where, rows in table.items():
            rows.append(trio.run(measure, where, seconds, number))
    for where, rows in table.items():
        figures = {key: median(row[key] for row in rows) for key in rows[0]}
        sys.stdout.write(f"{where:8} " + ", ".join(f"{key} {value:.1f}" for key, value in figures.items()) + "\n")


if __name__ == "__main__":
    main()
