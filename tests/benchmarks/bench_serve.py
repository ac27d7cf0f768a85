"""Speed of a running server, case by case: tokens a second, time to first token, gaps, CPU and memory.

    python tests/benchmarks/bench_serve.py --url http://127.0.0.1:8000 [--cases abcdefgp] [--repeat 3] [--schema openai]

Any server of ``POST /v1/completions`` will do (``--schema`` says how it takes a JSON schema). Absolute figures mean
nothing on a shared machine: run two servers in turn and compare, or compare with the limits that are printed beside
(read bandwidth, float32 products). Prompts are English from Python's own help texts, no two with a shared start unless
the case says so. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pydoc_data.topics import topics
from urllib.parse import urlsplit

import numpy as np
import psutil
import trio

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "kind", "ok"],
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog", "bird"]}, "ok": {"type": "boolean"},
    },
}  # fmt: skip
SCHEMA_FIELDS: dict[str, dict[str, object]] = {
    "openai": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "vllm": {"structured_outputs": {"json": SCHEMA}},
    "llama": {"json_schema": SCHEMA},
}
TEXT = " ".join(" ".join(topics[k] for k in sorted(topics)).split())
CHARACTERS_PER_TOKEN = 4.3


@dataclass(frozen=True)
class Case:
    """``clients`` keep one request each in flight until ``requests`` are answered."""

    name: str
    clients: int
    prompt: int
    generate: int
    requests: int
    shared: int = 0
    fields: dict[str, object] = field(default_factory=dict)
    schema: bool = False


CASES = {
    "a": Case("a one stream", 1, 32, 128, 4),
    "b": Case("b long prompt", 1, 512, 16, 6),
    "c": Case("c 16 streams", 16, 128, 128, 32),
    "d": Case("d 64 streams", 64, 128, 64, 96),
    "e": Case("e as c, sampled", 16, 128, 128, 32, fields={"temperature": 0.8, "top_p": 0.95}),
    "f": Case("f as c, schema", 16, 128, 64, 32, schema=True),
    "g": Case("g short requests", 32, 8, 1, 400),
    "p": Case("p shared prefix", 16, 512, 16, 48, shared=480),
}


@dataclass
class Reply:
    status: int
    first_s: float
    gaps_s: list[float]
    tokens: int
    body: bytes


class Client:
    """One keep-alive connection: bytes are stamped as they come and parsed when the answer is complete."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._stream: trio.SocketStream | None = None

    async def ask(self, body: dict[str, object]) -> Reply:
        reused = self._stream is not None
        reply = await self._ask(body)
        if reply.status == 0 and reused:  # the server had closed the idle connection
            reply = await self._ask(body)
        return reply

    async def _ask(self, body: dict[str, object]) -> Reply:
        if self._stream is None:
            self._stream = await trio.open_tcp_stream(self._host, self._port)
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        sent = time.perf_counter()
        await self._stream.send_all(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        data, stamps = bytearray(), list[float]()
        while not _complete(data):
            chunk = await self._stream.receive_some(65536)
            if not chunk:
                self._stream = None
                break
            stamps += [time.perf_counter()] * chunk.count(b"data: {")
            data += chunk
        return _reply(bytes(data), sent, stamps or [time.perf_counter()])

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()


def _complete(data: bytearray) -> bool:
    head, found, body = bytes(data).partition(b"\r\n\r\n") if b"\r\n\r\n" in data[:4096] else (b"", b"", b"")
    if not found:
        return False
    lowered = head.lower()
    if b"content-length:" in lowered:
        return len(body) >= int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
    return body.endswith(b"\r\n0\r\n\r\n")


def _reply(data: bytes, sent: float, stamps: list[float]) -> Reply:
    status = int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/") else 0
    tokens = 0
    for line in data.split(b"\n"):
        if b'"usage"' in line and b'"completion_tokens"' in line:
            tokens = int(line.split(b'"completion_tokens":')[1].split(b",")[0].rstrip(b"} \r"))
    gaps = [b - a for a, b in pairwise(stamps)]
    return Reply(status, stamps[0] - sent, gaps, tokens, data[-300:])


def prompt_text(rng: random.Random, tokens: int, shared: int) -> str:
    """English of about so many tokens, the first ``shared`` of them always the same."""

    def cut(source: random.Random, count: int) -> str:
        start = source.randrange(len(TEXT) - 20 * count - 100)
        return TEXT[start : start + int(count * CHARACTERS_PER_TOKEN)]

    prefix = cut(random.Random(7), shared) if shared else ""
    return f"{prefix} {rng.randrange(10**4)} {cut(rng, max(tokens - shared - 5, 1))}"


async def drive(url: str, model: str, case: Case, schema: str, rng: random.Random) -> dict[str, float]:
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    left = [{
        "model": model, "prompt": prompt_text(rng, case.prompt, case.shared), "max_tokens": case.generate,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "seed": i, **case.fields,
        **(SCHEMA_FIELDS[schema] if case.schema else {"ignore_eos": True}),
    } for i in range(case.requests)]  # fmt: skip
    replies: list[Reply] = []

    async def client() -> None:
        connection = Client(host, port)
        while left:
            replies.append(await connection.ask(left.pop()))
        await connection.aclose()

    processes = server_processes(port)
    cpu = cpu_s(processes)
    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(case.clients):
            nursery.start_soon(client)
    wall = time.perf_counter() - began
    bad = [r for r in replies if r.status != 200]
    if bad:
        sys.exit(f"case {case.name}: status {bad[0].status}: {bad[0].body!r}")
    tokens = sum(r.tokens for r in replies)
    gaps = sorted(g for r in replies for g in r.gaps_s) or [0.0]
    return {
        "tok_s": tokens / wall, "req_s": len(replies) / wall,
        "ttft_ms": 1e3 * statistics.median(r.first_s for r in replies), "gap_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))],
        "cpu_ms_per_tok": 1e3 * (cpu_s(processes) - cpu) / max(tokens, 1),
        "memory_mb": sum(p.memory_full_info().pss for p in processes) / 2**20,
    }  # fmt: skip


def server_processes(port: int) -> list[psutil.Process]:
    """The process that listens on the port, and its children."""
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid]
    pids = {c.pid for c in listening if getattr(c.laddr, "port", None) == port}
    found = [psutil.Process(pid) for pid in pids]
    return found + [child for process in found for child in process.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def machine_limits() -> dict[str, float]:
    """What NumPy reaches on this machine right now: one thread's read bandwidth and float32 product rate."""
    data = np.ones(2**26, np.float32)
    square = np.ones((1024, 1024), np.float32)
    bandwidth = product = 0.0
    for _ in range(5):
        began = time.perf_counter()
        data.sum()
        bandwidth = max(bandwidth, data.nbytes / (time.perf_counter() - began) / 1e9)
        began = time.perf_counter()
        square @ square
        product = max(product, 2 * 1024**3 / (time.perf_counter() - began) / 1e9)
    return {"read_gb_s": round(bandwidth, 1), "float32_gflop_s": round(product, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--cases", default="abcdefgp")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--schema", choices=sorted(SCHEMA_FIELDS), default="openai")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="new prompts each time by default")
    options = parser.parse_args()
    limits = machine_limits()
    heads = f"{'tok/s':>9}{'req/s':>8}{'ttft ms':>9}{'gap p99':>9}{'cpu/tok':>9}{'MB':>7}"
    sys.stdout.write(f"limits now: {limits}\n{'case':18}{heads}\n")
    table: dict[str, dict[str, float]] = {}
    for name in options.cases:
        rngs = [random.Random(f"{options.seed} {name} {i}") for i in range(options.repeat)]
        runs = [trio.run(drive, options.url, options.model, CASES[name], options.schema, rng) for rng in rngs]
        row = {key: round(statistics.median(r[key] for r in runs), 2) for key in runs[0]}
        table[name] = row
        sys.stdout.write(f"{CASES[name].name:18}{row['tok_s']:9.1f}{row['req_s']:8.2f}{row['ttft_ms']:9.1f}"
                         f"{row['gap_p99_ms']:9.1f}{row['cpu_ms_per_tok']:9.2f}{row['memory_mb']:7.0f}\n")  # fmt: skip
    sys.stdout.write(json.dumps({"url": options.url, "limits": limits, "cases": table}) + "\n")


if __name__ == "__main__":
    main()
