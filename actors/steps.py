"""A plan into arrays for the device, and the device's arrays back into tokens.

Rules of this file: pure; the only place that knows both the scheduler's words and the step seam's. What a run draws is
applied to its sequence here and nowhere else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..kernels.step import I32, SAMPLE, SCORE, U32, SlotOpen, StepBatch, StepResult
from .grammar_matcher import ConstraintError, Matcher
from .schedule import Plan, Scheduler, Work
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class MaskJob:
    """Fill mask rows ``row``.. for a sequence: the current position, then one after each draft. Done by the executor
    while the device computes; until the step's result is back, the matcher belongs to the step."""

    row: int
    sequence: Sequence
    drafts: list[int]


@dataclass(slots=True)
class Step:
    """A plan in the device's terms. ``runs``: the work of each run of the batch; ``masks``: rows to fill."""

    plan: Plan
    batch: StepBatch
    runs: list[Work]
    mask_rows: int
    mask_jobs: list[MaskJob]


@dataclass(slots=True)
class Gain:
    """What one sequence got out of a step: tokens (from logits row ``first_row`` on, one a row), and an error bit if
    what comes after them could not be computed, or why its grammar cannot be followed any further. What an answer does
    not need any more cannot be in error."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    first_row: int = 0
    finish: str | None = None
    error: int = 0
    refusal: ConstraintError | None = None


class _Runs:
    """Grows the rows and runs of a batch."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []  # row of the batch, forced, draft, row of the masks
        self.start = [0]
        self.kind: list[int] = []
        self.works: list[Work] = []
        self.jobs: list[MaskJob] = []
        self.mask_rows = 0

    def score(self, work: Work, first_row: int) -> None:
        sequence = work.sequence
        wanted = [q for q in sequence.wanted_scores(work.start, work.start + work.count) if q not in sequence.scores]
        if wanted:
            before = first_row - 1 - work.start
            self.rows += [(before + q, sequence.tokens[q], -1, -1) for q in wanted]
            self._end(work, SCORE)

    def sample(self, work: Work, first_row: int) -> None:
        sequence, row, mask = work.sequence, first_row + work.count - 1, -1
        forced = sequence.thinking.forced if sequence.thinking is not None else None
        if forced is None and (sequence.constrained or sequence.n_output < sequence.min_tokens):
            mask = self.mask_rows
            self.mask_rows += 1 + len(work.drafts)
            self.jobs.append(MaskJob(mask, sequence, work.drafts))
        for j, draft in enumerate((*work.drafts, -1)):
            self.rows.append((row + j, -1 if forced is None else forced, draft, mask + j if mask >= 0 else -1))
        self._end(work, SAMPLE)

    def _end(self, work: Work, kind: int) -> None:
        self.start.append(len(self.rows))
        self.kind.append(kind)
        self.works.append(work)


def assemble(plan: Plan) -> Step:
    """The plan as arrays; marks the slots that it opens as opened."""
    works = plan.works
    tokens: list[int] = []
    opens: list[SlotOpen] = []
    runs = _Runs()
    for work in works:
        sequence, first_row = work.sequence, len(tokens)
        tokens += sequence.tokens[work.start : work.start + work.count]
        tokens += work.drafts
        if sequence.score_from is not None:
            runs.score(work, first_row)
        if work.draws:
            if sequence.slot_stale:
                opens.append(_slot_open(sequence))
                sequence.slot_stale = False
            runs.sample(work, first_row)
    counts = _i32([w.count + len(w.drafts) for w in works])
    logit_rows, row_forced, row_draft, row_mask = np.ascontiguousarray(_i32(runs.rows).reshape(-1, 4).T)
    drawing = [w.sequence for w in runs.works]
    batch = StepBatch(
        step_id=plan.step_id,
        token_ids=_i32(tokens),
        positions=_ranges(_i32([w.start for w in works]), counts),
        row_sequence=np.repeat(np.arange(len(works), dtype=np.int32), counts),
        block_tables=_padded([w.sequence.table for w in works]),
        copies=_i32(plan.copies).reshape(-1, 2),
        slot_opens=opens,
        logit_rows=logit_rows,
        row_forced=row_forced,
        row_draft=row_draft,
        row_mask=row_mask,
        run_start=_i32(runs.start),
        run_kind=_i32(runs.kind),
        run_params=[s.params for s in drawing],
        run_slot=_i32([s.slot for s in drawing]),
        run_draw=_i32([s.n_output for s in drawing]),
        run_mu=np.array([s.mu for s in drawing], np.float32),
    )
    return Step(plan, batch, runs.works, runs.mask_rows, runs.jobs)


def _slot_open(sequence: Sequence) -> SlotOpen:
    n = sequence.n_prompt
    return SlotOpen(sequence.slot, _i32(sequence.tokens[:n]), _i32(sequence.tokens[n:]), sequence.params)


