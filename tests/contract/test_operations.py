"""What a person on call sees of a live server: metrics, the debug page, one line of log a request."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from typing import Any

import pytest
from door import MODEL, door_on
from raw_http import connect, request_bytes

from offbook.server.app import DoorSettings
from offbook.server.logs import JsonFormatter

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1}
KEY = "sk-hush-hush-0123456789"
PROMPT = "topsecretprompt"


async def test_debug_is_off_by_default() -> None:
    async with door_on() as door:
        assert (await door.get("/debug")).status == 404


async def test_debug_shows_what_is_going_on_and_no_secret() -> None:
    settings = DoorSettings(api_keys=(KEY,), debug=True)
    long = {**BODY, "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 12}
    key = {"authorization": f"Bearer {KEY}"}
    async with door_on(settings=settings, step_s=0.01) as door, connect(door.port) as client:
        await client.send(request_bytes("POST", PATH, long, {**key, "x-request-id": "seen-1"}))
        await client.response_head()
        await client.chunk()
        answer = await door.ask("GET", "/debug", None, **key)
        assert PROMPT.encode() not in answer.body and KEY.encode() not in answer.body
        seen = answer.json
        (ticket,) = seen["tickets"]
        assert (seen["state"], seen["tickets_total"], set(seen["mailboxes"])) == (
            "ready", 1, {"admission", "batching", "execution", "fanout"},
        )  # fmt: skip
        assert all(box["senders_blocked"] == 0 for box in seen["mailboxes"].values())
        assert (ticket["id"], ticket["stage"], ticket["sequences_total"]) == ("seen-1", "generating", 12)
        assert len(ticket["sequences"]) == 8 and ticket["sequences"][0]["state"] == "running"
        assert ticket["client"].startswith("key-") and math.isfinite(ticket["age_s"])


async def test_metrics_say_what_an_operator_asks_first() -> None:
    async with door_on() as door:
        await door.completion(max_tokens=3)
        text = (await door.get("/metrics")).body.decode()
    for line in (
        "offbook_ready 1.0", "offbook_step_age_seconds 0.0", "offbook_queue_seconds_count 1.0",
        "offbook_request_seconds_count 1.0", 'offbook_model_info{device="simulated",model="simulated"} 1.0',
    ):  # fmt: skip
        assert line in text
    assert "process_resident_memory_bytes" in text and "process_open_fds" in text


async def test_a_step_that_hangs_shows_in_the_metrics_while_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door goes on answering while the device does not: that is what this gauge and the debug page are for."""
    async with door_on(settings=DoorSettings(debug=True), step_s=0.3) as door, connect(door.port) as client:
        await client.send(request_bytes("POST", PATH, BODY))
        seen = 0.0
        while not seen:
            text = (await door.get("/metrics")).body.decode()
            seen = float(re.findall(r"^offbook_step_age_seconds (\S+)$", text, re.MULTILINE)[0])
        began = time.monotonic()
        (ticket,) = (await door.get("/debug")).json["tickets"]
        assert ticket["stage"] == "prefill"
        assert (await client.response()).status == 200
        assert seen < 0.3 + time.monotonic() - began + 1


async def test_one_line_a_request_with_one_id_throughout(caplog: pytest.LogCaptureFixture) -> None:
    """Header, body and log line agree, whatever the ending; polls of /health and /metrics are not news."""
    caplog.set_level(logging.INFO, logger="offbook")
    async with door_on(settings=DoorSettings(api_keys=(KEY,))) as door:
        key = {"authorization": f"Bearer {KEY}"}
        answers = [
            await door.ask("POST", PATH, BODY, **key, x_request_id="id-200"),
            await door.ask("POST", PATH, {**BODY, "stream": True}, **key, x_request_id="id-stream"),
            await door.ask("POST", PATH, {**BODY, "n": 0}, **key, x_request_id="id-422"),
            await door.ask("POST", PATH, {**BODY, "model": "x"}, **key, x_request_id="id-404"),
            await door.ask("POST", PATH, BODY, x_request_id="id-401"),
            await door.ask("GET", "/nowhere", None, x_request_id="id-nowhere"),
            await door.ask("POST", PATH, b"{", **key, x_request_id="id-400"),
        ]
        await door.get("/health")
        await door.get("/metrics")
    lines = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "offbook.access"]
    ids = ["id-200", "id-stream", "id-422", "id-404", "id-401", "id-nowhere", "id-400"]
    assert [line["request_id"] for line in lines] == [a.headers["x-request-id"] for a in answers] == ids
    assert [line["status"] for line in lines] == [a.status for a in answers]
    assert all({"time", "level", "method", "path", "duration_ms"} <= line.keys() for line in lines)
    assert [("error" in line) for line in lines] == [a.status >= 400 for a in answers]


async def test_a_request_that_was_left_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="offbook")
    async with door_on(step_s=0.01) as door:
        async with connect(door.port) as client:
            long = {**BODY, "max_tokens": 3000, "ignore_eos": True, "stream": True}
            await client.send(request_bytes("POST", PATH, long))
            await client.response_head()
            await client.chunk()
        await door.settled()
        text = (await door.get("/metrics")).body.decode()
    (line,) = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "offbook.access"]
    assert line["error"] == "client_gone"
    assert 'offbook_http_responses_total{status="499"} 1.0' in text
    assert 'offbook_requests_total{outcome="abandoned"} 1.0' in text
