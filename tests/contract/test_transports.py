"""One client, two transports: the embedded API and HTTP give the same answers to the same requests, and refuse the same
requests in the same words. Two processes on the same weights, so this is the seed contract over processes as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded import Embedded
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live import Live, said
from request_strategies import requests
from valid_requests import valid_requests

from offbook.actors.config import EngineConfig
from offbook.actors.errors import InvalidRequest

any_request = settings(max_examples=100, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])


@pytest.fixture(scope="module")
def embedded(tiny_model_dir: Path) -> Iterator[Embedded]:
    with Embedded(EngineConfig(model=str(tiny_model_dir), kv_bytes=64 * 2**20, threads=2)) as engine:
        yield engine


@any_request
@given(st.data())
def test_the_same_answers(tiny: Live, embedded: Embedded, data: st.DataObject) -> None:
    body = data.draw(valid_requests(tiny.model, tiny.vocabulary))
    over_http = tiny.post(body).json
    for stream in (True, False):
        wire, deltas = embedded.complete({**body, "stream": stream})
        assert said(wire) == said(over_http)
        assert [d.text for d in deltas] == [choice["text"] for choice in over_http["choices"]]
        assert [d.finish_reason for d in deltas] == [choice["finish_reason"] for choice in over_http["choices"]]
        if body.get("return_token_ids"):
            assert [list(d.token_ids) for d in deltas] == [choice["token_ids"] for choice in over_http["choices"]]


@any_request
@given(st.data())
def test_the_same_refusals(tiny: Live, embedded: Embedded, data: st.DataObject) -> None:
    """Bodies that are a little wrong, in one place or in several."""
    body = {"model": tiny.model, **data.draw(requests(tiny.model, tiny.vocabulary)), "stream": False}
    answer, error = tiny.post(body), embedded.refusal(body)
    if error is None:
        assert answer.status == 200, answer.body
    else:
        told = answer.json["error"]
        assert (answer.status, told["message"]) == (error.status, error.message)
        if isinstance(error, InvalidRequest):
            assert told["param"] == error.failures[0].loc[0]  # a field's name, whatever lies below it


def test_names_that_python_cannot_pass_are_refused_alike(tiny: Live, embedded: Embedded) -> None:
    body = {"model": tiny.model, "prompt": "x", "zzz": 1, "temperature": "hot", "n": 0}
    answer, error = tiny.post(body), embedded.refusal(body)
    assert isinstance(error, InvalidRequest)
    assert (answer.status, answer.json["error"]["message"]) == (error.status, error.message)
    assert [item["loc"][-1] for item in answer.json["detail"]] == [failure.loc[-1] for failure in error.failures]
