"""What a stranger who can reach the port must not be able to do: pose, listen, exhaust, or steer.

On the simulated device. What a client may send at most is in test_limits.py.
"""

from __future__ import annotations

import ast
import builtins
import hmac
import json
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from door import MODEL, door_on
from raw_http import connect, request_bytes
from werkzeug.datastructures import Headers

from offbook.server.app import DoorSettings, Keys
from offbook.server.logs import JsonFormatter, TextFormatter

ROOT = Path(__file__).parent.parent.parent
PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1}
KEY = "sk-hush-hush-0123456789"
PROMPT = "topsecretprompt"


# -- keys ------------------------------------------------------------------------------------------------------------


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length go through hmac.compare_digest, for every known key, also after one has fitted."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    keys = Keys(("first", "second", "third"))
    assert keys.client_of(Headers({"Authorization": "Bearer first"}))
    with pytest.raises(PermissionError):
        keys.client_of(Headers({"Authorization": "Bearer " + "x" * 100_000}))
    assert len(compared) == 6
    assert {len(side) for pair in compared for side in pair} == {32}


ODD_CREDENTIALS = [
    "", "Bearer", "Bearer ", "Bearer  ", "Basic Og==", "bearer\t" + KEY + "x", f"Bearer {KEY[:-1]}", f"Bearer {KEY} x",
    f"Bearer {KEY.upper()}", "Bearer \xe9\xff", f"Bearer {KEY},Bearer {KEY}", "Bearer null", "Bearer " + "k" * 20_000,
]  # fmt: skip


@pytest.mark.parametrize("path", [PATH, "/inference/v1/completions", "/v1/models", f"/v1/models/{MODEL}", "/debug"])
async def test_nothing_but_the_key_opens_the_door(path: str) -> None:
    method = "POST" if "completions" in path else "GET"
    async with door_on(settings=DoorSettings(api_keys=(KEY,), debug=True)) as door:
        for value in ODD_CREDENTIALS:
            for name in ("authorization", "x-api-key"):
                async with connect(door.port) as client:
                    body = json.dumps(BODY).encode() if method == "POST" else b""
                    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{name}: {value}\r\ncontent-length: {len(body)}\r\n"
                    await client.send(head.encode("latin-1") + b"content-type: application/json\r\n\r\n" + body)
                    answer = await client.response()
                assert answer.status == 401, (name, value[:40])
                assert answer.headers["www-authenticate"] == "Bearer"
                assert KEY.encode() not in answer.body
        opened = await door.ask(method, path, BODY if method == "POST" else None, authorization=f"Bearer {KEY}")
        assert opened.status == 200


async def test_a_caller_without_a_key_is_told_so() -> None:
    async with door_on(settings=DoorSettings(api_keys=(KEY,))) as door:
        none, wrong = await door.ask("POST", PATH, BODY), await door.ask("POST", PATH, BODY, x_api_key="x")
    for answer, starts in ((none, "No API key was sent: "), (wrong, "The API key you provided is invalid.")):
        error = answer.json["error"]
        assert error.pop("message").startswith(starts)
        assert error == {"param": None, "code": "UNAUTHORIZED", "type": "error"}
        assert answer.json["request_id"] == answer.headers["x-request-id"]


async def test_a_refused_caller_costs_no_work() -> None:
    """A wrong key is found out before the body is read or the engine asked."""
    async with door_on(settings=DoorSettings(api_keys=(KEY,))) as door, connect(door.port) as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n")
        assert (await client.response()).status == 401
        assert door.executor.device.steps_run == 0


