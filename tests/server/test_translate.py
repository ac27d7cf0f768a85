"""The wire shapes, field by field, from hand-made answers; and that chunks add up to bodies for any cut."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.actors.answer import Answer
from offbook.actors.choice import join
from offbook.actors.errors import EngineOverloaded, Failure, InvalidRequest, ModelNotFound
from offbook.actors.events import Delta, PromptInfo, Speculation, Timings, TokenRow, Usage
from offbook.actors.request import from_fields
from offbook.server import replies, translate
from offbook.server.body import BadBody

TEXTS = {0: "<s>", 1: " cat", 2: "é", 3: "�", 4: " cat", 5: "x"}  # 3: half a character; 4: the same text as 1
DATA = {0: b"<s>", 1: b" cat", 2: "é".encode(), 3: b"\xc3", 4: b" cat", 5: b"x"}


def piece(token_id: int) -> tuple[str, bytes]:
    return TEXTS[token_id], DATA[token_id]


class FakeAnswer:
    """What translation reads of an answer."""

    id = "cmpl-1"
    created = 7
    model = "m"
    grammar = None
    warnings = ()
    seed = 42
    usage = Usage(2, 3, 1)
    timings = Timings(first_token_s=0.25, processing_s=1.0, prefill_s=1e-7)
    speculation: Speculation | None = None
    concurrent_requests = 4

    def __init__(self, **fields: Any) -> None:
        self.request = from_fields({"model": "m", "prompt": [0, 1], **fields})
        self.n = self.request.n or 1
        self.sampling_options = {"temperature": 0.5, "top_k": 0}
        self.prompts = (PromptInfo((0, 1), (0, 1)),)


def answer(**fields: Any) -> Answer:
    return cast(Answer, FakeAnswer(**fields))


def row(token_id: int, offset: int = 0, **fields: Any) -> TokenRow:
    made = {"logprob": -1.5, "sampling_logprob": -0.5, **fields}
    return TokenRow(token_id=token_id, text_offset=offset, **made)


def plain(deltas: list[Delta], **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(translate.encode(translate.completion(answer(**fields), piece, deltas)))
    return body


def test_the_smallest_body() -> None:
    body = plain([Delta(index=0, text="hi", token_ids=(5,), finish_reason="stop")])
    assert body == {
        "id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }  # fmt: skip


def test_new_logprobs() -> None:
    rows = (row(3, 1, top=((1, -0.1), (3, -1.5))), row(0, 1, sampling_logprob=None))
    body = plain([Delta(index=0, rows=rows)], logprobs=True)
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "�", "logprob": -1.5, "sampling_logprob": -0.5, "bytes": [0xC3], "token_id": 3, "text_offset": 1,
        "top_logprobs": [
            {"token": " cat", "logprob": -0.1, "token_id": 1, "bytes": [32, 99, 97, 116]},
            {"token": "�", "logprob": -1.5, "token_id": 3, "bytes": [0xC3]},
        ],
    }  # fmt: skip
    assert (second["sampling_logprob"], second["top_logprobs"]) == (None, [])


def test_legacy_logprobs() -> None:
    rows = (row(1, top=((2, -0.1),)), row(2, 4, logprob=-0.1, top=((2, -0.1),)), row(4, 5, top=((1, -0.2),)))
    logprobs = plain([Delta(index=0, rows=rows)], logprobs=1)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": [" cat", "é", " cat"],
        "token_logprobs": [-1.5, -0.1, -1.5],
        "top_logprobs": [{"é": -0.1, " cat": -1.5}, {"é": -0.1}, {" cat": -0.2}],  # of two " cat", the likelier
        "text_offset": [0, 4, 5],
        "token_ids": [1, 2, 4],
    }


def test_a_logprob_is_the_same_double_wherever_it_stands() -> None:
    value = -0.1096815109252929  # clients compare them for equality
    logprobs = plain([Delta(index=0, rows=(row(1, logprob=value, top=((1, value),)),))], logprobs=1)["choices"][0][
        "logprobs"
    ]
    assert logprobs["token_logprobs"][0] == logprobs["top_logprobs"][0][" cat"] == value


@pytest.mark.parametrize(("echoed", "first"), [((0, 1), {}), ((1,), {" cat": -1.5})])
def test_only_the_first_token_of_a_full_echo_has_no_alternatives(
    echoed: tuple[int, ...], first: dict[str, float]
) -> None:
    rows = tuple(row(t, sampling_logprob=None) for t in echoed)
    logprobs = plain([Delta(index=0, rows=rows, echoed_ids=echoed)], logprobs=1, echo=True)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == first


def test_sampling_masks() -> None:
    rows = (row(1, kept=3, kept_ids=(1, 2, 300)), row(1, kept=5000), row(1, sampling_logprob=None))
    for kind, payload in (("count", None), ("non_zero_list", [1, 2, 300]), ("non_zero_buffer", "AQAAAAIAAAAsAQAA")):
        body = plain([Delta(index=0, rows=rows)], logprobs=True, sampling_mask=kind)
        drawn, flat, echoed = body["choices"][0]["logprobs"]["content"]
        assert (drawn["sampling_mask_count"], drawn.get("sampling_mask")) == (3, payload)
        assert flat["sampling_mask_count"] == 5000 and "sampling_mask" not in flat
        assert "sampling_mask_count" not in echoed
    assert base64.b64decode("AQAAAAIAAAAsAQAA") == bytes([1, 0, 0, 0, 2, 0, 0, 0, 44, 1, 0, 0])


def test_raw_output_and_ids() -> None:
    rows = (row(1), row(5), row(0))
    delta = Delta(
        index=0, text="x", token_ids=(5, 0), echoed_ids=(1,), rows=rows, raw_text=" catx<s>", finish_reason="stop"
    )
    (choice,) = plain([delta], raw_output=True, return_token_ids=True, logprobs=2)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([0, 1], [5, 0])
    raw = choice["raw_output"]
    assert list(raw) == [
        "prompt_fragments", "prompt_token_ids", "completion", "completion_token_ids", "completion_logprobs", "images",
        "videos", "grammar",
    ]  # fmt: skip
    assert (raw["prompt_fragments"], raw["completion"], raw["completion_token_ids"]) == ([0, 1], " catx<s>", [1, 5, 0])
    assert [r["token_id"] for r in raw["completion_logprobs"]["content"]] == [1, 5, 0]  # the new format, always


def test_measurements() -> None:
    told = cast(FakeAnswer, answer(perf_metrics_in_response=True))
    told.speculation = Speculation(prompt_tokens=9, matched_tokens=5, drafted_tokens=8, accepted=((3, 4), (2, 4)))
    metrics = translate.perf_metrics(cast(Answer, told))
    assert metrics["speculation-acceptance"] == "0:3/4,1:2/4"
    assert metrics["prefill-duration"] == 0.0 and metrics["server-time-to-first-token"] == 0.25
    headers = translate.closing_headers(cast(Answer, told))
    assert headers["fireworks-prefill-duration"] == "0.000000"  # never with an exponent
    assert headers["fireworks-speculation-prompt-matched-tokens"] == "5"
    assert translate.opening_headers(cast(Answer, told)) == {
        "fireworks-prompt-tokens": "2",
        "fireworks-seed": "42",
        "fireworks-sampling-options": '{"temperature": 0.5, "top_k": 0}',
    }


def test_headers_carry_any_model_name() -> None:
    told = cast(FakeAnswer, answer())
    told.model = "modèle\r\nx: y"
    value = translate.closing_headers(cast(Answer, told))["fireworks-deployment"]
    assert value.isascii() and value.isprintable()


def delta_of(text: str, rows: list[TokenRow]) -> Delta:
    ids = tuple(r.token_id for r in rows)
    return Delta(index=0, text=text, token_ids=ids, rows=tuple(rows), raw_text=text)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


rows_strategy = st.builds(row, st.integers(0, 5), st.integers(0, 9))
deltas_strategy = st.lists(
    st.builds(delta_of, st.text(max_size=5), st.lists(rows_strategy, max_size=3)), min_size=1, max_size=6
)


@given(deltas_strategy, st.sampled_from([True, 1, None]), st.booleans(), st.sampled_from([None, True, False]))
def test_chunks_add_up_to_the_body(deltas: list[Delta], logprobs: Any, raw: bool, usage: bool | None) -> None:
    last = join([deltas[-1], Delta(index=0, finish_reason="length")])
    deltas = [*deltas[:-1], last]
    fields = {
        "logprobs": logprobs,
        "raw_output": raw,
        "return_token_ids": raw,
        "stream_options": {"include_usage": usage},
    }
    told = answer(**fields, stream=True, perf_metrics_in_response=True)
    writer = translate.StreamWriter(told, piece)
    data = b"".join(writer.chunk(delta) for delta in deltas) + writer.end()
    *events, done, nothing = data.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert (chunks[-1]["choices"] == []) == (usage is not False)
    content = [chunk for chunk in chunks if chunk["choices"]]
    assert [("perf_metrics" in chunk) for chunk in chunks] == [c is content[-1] for c in chunks]
    body = plain([join(deltas)], **fields)["choices"][0]
    choices = [chunk["choices"][0] for chunk in content]
    assert "".join(c["text"] for c in choices) == body["text"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    if raw:
        assert choices[-1]["raw_output"] == body["raw_output"]
        assert flat(c["token_ids"] for c in choices) == body["token_ids"]
        assert [("prompt_token_ids" in c) for c in choices] == [True] + [False] * (len(choices) - 1)
    if logprobs is not None:
        keys = body["logprobs"].keys()
        assert {k: flat(c["logprobs"][k] for c in choices) for k in keys} == body["logprobs"]


def test_error_envelopes() -> None:
    def parts(error: Any) -> tuple[int, Any, dict[str, str]]:
        reply = replies.failure(error, "r1")
        return reply.status, json.loads(reply.body), reply.headers

    failure = Failure(("logit_bias", "abc"), "Wrong", "kind", "'abc'")
    status, body, _ = parts(InvalidRequest(failure))
    assert (status, body["detail"]) == (422, [{"loc": ["body", "logit_bias", "abc"], "msg": "Wrong", "type": "kind"}])
    assert body["error"] == {
        "object": "error", "type": "invalid_request_error", "code": "invalid_request_error", "param": "logit_bias",
        "message": "Wrong, field: 'logit_bias.abc', value: 'abc'",
    }  # fmt: skip
    status, body, _ = parts(InvalidRequest(failure, status=400))
    assert (status, "detail" in body) == (400, False)
    status, body, _ = parts(ModelNotFound("no"))
    error = {"message": "no", "param": "model", "code": "NOT_FOUND", "type": "error"}
    assert (status, body) == (404, {"error": error, "request_id": "r1"})
    status, _, headers = parts(EngineOverloaded("full", 1.2))
    assert (status, headers["retry-after"]) == (503, "2")
    assert parts(BadBody("bad", 415))[0] == 415
