"""The sampler: logits of a step in, tokens and their probabilities out. The C++ row programs on the CPU.

Rules of this file: a row's result depends on its own logits, parameters, slot and draw counter alone, never on its
batch. The library is built at first use; without a compiler the float64 NumPy version does the work, with one warning.
Nothing is kept between steps except the slots.
"""

from __future__ import annotations

import ctypes
import logging

import numpy as np
import numpy.typing as npt

from .build import NoCompilerError, load_library
from .sampler_layout import (
    LARGEST_VOCABULARY,
    SLOT,
    STEP_ARGS,
    PackedParams,
    check_batch,
    check_masks,
    kept_limits,
    new_result,
    slot_entries,
)
from .sampler_reference import ReferenceSampler
from .step import F32, I32, SAMPLE, U32, SlotOpen, StepBatch, StepResult

_log = logging.getLogger(__name__)
__all__ = ["Sampler", "new_result"]

SOURCES = ("sampler.cpp",)


class Sampler:
    """Samples rows of logits on the CPU. Not thread-safe: one owner calls it, one step at a time.

    ``parallel_for`` is the address of ``void f(int n, void (*body)(void* context, int begin, int end), void* context)``
    that runs ``body`` over 0..n on a thread pool; None = serial. Raises ValueError for a vocabulary outside
    1..2**20.
    """

    def __init__(
        self, vocabulary_size: int, slots: int, parallel_for: int | None = None, *, level: str | None = None
    ) -> None:
        if not 1 <= vocabulary_size <= LARGEST_VOCABULARY:
            raise ValueError(f"vocabulary_size: {vocabulary_size} is outside 1..{LARGEST_VOCABULARY}")
        self.vocabulary_size = vocabulary_size
        self._parallel_for = ctypes.c_void_p(parallel_for)
        self._slots = np.zeros(slots, SLOT)
        self._entries: list[tuple[I32, U32, F32] | None] = [None] * slots
        self._packed = PackedParams()
        self._reference: ReferenceSampler | None = None
        try:
            self._call = load_library("sampler", SOURCES, level=level).offbook_sample
            self._call.restype = None
        except NoCompilerError as error:
            _log.warning("the sampler's library cannot be built, so NumPy samples, which is slower: %s", error)
            self._reference = ReferenceSampler(vocabulary_size, slots)

    def open_slot(self, opening: SlotOpen) -> None:
        """Starts the state of one sequence. Raises ValueError for a bad slot or a token id outside the vocabulary."""
        if not 0 <= opening.slot < len(self._slots):
            raise ValueError(f"slot: {opening.slot} is outside 0..{len(self._slots) - 1}")
        if self._reference is not None:
            return self._reference.open_slot(opening)
        start = slot_entries(opening, self.vocabulary_size)
        entries = self._entries[opening.slot] or self._new_entries(opening.slot)
        for array, values in zip(entries, start, strict=True):
            array[: len(values)] = values
        self._slots["n"][opening.slot] = len(start[0])
        return None

    def _new_entries(self, slot: int) -> tuple[I32, U32, F32]:
        size = self.vocabulary_size  # never outgrown; pages that are not touched cost nothing
        entries = (np.empty(size, np.int32), np.empty(size, np.uint32), np.empty(size, np.float32))
        self._entries[slot] = entries
        for name, array in zip(("ids", "marks", "bias"), entries, strict=True):
            self._slots[name][slot] = array.ctypes.data
        return entries

    def sample(
        self,
        logits: F32 | npt.NDArray[np.uint16],
        batch: StepBatch,
        k_begin: int,
        k_end: int,
        masks: U32 | None,
        result: StepResult,
    ) -> None:
        """Fills rows k_begin..k_end of the result, and the runs' mu, from logits [k_end - k_begin, V].

        Logits are float32, or bfloat16 seen as uint16; C-contiguous. SAMPLE runs lie whole inside the rows, SCORE runs
        may be cut. Slots move on by the tokens taken. Raises ValueError naming what does not fit; a row that cannot be
        sampled sets its ``error`` bits instead.
        """
        if k_begin >= k_end:
            return
        params = self._packed.of(batch.run_params)
        self._check(logits, batch, params, k_begin, k_end, masks)
        if self._reference is not None:
            self._reference.sample(logits, batch, k_begin, k_end, masks, result)
            return
        limits = kept_limits(batch, k_begin, k_end)
        wanting = np.flatnonzero(limits)
        width = int(limits.max())
        kept_at = np.full(len(limits), -1, np.int32)
        kept_at[wanting] = np.arange(len(wanting))
        kept_ids = np.empty((len(wanting), width), np.int32)
        args = np.zeros(1, STEP_ARGS)
        pointers = (
            logits, masks, np.frombuffer(params, np.uint8), batch.row_forced, batch.row_draft, batch.row_mask,
            batch.run_start, batch.run_kind, batch.run_slot, batch.run_draw, batch.run_mu, self._slots, kept_at,
            result.token, result.error, result.logprob, result.sampling_logprob, result.kept, result.run_mu,
            result.top_ids, result.top_logprobs, kept_ids,
        )  # fmt: skip
        mask_words = 0 if masks is None else masks.shape[1]
        args[0] = (
            *(0 if array is None else array.__array_interface__["data"][0] for array in pointers),
            *(self.vocabulary_size, k_begin, k_end, len(batch.run_params), mask_words),
            *(result.top_ids.shape[1], width, logits.dtype == np.uint16),
        )
        self._run(args.ctypes.data)
        for k, ids in zip(wanting.tolist(), kept_ids, strict=True):
            if batch.row_forced[k] >= 0:
                ids[0] = batch.row_forced[k]
            if 0 < result.kept[k] <= limits[k]:
                result.kept_ids[k] = ids[: result.kept[k]].copy()

    def _run(self, step_args: int) -> None:
        """Works on the rows of the StepArgs at this address."""
        self._call(ctypes.c_void_p(step_args), self._parallel_for)

    def _check(
        self,
        logits: F32 | npt.NDArray[np.uint16],
        batch: StepBatch,
        params: bytes,
        k_begin: int,
        k_end: int,
        masks: U32 | None,
    ) -> None:
        rows, vocabulary = k_end - k_begin, self.vocabulary_size
        if logits.dtype not in (np.float32, np.uint16) or logits.shape != (rows, vocabulary):
            raise ValueError(f"logits: need float32 [{rows}, {vocabulary}], got {logits.dtype} {logits.shape}")
        if not logits.flags.c_contiguous or (masks is not None and not masks.flags.c_contiguous):
            raise ValueError("logits, masks: need C-contiguous arrays")
        check_batch(batch, params, len(self._slots), vocabulary)
        check_masks(batch, masks, vocabulary)
        r = int(np.searchsorted(batch.run_start, k_begin, "right")) - 1
        q = int(np.searchsorted(batch.run_start, k_end, "left")) - 1
        for run, edge in ((r, k_begin), (q, k_end)):
            if batch.run_kind[run] == SAMPLE and edge not in (batch.run_start[run], batch.run_start[run + 1]):
                raise ValueError(f"rows {k_begin}..{k_end} cut the SAMPLE run {run}")

    def close(self) -> None:
        """Frees the slots; calling it twice is fine."""
        self._entries = [None] * len(self._slots)
        self._slots["n"] = 0
