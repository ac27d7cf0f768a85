"""Guesses at what comes next, which the model checks several at a time.

Why: a predicted output, or text that repeats its prompt, is mostly right, and checking k drafts costs little more than
one step. Rules of this file: drafts never change an answer, only its speed, so anything may be guessed; the work per
generated token is bounded whatever the prediction, and so is the waste: refused drafts never exceed the tokens that
were guessed right plus a sixteenth of the answer plus four, hence a wholly wrong prediction costs a few per cent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import sqrt
from typing import Protocol

FIRST_RUN = 4  # how many right guesses in a row are expected before anything is known
FIXED_COST = 2.5  # what a step costs whatever its rows, in rows (measured: one stream of the default model)
FREE_WASTE = 4  # refused drafts that need no merit
WASTE_PERIOD = 16  # one more refused draft is free every so many tokens
NEARBY = 8  # how far around the expected place a single equal token is enough to go on from
SKIPPED = 2  # the same right after the first miss: beyond it, a replaced token is likelier than a skipped passage


class Drafter(Protocol):
    """Who guesses. ``tokens`` is prompt and output of one sequence, which only ever grows; ``n_prompt`` its prompt's
    length. One drafter serves one sequence."""

    drafted: int  # drafts proposed so far
    matched: int  # of these, how many the answer then had

    def propose(self, tokens: Sequence[int], n_prompt: int, most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``tokens``; often none."""

    def settle(self, tokens: Sequence[int], n_prompt: int) -> None:
        """Count what became of the latest proposal; propose() does so itself, so call this after the last token."""


