"""Real clients against a real server: the public ones, and the strictest reader of all, a trainer's sampler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from fireworks import BadRequestError, Fireworks
from fireworks.training.sdk.sampling import DeploymentSampler
from server_process import ServerProcess

PROMPT = "the sky is of the sea"


@pytest.fixture(params=["tiny_server", pytest.param("default_server", marks=pytest.mark.model)])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    found: ServerProcess = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def model(server: ServerProcess) -> str:
    name: str = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    return name


@pytest.fixture
def fireworks(server: ServerProcess) -> Iterator[Fireworks]:
    with Fireworks(api_key="x", base_url=server.url, max_retries=0) as client:
        yield client


@pytest.fixture
def open_ai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=0) as client:
        yield client


# -- fireworks-ai ----------------------------------------------------------------------------------------------------


def test_fireworks_completes(fireworks: Fireworks, model: str) -> None:
    answer = fireworks.completions.create(
        model=model, prompt=PROMPT, max_tokens=4, logprobs=True, top_logprobs=5, echo=True, raw_output=True,
        return_token_ids=True, perf_metrics_in_response=True, temperature=1.0, ignore_eos=True,
        extra_body={"sampling_mask": "count"},
        extra_headers={"x-session-affinity": "s", "x-multi-turn-session-id": "m"},
    )  # fmt: skip
    (choice,) = answer.choices
    assert type(choice.logprobs).__name__ == "NewLogProbs"
    assert choice.text.startswith(PROMPT) and choice.finish_reason == "length"
    assert choice.token_ids is not None and len(choice.token_ids) == 4
    assert choice.raw_output is not None and choice.raw_output.prompt_token_ids == choice.prompt_token_ids
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert answer.perf_metrics is not None and answer.perf_metrics["prompt-tokens"] == answer.usage.prompt_tokens


def test_fireworks_reads_the_legacy_format(fireworks: Fireworks, model: str) -> None:
    answer = fireworks.completions.create(model=model, prompt=PROMPT, max_tokens=1, logprobs=1, echo=True)
    logprobs = answer.choices[0].logprobs
    assert type(logprobs).__name__ == "LogProbs"
    tops: Any = logprobs.top_logprobs  # type: ignore[union-attr]
    values: Any = logprobs.token_logprobs  # type: ignore[union-attr]
    assert (values[0], tops[0]) == (0.0, {})
    assert all(value in top.values() for value, top in zip(values[1:], tops[1:], strict=True))


def test_fireworks_streams_what_it_completes(fireworks: Fireworks, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 16, "seed": 7, "temperature": 1.0}
    plain = fireworks.completions.create(**fields)
    chunks = list(fireworks.completions.create(**fields, stream=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
    assert chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_fireworks_raises_what_is_wrong(fireworks: Fireworks, model: str) -> None:
    with pytest.raises(BadRequestError, match="Extra inputs are not permitted, field: 'zzz'"):
        fireworks.completions.create(model=model, prompt="x", extra_body={"zzz": 1})


# -- openai ----------------------------------------------------------------------------------------------------------


def test_openai_completes_batches(open_ai: openai.OpenAI, model: str) -> None:
    answer = open_ai.completions.create(
        model=model, prompt=[[1, 2, 3], [4, 5]], n=2, max_tokens=2, logprobs=2, echo=True, extra_body={"top_k": 0}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) >= (4 if choice.index < 2 else 3)
    assert answer.usage is not None and answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("fields", [{}, {"stop": ["e"]}, {"temperature": 0}, {"n": 2}], ids=str)
def test_openai_streams_what_it_completes(open_ai: openai.OpenAI, model: str, fields: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 24, "seed": 3, **fields}
    plain = open_ai.completions.create(**asked)
    texts: dict[int, str] = {}
    for chunk in open_ai.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {choice.index: choice.text for choice in plain.choices}


def test_openai_lists_models_and_raises_typed_errors(open_ai: openai.OpenAI, model: str) -> None:
    assert [m.id for m in open_ai.models.list()] == [model]
    with pytest.raises(openai.NotFoundError) as missing:
        open_ai.completions.create(model="other", prompt="x")
    assert (missing.value.param, missing.value.code) == ("model", "NOT_FOUND")
    with pytest.raises(openai.UnprocessableEntityError, match="less than or equal to 2") as wrong:
        open_ai.completions.create(model=model, prompt="x", temperature=3)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_request_error")


# -- the trainer's sampler -------------------------------------------------------------------------------------------


def sample(server: ServerProcess, model: str, prompt: list[int], **fields: Any) -> Any:
    async def run() -> Any:
        sampler = DeploymentSampler(inference_url=server.url, model=model, api_key="x")
        return await sampler.sample_with_prompt_tokens(prompt, **fields)

    return asyncio.run(run())


def test_the_sampler_gets_aligned_logprobs(server: ServerProcess, model: str) -> None:
    prompt = [5, 6, 7, 8]
    fields = {"max_tokens": 8, "temperature": 1.0, "logprobs": True, "echo": True, "seed": 11, "ignore_eos": True}
    (sampled,) = sample(server, model, prompt, **fields)
    assert list(sampled.full_tokens[:4]) == prompt
    assert (sampled.prompt_len, sampled.completion_len, sampled.finish_reason) == (4, 8, "length")
    assert len(sampled.inference_logprobs) == 4 + 8 - 1
    (again,) = sample(server, model, prompt, **fields)
    assert (again.full_tokens, again.inference_logprobs) == (sampled.full_tokens, sampled.inference_logprobs)


def test_the_sampler_falls_back_from_shared_storage(server: ServerProcess, model: str) -> None:
    """It compares these messages word by word."""
    fields = {"model": model, "prompt": "R3", "max_tokens": 0, "n": 1, "echo": True, "logprobs": True}
    url = f"{server.url}/inference/v1/completions"
    routing: Any = httpx.post(url, json={**fields, "routing_matrix_format": "parquet_v1"})
    assert DeploymentSampler._unsupported_routing_format(routing)
    for extra in ({"sampling_mask": "parquet_v1"}, {"top_sampling_logprobs": 4, "top_sampling_format": "parquet_v1"}):
        channel: Any = httpx.post(url, json={**fields, **extra})
        assert DeploymentSampler._unsupported_top_sampling_format(channel)


# -- one client, two transports; real English ------------------------------------------------------------------------


@pytest.mark.model
def test_the_default_model_speaks_english(default_server: ServerProcess) -> None:
    with openai.OpenAI(api_key="x", base_url=f"{default_server.url}/v1") as client:
        model = client.models.list().data[0].id
        fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 8}
        answer = client.completions.create(prompt="The capital of France is", **fields)
    assert "Paris" in answer.choices[0].text


@pytest.mark.model
def test_a_plain_client_sees_whole_characters(default_server: ServerProcess) -> None:
    with openai.OpenAI(api_key="x", base_url=f"{default_server.url}/v1") as client:
        model = client.models.list().data[0].id
        fields: dict[str, Any] = {"model": model, "prompt": "日本語の文章：", "seed": 5, "max_tokens": 40}
        text = "".join(c.choices[0].text for c in client.completions.create(**fields, stream=True) if c.choices)
    assert "�" not in text
    assert json.dumps(text)
