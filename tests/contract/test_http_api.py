"""The API over real sockets, on real actors and a simulated device."""

from __future__ import annotations

import json
import logging
import random
import re
from typing import Any

import pytest
import trio
from door import MODEL, canonical, door_on, joined, random_request
from raw_http import connect, request_bytes, serving

from offbook.actors.errors import CompletionError
from offbook.server import translate
from offbook.server.app import Door, DoorSettings, create_app

PATHS = ("/v1/completions", "/inference/v1/completions")


@pytest.mark.parametrize("path", PATHS)
async def test_a_plain_answer(path: str) -> None:
    async with door_on() as door:
        answer = await door.ask("POST", path, {"model": MODEL, "prompt": "hello", "max_tokens": 5, "temperature": 0})
    body = answer.json
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert list(body["choices"][0]) == ["index", "text", "logprobs", "finish_reason"]
    assert re.fullmatch("cmpl-[0-9a-f]{32}", body["id"])
    assert (body["object"], body["model"], body["choices"][0]["logprobs"]) == ("text_completion", MODEL, None)
    usage = body["usage"]
    assert list(usage) == ["prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == body["id"]


async def test_measurements_are_always_in_the_headers_and_in_the_body_on_request() -> None:
    async with door_on() as door:
        answer = await door.completion(perf_metrics_in_response=True, max_tokens=4)
    metrics = answer.json["perf_metrics"]
    for name, value in metrics.items():
        assert answer.headers[f"fireworks-{name}"] in (str(value), f"{value:.6f}" if isinstance(value, float) else "")
    assert {type(metrics[n]) for n in ("prompt-tokens", "cached-prompt-tokens", "num-concurrent-requests")} == {int}
    stages = ("tokenizer-queue", "tokenizer", "prefill-queue", "prefill", "generation-queue", "generation")
    total = sum(metrics[f"{stage}-duration"] for stage in stages)
    assert total == pytest.approx(metrics["server-processing-time"], abs=1e-5)
    assert json.loads(answer.headers["fireworks-sampling-options"])["temperature"] == 1.0


async def test_the_seed_in_the_header_replays_the_answer() -> None:
    async with door_on() as door:
        first = await door.completion(max_tokens=20, n=2)
        again = await door.completion(max_tokens=20, n=2, seed=int(first.headers["fireworks-seed"]))
    assert first.json["choices"] == again.json["choices"]


async def test_stream_headers_come_before_the_first_token() -> None:
    async with door_on(step_s=0.5) as door, connect(door.port) as client:
        with trio.fail_after(0.4):
            await client.send(request_bytes("POST", PATHS[0], {"model": MODEL, "prompt": "hello", "stream": True}))
            status, headers = await client.response_head()
    assert (status, headers["content-type"], headers["fireworks-prompt-tokens"]) == (200, "text/event-stream", "5")
    assert {"fireworks-seed", "fireworks-sampling-options", "x-request-id"} <= set(headers)


@pytest.mark.parametrize("seed", range(40))
async def test_any_stream_adds_up_to_the_plain_answer(seed: int) -> None:
    request = random_request(random.Random(seed))
    async with door_on() as door:
        plain = await door.complete(**request, stream=False)
        stream = await door.complete(**request, stream=True)
    assert (plain.status, stream.status) == (200, 200), (seed, plain.body)
    whole = joined(stream.events)
    expected = plain.json
    for body in (whole, expected):
        body["usage"].pop("prompt_tokens_details")  # the second request found the first one's blocks
    assert canonical(whole) == canonical(expected), f"seed {seed}"


async def test_a_stream_with_everything() -> None:
    fields = {"echo": True, "raw_output": True, "return_token_ids": True, "perf_metrics_in_response": True}
    async with door_on() as door:
        answer = await door.completion(logprobs=True, top_logprobs=2, n=2, max_tokens=3, stream=True, **fields)
    events = answer.events
    assert "perf_metrics" in events[-2] and sum("perf_metrics" in e for e in events) == 1
    for choice in joined(events)["choices"]:
        raw, rows = choice["raw_output"], choice["logprobs"]["content"]
        assert raw["completion_token_ids"][:5] == raw["prompt_token_ids"] == choice["prompt_token_ids"]
        assert raw["completion_token_ids"][5:] == choice["token_ids"]
        assert raw["completion_logprobs"]["content"] == rows and len(rows) == len(raw["completion_token_ids"])
        assert [row["sampling_logprob"] is None for row in rows] == [True] * 5 + [False] * (len(rows) - 5)


async def test_internal_content_is_token_ids_by_another_name() -> None:
    async with door_on() as door:
        options = {"include_internal_content": True}
        stream = await door.completion(stream=True, stream_options=options, max_tokens=3)
        plain = await door.completion(stream_options=options, max_tokens=3)
    assert joined(stream.events)["choices"][0]["prompt_token_ids"]
    assert "token_ids" not in plain.json["choices"][0]


# -- who asks --------------------------------------------------------------------------------------------------------


async def test_the_request_id_is_the_clients_or_the_answers() -> None:
    async with door_on() as door:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        own = await door.ask("POST", PATHS[0], body, x_request_id="my-id-1")
        odd = await door.ask("POST", PATHS[0], body, x_request_id="two words")
        bad = await door.ask("POST", PATHS[0], {"prompt": 5}, x_request_id="my-id-2")
    assert (own.headers["x-request-id"], bad.headers["x-request-id"]) == ("my-id-1", "my-id-2")
    assert odd.headers["x-request-id"].startswith("cmpl-")


async def test_keys() -> None:
    keys_of = ("secret-1", "secret-2")
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    async with door_on(settings=DoorSettings(api_keys=keys_of)) as door:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-1"}, {"x_api_key": "secret"}):
            answer = await door.ask("POST", PATHS[0], body, **headers)
            assert (answer.status, answer.json["error"]["code"]) == (401, "UNAUTHORIZED")
            assert (await door.ask("GET", "/v1/models", None, **headers)).status == 401
        good = ({"authorization": "Bearer secret-2"}, {"authorization": "bearer  secret-1"}, {"x_api_key": "secret-1"})
        for headers in good:
            assert (await door.ask("POST", PATHS[0], body, **headers)).status == 200
        assert (await door.get("/health")).status == 200


async def test_a_key_has_its_share() -> None:
    settings = DoorSettings(api_keys=("one", "two"))
    async with door_on(settings=settings, client_share_max=1, step_s=0.01) as door, connect(door.port) as client:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
        await client.send(request_bytes("POST", PATHS[0], body, {"authorization": "Bearer one"}))
        await client.response_head()
        small = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        refused = await door.ask("POST", PATHS[0], small, authorization="Bearer one")
        other = await door.ask("POST", PATHS[0], small, authorization="Bearer two")
    assert (refused.status, other.status) == (429, 200)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json["error"]["code"] == "rate_limit_exceeded"


async def test_the_deadline_header() -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3000, "ignore_eos": True}
    async with door_on(step_s=0.01) as door:
        late = await door.ask("POST", PATHS[0], body, x_request_timeout_s="0.1")
        stream = await door.ask("POST", PATHS[0], {**body, "stream": True}, x_request_timeout_s="0.1")
        for wrong in ("0", "-1", "soon", "nan", "1e99"):
            answer = await door.ask("POST", PATHS[0], body, x_request_timeout_s=wrong)
            assert (answer.status, answer.json["error"]["param"]) == (400, "x-request-timeout-s")
        await door.settled()
    assert (late.status, late.json["error"]["code"]) == (504, "timeout")
    assert stream.events[-1]["error"]["status_code"] == 504