class _Patience:
    """How much to propose, judged by what became of earlier proposals."""

    def __init__(self) -> None:
        self.drafted = 0
        self.matched = 0
        self._misses = 0  # proposals that were not right to their end, barren ones in a row as one
        self._missed_at = 0  # how much was foreseen until the latest of them
        self._barren = 0  # proposals in a row of which nothing was right
        self._agreed = 0  # output tokens that were foreseen, proposed or not
        self._begin = 0  # where in the tokens the latest proposal began
        self._proposal: list[int] = []

    def settle(self, tokens: Sequence[int], n_prompt: int) -> None:
        proposal, begin = self._proposal, self._begin
        self._proposal = []
        if len(tokens) <= begin:  # nothing came of it: a step that never ran
            self.drafted -= len(proposal)
            return
        if not proposal:
            return
        right = 0
        while right < len(proposal) and begin + right < len(tokens) and tokens[begin + right] == proposal[right]:
            right += 1
        self.matched += right
        if right < len(proposal):
            self._misses += not self._barren
            self._missed_at = self._agreed + right
        self._barren = 0 if right else self._barren + 1

    def _allowance(self, n_output: int, most: int) -> int:
        """How many drafts may be risked now."""
        wasted = self.drafted - self.matched
        return min(most, self._width(), FREE_WASTE + self._agreed + n_output // WASTE_PERIOD - wasted)

    def _width(self) -> int:
        """Where right guesses come in runs of ``run`` (on average, or by now), sqrt(2 cost run) drafts a step give the
        most tokens for the time: what is lost beyond a miss then weighs as much as the steps saved. A quarter of it for
        each proposal in a row that came to nothing."""
        run = max((self._agreed + FIRST_RUN) / (self._misses + 1), self._agreed - self._missed_at)
        return max(1, round(sqrt(2 * FIXED_COST * run)) >> 2 * self._barren)

    def _remember(self, tokens: Sequence[int], proposal: list[int]) -> list[int]:
        self._proposal, self._begin = proposal, len(tokens)
        self.drafted += len(proposal)
        return list(proposal)


class Prediction(_Patience):
    """Follows a predicted output. Where the answer departs from it, it first takes one token for replaced; after that
    it finds its place again at two tokens in a row that stand where they do in the answer, at one near the expected
    place, or at two in a row anywhere, the nearest first."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self._ids = ids
        self._pairs: dict[tuple[int, int], list[int]] = {}  # two tokens in a row -> places after them, ascending
        self._next: int | None = 0  # place of the token expected next; None = lost
        self._home = 0  # the place expected next when it last was sure
        self._astray = 0  # tokens since then
        self._sure = 2  # tokens followed in a row since the place was found
        self._seen = 0  # output tokens looked at

    def fresh(self) -> Prediction:
        """A drafter for another choice, with the same prediction and index."""
        other = Prediction(self._ids)
        other._pairs = self._pairs
        return other

    def propose(self, tokens: Sequence[int], n_prompt: int, most: int) -> list[int]:
        self.settle(tokens, n_prompt)
        for at in range(n_prompt + self._seen, len(tokens)):
            self._look(tokens, n_prompt, at)
        self._seen = len(tokens) - n_prompt
        width = self._allowance(self._seen, most)
        if self._next is None or width <= 0:
            return self._remember(tokens, [])
        return self._remember(tokens, list(self._ids[self._next : self._next + width]))

    def _look(self, tokens: Sequence[int], n_prompt: int, at: int) -> None:
        """Take note of the output token ``tokens[at]``."""
        ids, place, token = self._ids, self._next, tokens[at]
        if place is not None and place < len(ids) and ids[place] == token:
            self._next = place + 1
            self._agreed += 1
            self._sure += 1
            if self._sure >= 2:
                self._home, self._astray = place + 1, 0
            return
        self._astray += 1
        self._sure = 0
        same = at - n_prompt  # where it stands if all that ever differed was replaced one for one
        if 0 < same < len(ids) and ids[same] == token and ids[same - 1] == tokens[at - 1]:
            self._next = same + 1
            return
        first = self._astray == 1
        self._next = self._nearby(token, SKIPPED if first else NEARBY)
        if self._next is None:
            self._next = self._home + 1 if first else self._anywhere((tokens[at - 1], token))

    def _nearby(self, token: int, reach: int) -> int | None:
        """The place after ``token`` closest to where it would stand had the answer only replaced what lies between."""
        expected = self._home + self._astray - 1
        places = range(max(self._home, expected - reach), min(expected + reach + 1, len(self._ids)))
        for place in sorted(places, key=lambda place: abs(place - expected)):
            if self._ids[place] == token:
                return place + 1
        return None

    def _anywhere(self, pair: tuple[int, int]) -> int | None:
        if not self._pairs:
            for i in range(1, len(self._ids)):
                self._pairs.setdefault((self._ids[i - 1], self._ids[i]), []).append(i + 1)
        places = self._pairs.get(pair)
        if places is None:
            return None
        expected = self._home + self._astray
        i = bisect_left(places, expected)
        return min(places[max(0, i - 1) : i + 1], key=lambda place: abs(place - expected))


class PromptLookup(_Patience):
    """Goes on as the text did the last time that its three latest tokens stood in this order, in prompt or output."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        super().__init__()
        self._prompt = prompt_ids
        self._in_prompt: dict[tuple[int, int, int], int] = {}  # three tokens in a row -> latest place after them
        self._in_output: dict[tuple[int, int, int], int] = {}
        self._seen = 0  # output tokens looked at
        self._next: int | None = None  # place of the token foreseen

    def fresh(self) -> PromptLookup:
        """A drafter for another choice of the same prompt, with the same index."""
        other = PromptLookup(self._prompt)
        other._in_prompt = self._in_prompt
        return other

    def propose(self, tokens: Sequence[int], n_prompt: int, most: int) -> list[int]:
        self.settle(tokens, n_prompt)
        if not self._in_prompt:
            for i in range(3, n_prompt):
                self._in_prompt[tokens[i - 3], tokens[i - 2], tokens[i - 1]] = i
        for at in range(n_prompt + self._seen, len(tokens)):
            self._agreed += self._next is not None and tokens[self._next] == tokens[at]
            self._next = self._find(tokens, at + 1)
            if at >= 3:
                self._in_output[tokens[at - 2], tokens[at - 1], tokens[at]] = at + 1
        self._seen = len(tokens) - n_prompt
        width = self._allowance(self._seen, most)
        if self._next is None or width <= 0:
            return self._remember(tokens, [])
        return self._remember(tokens, list(tokens[self._next : self._next + width]))

    def _find(self, tokens: Sequence[int], end: int) -> int | None:
        if end < 3:
            return None
        key = (tokens[end - 3], tokens[end - 2], tokens[end - 1])
        return self._in_output.get(key, self._in_prompt.get(key))
