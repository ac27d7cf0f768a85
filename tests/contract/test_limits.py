"""A limit on everything that a client sends, and a clear refusal beyond it.

Others are tested elsewhere in this folder: slow headers and the number of connections in test_adapter.py, slow bodies
in test_http_api.py, nesting in test_http_reports.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from door import MODEL, door_on
from raw_http import Answered, connect, request_bytes

from offbook.server.app import DoorSettings

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1}


async def refused(answer: Answered, *status: int) -> None:
    assert answer.status in status, (answer.status, answer.body[:200])
    assert isinstance(answer.json["error"]["message"], str)
    assert len(answer.body) < 20_000


def many(count: int) -> dict[str, Any]:
    return {"prompt": ["a"] * count}


LIMITS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "prompts": (many(300), (400, 422)),
    "n": ({"n": 129}, (422,)),
    "prompts x n": (many(200) | {"n": 100}, (400, 422)),
    "max_tokens": ({"max_tokens": 2**40, "context_length_exceeded_behavior": "error"}, (400, 422)),
    "logprobs": ({"logprobs": 1000}, (400, 422)),
    "stop strings": ({"stop": ["x"] * 5}, (400, 422)),
    "a long prompt": ({"prompt": "a" * 1_000_000}, (400,)),
    "a grammar": ({"response_format": {"type": "grammar", "grammar": 'root ::= "' + "a" * 300_000 + '"'}}, (400,)),
    "a schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {
        "enum": ["x" * 600_000]}}}}, (400,)),
    "a model's name": ({"model": "m" * 1_000_000}, (404, 422)),
    "a field's name": ({"f" * 1_000_000: 1}, (400,)),
}  # fmt: skip


@pytest.mark.parametrize("what", LIMITS)
async def test_limits(what: str) -> None:
    fields, status = LIMITS[what]
    async with door_on() as door:
        await refused(await door.ask("POST", PATH, {**BODY, **fields}), *status)
        assert await door.canary()


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_is_a_413(declared: bool) -> None:
    data = json.dumps({**BODY, "prompt": "a" * 70_000}).encode()
    head = {"content-length": str(len(data))} if declared else {"transfer-encoding": "chunked", "content-length": ""}
    sent = data if declared else b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    async with door_on(settings=DoorSettings(body_bytes_max=65_536)) as door, connect(door.port) as client:
        await client.send(request_bytes("POST", PATH, b"", {"content-length": "", **head}) + sent)
        await refused(await client.response(), 413)
        assert await door.canary()


ODD_TARGETS = [
    b"?v1/models",
    b"http://[::1",
    b"//[",
    b"http:",
    b"health",
    b"a:b",
    b"*",
    b"/%ff%fe",
    b"/../health",
    b"#",
]
ODD_HOSTS = [b"", b"[", b"[::1", b"[::1]:80", b"x y", b"a..b", b"a" * 64, b"x:99999999", b"x,y", b"../..", b"a" * 9000]


@pytest.mark.parametrize("line", [(t, b"x") for t in ODD_TARGETS] + [(b"/health", h) for h in ODD_HOSTS])
async def test_odd_targets_and_hosts_are_nothing_to_stumble_over(line: tuple[bytes, bytes]) -> None:
    target, host = line
    async with door_on() as door:
        for method in (b"GET", b"OPTIONS", b"CONNECT", b"POST"):
            async with connect(door.port) as client:
                await client.send(b"%s %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % (method, target, host))
                out = await client.read_to_end()
            assert re.match(rb"HTTP/1.1 (200|4\d\d) ", out), (line, out[:60])
        assert await door.canary()


LARGE_HEADS = [
    b"GET /" + b"a" * 100_000,
    b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000,
    b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 50_000,
]


@pytest.mark.parametrize("head", LARGE_HEADS, ids=["target", "value", "lines"])
async def test_headers_beyond_the_limit_are_refused(head: bytes) -> None:
    async with door_on() as door:
        async with connect(door.port) as client:
            await client.send(head)
            out = await client.read_to_end()
        assert re.match(rb"HTTP/1.1 (400|431) ", out), out[:60]
        assert await door.canary()


async def test_a_compressed_body_is_not_unpacked() -> None:
    async with door_on() as door:
        for encoding in ("gzip", "br", "zstd", "deflate"):
            answer = await door.ask("POST", PATH, b"\x1f\x8b" + b"\0" * 100, content_encoding=encoding)
            await refused(answer, 415)
