"""A mixed load on the default model for many minutes: what was asked, what came of it, and the server's memory.

    PYTHONPATH=.typing:tests/support python tests/stress/soak.py [--minutes 20] [--workers 12]

Valid requests of every kind from ``--workers`` clients, a wave of badly behaved ones each minute, and a canary that
must always give the same answer. Every valid request that is not answered whole is a failure, printed at the end with
its kind; so is whatever is still held when all have gone. Exit code 1 then.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio
from crowd import PATH, Crowd, sing
from raw_http import connect
from stressed import Stressed, stressed, tell

MODEL = "smollm2-135m-instruct"
WAVE = {"leaver": 12, "slow_reader": 2, "slow_head": 2, "slow_body": 2, "silent": 2, "fool": 8, "babbler": 4}
TOPICS = ("the sea", "a small town", "bread", "the moon", "an old clock", "trains", "rain in spring", "a lost key")
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "age"],
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 99}},
}  # fmt: skip
Body = dict[str, Any]


def _prompt(chance: random.Random) -> str:
    return f"{chance.randrange(1000)} facts about {chance.choice(TOPICS)}:"


def _conversation(chance: random.Random) -> str:
    return "You answer briefly and kindly. " * 12 + "".join(
        f"\nQ: tell me about {chance.choice(TOPICS)}\nA: well." for _ in range(chance.randrange(1, 6))
    )


KINDS: dict[str, Callable[[random.Random], Body]] = {
    "greedy": lambda c: {"temperature": 0, "max_tokens": c.randrange(1, 96)},
    "stream": lambda c: {"stream": True, "max_tokens": c.randrange(1, 128)},
    "sampled": lambda c: {
        "temperature": 1.1, "top_p": 0.9, "top_k": 80, "min_p": 0.01, "repetition_penalty": 1.1, "stream": True,
    },
    "mirostat": lambda c: {"mirostat_target": 3.0, "max_tokens": 40},
    "n": lambda c: {"n": 3, "max_tokens": 24, "temperature": 0.9},
    "logprobs": lambda c: {"logprobs": True, "top_logprobs": 5, "sampling_mask": "count", "max_tokens": 32},
    "scoring": lambda c: {"prompt": _conversation(c), "max_tokens": 0, "echo": True, "logprobs": 1},
    "conversation": lambda c: {"prompt": _conversation(c), "max_tokens": 48, "stop": ["\nQ:"]},
    "batch": lambda c: {"prompt": [_prompt(c) for _ in range(4)], "max_tokens": 16},
    "long": lambda c: {"prompt": _conversation(c) * c.randrange(2, 8), "max_tokens": 8, "stream": True},
    "schema": lambda c: {"response_format": {"type": "json_schema", "json_schema": SCHEMA}, "max_tokens": 60},
    "grammar": lambda c: {"response_format": {"type": "grammar", "grammar": 'root ::= [a-z ]{8,30} "."'}},
    "prediction": lambda c: {"prediction": "the quick brown fox jumps over the lazy dog " * 3, "max_tokens": 48},
    "stop": lambda c: {"stop": [".", "\n\n"], "max_tokens": 200, "stream": True},
}  # fmt: skip


class Soak:
    def __init__(self, server: Stressed, seed: int) -> None:
        self.server, self.seed = server, seed
        self.happened: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []
        self.songs = 0

    async def worker(self, number: int, until: float) -> None:
        chance = random.Random(f"{self.seed} {number}")
        while time.monotonic() < until:
            kind = chance.choice(list(KINDS))
            body = {"model": MODEL, "prompt": _prompt(chance), "seed": chance.randrange(2**40), **KINDS[kind](chance)}
            body.setdefault("max_tokens", 64)
            try:
                outcome = await self.ask(body)
            except (OSError, trio.BrokenResourceError, AssertionError, ValueError) as error:
                outcome = f"{type(error).__name__}: {error}"
            self.happened[kind, outcome] += 1
            if outcome != "whole":
                self.failures.append(f"{kind}: {outcome}")

    async def ask(self, body: Body) -> str:
        async with connect(self.server.port) as client:
            answer = await client.request("POST", PATH, body)
        if answer.status != 200:
            return f"{answer.status} {answer.body[:200]!r}"
        if not body.get("stream"):
            choices = answer.json["choices"]
        elif any("error" in event for event in answer.events):
            return "an error in the stream"
        else:
            choices = [c for event in answer.events for c in event["choices"] if c["finish_reason"]]
        prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
        whole = len(choices) == prompts * body.get("n", 1) and all(c["finish_reason"] for c in choices)
        return "whole" if whole else "not whole"

    async def canary(self, song: str, until: float) -> None:
        while time.monotonic() < until:
            async with connect(self.server.port) as client:
                if await sing(client, MODEL) != song:
                    self.failures.append("the canary sang another song")
            self.songs += 1
            await trio.sleep(0.5)

    async def waves(self, until: float) -> None:
        """Bad company and a line of figures each minute."""
        for minute in range(10**6):
            began = time.monotonic()
            if began > until - 15:
                break
            crowd = Crowd(self.server.port, MODEL, self.seed + minute)
            await crowd.come(WAVE)
            self.failures += crowd.surprises
            self.happened.update({(f"bad: {role}", outcome): n for (role, outcome), n in crowd.happened.items()})
            await trio.sleep(max(0.0, min(60.0, until - time.monotonic()) - (time.monotonic() - began)))
            tell(
                f"minute {minute + 1}: {sum(self.happened.values())} requests, {len(self.failures)} failures, "
                f"{self.songs} songs, RSS {self.server.rss / 2**20:.0f} MiB, {self.server.process.num_fds()} files"
            )

    async def run(self, minutes: float, workers: int) -> None:
        async with connect(self.server.port) as client:
            song = await sing(client, MODEL)
        until = time.monotonic() + 60 * minutes
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.canary, song, until)
            nursery.start_soon(self.waves, until)
            for number in range(workers):
                nursery.start_soon(self.worker, number, until)
        await self.server.settled()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with stressed(MODEL, "--kv-memory", "128M") as server:
        soak = Soak(server, options.seed)
        tell(f"start: RSS {server.rss / 2**20:.0f} MiB")
        trio.run(soak.run, options.minutes, options.workers)
        tell(f"end: RSS {server.rss / 2**20:.0f} MiB, nothing held")
    for (kind, outcome), n in sorted(soak.happened.items()):
        tell(f"{n:6} {kind}: {outcome}")
    for failure in soak.failures[:20]:
        tell(f"failed: {failure}")
    return bool(soak.failures)


if __name__ == "__main__":
    sys.exit(main())
