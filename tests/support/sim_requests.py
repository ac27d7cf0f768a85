"""Random requests for the simulated model, and whether an answer is what each must be answered (sim_oracle.py)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from sim_device import END_THINK, THINK, VOCABULARY
from sim_oracle import FORMATS, LETTERS, Lone, check_row, lone

from offbook.actors.events import Delta, Usage
from offbook.actors.request import CompletionRequest, from_fields

DEFAULT_MAX_TOKENS = 30  # of the simulated engines


def random_completion(rng: random.Random, context: int) -> CompletionRequest:
    """Any mix of what a request can ask for that the simulated device can show."""
    return from_fields(random_fields(rng, context))


def random_fields(rng: random.Random, context: int) -> dict[str, object]:
    """The same as a body."""
    body: dict[str, object] = {
        "model": "simulated", "prompt": _prompt(rng, context), "stream": rng.random() < 0.7, "seed": rng.randrange(3),
        rng.choice(("max_tokens", "max_tokens", "max_completion_tokens")): rng.choice((None, 0, 1, 5, 30, 60)),
        "n": rng.choice((1, 1, 1, 3)), "ignore_eos": rng.random() < 0.5, "temperature": rng.choice((0, 1.0)),
        "service_tier": rng.choice(("default", "priority")), "user": rng.choice((None, "u", "v")),
    }  # fmt: skip
    options: list[dict[str, object]] = [
        {"echo": True, "logprobs": rng.choice((0, 1, 2))}, {"echo_last": 3, "logprobs": True},
        {"echo": True, "logprobs": True, "top_logprobs": rng.randrange(4)}, {"frequency_penalty": 0.5},
        {"logprobs": True, "top_logprobs": rng.choice((1, 3)), "sampling_mask": "non_zero_list"}, {"raw_output": True},
        {"prompt_cache_isolation_key": rng.choice("pq")}, {"prompt_cache_key": "k"}, {"prompt_cache_max_len": 5},
        {"stream_options": {"buffer_tokens": 3}}, {"stream_options": {"buffer_ms": 7}},
        {"stop": rng.choice("abcdefgh")}, {"stop": ["e", "nd>", "Qx"]}, {"mirostat_target": 1.5},
        {"logit_bias": {"5": 3, "7": -100, "9": 0}},
        {"reasoning_effort": rng.choice((1, 4, "none", "low"))}, {"thinking": {"type": "disabled"}},
        {"thinking": {"budget_end_str": rng.choice(("", "xy")), "effort": rng.choice((2, 5))}},
    ]  # fmt: skip
    for option in rng.sample(options, rng.randrange(6)):
        body |= option
    if rng.random() < 0.3:
        body["response_format"] = rng.choice(FORMATS)
    if rng.random() < 0.15:
        body["min_tokens"] = min(rng.choice((2, 4, 9)), _asked(from_fields(body)))
    if rng.random() < 0.3:
        body |= _prediction(rng, body, context)
    return body


def _prompt(rng: random.Random, context: int) -> object:
    """A text or ids, one or several, some of them inside a thinking block; starts are often shared."""
    stem = "".join(chr(97 + (i * 7) % 26) for i in range(rng.choice((3, 20, 32, 50))))[: context // 2]
    prompt = stem + "".join(rng.choice("xyz") for _ in range(rng.randrange(6)))
    kind = rng.random()
    if kind < 0.6:
        return prompt
    if kind < 0.75:
        return [prompt, stem + "b"]
    marked = [
        *LETTERS.encode(prompt),
        THINK,
        *LETTERS.encode("hm"),
        *rng.choice(((), (END_THINK,), (END_THINK, THINK))),
    ]
    if kind < 0.85:
        return marked
    if kind < 0.97:
        return [LETTERS.encode(prompt), LETTERS.encode("ab"), marked][: rng.randrange(2, 4)]
    return [prompt, stem * (1 + context // len(stem))]  # the second one does not fit


def _prediction(rng: random.Random, body: dict[str, object], context: int) -> dict[str, object]:
    """What the first choice will say, more or less, as ids or as text."""
    request = from_fields(body)
    if not fits(request, context):
        return {}
    ids = []
    for token in expected(request, context)[0][0].truth.tokens:
        change = rng.random() if rng.random() < 0.2 else 1.0
        ids += [] if change < 0.3 else [rng.randrange(VOCABULARY), token] if change < 0.6 else [token]
    ids += rng.choices(range(VOCABULARY), k=rng.choice((0, 0, 5)))  # drafts behind the end
    if rng.random() < 0.5:
        return {"speculation": ids}
    return {"prediction": {"type": "content", "content": "".join(LETTERS.letters[t] for t in ids if t < THINK)}}


@dataclass(frozen=True)
class Expected:
    """What one choice must be: its prompt, what is echoed of it, and its lone run."""

    ids: list[int]
    echoed: list[int]
    truth: Lone

    @property
    def text(self) -> str:
        return _text(self.echoed) + self.truth.text

    @property
    def raw(self) -> str:
        return _text(self.echoed) + self.truth.raw


def prompts_of(request: CompletionRequest) -> list[list[int]]:
    given: Any = request.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    return [LETTERS.encode(p) if isinstance(p, str) else list(p) for p in (given if several else [given])]


def fits(request: CompletionRequest, context: int) -> bool:
    """Whether every prompt has room in the context."""
    return all(len(ids) + min(_asked(request), 1) <= context for ids in prompts_of(request))


def _asked(request: CompletionRequest) -> int:
    asked = request.max_tokens if request.max_tokens is not None else request.max_completion_tokens
    return DEFAULT_MAX_TOKENS if asked is None else asked


def expected(request: CompletionRequest, context: int) -> tuple[list[Expected], tuple[int, int]]:
    """Every choice by index, and the tokens of all prompts and of all completions."""
    prompts, n = prompts_of(request), request.n or 1
    choices = []
    for index in range(len(prompts) * n):
        ids = prompts[index // n]
        echoed = ids[-request.echo_last :] if request.echo_last else ids if request.echo else []
        truth = lone(ids, request, index % n, min(_asked(request), context - len(ids)))
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
        assert "".join(d.raw_text for d in mine) == (choice.raw if request.raw_output else "")
        assert len([row for d in mine for row in d.rows]) == _rows(request, choice)
        _check_rows(request, mine, choice)
    assert (usage.prompt_tokens, usage.completion_tokens) == tokens
    prompts = len(choices) // (request.n or 1)
    assert 0 <= usage.cached_tokens <= usage.prompt_tokens - prompts
    if request.prompt_cache_max_len is not None:
        assert usage.cached_tokens <= request.prompt_cache_max_len * prompts


def check_start(request: CompletionRequest, deltas: list[Delta], context: int) -> None:
    """What has come of an answer that nobody heard to its end is the start of what had to come."""
    choices, _ = expected(request, context) if deltas else ([], ())
    assert all(0 <= delta.index < len(choices) for delta in deltas)
    for index, choice in enumerate(choices):
        mine = [d for d in deltas if d.index == index]
        ids = [t for d in mine for t in d.token_ids]
        assert ids == choice.truth.tokens[: len(ids)]
        assert choice.text.startswith("".join(d.text for d in mine))
        _check_rows(request, mine, choice)


def check_body(request: CompletionRequest, body: dict[str, Any], context: int) -> None:
    """The same for an answer in the API's own words, joined if it was a stream."""
    choices, tokens = expected(request, context)
    told = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]]
    assert told == [(index, choice.text, choice.truth.reason) for index, choice in enumerate(choices)]
    if (usage := body["usage"]) is not None:
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == tokens


def _rows(request: CompletionRequest, choice: Expected) -> int:
    wanted = request.logprobs is not None and request.logprobs is not False
    return len(choice.echoed) + len(choice.truth.tokens) if wanted else 0


def _check_rows(request: CompletionRequest, mine: list[Delta], choice: Expected) -> None:
    truth, start = choice.truth, len(choice.ids) - len(choice.echoed)
    whole = [*choice.ids, *truth.tokens]
    before = len(_text(choice.echoed))
    places = [(before + offset, forced) for offset, forced in zip(truth.offsets, truth.forced, strict=True)]
    for q, row in enumerate((row for d in mine for row in d.rows), start):
        at = q - len(choice.ids)
        check_row(row, request, whole[:q], whole[q], places[at] if at >= 0 else None)


def _text(ids: list[int]) -> str:
    return b"".join(LETTERS.token_bytes(t) for t in ids).decode()
