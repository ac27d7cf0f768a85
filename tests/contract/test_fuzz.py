"""Nothing that comes through the door breaks the server: bodies, grammars, schemas and bytes by chance.

Against a running process on a tiny model whose limits keep every request short. OFFBOOK_FUZZ=1 looks for new examples
(tests/conftest.py), and ten times as many.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis.strategies import SearchStrategy
from raw_http import connect, request_bytes
from request_strategies import FIELDS, grammars, mutated, requests, schemas
from server_process import ServerProcess, server_process

from offbook.actors.request import CompletionRequest

TIMES = 10 if os.environ.get("OFFBOOK_FUZZ") else 1
MODEL, VOCABULARY = "tiny", 300
ANSWER_S = 20.0  # no request of these may take longer, on the slowest machine
PATH = "/v1/completions"
few = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


class Fuzzed:
    """A server, and a canary in it."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.client = httpx.Client(base_url=server.url, timeout=ANSWER_S)
        self.song = self.sing()

    def post(self, body: dict[str, Any]) -> httpx.Response:
        """A body as it is: lone surrogates and all."""
        data = json.dumps(body).encode()
        return self.client.post(PATH, content=data, headers={"content-type": "application/json"})

    def sing(self) -> str:
        body = {"model": MODEL, "prompt": "the sky", "max_tokens": 12, "seed": 5, "logprobs": 2}
        answer = self.client.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        return json.dumps(answer.json()["choices"])

    def check(self) -> None:
        """The canary sings as before, and all that was held is free."""
        assert self.sing() == self.song
        until = time.monotonic() + 10
        while not {"offbook_kv_blocks_used 0.0", "offbook_requests_waiting 0.0"} <= set(self._metrics()):
            assert time.monotonic() < until, "something is still held"
            threading.Event().wait(0.02)

    def _metrics(self) -> list[str]:
        return self.client.get("/metrics").text.splitlines()