# -- what is written down --------------------------------------------------------------------------------------------


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Every logger of the process at its most talkative."""
    names = ["", "offbook", "offbook.http", "offbook.access", "hypercorn", "quart", "quart.app", "trio"]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(1)
    with caplog.at_level(1):
        yield caplog
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


async def test_keys_and_prompts_are_in_no_log_at_any_level(everything_logged: pytest.LogCaptureFixture) -> None:
    good = {**BODY, "prompt": PROMPT, "max_tokens": 3}
    bodies: list[bytes | dict[str, Any]] = [
        good, {**good, "stream": True}, {**good, "temperature": 9}, {**good, "unknown": PROMPT},
        {**good, "stop": [PROMPT]},
        {**good, "user": KEY}, {**good, "model": PROMPT}, json.dumps(good).encode()[:-1], {**good, "seed": PROMPT},
        {**good, "response_format": {"type": "grammar", "grammar": f'root ::= "{PROMPT}'}},
        {**good, "prompt": PROMPT * 100_000}, {**good, "echo": True, "logprobs": 2},
    ]  # fmt: skip
    async with door_on(settings=DoorSettings(api_keys=(KEY,))) as door:
        for body in bodies:
            await door.ask("POST", PATH, body, authorization=f"Bearer {KEY}")
            await door.ask("POST", f"{PATH}?key={KEY}", body, authorization=f"Bearer {KEY}x")
        async with connect(door.port) as client:  # one who leaves in mid-stream
            stream = {**good, "max_tokens": 3000, "ignore_eos": True, "stream": True}
            await client.send(request_bytes("POST", PATH, stream, {"authorization": f"Bearer {KEY}"}))
            await client.response_head()
        await door.settled()
        metrics = (await door.get("/metrics")).body.decode()
    records = everything_logged.records
    assert len([r for r in records if r.name == "offbook.access"]) >= 2 * len(bodies)
    written = [metrics, *(form.format(r) for r in records for form in (TextFormatter(), JsonFormatter()))]
    assert not [text for text in written if KEY in text or PROMPT in text]


async def test_a_path_cannot_forge_a_log_line(everything_logged: pytest.LogCaptureFixture) -> None:
    async with door_on() as door:
        for path in (
            "/%0a12:00:01%20INFO%20forged",
            "/%1b[2Jx",
            "/a%20status=200%20client=admin",
            "/%e2%80%ae",
            "/%c2%85x",
        ):
            assert (await door.get(path)).status == 404
        odd = await door.complete(model=f"accounts/\x1b[2J\n\u202eevil/models/{MODEL}", prompt="a", max_tokens=1)
        assert odd.status == 200
    records = [r for r in everything_logged.records if r.name == "offbook.access"]
    assert len(records) == 6
    for record in records:
        text = TextFormatter().format(record)
        assert text.isprintable(), text
        assert " client=admin" not in text and " INFO forged" not in text
        assert len(JsonFormatter().format(record).splitlines()) == 1


# -- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [b"a\rset-cookie: x", b"a\nset-cookie: x", b"\xff\xfe", b"\xe9", b"a b", b"a\x00b", b"x" * 129, b"", b"\x7f"],
)
async def test_a_request_id_injects_nothing(sent: bytes) -> None:
    """Given back only when it is one plain token; raw control bytes are no HTTP at all, a bare LF ends the line."""
    data = request_bytes("POST", PATH, BODY).replace(
        b"host: test\r\n", b"host: test\r\nx-request-id: " + sent + b"\r\n"
    )
    async with door_on() as door, connect(door.port) as client:
        await client.send(data)
        answer = await client.response()
    assert answer.status in (200, 400)
    assert "set-cookie" not in answer.headers
    if answer.status == 200:
        assert re.fullmatch(r"cmpl-[0-9a-f]{32}|a", answer.headers["x-request-id"])


async def test_what_a_body_holds_cannot_add_headers() -> None:
    schema = {"type": "object", "x\r\nset-cookie: a=b": 1, "properties": {"a": {"const": 1}}}
    evil = "x\r\nset-cookie: a=b\r\n\r\n"
    bodies = [
        {**BODY, "model": f"accounts/{evil}/models/{MODEL}"}, {**BODY, "user": evil},
        {**BODY, "prompt_cache_key": evil},
        {**BODY, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "max_tokens": 20},
        {**BODY, evil: 1}, {**BODY, "metadata": {evil: evil}},
    ]  # fmt: skip
    async with door_on(grammar_lenient=True) as door:
        for body in bodies:
            answer = await door.ask("POST", PATH, body)
            assert answer.status in (200, 400, 422)
            assert "set-cookie" not in answer.headers


async def test_warnings_fit_into_a_header() -> None:
    """However much of a schema is left out: clients give up on headers beyond some kilobytes."""
    parts = {f"p{i}": {"type": "string", "contentEncoding": "base64", f"x-{i}": 1} for i in range(2000)}
    schema = {"type": "object", "properties": parts}
    async with door_on(grammar_lenient=True) as door:
        body = {**BODY, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        answer = await door.ask("POST", PATH, body)
    assert answer.status in (200, 400)
    assert sum(len(n) + len(v) + 4 for n, v in answer.headers.items()) < 8192


SMUGGLED = [
    b"content-length: 5\r\ncontent-length: 6", b"transfer-encoding: chunked", b"content-length: +5",
    b"content-length: 0x5", b"transfer-encoding: chunked, identity", b"transfer-encoding : chunked", b" folded: x",
    b"content-length: -1",
]  # fmt: skip


@pytest.mark.parametrize("extra", SMUGGLED)
async def test_two_ideas_of_where_a_body_ends_are_refused(extra: bytes) -> None:
    """What request smuggling lives on; the connection ends with the error."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n" + extra + b"\r\n"
    async with door_on() as door, connect(door.port) as client:
        await client.send(head + b"\r\nhelloGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        out = await client.read_to_end()
    assert re.match(rb"HTTP/1.1 (400|501) ", out), out[:60]
    assert len(re.findall(rb"HTTP/1\.1 \d", out)) == 1


# -- nothing from a request becomes a path or code -------------------------------------------------------------------


async def test_a_request_opens_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that look like paths, in every place where a name may stand: nothing is opened, nothing unpickled."""
    touched: list[str] = []

    def watched(file: Any, *rest: Any, **named: Any) -> Any:
        touched.append(str(file))
        return real(file, *rest, **named)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    names = [
        "../../../../etc/passwd",
        "/etc/passwd",
        "file:///etc/passwd",
        "C:\\boot.ini",
        "..%2f..%2fetc%2fpasswd",
        "\0",
    ]
    async with door_on() as door:
        await door.canary()  # what is loaded lazily is loaded now
        await door.get("/openapi.json")
        await door.completion(response_format={"type": "grammar", "grammar": 'root ::= "a"'}, max_tokens=2)
        real = builtins.open
        monkeypatch.setattr(builtins, "open", watched)
        monkeypatch.setattr(pickle, "loads", never)
        monkeypatch.setattr(pickle, "load", never)
        for name in names:
            for field in ("model", "prompt", "user", "prompt_cache_key", "prompt_cache_isolation_key", "stop"):
                await door.ask("POST", PATH, {**BODY, field: name})
            for fmt in ({"type": "grammar", "grammar": f'root ::= "{name}"'}, {"type": "json_schema", "json_schema": {
                "schema": {"$ref": name}}}):  # fmt: skip
                await door.ask("POST", PATH, {**BODY, "response_format": fmt})
            if name.isprintable() and "\\" not in name:
                for prefix in ("/", "/v1/models/", "/static/"):
                    assert (await door.get(prefix + name.lstrip("/"))).status == 404
        monkeypatch.undo()
    assert not touched


BANNED = re.compile(r"\b(eval|exec|__import__|os\.system|os\.popen|(?<!re\.)compile|pickle|marshal|shelve)\b")


def test_the_package_has_no_way_to_run_what_it_is_sent() -> None:
    """No pickle, no eval, no shell, anywhere in the package."""
    for path in [p for room in ("server", "actors", "kernels") for p in (ROOT / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert not BANNED.fullmatch(ast.unparse(node.func)), (path, node.lineno)
                assert not any(k.arg == "shell" for k in node.keywords), (path, node.lineno)
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not any(BANNED.fullmatch(n) for n in names), path
