"""The whole server in the test's own process: real routes and sockets, real actors, a simulated device."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from raw_http import Answered, Served, serving
from sim_device import SimDevice, loaded_with
from sim_executor import SimExecutor

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.server.app import Door, DoorSettings, create_app

MODEL = "simulated"


class DoorOn(Served):
    """A served engine, and shorthands."""

    engine: Engine
    executor: SimExecutor

    async def completion(self, prompt: Any = "hello", **fields: Any) -> Answered:
        """POST /v1/completions for the simulated model."""
        return await self.complete(**{"model": MODEL, "prompt": prompt, **fields})

    async def canary(self) -> str:
        """A tiny good request that must go on giving the same text whatever else has happened."""
        answer = await self.completion("ok", max_tokens=3, temperature=0)
        assert answer.status == 200
        text: str = answer.json["choices"][0]["text"]
        return text

    async def settled(self) -> None:
        """Waits until no answer is open and no block is held."""
        with trio.fail_after(5):
            while self._busy():  # noqa: ASYNC110  # blocks are freed by the next step: nothing tells the caller
                await trio.sleep(0.005)

    def _busy(self) -> bool:
        now = self.engine.snapshot()
        return bool(now["active"] or now["blocks_held"] or now["running"])


@asynccontextmanager
async def door_on(
    executor: SimExecutor | None = None, *, settings: DoorSettings | None = None, limits: dict[str, Any] | None = None,
    blocks: int = 512, step_s: float = 0.0005, **config: Any,
) -> AsyncIterator[DoorOn]:  # fmt: skip
    executor = executor or SimExecutor(SimDevice(blocks=blocks), step_s=step_s)
    door = Door()
    async with (
        open_engine(EngineConfig(**config), loaded=loaded_with(executor, executor.device)) as engine,
        serving(create_app(door, settings), **(limits or {})) as served,
    ):
        door.engine = engine
        on = DoorOn(served.port, served.config, served.scope)
        on.stop, on.ended, on.engine, on.executor = served.stop, served.ended, engine, executor
        yield on


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain body that a stream's chunks add up to; asserts what every stream keeps to."""
    head = {key: events[0][key] for key in ("id", "object", "created", "model")}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        assert head == {key: event[key] for key in head}
        assert usage is None, "usage comes last"
        usage = event["usage"]
        assert len(event["choices"]) == (0 if usage else 1)
        for chunk in event["choices"]:
            choice = choices.setdefault(chunk["index"], {"index": chunk["index"], "text": "", "finish_reason": None})
            assert choice["finish_reason"] is None, "nothing follows a finish"
            _add(choice, chunk)
    body = {**head, "choices": [choices[i] for i in sorted(choices)], "usage": usage}
    return body | next(({"perf_metrics": e["perf_metrics"]} for e in events if "perf_metrics" in e), {})


def _add(choice: dict[str, Any], chunk: dict[str, Any]) -> None:
    choice["text"] += chunk["text"]
    choice["finish_reason"] = chunk["finish_reason"]
    for key in ("raw_output", "prompt_token_ids"):
        if key in chunk:
            assert key not in choice, f"{key} comes once"
            choice[key] = chunk[key]
    if "token_ids" in chunk:
        choice.setdefault("token_ids", []).extend(chunk["token_ids"])
    new, old = chunk["logprobs"], choice.get("logprobs")
    choice["logprobs"] = new if old is None else {key: [*old[key], *new[key]] for key in old} if new else old


def random_request(random: random.Random) -> dict[str, Any]:
    """Any valid request for the simulated model."""
    letters = "abcdefghij"
    word = "".join(random.choice(letters) for _ in range(random.randint(1, 40)))
    ids = [random.randint(1, 60) for _ in range(random.randint(1, 40))]
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": random.choice([word, [word, "xy"], ids, [ids, ids[:3]]]),
        "max_tokens": random.randint(0, 12),
        "seed": random.randint(0, 1000),
    }
    chances: dict[str, list[Any]] = {
        "n": [2, 3],
        "stop": ["a", ["b", "cd"], ["e"]],
        "temperature": [0, 0.5],
        "logprobs": [True, 0, 2, False],
        "top_logprobs": [0, 3],
        "echo": [True],
        "echo_last": [0, 2, 99],
        "raw_output": [True],
        "return_token_ids": [True],
        "ignore_eos": [True],
        "sampling_mask": ["count", "non_zero_list", "non_zero_buffer"],
        "stream_options": [{"buffer_tokens": 3}, {"buffer_ms": 2}, {"include_usage": True}],
    }
    for name, values in chances.items():
        if random.random() < 0.35:
            body[name] = random.choice(values)
    return body


def canonical(body: dict[str, Any]) -> str:
    """A body without what differs from request to request."""
    return json.dumps({**body, "id": "", "created": 0, "perf_metrics": None}, sort_keys=True)
