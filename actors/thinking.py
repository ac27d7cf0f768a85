"""Thinking budgets: what a request asks of a model's thinking, and the tokens that enforce it.

There is no chat template on this API: a prompt opens a thinking block itself, or the model does, between the markers
of its tokenizer (or configured ones). Rules of this file: pure; a budget counts generated tokens inside blocks, markers
not among them, over the whole answer; when it is spent, the bridge text and the end marker are forced, token by token.
A grammar waits for the end of a block that the prompt has opened, whether there is a budget or not.
What a model without markers cannot do is refused; what asks for nothing is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

import msgspec

from .errors import Failure, InvalidRequest
from .request import CompletionRequest, Effort

BRIDGE = "\n\nThat is enough thinking; the answer follows.\n"
NO_LIMIT = 2**31  # more than any answer has tokens
LEVELS = ("low", "medium", "high", "xhigh", "max")  # think as the model does by itself: no hard limit


class Tokens(Protocol):
    def encode(self, text: str, *, bos: bool = True) -> list[int]: ...
    def id_of(self, text: str) -> int | None: ...


class Markers(msgspec.Struct, frozen=True):
    """The token sequences that open and close a block."""

    start: tuple[int, ...]
    end: tuple[int, ...]


class ThinkingPlan(msgspec.Struct, frozen=True):
    """At most ``budget`` thinking tokens, then ``closing`` is forced (the bridge, then the end marker)."""

    markers: Markers
    budget: int
    closing: tuple[int, ...]


def find_markers(tokenizer: Tokens, start: str | None, end: str | None) -> Markers | None:
    """The configured markers, else the tokenizer's own ``<think>`` and ``</think>``, else None. Raises ValueError when
    only one is configured."""
    if (start is None) != (end is None):
        raise ValueError("configure both think markers, or neither")
    if start is not None and end is not None:
        markers = Markers(tuple(tokenizer.encode(start, bos=False)), tuple(tokenizer.encode(end, bos=False)))
        if not markers.start or not markers.end:
            raise ValueError("a think marker is empty")
        return markers
    own = (tokenizer.id_of("<think>"), tokenizer.id_of("</think>"))
    return None if own[0] is None or own[1] is None else Markers((own[0],), (own[1],))


def plan_thinking(request: CompletionRequest, markers: Markers | None, tokenizer: Tokens) -> ThinkingPlan | None:
    """What to enforce, None when nothing. ``thinking.type`` disabled always wins; ``thinking.effort`` goes before
    ``reasoning_effort``; a budget is an integer effort or ``budget_tokens``, the smaller one where both are given.

    Raises InvalidRequest: 422 for values that are never right, 400 for what this model cannot do.
    """
    thinking = request.thinking
    field: tuple[str, ...] = ("reasoning_effort",)
    asked = request.reasoning_effort
    if thinking is not None and thinking.effort is not None:
        field, asked = ("thinking", "effort"), thinking.effort
    effort = _normal(asked, field)
    if thinking is not None and thinking.type == "disabled":
        effort = "none"
    limits = [effort] if isinstance(effort, int) else []
    if thinking is not None and thinking.budget_tokens is not None:
        limits.append(thinking.budget_tokens)
    bridge = thinking.budget_end_str if thinking is not None else None
    if bridge is not None and not limits:
        message = "Has no effect without budget_tokens"
        raise InvalidRequest(Failure(("thinking", "budget_end_str"), message, "value_error"), status=422)
    _check_model(request, effort, limits, markers, field)
    bound = request.response_format is not None and request.response_format.type != "text"
    if markers is None or (effort != "none" and not limits and not bound):
        return None
    if effort == "none":
        return ThinkingPlan(markers, 0, markers.end)
    text = BRIDGE if bridge is None else bridge
    return ThinkingPlan(markers, min(limits, default=NO_LIMIT), (*tokenizer.encode(text, bos=False), *markers.end))


def _normal(effort: Effort | None, field: tuple[str, ...]) -> str | int | None:
    """Booleans as the words they stand for; a positive integer is a budget."""
    if isinstance(effort, bool):
        return "medium" if effort else "none"
    if isinstance(effort, int) and effort <= 0:
        message = "Input should be greater than 0"
        raise InvalidRequest(Failure(field, message, "greater_than", repr(effort)), status=422)
    return effort


def _check_model(
    request: CompletionRequest,
    effort: str | int | None,
    limits: list[int],
    markers: Markers | None,
    field: tuple[str, ...],
) -> None:
    failures = []
    if effort == "adaptive" or (request.thinking is not None and request.thinking.type == "adaptive"):
        loc = field if effort == "adaptive" else ("thinking", "type")
        failures.append(Failure(loc, "Adaptive thinking is not supported by this model", "not_supported", "'adaptive'"))
    elif markers is None:
        why = "This model's tokenizer has no think markers, so it cannot be asked to think"
        if effort is not None and effort != "none":
            failures.append(Failure(field, why, "not_supported", repr(effort)))
        if request.thinking is not None and request.thinking.type == "enabled" and (limits or effort is None):
            loc = ("thinking", "budget_tokens") if request.thinking.budget_tokens is not None else ("thinking", "type")
            failures.append(Failure(loc, why, "not_supported"))
    if request.reasoning_history in ("disabled", "interleaved"):
        why = "A raw prompt has no messages to take reasoning out of; it is used as it is"
        failures.append(Failure(("reasoning_history",), why, "not_supported", repr(request.reasoning_history)))
    if failures:
        raise InvalidRequest(*failures, status=400)


class ThinkingState:
    """Where one answer stands. ``forced`` is the token that must come next, None when the model is free."""

    def __init__(self, plan: ThinkingPlan, prompt: Sequence[int]) -> None:
        self._plan = plan
        self._longest = max(len(plan.markers.start), len(plan.markers.end))
        self._tail = list(prompt[-self._longest :])  # the last few tokens, enough to recognise a marker
        self._spent = 0
        self._closing: list[int] = []  # what is still to be forced, last token first
        self.inside = _end_of(plan.markers.start, prompt) > _end_of(plan.markers.end, prompt)
        self._force_if_spent()

    def fresh(self) -> ThinkingState:
        """The same at the beginning of another answer to the same prompt."""
        other = copy(self)
        other._tail, other._closing = list(self._tail), list(self._closing)
        return other

    @property
    def forced(self) -> int | None:
        return self._closing[-1] if self._closing else None

    @property
    def draft_limit(self) -> int:
        """How many drafts may be fed so that not even all of them, accepted, could pass the budget."""
        if self._closing:
            return 0
        return max(self._plan.budget - self._spent - 1, 0)

    def push(self, token: int) -> None:
        """Take note of a token of the answer."""
        if self._closing:
            self._closing.pop()
            self._mark(token)
            self.inside = bool(self._closing)  # whatever markers the bridge spells
            return
        was_inside = self.inside
        self._mark(token)
        if was_inside and self.inside:
            self._spent += 1
        self._force_if_spent()

    def _force_if_spent(self) -> None:
        if self.inside and self._spent >= self._plan.budget:
            self._closing = list(reversed(self._plan.closing))

    def _mark(self, token: int) -> None:
        markers = self._plan.markers
        self._tail.append(token)
        del self._tail[: -self._longest]
        if self._ends_with(markers.end):
            self.inside = False
        elif self._ends_with(markers.start):
            self.inside = True

    def _ends_with(self, marker: tuple[int, ...]) -> bool:
        return tuple(self._tail[-len(marker) :]) == marker


def _end_of(marker: tuple[int, ...], tokens: Sequence[int]) -> int:
    """Where the last occurrence of the marker ends; -1 without one."""
    for at in range(len(tokens) - len(marker), -1, -1):
        if tokens[at] == marker[0] and tuple(tokens[at : at + len(marker)]) == marker:
            return at + len(marker)
    return -1
