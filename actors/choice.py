"""One choice of an answer while fan-out writes it: tokens into text, rows and a finish reason.

Rules of this file: pure; owned by fan-out from the moment its ticket is enqueued. Which tokens count is decided here
when a stop string completes: the token that completes it is the last one.
"""

from __future__ import annotations

import msgspec

from ..kernels.step import StepResult
from .blocks import Score
from .events import Delta, FinishReason, TokenRow
from .sequence import Sequence
from .steps import Gain, alternatives
from .text import ChoiceText, Surfaces, decode_all
from .ticket import Ticket


class Wants(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants to see of each choice."""

    rows: bool = False
    top: int = 0
    kept: bool = False  # the count of surviving tokens
    kept_ids: bool = False
    raw_text: bool = False
    echo: int = 0  # how many of the last prompt tokens are echoed
    echo_text: str | None = None  # the text prompt itself, when all of it is echoed


class Choice:
    """See the module. ``wants.echo`` tokens of the prompt come first."""

    def __init__(
        self, ticket: Ticket, index: int, sequence: Sequence, surfaces: Surfaces, stops: tuple[str, ...], wants: Wants
    ) -> None:
        self.ticket = ticket
        self.index = index
        self.sequence = sequence
        self._surfaces = surfaces
        self._wants = wants
        self._stops = stops
        self._text: ChoiceText | None = None  # made when the echo, whose length it starts from, is known
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._held: list[Delta] = []  # for answers that are not streamed

    def gain(self, gain: Gain, result: StepResult) -> Delta | None:
        """Add a step's tokens; None when there is nothing to tell."""
        if self.finish_reason is not None or not (gain.tokens or gain.finish):
            return None
        echo = self._begin() if self._text is None else None
        text: list[str] = []
        raw: list[str] = []
        rows: list[TokenRow] = []
        ids: list[int] = []
        for k, token in enumerate(gain.tokens, gain.first_row):
            last = gain.finish is not None and len(ids) + 1 == len(gain.tokens)
            self._add(token, k, result, last, text, raw, rows)
            ids.append(token)
            self.completion_tokens += 1
            if self._text is not None and self._text.stopped:
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and gain.finish is not None:
            self.finish_reason = "stop" if gain.finish == "stop" else "length"
            if not gain.tokens and self._text is not None:
                text.append(self._text.finish().text)
        delta = Delta(
            index=self.index, text="".join(text), token_ids=tuple(ids), rows=tuple(rows),
            raw_text="".join(raw) if self._wants.raw_text else "", finish_reason=self.finish_reason,
        )  # fmt: skip
        return delta if echo is None else join([echo, delta])

    def _add(
        self, token: int, k: int, result: StepResult, last: bool, text: list[str], raw: list[str], rows: list[TokenRow]
    ) -> None:
        assert self._text is not None
        may_stop = self.completion_tokens + 1 > self.sequence.min_tokens
        if last and token in self.sequence.eos_ids:
            piece = self._text.finish(token, may_stop=may_stop)
            text.append(piece.text)
        else:
            piece = self._text.push(token, may_stop=may_stop)
            text.append(piece.text)
            if last and not self._text.stopped:
                text.append(self._text.finish().text)
        raw.append(piece.raw_text)
        if self._wants.rows:
            rows.append(self._row(token, k, result, piece.offset))

    def _row(self, token: int, k: int, result: StepResult, offset: int) -> TokenRow:
        ids = result.kept_ids.get(k) if self._wants.kept_ids else None
        return TokenRow(
            token_id=token, logprob=float(result.logprob[k]), sampling_logprob=float(result.sampling_logprob[k]),
            text_offset=offset, top=alternatives(result, k, self._wants.top),
            kept=int(result.kept[k]) if self._wants.kept else None,
            kept_ids=None if ids is None else tuple(ids.tolist()),
        )  # fmt: skip

    def _begin(self) -> Delta | None:
        """The echo, if one is wanted; the text of the choice starts after it."""
        n = self._wants.echo
        if not n:
            self._text = ChoiceText(self._surfaces, self._stops)
            return None
        sequence = self.sequence
        ids = sequence.tokens[sequence.n_prompt - n : sequence.n_prompt]
        text, offsets = decode_all(self._surfaces, ids, specials=True)
        given = self._wants.echo_text
        if given is not None:  # what the tokenizer put before it (BOS, a space) has no place in the text
            added = len(text) - len(given)
            text, offsets = given, [max(o - added, 0) for o in offsets]
        self._text = ChoiceText(self._surfaces, self._stops, start_offset=len(text))
        rows: list[TokenRow] = []
        if self._wants.rows:
            first = sequence.n_prompt - n
            unscored: Score = (0.0, ())  # the first token of all has no distribution to come from
            for i, (token, offset) in enumerate(zip(ids, offsets, strict=True)):
                logprob, top = sequence.scores.get(first + i, unscored)
                rows.append(
                    TokenRow(token_id=token, logprob=logprob, sampling_logprob=None,
                             text_offset=min(offset, len(text)), top=top[: self._wants.top])
                )  # fmt: skip
        raw = text if self._wants.raw_text else ""
        return Delta(index=self.index, text=text, echoed_ids=tuple(ids), rows=tuple(rows), raw_text=raw)

    def hold(self, delta: Delta) -> Delta | None:
        """Keep deltas of an answer that is not streamed until the choice is complete."""
        self._held.append(delta)
        if self.finish_reason is None:
            return None
        whole, self._held = join(self._held), []
        return whole


def join(deltas: list[Delta]) -> Delta:
    """Consecutive deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        index=deltas[0].index,
        text="".join(d.text for d in deltas),
        token_ids=tuple(t for d in deltas for t in d.token_ids),
        echoed_ids=deltas[0].echoed_ids,
        rows=tuple(r for d in deltas for r in d.rows),
        raw_text="".join(d.raw_text for d in deltas),
        finish_reason=deltas[-1].finish_reason,
    )
