"""What one step costs the event loop, without a device: planning, applying, text, delivery to embedded readers.

``python tests/benchmarks/bench_loop.py [streams] [tokens]`` prints microseconds per step and per token. The budget is
well under 2 ms a step at 64 streams.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import trio

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from sim_device import SimDevice, blank, loaded_with

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.steps import Step
from offbook.kernels.step import StepResult


class NullExecutor:
    """Answers every step at once with the same token."""

    def __init__(self) -> None:
        self.steps = 0

    async def run(self, step: Step) -> StepResult:
        self.steps += 1
        await trio.lowlevel.checkpoint()
        result = blank(step.batch)
        result.token = np.full(len(result.token), 7, np.int32)
        return result


async def stream(engine: Engine, tokens: int, **fields: object) -> None:
    async with engine.complete(prompt="hello there", max_tokens=tokens, ignore_eos=True, **fields) as answer:  # type: ignore[arg-type]
        async for _ in answer:
            pass


async def main(streams: int, tokens: int) -> None:
    for name, fields in (("plain", {}), ("logprobs=5", {"logprobs": 5}), ("stop", {"stop": ["zebra", "quagga"]})):
        executor = NullExecutor()
        device = SimDevice(streams * (tokens // 16 + 3), slots=streams)
        config = EngineConfig(running_max=streams)
        async with open_engine(config, loaded=loaded_with(executor, device)) as engine:
            began = time.process_time()
            async with trio.open_nursery() as nursery:
                for _ in range(streams):
                    nursery.start_soon(lambda: stream(engine, tokens, **fields))  # noqa: B023
            spent = time.process_time() - began
        per_step = 1e6 * spent / executor.steps
        sys.stdout.write(f"{name:12} {per_step:8.0f} us a step, {per_step / streams:6.1f} us a token\n")


if __name__ == "__main__":
    arguments = [int(a) for a in sys.argv[1:]]
    trio.run(main, arguments[0] if arguments else 64, arguments[1] if len(arguments) > 1 else 128)
