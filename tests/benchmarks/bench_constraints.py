"""What a schema costs and what a prediction saves, on the default model, through the embedded engine.

``python tests/benchmarks/bench_constraints.py`` prints tokens a second: 16 streams with and without a JSON schema, then
one stream of 512 tokens with predictions of several kinds. Medians of rounds that take turns; only ratios within one
run mean anything.
"""

from __future__ import annotations

import random
import time
from functools import partial
from statistics import median

import trio

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine

SCHEMA = {
    "type": "array", "minItems": 12, "maxItems": 12,
    "items": {"type": "object", "additionalProperties": False, "required": ["name", "age", "kind"], "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog", "bird"]},
    }},
}  # fmt: skip
ROUNDS = 5
FORMAT = {"type": "json_schema", "json_schema": SCHEMA}


async def generate(engine: Engine, out: list[list[int]], **fields: object) -> None:
    async with engine.complete(**fields) as answer:  # type: ignore[arg-type]
        (choice,) = await answer.choices()
        out.append(list(choice.token_ids))


async def streams(engine: Engine, fields: dict[str, object]) -> float:
    """Tokens a second of 16 streams."""
    out: list[list[int]] = []
    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for i in range(16):
            prompt = f"A list of {i + 3} animals in a zoo, as JSON:\n"
            body: dict[str, object] = {"prompt": prompt, "max_tokens": 64, "temperature": 0.8, "seed": i, **fields}
            nursery.start_soon(partial(generate, engine, out, **body))
    return sum(map(len, out)) / (time.perf_counter() - began)


async def one(engine: Engine, prediction: list[int] | None) -> tuple[float, list[int]]:
    """Tokens a second of one stream of 512 tokens, and its tokens."""
    out: list[list[int]] = []
    fields: dict[str, object] = {} if prediction is None else {"speculation": prediction}
    began = time.perf_counter()
    fields |= {"max_tokens": 512, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    await generate(engine, out, prompt="Once upon a time", **fields)
    return 512 / (time.perf_counter() - began), out[0]


async def main() -> None:
    rng = random.Random(0)
    async with open_engine(EngineConfig()) as engine:
        plain, constrained = [], []
        for _ in range(ROUNDS + 1):
            plain.append(await streams(engine, {"ignore_eos": True}))
            constrained.append(await streams(engine, {"response_format": FORMAT}))
        a, b = median(plain[1:]), median(constrained[1:])  # the first round warms up
        print(f"16 streams: {a:.0f} tok/s, with a schema {b:.0f} ({b / a:.2f})")
        _, tokens = await one(engine, None)
        guesses = {
            "none": None,
            "right": tokens,
            "wrong in every 20th token": [rng.randrange(40000) if i % 20 == 10 else t for i, t in enumerate(tokens)],
            "wrong in a random 5 %": [rng.randrange(40000) if rng.random() < 0.05 else t for t in tokens],
            "wrong in one stretch of 5 %": [*tokens[:200], *(rng.randrange(40000) for _ in range(26)), *tokens[226:]],
            "wrong": [rng.randrange(40000) for _ in tokens],
        }
        speeds: dict[str, list[float]] = {name: [] for name in guesses}
        for _ in range(ROUNDS):
            for name, guess in guesses.items():
                speed, again = await one(engine, guess)
                assert again == tokens
                speeds[name].append(speed)
        base = median(speeds["none"])
        for name, values in speeds.items():
            print(f"one stream, prediction: {name:28} {median(values):5.0f} tok/s ({median(values) / base:.2f})")


if __name__ == "__main__":
    trio.run(main)
