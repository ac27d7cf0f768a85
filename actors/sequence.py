"""One choice being written: its tokens, where it stands, and what it wants from each step.

Rules of this file: pure; the only place where a sequence changes state. Every row a sequence asks for depends on its
own tokens alone, so that no neighbour, chunk or cache hit can show in its answer.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

from ..kernels.params import SamplingParams
from ..kernels.step import BLOCK_TOKENS
from .blocks import Block, Namespace, Score

if TYPE_CHECKING:
    from .drafts import Drafter
    from .grammar_matcher import Matcher
    from .thinking import ThinkingState


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[tuple[State, str], State] = {
    (State.WAITING, "start"): State.RUNNING,
    (State.RUNNING, "preempt"): State.WAITING,
    (State.RUNNING, "finish"): State.FINISHED,
    (State.WAITING, "finish"): State.FINISHED,
}


class Sequence:
    """A prompt and what has been generated after it.

    ``computed``: how many of ``tokens`` have their KV in ``blocks`` (or will, once the step being planned has run).
    """

    __slots__ = (
        "arrival", "blocks", "cache_limit", "cached_tokens", "computed", "drafted", "drafter", "eos_ids", "keep",
        "matcher", "max_tokens", "min_tokens", "mu", "n_prompt", "namespace", "owner", "params", "preemptions",
        "score_from", "scores", "slot", "slot_stale", "state", "table", "thinking",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Tokens[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        score_from: int | None = None,
        namespace: Namespace = None,
        cache_limit: int | None = None,
        keep: bool = False,
        matcher: Matcher | None = None,
        drafter: Drafter | None = None,
        thinking: ThinkingState | None = None,
        owner: object = None,
    ) -> None:
        self.tokens = list(prompt)
        self.n_prompt = len(self.tokens)
        self.params = params
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.eos_ids = eos_ids
        self.score_from = score_from  # first prompt position whose log-probability is wanted; None = none is
        self.scores: dict[int, Score] = {}  # prompt position -> its score
        self.namespace = namespace
        self.cache_limit = self.n_prompt - 1 if cache_limit is None else min(cache_limit, self.n_prompt - 1)
        self.keep = keep
        self.matcher = matcher
        self.drafter = drafter
        self.thinking = thinking
        self.owner = owner  # whoever wants the tokens; opaque here
        self.state = State.WAITING
        self.arrival = -1  # order of admission: older ones never make room for younger ones
        self.blocks: list[Block] = []
        self.table = array("i")  # their ids
        self.computed = 0
        self.cached_tokens: int | None = None  # prompt tokens found in the cache at the first start
        self.slot = -1  # the sampler's state on the device, while running
        self.slot_stale = True  # whether the slot must be opened before the next draw
        self.mu = 2.0 * params.mirostat_target if params.mirostat_target is not None else 0.0
        self.preemptions = 0
        self.drafted: list[tuple[int, int]] = []  # (drafted, accepted) per step that had drafts

    def move(self, event: str) -> None:
        """Follow the transition table. Raises KeyError on an illegal event: a bug."""
        self.state = TRANSITIONS[self.state, event]

    def give(self, blocks: Iterable[Block]) -> None:
        """More blocks, after those that it has."""
        for block in blocks:
            self.blocks.append(block)
            self.table.append(block.id)

    def drop_blocks(self) -> list[Block]:
        """Leaves it with nothing computed; returns the blocks it had."""
        dropped, self.blocks, self.table, self.computed = self.blocks, [], array("i"), 0
        return dropped

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def remaining(self) -> int:
        """Tokens to feed before the next draw; 1 = decoding."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        length = len(self.tokens)
        return length > self.n_prompt and length == self.computed + 1

    @property
    def constrained(self) -> bool:
        """Whether the grammar applies to the next token: not inside a thinking block, whose text is the model's own."""
        return self.matcher is not None and not (self.thinking is not None and self.thinking.inside)

    @property
    def room(self) -> int:
        """Tokens it may still generate."""
        return self.max_tokens - self.n_output

    def wanted_scores(self, start: int, stop: int) -> range:
        """Prompt positions whose score comes out of feeding tokens start..stop-1 (position q from the row of q-1)."""
        if self.score_from is None:
            return range(0)
        return range(max(self.score_from, start + 1, 1), min(stop + 1, self.n_prompt))

    def reusable(self, block: Block, start: int, stop: int) -> int:
        """How far (up to ``stop``) cached positions from ``start`` in ``block`` can stand in for computed ones: all the
        way, unless a wanted score is missing there."""
        if self.score_from is None:
            return stop
        for q in range(max(start, self.score_from, 1), stop):
            if q not in self.scores and not self._covers(block.scores.get(q % BLOCK_TOKENS)):
                return q
        return stop

    def _covers(self, score: Score | None) -> bool:
        return score is not None and len(score[1]) >= self.params.top_logprobs

    def adopt_scores(self, block: Block, start: int, stop: int) -> None:
        """Take over the cached scores of positions start..stop-1."""
        if self.score_from is not None:
            for q in range(max(start, self.score_from, 1), stop):
                if q not in self.scores:
                    self.scores[q] = block.scores[q % BLOCK_TOKENS]

    def take(self, token: int) -> str | None:
        """Append a generated token; the reason to finish, if it is the last one."""
        self.tokens.append(token)
        n_output = self.n_output
        if token in self.eos_ids and n_output > self.min_tokens:
            return "stop"
        return "length" if n_output >= self.max_tokens else None