async def test_the_log_has_figures_and_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="offbook")
    async with door_on(settings=DoorSettings(api_keys=("hushhush",))) as door:
        body = {"model": MODEL, "prompt": "topsecret", "max_tokens": 3, "ignore_eos": True}
        await door.ask("POST", PATHS[0], body, authorization="Bearer hushhush", x_request_id="r1")
        await door.ask("POST", PATHS[0], {**body, "temperature": 9}, authorization="Bearer hushhush")
        await door.ask("POST", PATHS[0], body, authorization="Bearer hushhush2")
    records = [r for r in caplog.records if r.name == "offbook.access"]
    fields = [r.fields for r in records]  # type: ignore[attr-defined]
    assert [f["status"] for f in fields] == [200, 422, 401]
    assert (fields[0]["request_id"], fields[0]["completion_tokens"], fields[0]["prompt_tokens"]) == ("r1", 3, 9)
    assert fields[0]["client"].startswith("key-")
    text = str([(r.getMessage(), r.fields) for r in records])  # type: ignore[attr-defined]
    assert "hushhush" not in text and "topsecret" not in text


# -- the other routes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/inference"])
async def test_models(prefix: str) -> None:
    async with door_on() as door:
        (model,) = (await door.get(f"{prefix}/v1/models")).json["data"]
        one = await door.get(f"{prefix}/v1/models/{MODEL}")
        long = await door.get(f"{prefix}/v1/models/accounts/fireworks/models/{MODEL}")
        none = await door.get(f"{prefix}/v1/models/other")
    assert (model["id"], model["object"], model["context_length"]) == (MODEL, "model", 4096)
    assert one.json == model
    assert (long.status, long.json["id"]) == (200, f"accounts/fireworks/models/{MODEL}")
    assert (none.status, none.json["error"]["code"], none.json["error"]["param"]) == (404, "NOT_FOUND", "model")


