"""Which tokens of which sequences go into the next step.

Rules of this file: pure and synchronous, one owner (batching). A plan is a decision, not an action: it takes blocks and
advances ``computed``, and touches no channel. Older sequences are planned first and only ever take room from younger
ones, so the oldest always gets on and nothing is stuck. What a plan looks like may depend on load and on clocks; what a
sequence's rows compute may not.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from ..kernels.step import BLOCK_TOKENS
from .blocks import Block, BlockPool, blocks_for
from .prefix import Match, PrefixCache
from .sequence import Sequence, State


@dataclass(slots=True)
class Work:
    """Feed ``count`` known tokens from position ``start``, then ``drafts``; draw if that reaches the newest token."""

    sequence: Sequence
    start: int
    count: int
    drafts: list[int] = field(default_factory=list)
    draws: bool = False


@dataclass(slots=True)
class Plan:
    step_id: int
    works: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sources: list[Block] = field(default_factory=list)  # held until the plan is complete: they are being copied from
    preempted: int = 0

    @property
    def rows(self) -> int:
        return sum(w.count + len(w.drafts) for w in self.works)


class StepBudget:
    """How many prefill tokens a step may hold. Alone, a prefill takes the most efficient chunk; beside running decodes,
    as many as keep the step near ``busy_ms``, by the measured rate (rows per millisecond)."""

    def __init__(self, *, alone: int, busy_ms: float, floor: int = 32) -> None:
        self.alone = alone
        self.busy_ms = busy_ms
        self.floor = floor
        self._rows_per_ms: float | None = None

    def observe(self, rows: int, step_ms: float) -> None:
        """Learn from a step; small steps say nothing about the rate of large ones."""
        if rows >= self.floor and step_ms > 0:
            rate = rows / step_ms
            old = self._rows_per_ms
            self._rows_per_ms = rate if old is None else 0.8 * old + 0.2 * rate

    def prefill(self, decoding: int) -> int:
        """Prefill tokens for a step with so many decode rows."""
        if not decoding:
            return self.alone
        rate = self._rows_per_ms or self.floor / self.busy_ms
        return min(self.alone, max(self.floor, int(rate * self.busy_ms) - decoding))


class Scheduler:
    """The sequences that batching owns, and the blocks they hold."""

    def __init__(
        self, pool: BlockPool, budget: StepBudget, *, running_max: int, slots: int, drafts_max: int = 0
    ) -> None:
        self.pool = pool
        self.prefix = PrefixCache(pool)
        self.budget = budget
        self.running_max = running_max
        self.drafts_max = drafts_max  # a step; rows pay while a step's fixed cost is shared by few
        self._draft_share = drafts_max  # of this for each sequence's guesses; forced tokens are no guesses
        self.running: list[Sequence] = []  # by arrival
        self.waiting: deque[Sequence] = deque()  # by arrival; preempted ones are older, so they come first
        self._free_slots = list(range(slots - 1, -1, -1))
        self._arrivals = 0
        self._last_step = -1
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Let go of a sequence in any state, and of all it holds. Not while a step with it is out."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.move("finish")
        self._let_go(sequence)

    def plan(self, step_id: int) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        plan = Plan(step_id)
        self._last_step = step_id - 1  # steps run one at a time: all before this one are done
        decoding = sum(s.decoding for s in self.running)
        self._draft_share = self.drafts_max // max(decoding, 1)
        left = self.budget.prefill(decoding)
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING:
                continue  # made room for an older one just now
            if sequence.decoding:
                self._decode(plan, sequence)
            else:
                left -= self._prefill(plan, sequence, left)
        while self.waiting and left > 0 and len(self.running) < self.running_max:
            took = self._start(plan, self.waiting[0], left)
            if took is None:
                break
            left -= took
        self.pool.release(plan.sources)
        plan.sources.clear()
        return plan if plan.works else None

    def distrust(self, work: Work, step_id: int) -> None:
        """A step failed: forget the blocks that it was to fill, and let none of its tokens, nor a block that it was to
        copy into, count as computed."""
        for block in work.sequence.blocks:
            if block.filled_by == step_id:
                self.pool.forget(block)
        work.sequence.computed = work.start - work.start % BLOCK_TOKENS

    # -- one sequence --------------------------------------------------------------------------------------------

    def _decode(self, plan: Plan, sequence: Sequence) -> None:
        drafts = self._drafts(sequence)
        if not self._cover(plan, sequence, len(sequence.tokens) + len(drafts)):
            self._preempt(plan, sequence)
            return
        self._advance(plan, sequence, 1, drafts)

    def _drafts(self, sequence: Sequence) -> list[int]:
        if sequence.drafter is None and sequence.matcher is None:
            return []
        places = (len(sequence.blocks) + self.pool.available) * BLOCK_TOKENS  # a guess takes nobody's place
        most = min(self.drafts_max, sequence.room - 1, places - len(sequence.tokens))
        if sequence.thinking is not None:
            most = min(most, sequence.thinking.draft_limit)
        if most <= 0:
            return []
        if sequence.matcher is not None and not sequence.constrained:
            return []  # inside a thinking block, with a grammar waiting: a draft could close the block
        drafts = sequence.matcher.forced_tokens()[:most] if sequence.matcher is not None else []
        if sequence.drafter is not None and not drafts:
            drafts = sequence.drafter.propose(sequence.tokens, sequence.n_prompt, min(most, self._draft_share))
        if drafts and sequence.matcher is not None:
            drafts = drafts[: sequence.matcher.accepts(drafts)]
        return drafts

    def _prefill(self, plan: Plan, sequence: Sequence, left: int) -> int:
        if left <= 0:
            return 0
        chunk = min(sequence.remaining, left)
        if not self._cover(plan, sequence, sequence.computed + chunk):
            chunk = min(chunk, len(sequence.blocks) * BLOCK_TOKENS - sequence.computed)
            if chunk <= 0:
                return 0
        self._advance(plan, sequence, chunk, [])
        return chunk

    def _start(self, plan: Plan, sequence: Sequence, left: int) -> int | None:
        """Move the first waiting sequence in; None when it has to wait for room or for another's result."""
        match = self.prefix.match(sequence, plan.step_id)
        if match.pending or not self._reserve(plan, match, len(sequence.tokens), left):
            return None
        chunk = min(len(sequence.tokens) - match.length, left)
        self.waiting.popleft()
        sequence.move("start")
        insort(self.running, sequence, key=lambda s: s.arrival)
        matched = len(match.blocks)
        sequence.give(match.blocks)
        sequence.computed = match.length
        if sequence.cached_tokens is None:
            sequence.cached_tokens = match.length
        if sequence.params.uses_slot:
            sequence.slot = self._free_slots.pop()
        sequence.slot_stale = sequence.params.uses_slot
        covered = self._cover(plan, sequence, match.length + chunk)
        assert covered, "room was counted above"
        if match.source is not None:
            plan.copies.append((match.source.id, sequence.blocks[matched].id))
        self._advance(plan, sequence, chunk, [])
        return chunk

    def _reserve(self, plan: Plan, match: Match, tokens: int, left: int) -> bool:
        """Hold what matched, if the blocks for the rest of the first chunk can be had as well."""
        spare = sum(s.decoding for s in self.running)  # a block for each decode, or it would be preempted at once
        for block in match.blocks:
            self.pool.hold(block)
        if match.source is not None:
            self.pool.hold(match.source)
        for _ in range(2):
            stop = min(tokens, match.length + left)
            if self.pool.available >= blocks_for(stop) - len(match.blocks) + spare:
                if match.source is not None:
                    plan.sources.append(match.source)
                return True
            if match.source is None or self.running:
                break
            # alone, and still too little: the block to copy from is in the way of the copy
            self.pool.release([match.source])
            match.source, match.length = None, len(match.blocks) * BLOCK_TOKENS
        if match.source is not None:
            self.pool.release([match.source])
        self.pool.release(reversed(match.blocks))
        return False

    def _advance(self, plan: Plan, sequence: Sequence, count: int, drafts: list[int]) -> None:
        start = sequence.computed
        sequence.computed = stop = start + count
        self.prefix.enter(sequence, start, stop, plan.step_id)
        draws = stop == len(sequence.tokens) and sequence.max_tokens > 0
        plan.works.append(Work(sequence, start, count, drafts, draws))

    # -- blocks --------------------------------------------------------------------------------------------------

    def _cover(self, plan: Plan, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence blocks for so many positions, taking them from younger sequences if need be."""
        need = blocks_for(tokens) - len(sequence.blocks)
        if need <= 0:
            return True
        while need > self.pool.available:
            victim = self.running[-1]
            if victim.arrival <= sequence.arrival:
                return False
            self._preempt(plan, victim)
        for _ in range(need):
            block = self.pool.allocate()
            assert block is not None, "counted above"
            sequence.give((block,))
        return True

    def _preempt(self, plan: Plan, sequence: Sequence) -> None:
        """Free all a running sequence holds; it starts over later from its tokens (its blocks may still be cached)."""
        self.running.remove(sequence)
        sequence.move("preempt")
        self._let_go(sequence)
        sequence.preemptions += 1
        plan.preempted += 1
        self.preemptions += 1
        at = sum(1 for s in self.waiting if s.arrival < sequence.arrival)
        self.waiting.insert(at, sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.blocks:
            self.prefix.enter_tail(sequence, self._last_step)
        self.pool.release(reversed(sequence.drop_blocks()), keep=sequence.keep)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