@pytest.fixture(scope="module")
def fuzzed(tiny_model_dir: Path) -> Iterator[Fuzzed]:
    limits = ("--default-max-tokens", "8", "--choices-max", "16", "--context", "96", "--body-timeout", "3")
    with server_process("--model", str(tiny_model_dir), "--kv-memory", "64M", "--threads", "1", *limits) as server:
        fuzzed = Fuzzed(server)
        yield fuzzed
        fuzzed.check()
        fuzzed.client.close()
        assert "Traceback" not in "".join(server.errors) and " ERROR " not in "".join(server.errors)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """A refusal, in the one form that all have."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:500], answer.request.content[:2000])
    error: dict[str, Any] = answer.json()["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["code"], str)
    assert len(answer.content) < 20_000 and "Traceback" not in answer.text
    return error


def finite(value: Any) -> None:
    if isinstance(value, float):
        assert math.isfinite(value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        finite(part)


def good(answer: httpx.Response, body: dict[str, Any]) -> None:
    """A 200 that holds what was asked for; a stream may also end in an error event."""
    if not body.get("stream"):
        parsed = json.loads(answer.content, parse_constant=pytest.fail)
        finite(parsed)
        prompt = body["prompt"]
        prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        assert len(parsed["choices"]) == prompts * (body.get("n") or 1)
        assert all(c["finish_reason"] in ("stop", "length") for c in parsed["choices"])
        return
    *events, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    for event in events:
        finite(json.loads(event.removeprefix("data: "), parse_constant=pytest.fail))


def test_every_field_is_fuzzed() -> None:
    assert {"model", "prompt", *FIELDS} == set(CompletionRequest.__struct_fields__)


@example(body={"model": MODEL, "prompt": "a", "max_tokens": 1, "no such field": None})  # once a 500
@given(body=requests(MODEL, VOCABULARY))
@settings(few, max_examples=250 * TIMES)
def test_any_body_gets_an_answer_or_a_clear_refusal(fuzzed: Fuzzed, body: dict[str, Any]) -> None:
    answer = fuzzed.post(body)
    if answer.status_code == 200:
        good(answer, body)
    else:
        error_of(answer)


@given(grammar=grammars())
@settings(few, max_examples=80 * TIMES)
def test_any_grammar_in_bounded_time(fuzzed: Fuzzed, grammar: str) -> None:
    constrained(fuzzed, {"type": "grammar", "grammar": grammar})


@given(schema=schemas())
@settings(few, max_examples=80 * TIMES)
def test_any_schema_in_bounded_time(fuzzed: Fuzzed, schema: Any) -> None:
    constrained(fuzzed, {"type": "json_schema", "json_schema": {"schema": schema}})


def constrained(fuzzed: Fuzzed, fmt: dict[str, Any]) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 12, "response_format": fmt, "seed": 1}
    began = time.monotonic()
    answer = fuzzed.post(body)
    assert time.monotonic() - began < 10
    if answer.status_code == 200:
        good(answer, body)
    else:
        assert "response_format" in error_of(answer)["message"]


# -- the OpenAPI document, by another's reading of it ----------------------------------------------------------------


def test_the_document_describes_the_server(fuzzed: Fuzzed) -> None:
    """Statuses, media types and bodies are those of the document; what it forbids is refused."""
    document = schemathesis.openapi.from_url(f"{fuzzed.server.url}/openapi.json")
    operations = [cast(Any, found).ok() for found in document.get_all_operations()]
    assert {(o.method.upper(), o.path) for o in operations} >= {("POST", PATH), ("GET", "/v1/models")}
    for operation in operations:
        for mode in schemathesis.GenerationMode if operation.body else [schemathesis.GenerationMode.POSITIVE]:
            _validate(operation.as_strategy(generation_mode=mode))


def _validate(cases: SearchStrategy[Any]) -> None:
    @given(case=cases)
    @settings(few, max_examples=20 * TIMES)
    def validate(case: Any) -> None:
        case.headers.pop("x-request-timeout-s", None)  # a deadline that passes is a 504, and so it should be
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # else nearly all of them end as 404
        checks = schemathesis.checks
        beyond = [checks.positive_data_acceptance]  # no schema tells the rules between fields
        if isinstance(case.body, dict) and case.body.get("stream"):
            beyond.append(checks.response_schema_conformance)  # reads a stream's schema as that of one event
        case.call_and_validate(timeout=ANSWER_S, excluded_checks=beyond)

    validate()


# -- bytes -----------------------------------------------------------------------------------------------------------


BODY = {"model": MODEL, "prompt": "the sky", "max_tokens": 2, "stop": ["é"], "seed": 7}
SEEDS = [
    request_bytes("POST", PATH, BODY),
    request_bytes("POST", PATH, {**BODY, "stream": True}, {"x-request-id": "a", "authorization": "Bearer x"}),
    request_bytes("GET", "/v1/models/tiny"),
    request_bytes("GET", "/health") + request_bytes("POST", PATH, BODY),
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    b'7\r\n{"model\r\n2\r\n":\r\n0\r\n\r\n',
]  # fmt: skip


async def _answer_to(port: int, data: bytes) -> bytes:
    """All that comes back until the server closes; after a moment our end of the connection closes."""
    async with connect(port) as client:
        out = b""
        try:
            await client.send(data)
            with trio.move_on_after(0.5):
                while part := await client.stream.receive_some(65_536):
                    out += part
                return out
            await client.stream.send_eof()
            while part := await client.stream.receive_some(65_536):
                out += part
        except trio.BrokenResourceError:
            pass  # closed on us in the middle of what we sent: its right
        return out


@pytest.mark.parametrize("seed", range(3 * TIMES))
async def test_any_bytes_get_an_answer_or_a_closed_door(fuzzed: Fuzzed, seed: int) -> None:
    chance = random.Random(seed)
    sent = [mutated(chance.choice(SEEDS), chance) for _ in range(150)]
    limit = trio.CapacityLimiter(50)

    async def one(data: bytes) -> None:
        async with limit:
            with trio.fail_after(ANSWER_S):
                out = await _answer_to(fuzzed.server.port, data)
        statuses = [line.split()[1] for line in out.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert not out or out.startswith(b"HTTP/1.1 "), (seed, data, out)
        assert all(b"100" <= s < b"500" or s in (b"501", b"505") for s in statuses), (seed, data, out)

    async with trio.open_nursery() as nursery:
        for data in sent:
            nursery.start_soon(one, data)
    await trio.to_thread.run_sync(fuzzed.check)


@pytest.mark.parametrize("seed", range(2 * TIMES))
def test_any_bytes_as_a_body(fuzzed: Fuzzed, seed: int) -> None:
    chance = random.Random(1000 + seed)
    valid = json.dumps({**BODY, "response_format": {"type": "json_object"}, "logit_bias": {"5": 1}}).encode()
    for _ in range(150):
        data = mutated(valid, chance) if chance.random() < 0.8 else chance.randbytes(chance.randint(0, 200))
        answer = fuzzed.client.post(PATH, content=data, headers={"content-type": "application/json"})
        if answer.status_code != 200:
            error_of(answer)
    fuzzed.check()


def test_rubbish_without_end_is_cut_off(fuzzed: Fuzzed) -> None:
    with socket.create_connection(("127.0.0.1", fuzzed.server.port)) as client, pytest.raises(OSError):
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until:
            client.sendall(bytes(65_536))
    fuzzed.check()