async def test_the_model_is_echoed_as_asked() -> None:
    name = f"accounts/fireworks/models/{MODEL}"
    async with door_on() as door:
        answer = await door.complete(model=name, prompt="a", max_tokens=1)
        missing = await door.complete(model="gpt", prompt="a")
    assert answer.json["model"] == name
    assert (missing.status, missing.json["error"]["param"]) == (404, "model")


async def test_health_has_three_states() -> None:
    door = Door()
    async with serving(create_app(door)) as served:
        answer = await served.get("/health")
        assert (answer.status, answer.json) == (503, {"status": "starting"})
        for path in ("/v1/models", "/v1/models/x"):
            assert (await served.get(path)).status == 503
        refused = await served.complete(model="m", prompt="p")
        assert (refused.status, "starting" in refused.json["error"]["message"]) == (503, True)
        assert int(refused.headers["retry-after"]) >= 1
        assert (await served.get("/metrics")).status == 200
    async with door_on() as served:
        assert (await served.get("/health")).json == {"status": "ready"}
        served.engine.begin_drain()
        answer = await served.get("/health")
        assert (answer.status, answer.json) == (503, {"status": "draining"})
        refused = await served.completion()
        assert (refused.status, "draining" in refused.json["error"]["message"]) == (503, True)


async def test_metrics_count_what_happened() -> None:
    async with door_on() as door:
        await door.completion(max_tokens=3, ignore_eos=True)
        await door.completion(temperature=7)
        text = (await door.get("/metrics")).body.decode()
    assert 'offbook_http_responses_total{status="200"} 1.0' in text
    assert 'offbook_http_responses_total{status="422"} 1.0' in text
    assert "offbook_generated_tokens_total 3.0" in text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "NOT_FOUND"),
        ("POST", "/v1/chat/completions", 404, "NOT_FOUND"),
        ("GET", "/v1/completions", 405, "METHOD_NOT_ALLOWED"),
        ("DELETE", "/v1/models", 405, "METHOD_NOT_ALLOWED"),
    ],
)
async def test_paths_and_methods_that_are_not_there(method: str, path: str, status: int, code: str) -> None:
    async with door_on() as door:
        answer = await door.ask(method, path, None)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert isinstance(answer.json["error"]["message"], str)
    assert status != 405 or "allow" in answer.headers


async def test_a_body_that_comes_too_slowly() -> None:
    async with door_on(settings=DoorSettings(body_timeout_s=0)) as door, connect(door.port) as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        answer = await client.response()
        assert (answer.status, answer.json["error"]["code"]) == (408, "request_timeout")


async def test_a_bug_in_a_handler_is_a_500_and_no_more() -> None:
    async with door_on() as door:
        door.engine.check_model = None  # type: ignore[assignment,method-assign]
        broken = await door.completion()
        assert (broken.status, broken.json["error"]["code"]) == (500, "internal_server_error")
        assert "check_model" not in broken.body.decode()


# -- one client, two transports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100, 112))
async def test_the_embedded_api_gives_the_same(seed: int) -> None:
    request = random_request(random.Random(seed))
    async with door_on() as door:
        body = (await door.complete(**request)).json
        async with door.engine.complete(**{**request, "stream": False}) as answer:
            deltas = await answer.choices()
            encoded = translate.encode(translate.completion(answer, door.engine.surfaces.piece, deltas))
    embedded = json.loads(encoded)
    for one in (body, embedded):
        one["usage"].pop("prompt_tokens_details")
    assert canonical(embedded) == canonical(body), f"seed {seed}"
    assert [d.text for d in deltas] == [c["text"] for c in body["choices"]]


@pytest.mark.parametrize(
    "fields", [{"temperature": 3, "zzz": 1}, {"prompt": [71]}, {"model": "other"}, {"logprobs": 6}, {"images": ["x"]}]
)
async def test_the_embedded_api_refuses_the_same(fields: dict[str, Any]) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "a", **fields}
    async with door_on() as door:
        answer = await door.complete(**request)
        with pytest.raises(CompletionError) as caught:
            async with door.engine.complete(**request):
                pass
    assert (caught.value.status, caught.value.message) == (answer.status, answer.json["error"]["message"])
