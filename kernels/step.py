"""The seam between the actors and a device: one step's work in, one step's tokens out.

Rules of this file: plain arrays only, so that a step can cross a thread or a process; nothing here knows a request.
A device computes every row from that row's own token, position and KV alone: who else is in the step never shows.

Vocabulary. A *row* is one token fed to the model (M of them). A *logits row* is a row whose next-token distribution
is wanted (K of them). A *run* is a consecutive group of logits rows of one sequence (R of them):

- a SAMPLE run draws a token for its first row; while the drawn token equals ``row_draft`` of that row, it goes on to
  the next row (this is how draft tokens are verified); it stops at the first difference;
- a SCORE run draws nothing: for every row it reports the log-probability of ``row_forced`` (prompt scoring).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .params import SamplingParams

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BLOCK_TOKENS = 16  # positions a KV block holds

SAMPLE, SCORE = 0, 1  # kinds of run

ERROR_NAN = 1  # the row's logits hold a NaN
ERROR_EMPTY = 2  # no token is allowed (mask and bias leave nothing)


@dataclass(frozen=True, slots=True)
class SlotOpen:
    """Start (or restore after preemption) the sampler state of one sequence; a slot is closed by being reopened."""

    slot: int
    prompt_ids: I32
    output_ids: I32
    params: SamplingParams


@dataclass(slots=True)
class StepBatch:
    """One step, as flat arrays. S block tables of width W; the KV of row m at position p lives in block
    ``block_tables[row_sequence[m], p // BLOCK_TOKENS]``. In every layer the KV of all rows is written before any row
    attends, so a row may read positions that another row of the same step writes."""

    step_id: int
    token_ids: I32  # [M]
    positions: I32  # [M]
    row_sequence: I32  # [M]
    block_tables: I32  # [S, W]
    copies: I32  # [C, 2] (source block, target block), done before everything else
    slot_opens: list[SlotOpen] = field(default_factory=list)

    logit_rows: I32 = field(default_factory=lambda: np.empty(0, np.int32))  # [K] ascending within a run
    row_forced: I32 = field(default_factory=lambda: np.empty(0, np.int32))  # [K] -1 = sample; else this token is taken
    row_draft: I32 = field(default_factory=lambda: np.empty(0, np.int32))  # [K] token fed in the run's next row, or -1
    row_mask: I32 = field(default_factory=lambda: np.empty(0, np.int32))  # [K] row of the masks given to sample(), -1

    run_start: I32 = field(default_factory=lambda: np.zeros(1, np.int32))  # [R + 1] offsets into the K rows
    run_kind: I32 = field(default_factory=lambda: np.empty(0, np.int32))  # [R] SAMPLE or SCORE
    run_params: list[SamplingParams] = field(default_factory=list)  # [R]
    run_slot: I32 = field(default_factory=lambda: np.empty(0, np.int32))  # [R] -1 = stateless
    run_draw: I32 = field(default_factory=lambda: np.empty(0, np.int32))  # [R] tokens drawn before: the draw's counter
    run_mu: F32 = field(default_factory=lambda: np.empty(0, np.float32))  # [R] mirostat's mu (ignored when off)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps that will come, for devices that make their memory before the first one."""

    rows: int
    run_rows: int = 1  # of a SAMPLE run
    alternatives: int = 5  # top_logprobs of a run
    kept_ids: int = 1000  # kept_ids_max of a run


@dataclass(slots=True)
class StepResult:
    """What a step gave, per logits row (K) and per run (R). Rows that a run did not reach hold token -1."""

    step_id: int
    token: I32  # [K] the token taken (the forced one in a SCORE run), -1 where not reached or on error
    error: U8  # [K] bits ERROR_*
    logprob: F32  # [K] log-softmax of the raw logits at the token; finite, at least -9999 (0 where not asked for)
    sampling_logprob: F32  # [K] under the final distribution; 0 when greedy or forced; unspecified in a SCORE run
    kept: I32  # [K] how many tokens were left to draw from (1 when greedy or forced)
    run_mu: F32  # [R] mirostat's mu after the run
    top_ids: I32  # [K, T] T = the largest top_logprobs in the step; -1 pads; best first, ties to the lowest id
    top_logprobs: F32  # [K, T]
    kept_ids: dict[int, I32] = field(default_factory=dict)  # logits row -> surviving ids, ascending
    forward_ms: float = 0.0
    sample_ms: float = 0.0


class Device(Protocol):
    """A loaded model on some hardware. Not thread-safe: one owner calls it, one step at a time."""

    name: str  # for people: "CPU, AVX2, 2 threads"
    vocabulary_size: int  # V, columns of the logits
    context_length: int
    blocks_total: int
    slots_total: int
    kv_bytes: int
    weight_bytes: int

    def forward(self, batch: StepBatch) -> None:
        """Copies, slot openings and the model's body for all rows; what sample() needs stays on the device."""

    def sample(self, batch: StepBatch, masks: U32 | None) -> StepResult:
        """Head and sampling for the batch given to the latest forward(). ``masks`` is [n, ceil(V / 32)], bit
        ``id & 31`` of word ``id >> 5`` set where the token is allowed."""

    def close(self) -> None:
        """Free everything; calling it twice is fine."""
