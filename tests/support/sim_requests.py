"""Random requests for the simulated model, and what each must be answered: from its own tokens alone.

Rules of this file: the oracle knows no blocks, no steps and no neighbours, and finds stop strings by searching.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from sim_device import EOS, VOCABULARY, LetterTokenizer, draw, logprob_of

from offbook.actors.events import Delta, Usage
from offbook.actors.request import CompletionRequest, from_fields
from offbook.actors.resolve import stop_strings
from offbook.kernels.params import SamplingParams

LETTERS = LetterTokenizer()


def random_completion(rng: random.Random, context: int) -> CompletionRequest:
    """Any mix of what a request can ask for that the simulated device can show."""
    return from_fields(random_fields(rng, context))


def random_fields(rng: random.Random, context: int) -> dict[str, object]:
    """The same as a body."""
    stem = "".join(chr(97 + (i * 7) % 26) for i in range(rng.choice((3, 20, 32, 50))))[: context // 2]
    prompt: object = stem + "".join(rng.choice("xyz") for _ in range(rng.randrange(6)))
    if rng.random() < 0.2:
        prompt = [stem + "a", stem + "b"]
    elif rng.random() < 0.2:
        prompt = LETTERS.encode(str(prompt))
    body: dict[str, object] = {
        "model": "simulated", "prompt": prompt, "stream": rng.random() < 0.7, "seed": rng.randrange(3),
        "max_tokens": rng.choice((0, 1, 5, 30, 60)), "n": rng.choice((1, 1, 1, 3)), "ignore_eos": rng.random() < 0.5,
        "temperature": rng.choice((0, 1.0)), "service_tier": rng.choice(("default", "priority")),
        "user": rng.choice((None, "u", "v")),
    }  # fmt: skip
    options: list[dict[str, object]] = [
        {"echo": True, "logprobs": 2}, {"echo_last": 3, "logprobs": True}, {"frequency_penalty": 0.5},
        {"logprobs": True}, {"prompt_cache_isolation_key": rng.choice("pq")},
        {"speculation": "abcxyz"}, {"prompt_cache_key": "k"}, {"stream_options": {"buffer_tokens": 3}},
        {"stream_options": {"buffer_ms": 7}}, {"prompt_cache_max_len": 5}, {"stop": rng.choice("abcdefgh")},
        {"stop": ["e", "nd>", "Qx"]},
    ]  # fmt: skip
    for option in rng.sample(options, rng.randrange(5)):
        body |= option
    if rng.random() < 0.1:
        body["min_tokens"] = min(4, int(str(body["max_tokens"])))
    return body


@dataclass(frozen=True)
class Lone:
    """The answer that a choice would have alone."""

    tokens: list[int]
    text: str
    reason: str


def lone(prompt: list[int], request: CompletionRequest, choice: int, max_tokens: int) -> Lone:
    """Draw after draw, from the tokens alone. ``max_tokens``: as fitted to the context."""
    params = SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature, seed=request.seed or 0, choice=choice,
        frequency_penalty=request.frequency_penalty or 0.0,
    )  # fmt: skip
    least = request.min_tokens or 0
    stops = stop_strings(request)
    tokens = list(prompt)
    written: list[tuple[str, bool]] = []  # characters, and whether they are shown
    for i in range(max_tokens):
        token = draw(tokens, params, i, tokens if params.uses_slot else ())
        if token == EOS and i < least and not request.ignore_eos:
            token += 1  # what the simulated device does with a masked token
        tokens.append(token)
        before = len(written)
        written += [(char, not LETTERS.is_special(token)) for char in LETTERS.token_bytes(token).decode()]
        cut = _stop_begins("".join(c for c, _ in written), stops, before) if i >= least else None
        if cut is not None:
            return Lone(tokens[len(prompt) :], _shown(written[:cut]), "stop")
        if token == EOS and not request.ignore_eos:
            return Lone(tokens[len(prompt) :], _shown(written), "stop")
    return Lone(tokens[len(prompt) :], _shown(written), "length")


def _shown(written: list[tuple[str, bool]]) -> str:
    return "".join(char for char, shown in written if shown)


def _stop_begins(text: str, stops: tuple[str, ...], before: int) -> int | None:
    """The earliest start of a stop string that ends after ``before``."""
    starts = [at for s in stops if (at := text.find(s, max(before - len(s) + 1, 0))) >= 0]
    return min(starts, default=None)


@dataclass(frozen=True)
class Expected:
    """What one choice must be: its prompt, what is echoed of it, and its lone run."""

    ids: list[int]
    echoed: list[int]
    truth: Lone

    @property
    def text(self) -> str:
        return _text(self.echoed) + self.truth.text


def expected(request: CompletionRequest, context: int) -> tuple[list[Expected], tuple[int, int]]:
    """Every choice by index, and the tokens of all prompts and of all completions."""
    given = request.prompt if isinstance(request.prompt, list) and isinstance(request.prompt[0], str) else None
    prompts = [_ids(p) for p in given or (request.prompt,)]
    n = request.n or 1
    choices = []
    for index in range(len(prompts) * n):
        ids = prompts[index // n]
        echoed = ids[-request.echo_last :] if request.echo_last else ids if request.echo else []
        truth = lone(ids, request, index % n, min(request.max_tokens or 0, context - len(ids)))
        choices.append(Expected(ids, echoed, truth))
    return choices, (sum(map(len, prompts)), sum(len(choice.truth.tokens) for choice in choices))


def check_answer(request: CompletionRequest, deltas: list[Delta], usage: Usage, context: int) -> None:
    """Every choice equals its lone cold run: text, ids, rows and finish reasons; and usage adds up."""
    choices, tokens = expected(request, context)
    for index, choice in enumerate(choices):
        mine = [d for d in deltas if d.index == index]
        assert [t for d in mine for t in d.token_ids] == choice.truth.tokens
        assert [d.finish_reason for d in mine if d.finish_reason] == [choice.truth.reason]
        assert mine[-1].finish_reason == choice.truth.reason, "nothing comes after the end"
        assert "".join(d.text for d in mine) == choice.text
        _check_rows(request, mine, choice.ids, choice.echoed, choice.truth)
    assert (usage.prompt_tokens, usage.completion_tokens) == tokens
    prompts = len(choices) // (request.n or 1)
    assert 0 <= usage.cached_tokens <= usage.prompt_tokens - prompts
    if request.prompt_cache_max_len is not None:
        assert usage.cached_tokens <= request.prompt_cache_max_len * prompts


def check_body(request: CompletionRequest, body: dict[str, Any], context: int) -> None:
    """The same for an answer in the API's own words, joined if it was a stream."""
    choices, tokens = expected(request, context)
    told = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]]
    assert told == [(index, choice.text, choice.truth.reason) for index, choice in enumerate(choices)]
    if (usage := body["usage"]) is not None:
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == tokens


def _check_rows(request: CompletionRequest, mine: list[Delta], ids: list[int], echoed: list[int], truth: Lone) -> None:
    rows = [row for d in mine for row in d.rows]
    if request.logprobs is None:
        assert not rows
        return
    whole = [*ids, *truth.tokens]
    start = len(ids) - len(echoed)
    assert [row.token_id for row in rows] == whole[start:]
    for q, row in enumerate(rows, start):
        assert row.logprob == (logprob_of(whole[:q], whole[q]) if q else 0.0)
    assert all(t < VOCABULARY for t in whole)


def _ids(prompt: object) -> list[int]:
    return LETTERS.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]  # type: ignore[attr-defined]


def _text(ids: list[int]) -> str:
    return b"".join(LETTERS.token_bytes(t) for t in ids).decode()
