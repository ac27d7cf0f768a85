"""The answer that a choice of the simulated model would have alone and cold, from its request and its prompt's tokens.

Rules of this file: it knows no blocks, steps, drafts or neighbours. A grammar is asked token by token, thinking and
stop strings are followed by searching from the beginning: the slow and obvious way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import msgspec
import numpy as np
from sim_device import (
    END_THINK,
    THINK,
    VOCABULARY,
    LetterTokenizer,
    alternatives_of,
    draw,
    kept_of,
    logprob_of,
    next_mu,
    slot_state,
)  # fmt: skip

from offbook.actors.constraints import Constraints
from offbook.actors.events import TokenRow
from offbook.actors.grammar import Constraint, Vocabulary, compile_constraint
from offbook.actors.grammar_matcher import Matcher
from offbook.actors.request import CompletionRequest, ResponseFormat
from offbook.actors.resolve import stop_strings
from offbook.actors.thinking import BRIDGE
from offbook.kernels.params import SamplingParams

LETTERS = LetterTokenizer()
_QUOTED = {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"], "additionalProperties": False}
_PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"enum": ["ann", "bobby"]}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
}  # fmt: skip
FORMATS: list[dict[str, object]] = [
    {"type": "grammar", "grammar": 'root ::= "the " [a-z] " quick brown fox " [0-9]{0,5} " jumps over" " it"?'},
    {"type": "grammar", "grammar": 'root ::= ("ab" | "ba" | "xyz ")+'},
    {"type": "grammar", "grammar": 'root ::= [a-k]{2,9} ("think" [a-z ]*)?'},
    {"type": "json_schema", "json_schema": _PERSON},
    {"type": "json_schema", "schema": _QUOTED},
    {"type": "json_object"},
    {"type": "text"},
]


@cache
def _vocabulary() -> Vocabulary:
    return Vocabulary(LETTERS, LETTERS.eos_ids, VOCABULARY)


@cache
def _compiled(fmt: bytes) -> Constraint | None:
    return compile_constraint(msgspec.json.decode(fmt, type=ResponseFormat), _vocabulary())


def constraint_of(fmt: ResponseFormat | None) -> Constraint | None:
    return None if fmt is None else _compiled(msgspec.json.encode(fmt))


def compiled_already(constraints: Constraints) -> None:
    """An engine's constraints as if every format had been asked for before: what compiling does in its thread takes
    real time, and is tested elsewhere."""
    for fields in FORMATS:
        fmt = msgspec.convert(fields, ResponseFormat)
        if (made := constraint_of(fmt)) is not None:
            constraints._kept[constraints._encode(fmt)] = made


@dataclass
class Lone:
    """The answer that a choice would have alone."""

    tokens: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)  # for each token, whether thinking's end forced it
    offsets: list[int] = field(default_factory=list)  # where each token begins in the text
    text: str = ""
    raw: str = ""
    reason: str = "length"


def lone(prompt: list[int], request: CompletionRequest, choice: int, max_tokens: int) -> Lone:
    """Draw after draw. ``max_tokens``: as fitted to the context."""
    made = Lone()
    params = params_of(request, choice)
    grammar = constraint_of(request.response_format)
    matcher = grammar.matcher() if grammar is not None else None
    thinking = _Thinking(request, prompt, bound=matcher is not None)
    eos = () if request.ignore_eos else LETTERS.eos_ids
    least, mu = min(request.min_tokens or 0, max_tokens), 2.0 * (params.mirostat_target or 0.0)
    written: list[tuple[str, bool]] = []  # characters, and whether they are shown
    for i in range(max_tokens):
        forced, bound = thinking.forced(), matcher is not None and not thinking.inside
        token = forced
        if token is None:
            state = slot_state(params, prompt, made.tokens)
            token = draw([*prompt, *made.tokens], params, i, state, mu)
            token = _allowed(token, matcher if bound else None, eos, may_end=i >= least)
            mu = next_mu(mu, params, token)
        thinking.take(token, forced=forced is not None, bound=bound)
        made.tokens.append(token)
        made.forced.append(forced is not None)
        made.offsets.append(len(_shown(written)))
        before = len(written)
        written += [(char, not LETTERS.is_special(token)) for char in LETTERS.token_bytes(token).decode()]
        made.raw = "".join(char for char, _ in written)
        cut = _stop_begins(made.raw, stop_strings(request), before) if i >= least else None
        made.text = _shown(written[:cut])
        over = token in eos and i >= least
        if bound and matcher is not None:
            assert matcher.consume(token)
            over = over or matcher.finished
        if cut is not None or over:
            made.reason = "stop"
            break
    return made


def params_of(request: CompletionRequest, choice: int) -> SamplingParams:
    bias = sorted((int(t), float(v)) for t, v in (request.logit_bias or {}).items() if v)
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature, seed=request.seed or 0, choice=choice,
        frequency_penalty=request.frequency_penalty or 0.0, presence_penalty=request.presence_penalty or 0.0,
        mirostat_target=request.mirostat_target or None, logit_bias=tuple(bias),
    )  # fmt: skip


def check_row(
    row: TokenRow, request: CompletionRequest, before: list[int], token: int, place: tuple[int, bool] | None
) -> None:
    """A row of logprobs. ``before``: all tokens before it. ``place``: offset and forcedness if it was generated."""
    top = request.top_logprobs if request.top_logprobs is not None else 0
    if request.top_logprobs is None and not isinstance(request.logprobs, bool | None):
        top = request.logprobs
    assert row.token_id == token
    assert row.logprob == (logprob_of(before, token) if before else 0.0)
    assert list(row.top) == (alternatives_of(before, top) if before else [])
    if place is None:
        assert row.sampling_logprob is row.kept is None
        return
    params = params_of(request, 0)
    offset, forced = place
    assert row.text_offset == offset
    assert row.sampling_logprob == (0.0 if forced or params.temperature == 0 else row.logprob / 2)
    counted = request.sampling_mask is not None and request.logprobs is True
    assert row.kept == ((1 if forced else kept_of(before, params)) if counted else None)


class _Thinking:
    """Whether the answer is inside a thinking block, and what ends it."""

    def __init__(self, request: CompletionRequest, prompt: list[int], *, bound: bool) -> None:
        thinking, effort = request.thinking, request.reasoning_effort
        if thinking is not None and thinking.effort is not None:
            effort = thinking.effort
        limits = [effort] if isinstance(effort, int) and not isinstance(effort, bool) else []
        if thinking is not None and thinking.budget_tokens is not None:
            limits.append(thinking.budget_tokens)
        none = effort == "none" or effort is False or (thinking is not None and thinking.type == "disabled")
        self._left = 0 if none else min(limits, default=None)
        given = thinking.budget_end_str if thinking is not None else None
        bridge = "" if none else BRIDGE if given is None else given
        self._bridge = [*LETTERS.encode(bridge), END_THINK]
        self._closing: list[int] = []
        marks = [token for token in prompt if token in (THINK, END_THINK)]
        self.inside = (bound or self._left is not None) and marks[-1:] == [THINK]

    def forced(self) -> int | None:
        """The token that has to come next."""
        if self.inside and self._left == 0 and not self._closing:
            self._closing = list(self._bridge)
        return self._closing[0] if self._closing else None

    def take(self, token: int, *, forced: bool, bound: bool) -> None:
        if forced:
            del self._closing[0]
            self.inside = bool(self._closing)
        elif not bound and token in (THINK, END_THINK) and self.inside != (token == THINK):
            self.inside = token == THINK
        elif self.inside and self._left is not None:
            self._left -= 1


def _allowed(token: int, matcher: Matcher | None, eos: tuple[int, ...], *, may_end: bool) -> int:
    """What the simulated device makes of a draw under a mask: the next token that is allowed."""
    if matcher is None:
        return token + (token in eos and not may_end)
    row = np.zeros(-(-VOCABULARY // 32), np.uint32)
    matcher.fill(row, end=bool(eos) and may_end)
    ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return int(next((t for t in ids if t >= token), ids[0]))


def _shown(written: list[tuple[str, bool]]) -> str:
    return "".join(char for char, shown in written if shown)


def _stop_begins(text: str, stops: tuple[str, ...], before: int) -> int | None:
    """The earliest start of a stop string that ends after ``before``."""
    starts = [at for s in stops if (at := text.find(s, max(before - len(s) + 1, 0))) >= 0]
    return min(starts, default=None)
