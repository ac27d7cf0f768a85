"""Public fault reports about other servers, as tests of this one over HTTP; ids in the names.

On the simulated device, whose answers are known: 64 ids, one per letter, id 0 is EOS. Long,
since it is one list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import pytest
import trio
from door import MODEL, DoorOn, door_on, joined
from raw_http import Answered, connect, request_bytes
from sim_device import VOCABULARY, SimDevice
from sim_executor import SimExecutor

from offbook.actors import grammar_meter
from offbook.actors.execution import StepError
from offbook.actors.request import CompletionRequest
from offbook.actors.steps import Step
from offbook.server.app import DoorSettings

PATH = "/v1/completions"


def refused(answer: Answered) -> str:
    """The message of a 4xx; asserts that it is one, in the right shape."""
    assert 400 <= answer.status < 500, (answer.status, answer.body[:200])
    error = answer.json["error"]
    assert isinstance(error["message"], str) and isinstance(error["code"], str)
    assert error.get("param") is None or re.fullmatch(r"[\w-]{1,40}", error["param"])  # a field's name, no value
    assert len(answer.body) < 20_000
    message: str = error["message"]
    return message


async def raw(door: DoorOn, body: bytes, **headers: str) -> Answered:
    return await door.ask("POST", PATH, body, **headers)


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[-1], [[-1]], [[5], [-1]]])
async def test_b042_b043_a_negative_id(prompt: Any) -> None:
    async with door_on() as door:
        assert "prompt" in refused(await door.completion(prompt))
        assert await door.canary()


@pytest.mark.parametrize("token", [VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, 2**32, 2**32 + 5, 2**63, 10**30])
async def test_b044_an_id_outside_the_vocabulary(token: int) -> None:
    async with door_on() as door:
        before = await door.canary()
        refused(await door.completion([5, token], echo=True))
        assert await door.canary() == before


# -- validation ------------------------------------------------------------------------------------------------------


async def test_b083_null_is_not_given() -> None:
    async with door_on() as door:
        plain = (await door.completion(max_tokens=2, temperature=0)).json["choices"]
        for name in CompletionRequest.__struct_fields__:
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 2, "temperature": 0, name: None}
            answer = await door.complete(**body)
            if name in ("model", "prompt"):
                assert f"Field required, field: '{name}'" in refused(answer)
            else:
                assert answer.status == 200
                if name not in ("max_tokens", "temperature"):
                    assert answer.json["choices"] == plain


@pytest.mark.parametrize("value", ["NaN", "1e400", "-Infinity", "Infinity", "-1e999"])
async def test_b084_numbers_that_are_none(value: str) -> None:
    async with door_on() as door:
        before = await door.canary()
        refused(await raw(door, b'{"model":"%s","prompt":"x","temperature":%s}' % (MODEL.encode(), value.encode())))
        assert await door.canary() == before


GOOD = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1})
NOT_JSON = {
    "syntax": b'{"a":1, x}',
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "string": b'"s"',
    "number": b"5",
    "cut": b"{",
    "bytes": b"\xff\xfe",
    "two": b'{"prompt":"x"}{"prompt":"y"}',
    "twice": b'{"model":"m","prompt":"a","prompt":"b"}',
    "twice inside": b'{"model":"m","prompt":"a","stream_options":{"include_usage":true,"include_usage":false}}',
    "bom": b"\xef\xbb\xbf" + GOOD.encode(),
    "utf-16": GOOD.encode("utf-16"),
    "latin-1": b'{"model":"m","prompt":"\xe9"}',
    "control": b'{"model":"m","prompt":"\x01"}',
    "digits": b'{"model":"m","prompt":"x","seed":' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("data", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_b210_bodies_that_are_no_json_object(data: bytes) -> None:
    async with door_on() as door:
        assert (await raw(door, data)).status == 400
        refused(await raw(door, data))
        assert await door.canary()


@pytest.mark.parametrize(
    ("media", "status"),
    [
        ("", 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json;charset=latin1", 415),
        ("multipart/form-data; boundary=x", 415),
        (";;;", 415),
    ],
)
async def test_b211_content_types(media: str, status: int) -> None:
    async with door_on() as door:
        answer = await raw(door, GOOD.encode(), content_type=media)
        assert answer.status == status
        assert status == 200 or "Content-Type" in refused(answer) or "charset" in refused(answer)
        assert (await raw(door, GOOD.encode(), content_encoding="gzip")).status == 415


@pytest.mark.parametrize("field", ["zzz", "metadata", "response_format", "prompt", "logit_bias"])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
async def test_b212_deep_nesting(field: str, opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    async with door_on() as door:
        for depth in (100, 1000, 5000, 100_000):
            nested = opening * depth + b"1" + closing * depth
            if field == "response_format":
                nested = b'{"type":"json_schema","json_schema":' + nested + b"}"
            body = b'{"model":"%s","prompt":"x","max_tokens":1,"%s":%s}' % (MODEL.encode(), field.encode(), nested)
            refused(await raw(door, body))
        assert await door.canary()


@pytest.mark.parametrize(
    "extra",
    [{"max_token": 4}, {"temperatur": 9}, {"best_of": 2}, {"suffix": "z"}, {"zzz": [1]}, {"stop_token_ids": [1]}],
)
async def test_b214_unknown_fields(extra: dict[str, Any]) -> None:
    async with door_on() as door:
        answer = await door.completion(**extra)
        assert answer.status == 400
        assert refused(answer) == f"Extra inputs are not permitted, field: '{next(iter(extra))}'"


async def test_b215_every_error_has_one_shape() -> None:
    secret = "s3cret " * 2000
    async with door_on(settings=DoorSettings(body_bytes_max=100_000)) as door:
        answers = {
            422: await door.completion({"a": secret}),
            404: await door.complete(model="no-such-model", prompt=secret),
            400: await door.completion([1] * 5000),
            413: await door.completion("x" * 200_000),
            405: await door.ask("GET", PATH, None),
            415: await raw(door, b"<xml/>", content_type="application/xml"),
        }
        for status, answer in answers.items():
            assert answer.status == status, (status, answer.body)
            refused(answer)
            assert secret[:200] not in answer.body.decode() and "Traceback" not in answer.body.decode()
        assert answers[422].json["detail"][0]["loc"] == ["body", "prompt"]
        assert "maximum context length" in refused(answers[400])
        out_of_range = await door.completion(temperature=3, n=0, zzz=1)
    assert refused(out_of_range).startswith("3 request validation errors: ")
    assert len(out_of_range.json["detail"]) == 3


@pytest.mark.parametrize("where", ["prompt", "stop", "user", "prompt_cache_key", "speculation", "metadata"])
async def test_b216_surrogates(where: str) -> None:
    def body(text: bytes) -> bytes:
        value = b'{"k":"%s"}' % text if where == "metadata" else b'"%s"' % text
        fields = {"model": b'"%s"' % MODEL.encode(), "prompt": b'"hello"', "echo": b"true", "max_tokens": b"1"}
        fields[where] = value
        return b"{" + b",".join(b'"%s":%s' % (k.encode(), v) for k, v in fields.items()) + b"}"

    async with door_on() as door:
        for lone in (rb"\ud83d", rb"a\udc00b", rb"\ud83d\ud83d", rb"\udc00\ud83d"):
            answer = await raw(door, body(lone))
            assert (answer.status, "surrogate" in refused(answer)) == (400, True)
        for fine in (rb"\ud83d\ude00 pair", rb"\u0000", rb"\uffff", "\ufeffx".encode()):
            assert (await raw(door, body(fine))).status == 200


# -- usage -----------------------------------------------------------------------------------------------------------


async def test_b127_b128_usage_is_the_sum_once_and_the_same_streamed() -> None:
    fields = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "n": 2}
    async with door_on() as door:
        stream = joined((await door.completion("four words are here", stream=True, **fields)).events)
        plain = (await door.completion("four words are here", **fields)).json
    assert stream["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == 200
    assert stream["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == 19


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "options", [None, {}, *({"include_usage": v} for v in (None, True, False)), {"continuous_usage_stats": False}]
)
async def test_b129_b130_only_false_drops_the_one_usage_chunk(options: Any, stream: bool) -> None:
    async with door_on() as door:
        answer = await door.completion(max_tokens=5, stream=stream, stream_options=options)
    if not stream:
        assert answer.json["usage"]["prompt_tokens"] == 5
        return
    with_usage = [event for event in answer.events if event["usage"] is not None]
    assert len(with_usage) == (0 if options == {"include_usage": False} else 1)
    assert all(event is answer.events[-1] or event["choices"] == [] for event in with_usage)


async def test_b132_the_usage_chunk_tells_of_the_cache() -> None:
    prompt = [*range(1, 61), *range(1, 41)]
    async with door_on() as door:
        await door.completion(prompt, max_tokens=1)
        events = (await door.completion(prompt, max_tokens=2, stream=True)).events
    (usage,) = [e["usage"] for e in events if e["usage"]]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 80


# -- streams ---------------------------------------------------------------------------------------------------------


async def test_b135_b140_many_streams_do_not_mix() -> None:
    answers: dict[int, Answered] = {}
    async with door_on() as door:

        async def ask(i: int) -> None:
            fields = {"max_tokens": 60, "seed": i, "ignore_eos": True}
            answers[i] = await door.completion(f"go {i}", stream=True, **fields)

        async with trio.open_nursery() as nursery:
            for i in range(32):
                nursery.start_soon(ask, i)
        plain = [(await door.completion(f"go {i}", seed=i, max_tokens=60, ignore_eos=True)).json for i in range(32)]
    whole = {i: joined(answer.events) for i, answer in answers.items()}
    assert len({body["id"] for body in whole.values()}) == 32
    assert [whole[i]["choices"] for i in range(32)] == [body["choices"] for body in plain]


def failing_at(step_number: int) -> SimExecutor:
    """An executor that fails its n-th step."""
    executor = SimExecutor(SimDevice(blocks=512), step_s=0.0005)
    steps: list[Step] = []

    def before(step: Step) -> None:
        steps.append(step)
        if len(steps) == step_number:
            raise StepError("the device failed (planted)")

    executor.before = before
    return executor


@pytest.mark.parametrize("n", [1, 2])
async def test_b136_b137_an_error_in_mid_stream_is_an_event_of_its_own(n: int) -> None:
    async with door_on(failing_at(6)) as door:
        answer = await door.completion(max_tokens=50, stream=True, ignore_eos=True, n=n)
        *before, last = answer.events
        assert len(before) >= 3 and all("error" not in event for event in before)
        assert {key: last[key] for key in ("id", "object", "created", "model")}.items() <= before[0].items()
        assert last["choices"] == []
        assert last["error"].items() >= {"object": "error", "code": "internal_server_error", "status_code": 500}.items()
        assert all(choice["finish_reason"] is None for event in before for choice in event["choices"])
        await door.settled()
        assert await door.canary()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_takes_too_long_names_its_field(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(
        grammar_meter, "clock", map(float, count()).__next__
    )  # every look at the grammar takes a second
    fields = {"response_format": {"type": "grammar", "grammar": "root ::= [a-z]*"}, "ignore_eos": True}
    async with door_on() as door:
        answer = await door.completion(max_tokens=50, stream=stream, **fields)
        error = (answer.events[-1] if stream else answer.json)["error"]
        assert answer.status == (200 if stream else 400)
        assert (error["code"], error["param"]) == ("invalid_request_error", "response_format")
        assert error.get("status_code") == (400 if stream else None)
        assert "simplify it" in error["message"]
        await door.settled()
        assert await door.canary()


async def test_a_failed_step_before_the_first_byte_is_a_plain_500() -> None:
    async with door_on(failing_at(1)) as door:
        answer = await door.completion(max_tokens=5)
        assert (answer.status, answer.json["error"]["code"]) == (500, "internal_server_error")
        assert await door.canary()


@pytest.mark.parametrize("logprobs", [None, 1, True])
async def test_b142_b143_finish_reason_is_null_until_the_end(logprobs: Any) -> None:
    async with door_on() as door:
        fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": logprobs}
        events = (await door.completion("7-3=", stream=True, **fields)).events
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


# -- leaving and slowness --------------------------------------------------------------------------------------------


async def test_b146_only_real_leavers_are_counted() -> None:
    fields = {"model": MODEL, "prompt": "x", "ignore_eos": True, "stream": True}
    async with door_on() as door:
        for _ in range(40):
            assert (await door.complete(**fields, max_tokens=2)).status == 200

        async def leave() -> None:
            async with connect(door.port) as client:
                await client.send(request_bytes("POST", PATH, {**fields, "max_tokens": 2000}))
                await client.response_head()
                await client.chunk()
                await client.chunk()

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(leave)
        with trio.fail_after(1):
            await door.settled()
        text = (await door.get("/metrics")).body.decode()
    assert 'offbook_http_responses_total{status="200"} 40.0' in text
    assert 'offbook_http_responses_total{status="499"} 20.0' in text


async def test_b148_leaving_during_a_long_prefill_stops_it() -> None:
    async with door_on(step_s=0.01, step_tokens_max=16, blocks=256) as door:
        body = {"model": MODEL, "prompt": [7] * 4000, "max_tokens": 4, "stream": True}
        began = trio.current_time()
        async with connect(door.port) as client:
            await client.send(request_bytes("POST", PATH, body))
            await client.response_head()
        assert await door.canary()
        await door.settled()
        assert trio.current_time() - began < 1.5  # the whole prefill takes 2.5 s


async def test_b150_survivors_equal_their_lone_runs() -> None:
    def body(i: int) -> dict[str, Any]:
        return {
            "model": MODEL, "prompt": f"r {i}", "max_tokens": 60, "ignore_eos": True, "stream": True, "seed": i,
            "frequency_penalty": 0.5, "logit_bias": {str(i % 60 + 1): -50},
        }  # fmt: skip

    answers: dict[int, Answered] = {}
    async with door_on(blocks=2048) as door:

        async def ask(i: int) -> None:
            if i % 2:
                answers[i] = await door.ask("POST", PATH, body(i))
                return
            async with connect(door.port) as client:
                await client.send(request_bytes("POST", PATH, body(i)))
                await trio.sleep(i / 1000)

        async with trio.open_nursery() as nursery:
            for i in range(60):
                nursery.start_soon(ask, i)
        await door.settled()
        for i in (1, 21, 41, 59):
            alone = await door.ask("POST", PATH, body(i))
            assert joined(alone.events)["choices"] == joined(answers[i].events)["choices"]


async def test_b151_b152_clients_that_do_not_read_hold_nothing_for_ever() -> None:
    fields = {"model": MODEL, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": 5}
    impatient = door_on(limits={"write_timeout_s": 0.5}, blocks=4096, step_s=0.0002)
    async with impatient as door, trio.open_nursery() as nursery:

        async def never_read() -> None:
            async with connect(door.port, receive_buffer=4096) as client:
                await client.send(request_bytes("POST", PATH, fields))
                await trio.sleep_forever()

        for _ in range(10):
            nursery.start_soon(never_read)
        await trio.sleep(0.2)
        began = trio.current_time()
        answer = await door.completion(max_tokens=100, ignore_eos=True, stream=True)
        assert joined(answer.events)["usage"]["completion_tokens"] == 100
        assert trio.current_time() - began < 3
        with trio.fail_after(10):
            await wait_for(lambda: door.engine.active == 0)
        await door.settled()
        nursery.cancel_scope.cancel()


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # what a server has let go of, nothing tells
        await trio.sleep(0.01)


# -- overload --------------------------------------------------------------------------------------------------------


async def test_b061_small_bodies_cannot_ask_for_everything() -> None:
    async with door_on() as door:
        for fields in ({"max_tokens": 10**12}, {"n": 129}, {"prompt": ["x"] * 128, "n": 128}, {"prompt": ["x"] * 300}):
            refused(await door.completion(**fields))
        assert await door.canary()


async def test_b104_many_biases_and_stop_strings() -> None:
    async with door_on() as door:
        many = {str(i): 1.0 for i in range(100_000)}
        with trio.fail_after(5):
            refused(await door.completion(logit_bias=many))
            refused(await door.completion(stop=["1", "2", "3", "4", "5"]))
            assert await door.canary()


async def test_a_full_queue_is_an_honest_503() -> None:
    async with door_on(running_max=1, queue_max=1, step_s=0.01) as door, trio.open_nursery() as nursery:
        fields = {"max_tokens": 1000, "ignore_eos": True}
        for _ in range(6):
            nursery.start_soon(lambda: door.completion(**fields))
        await trio.sleep(0.2)
        answer = await door.completion(max_tokens=1)
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        nursery.cancel_scope.cancel()


async def test_a_huge_prompt_is_refused_quickly() -> None:
    async with door_on() as door:
        with trio.fail_after(5):
            assert (await door.completion("a" * 3_000_000)).status == 400
            assert (await door.completion([1] * 1_000_000)).status == 400
            assert (await door.completion("a" * 10_000_000)).status == 413
            assert await door.canary()


def test_every_field_of_the_api_is_known() -> None:
    schema = msgspec.inspect.type_info(CompletionRequest)
    assert isinstance(schema, msgspec.inspect.StructType)
    assert {"model", "prompt"} == {field.name for field in schema.fields if field.required}
