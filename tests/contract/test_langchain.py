"""langchain-fireworks against a real server: its completion LLM, plain and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_fireworks import Fireworks
from live import Live

pytestmark = pytest.mark.clients
PROMPT = "The sky is"


def client(live: Live, **fields: Any) -> Fireworks:
    url = f"{live.url}/v1/completions"
    made: Any = Fireworks
    llm: Fireworks = made(base_url=url, api_key="x", model=live.model, max_tokens=16, temperature=0, **fields)
    return llm


def test_invoke_and_stream(live: Live) -> None:
    expected = live.text(PROMPT, max_tokens=16, temperature=0)
    llm = client(live)
    assert llm.invoke(PROMPT) == expected
    assert "".join(llm.stream(PROMPT)) == expected


def test_stop_words_count_in_both(live: Live) -> None:
    """B017: lost in streams by others."""
    expected = live.text(PROMPT, max_tokens=16, temperature=0)
    stop = expected[5:7]
    cut = expected.split(stop)[0]
    assert client(live).invoke(PROMPT, stop=[stop]) == cut
    assert "".join(client(live).stream(PROMPT, stop=[stop])) == cut


def test_many_prompts_and_errors(tiny: Live) -> None:
    prompts: list[Any] = ["the sky", "a b", "x"]
    expected = [tiny.text(prompt, max_tokens=16, temperature=0) for prompt in prompts]
    assert client(tiny).batch(prompts) == expected
    with pytest.raises(Exception, match="top_k"):
        client(tiny, top_k=1000).invoke("x")