def _padded(tables: list[array[int]]) -> I32:
    """Block tables of any lengths as rows of one array, not id by id, which would be most of a step's assembly."""
    lengths = _i32([len(t) for t in tables])
    rows = np.zeros((len(tables), lengths.max()), np.int32)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(tables), np.int32)
    return rows


def _ranges(starts: I32, counts: I32) -> I32:
    """[start, start + 1, ...] for each pair, joined."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(ends[-1], dtype=np.int32) + np.repeat(starts - ends + counts, counts)


def _i32(values: Seq[object]) -> I32:
    return np.array(values, dtype=np.int32)


def harvest(step: Step, result: StepResult, scheduler: Scheduler) -> list[Gain]:
    """Apply a step's result to its sequences. Raises ValueError when the result does not fit the step."""
    batch = step.batch
    if result.step_id != batch.step_id or len(result.token) != len(batch.logit_rows):
        raise ValueError(f"result of step {result.step_id} does not fit step {batch.step_id}")
    tokens, errors, mus = result.token.tolist(), result.error.tolist(), result.run_mu.tolist()
    kinds, starts = batch.run_kind.tolist(), batch.run_start.tolist()
    gains = {id(w.sequence): Gain(w.sequence) for w in step.plan.works}
    for work, kind, (start, stop), mu in zip(step.runs, kinds, pairwise(starts), mus, strict=True):
        gain = gains[id(work.sequence)]
        if gain.error:
            continue
        if kind == SAMPLE:
            gain.first_row = start
            _take_tokens(gain, work, tokens[start:stop])
            work.sequence.mu = mu
        if not gain.finish:
            gain.error = max(errors[start:stop])
            gain.refusal = work.sequence.matcher.failure if work.sequence.matcher is not None else None
        if kind == SCORE and not gain.error:
            _take_scores(work, range(start, stop), result, batch)
    for work in step.plan.works:
        sequence, gain = work.sequence, gains[id(work.sequence)]
        if work.start < sequence.n_prompt and not gain.error:
            stop = work.start + work.count
            if sequence.score_from is not None:
                scheduler.prefix.store_scores(sequence, work.start, stop)
            if sequence.max_tokens == 0 and stop >= sequence.n_prompt:
                gain.finish = "length"
    return list(gains.values())


def _take_scores(work: Work, rows: range, result: StepResult, batch: StepBatch) -> None:
    for k in rows:
        q = int(batch.positions[batch.logit_rows[k]]) + 1
        work.sequence.scores[q] = (float(result.logprob[k]), alternatives(result, k, work.sequence.params.top_logprobs))


def _take_tokens(gain: Gain, work: Work, drawn: list[int]) -> None:
    """The run's tokens up to the first that finishes; accepted drafts have their KV in place already."""
    sequence = work.sequence
    for token in drawn:
        if token < 0:
            break
        gain.tokens.append(token)
        constrained = sequence.constrained
        if sequence.thinking is not None and not constrained:  # what a grammar spells opens no block
            sequence.thinking.push(token)
        gain.finish = sequence.take(token)
        if constrained and sequence.matcher is not None and sequence.matcher.failure is None:
            sequence.matcher.consume(token)
            if sequence.matcher.finished:
                gain.finish = "stop"
        if gain.finish:
            break
    if work.drafts:
        accepted = max(len(gain.tokens) - 1, 0)
        sequence.computed += accepted
        sequence.drafted.append((len(work.drafts), accepted))
    if gain.finish and sequence.drafter is not None:
        sequence.drafter.settle(sequence.tokens, sequence.n_prompt)


def alternatives(result: StepResult, k: int, n: int) -> tuple[tuple[int, float], ...]:
    """The ``n`` best raw alternatives of a logits row, best first."""
    ids, values = result.top_ids[k, :n].tolist(), result.top_logprobs[k, :n].tolist()
    return tuple((i, v) for i, v in zip(ids, values, strict=True) if i >= 0)


def fill_masks(step: Step, vocabulary_size: int) -> U32 | None:
    """The step's packed allow masks [mask_rows, ceil(V / 32)], or None. Runs beside the device's forward pass."""
    if not step.mask_rows:
        return None
    masks = np.full((step.mask_rows, -(-vocabulary_size // 32)), 0xFFFFFFFF, np.uint32)
    for job in step.mask_jobs:
        sequence, rows = job.sequence, masks[job.row : job.row + 1 + len(job.drafts)]
        early = sequence.min_tokens - sequence.n_output  # rows at which it may not end yet
        if sequence.matcher is None or not sequence.constrained:
            for token in sequence.eos_ids:
                rows[:early, token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        else:
            _fill_matched(sequence.matcher, rows, job.drafts, max(early, 0) if sequence.eos_ids else None)
    return masks


def _fill_matched(matcher: Matcher, rows: U32, drafts: list[int], end_from: int | None) -> None:
    """A grammar that became too complex leaves nothing allowed: its own row fails, the step's others do not."""
    try:
        matcher.fill_ahead(rows, drafts, end_from=end_from)
    except ConstraintError:
        rows[:] = 0
