"""For any valid request, the joined chunks of the stream are the plain answer: texts, ids, rows of log-probabilities in
both formats, finish reasons, raw output and usage. Asked again, with every prompt in the cache, nothing changes."""

from __future__ import annotations

from typing import Any

from door import joined
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live import Body, Live, said
from valid_requests import fields, valid_requests

from offbook.actors.request import CompletionRequest


def check(live: Live, body: Body) -> None:
    plain, stream, again = (live.post({**body, "stream": stream}) for stream in (False, True, False))
    assert (plain.status, stream.status, again.status) == (200, 200, 200), plain.body[:500]
    whole = joined(stream.events)
    if (body.get("stream_options") or {}).get("include_usage") is False:
        assert whole["usage"] is None
        whole["usage"] = plain.json["usage"]
    assert said(whole) == said(plain.json) == said(again.json)
    assert ("perf_metrics" in whole) == ("perf_metrics" in plain.json) == bool(body.get("perf_metrics_in_response"))


@settings(max_examples=150, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
@given(st.data())
def test_any_valid_request(tiny: Live, data: st.DataObject) -> None:
    check(tiny, data.draw(valid_requests(tiny.model, tiny.vocabulary)))


def test_every_field_is_tried() -> None:
    """Apart from what chooses between the two, and from names that exclude one another."""
    elsewhere = {"model", "prompt", "stream", "seed", "max_tokens", "max_completion_tokens"}
    tried = {*fields(300), "speculation", "prediction"} - {"guess"}
    assert tried | elsewhere == set(CompletionRequest.__struct_fields__)


def test_requests_with_everything(live: Live) -> None:
    everything: dict[str, Any] = {
        "model": live.model, "prompt": ["the sky is", "日本語 😀"], "n": 2, "max_tokens": 6, "seed": 8, "echo": True,
        "raw_output": True, "return_token_ids": True, "perf_metrics_in_response": True, "ignore_eos": True,
        "temperature": 0.9, "top_p": 0.95, "stop": ["never there"],
    }  # fmt: skip
    for rows in ({"logprobs": True, "top_logprobs": 2, "sampling_mask": "non_zero_buffer"}, {"logprobs": 3}, {}):
        for options in ({}, {"buffer_tokens": 4}, {"buffer_ms": 5, "buffer_mode": "all"}):
            check(live, {**everything, **rows, "stream_options": options})
