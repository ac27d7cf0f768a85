"""Steps for the sampler's tests: batches, nasty rows, parameters of every kind, and the sampler on fibers.

Rules of this file: everything is seeded by the caller; nothing asserts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from offbook.kernels.build import load_library
from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import Sampler, new_result
from offbook.kernels.step import F32, I32, SAMPLE, SCORE, U32, StepBatch, StepResult

NOTHING = np.empty(0, np.int32)
LANES = 512


def make_batch(
    params: Sequence[SamplingParams],
    *,
    lengths: Iterable[int] | None = None,
    kinds: Iterable[int] | None = None,
    slots: Iterable[int] | None = None,
    draws: Iterable[int] | None = None,
    mu: Iterable[float] | None = None,
    forced: Iterable[int] | None = None,
    draft: Iterable[int] | None = None,
    mask_rows: Iterable[int] | None = None,
) -> StepBatch:
    """A step of ``len(params)`` runs, of one row each unless ``lengths`` says otherwise; only the sampler's fields."""
    runs = len(params)
    start = np.concatenate([[0], np.cumsum([1] * runs if lengths is None else list(lengths))]).astype(np.int32)
    rows = int(start[-1])

    def ints(values: Iterable[int] | None, size: int, default: int) -> I32:
        return np.array([default] * size if values is None else list(values), np.int32)

    targets = [2 * (p.mirostat_target or 0.0) for p in params] if mu is None else list(mu)
    return StepBatch(
        step_id=1,
        token_ids=NOTHING,
        positions=NOTHING,
        row_sequence=NOTHING,
        block_tables=NOTHING.reshape(0, 0),
        copies=NOTHING.reshape(0, 2),
        logit_rows=np.arange(rows, dtype=np.int32),
        row_forced=ints(forced, rows, -1),
        row_draft=ints(draft, rows, -1),
        row_mask=ints(mask_rows, rows, -1),
        run_start=start,
        run_kind=ints(kinds, runs, SAMPLE),
        run_params=list(params),
        run_slot=ints(slots, runs, -1),
        run_draw=ints(draws, runs, 0),
        run_mu=np.array(targets, np.float32),
    )


def run_step(
    sampler: Any, logits: npt.NDArray[Any], batch: StepBatch, masks: U32 | None = None, cuts: Sequence[int] = ()
) -> StepResult:
    """The whole step, in one call or cut at the given rows."""
    result = new_result(batch)
    edges = [0, *cuts, len(batch.logit_rows)]
    for begin, end in pairwise(edges):
        sampler.sample(np.ascontiguousarray(logits[begin:end]), batch, begin, end, masks, result)
    return result


def bits(result: StepResult, rows: slice = slice(None)) -> bytes:
    """Every bit of the rows' results (without the runs' mu)."""
    fields = ("token", "error", "logprob", "sampling_logprob", "kept", "top_ids", "top_logprobs")
    out = b"".join(getattr(result, name)[rows].tobytes() for name in fields)
    first = rows.start or 0
    last = len(result.token) if rows.stop is None else rows.stop
    return out + b"".join(result.kept_ids[k].tobytes() for k in sorted(result.kept_ids) if first <= k < last)


def pack_masks(allowed: npt.NDArray[np.bool_]) -> U32:
    """[n, V] booleans as packed rows."""
    n, v = allowed.shape
    padded = np.zeros((n, -(-v // 32) * 32), np.bool_)
    padded[:, :v] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


ROW_KINDS = ("normal", "tied", "flat", "peaked", "holes", "one", "two_levels", "lane_heavy", "huge", "tiny_range")


def make_row(kind: str, v: int, rng: np.random.Generator) -> F32:
    """One row of logits [v] of the named kind."""
    x = rng.standard_normal(v).astype(np.float32) * 3
    if kind == "tied":
        x = np.round(x)
    elif kind == "flat":
        x[:] = 0.25
    elif kind == "peaked":
        x[rng.integers(v)] += 60
    elif kind == "holes":
        x[rng.random(v) < 0.7] = -np.inf
        x[rng.integers(v)] = 1.0
    elif kind == "one":
        x[:] = -np.inf
        x[rng.integers(v)] = -3.0
    elif kind == "two_levels":
        x = np.where(rng.random(v) < 0.5, np.float32(1.5), np.float32(-0.0)).astype(np.float32)
    elif kind == "lane_heavy":  # the largest logits all fall into one lane
        x[7 % v :: LANES] += 20
    elif kind == "huge":
        x *= np.float32(1e30)
    elif kind == "tiny_range":
        x *= np.float32(1e-6)
    return x.astype(np.float32)


def params_grid(seed: int) -> list[SamplingParams]:
    """Every feature alone and many together; no slot needed."""
    some: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 2.0, "top_k": 1},
        {"top_k": 5},
        {"top_k": 50, "temperature": 0.8},
        {"top_k": 300},
        {"top_k": 10**6},
        {"top_p": 0.0},
        {"top_p": 1e-4},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 0.9999, "temperature": 1.7},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"min_p": 1e-6, "temperature": 0.01},
        {"typical_p": 0.0},
        {"typical_p": 0.5},
        {"typical_p": 0.99, "temperature": 1.3},
        {"mirostat_target": 3.0},
        {"mirostat_target": 0.01, "temperature": 0.9},
        {"mirostat_target": 5.0, "mirostat_lr": 1.0, "top_k": 1},
        {"top_k": 60, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "temperature": 0.8},
        {"top_k": 700, "top_p": 0.99, "min_p": 1e-4, "typical_p": 0.95},
        {"top_p": 0.9, "min_p": 0.02},
        {"min_p": 0.001, "typical_p": 0.8},
        {"temperature": 1e-6, "top_p": 0.9},
        {"temperature": 1e-45},
    ]
    return [
        SamplingParams(seed=seed * 1000 + i, choice=i % 3, top_logprobs=i % 6, kept_ids_max=(i % 4) * 20, **kw)
        for i, kw in enumerate(some)
    ]


class FiberSampler(Sampler):
    """The CUDA kernel on host fibers, under a schedule and with barriers left out on purpose."""

    def __init__(self, vocabulary_size: int, slots: int, *, grid: int = 2, schedule: int = 0) -> None:
        super().__init__(vocabulary_size, slots)
        self.schedule, self.grid = schedule, grid
        self.skip_line = self.diverge_line = 0
        self.complaint = ""
        self._buffers = np.empty(grid * 3 * vocabulary_size, np.float32)
        self._fibers = load_library("sampler_fibers", ("sampler_fibers.cpp",)).offbook_sample_on_fibers
        self._fibers.restype = ctypes.c_char_p

    def _run(self, step_args: int) -> None:
        buffers = ctypes.c_void_p(self._buffers.ctypes.data)
        fault = (self.skip_line, self.diverge_line)
        self.complaint = self._fibers(ctypes.c_void_p(step_args), buffers, self.grid, self.schedule, *fault).decode()


__all__ = ["SAMPLE", "SCORE", "FiberSampler", "bits", "make_batch", "make_row", "pack_masks", "params_grid", "run_step"]
