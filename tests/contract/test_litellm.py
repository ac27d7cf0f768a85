"""litellm against a real server, by its route for OpenAI's text completions (its Fireworks route is chat only)."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest
from live import Live

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at import: no look at the network for prices
litellm: Any = import_module("litellm")

pytestmark = pytest.mark.clients
PROMPT = "The sky is"


def complete(live: Live, **fields: Any) -> Any:
    return litellm.text_completion(
        model=f"text-completion-openai/{live.model}", api_base=f"{live.url}/v1", api_key="x",
        **{"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields},
    )  # fmt: skip


def test_plain_with_options_of_this_api(live: Live) -> None:
    answer = complete(live, top_k=40, seed=5, stop=["never there"])
    truth = live.both(PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == truth["choices"][0]["text"]
    assert answer.usage.completion_tokens == truth["usage"]["completion_tokens"]
    assert (answer.object, answer.model) == ("text_completion", live.model)


def test_echo_and_logprobs(live: Live) -> None:
    answer = complete(live, echo=True, logprobs=2, max_tokens=4)
    truth = live.choice(PROMPT, echo=True, logprobs=2, max_tokens=4, temperature=0)
    assert answer.choices[0].text == truth["text"]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(answer.choices[0].logprobs, key) == truth["logprobs"][key]


def test_stream(live: Live) -> None:
    chunks = list(complete(live, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == live.text(PROMPT, max_tokens=12, temperature=0)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_several_prompts_and_samples(tiny: Live) -> None:
    answer = complete(tiny, prompt=["the sky", "a b"], n=2, temperature=1.0, seed=3)
    truth = tiny.both(["the sky", "a b"], n=2, max_tokens=12, temperature=1.0, seed=3)
    assert [c.text for c in answer.choices] == [c["text"] for c in truth["choices"]]


def test_errors_have_their_types(tiny: Live) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.text_completion(
            model="text-completion-openai/other", prompt="x", api_base=f"{tiny.url}/v1", api_key="x", max_retries=0
        )
    with pytest.raises(Exception, match="top_k"):
        complete(tiny, top_k=1000, max_retries=0)
