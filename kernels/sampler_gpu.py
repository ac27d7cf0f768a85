"""The sampler on a GPU: our own cubin of ``sampler.cu``, launched through CuPy on torch's stream.

Rules of this file: one host-to-device copy, one launch and one device-to-host copy a step, each of what the step uses;
nothing is allocated after the constructor. The kernel finds all addresses in one record that is always at the same
place, so that ``launch`` can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .cuda import Arena, Array, Cuda, Fields
from .sampler_layout import (
    CONSTANTS,
    LARGEST_VOCABULARY,
    SLOT,
    STEP_ARGS,
    PackedParams,
    check_batch,
    check_masks,
    kept_limits,
    slot_entries,
)
from .step import SAMPLE, U32, SlotOpen, StepBatch, StepResult

LANES = 512  # threads of a block: block_scratch.h
BLOCKS_PER_MULTIPROCESSOR = 2
_SLOT_N = 6  # the field n of a Slot record, in 32-bit words


class GpuSampler:
    """``Sampler`` on a CUDA device, for at most ``rows`` logits rows and ``runs`` runs a step.

    ``top_width`` and ``kept_width`` bound the alternatives and the ids of survivors a row may ask for, ``mask_rows``
    the masks of a step. Device memory: 12 * V bytes a slot and 12 * V a block in flight. Raises NvrtcError when
    the kernel cannot be compiled.
    """

    def __init__(
        self, cuda: Cuda, vocabulary_size: int, slots: int, *, rows: int, runs: int, mask_rows: int = 0,
        top_width: int = 5, kept_width: int = 1000,
    ) -> None:  # fmt: skip
        if not 1 <= vocabulary_size <= LARGEST_VOCABULARY:
            raise ValueError(f"vocabulary_size: {vocabulary_size} is outside 1..{LARGEST_VOCABULARY}")
        self._cuda = cuda
        self.vocabulary_size, self._slots_total = vocabulary_size, slots
        self._limits = {"rows": rows, "runs": runs, "mask_rows": mask_rows, "top_width": top_width}
        self._kept_width = kept_width
        self._packed = PackedParams()
        self._kernel = cuda.kernels("sampler.cu", LANES)("offbook_sample")
        self._grid = BLOCKS_PER_MULTIPROCESSOR * cuda.multiprocessors
        self._buffers = cuda.zeros((self._grid * 3 * vocabulary_size,), torch.float32)
        self._words = -(-vocabulary_size // 32)
        self._inputs = Arena(cuda, Arena.size_of(self._input_fields(rows, runs, mask_rows)))
        self._outputs = Arena(cuda, Arena.size_of(_output_fields(rows, runs, rows * top_width, rows * kept_width)))
        self._inputs.lay(self._input_fields(0, 0, 0))
        self._make_slots(slots)

    def _input_fields(self, rows: int, runs: int, mask_rows: int) -> Fields:
        by_row, by_run = (np.int32, (rows,)), (np.int32, (runs,))
        return {
            "args": (STEP_ARGS, (1,)), "params": (CONSTANTS, (runs,)), "row_forced": by_row, "row_draft": by_row,
            "row_mask": by_row, "kept_at": by_row, "run_start": (np.int32, (runs + 1,)), "run_kind": by_run,
            "run_slot": by_run, "run_draw": by_run, "run_mu": (np.float32, (runs,)),
            "masks": (np.uint32, (mask_rows, self._words)),
        }  # fmt: skip

    def _make_slots(self, slots: int) -> None:
        """Three arrays [slots, V] and the table of Slot records that points into them."""
        v = self.vocabulary_size
        self._entries = [self._cuda.zeros((slots, v), torch.int32) for _ in range(3)]
        table = np.zeros(slots, SLOT)
        for name, array in zip(("ids", "marks", "bias"), self._entries, strict=True):
            table[name] = array.data_ptr() + np.arange(slots, dtype=np.uint64) * np.uint64(4 * v)
        self._table = self._cuda.put(table.view(np.int32).reshape(slots, SLOT.itemsize // 4))

    def open_slot(self, opening: SlotOpen) -> None:
        """As ``Sampler.open_slot``."""
        if not 0 <= opening.slot < self._slots_total:
            raise ValueError(f"slot: {opening.slot} is outside 0..{self._slots_total - 1}")
        start = slot_entries(opening, self.vocabulary_size)
        for array, values in zip(self._entries, start, strict=True):
            array[opening.slot, : len(values)].copy_(torch.from_numpy(values.view(np.int32)))
        self._table[opening.slot, _SLOT_N] = len(start[0])

    def stage(self, logits: Any, batch: StepBatch, k_begin: int, k_end: int, masks: U32 | None) -> None:
        """Checks a step and sends its arrays to the device. ``logits``: float32 or bfloat16 CUDA tensor [n, V].

        Raises ValueError as ``Sampler.sample`` does, and for a step larger than the constructor was told.
        """
        v = self.vocabulary_size
        if tuple(logits.shape) != (k_end - k_begin, v) or not logits.is_contiguous():
            raise ValueError(f"logits: need a contiguous tensor [{k_end - k_begin}, {v}], got {logits.shape}")
        if logits.device != self._buffers.device:
            raise ValueError(f"logits: need them on {self._buffers.device}, got {logits.device}")
        if logits.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"logits: need float32 or bfloat16, got {logits.dtype}")
        check_batch(batch, self._packed.of(batch.run_params), self._slots_total, v)
        check_masks(batch, masks, v)
        for edge, side in ((k_begin, "right"), (k_end, "left")):
            r = int(np.searchsorted(batch.run_start, edge, side)) - 1  # type: ignore[call-overload]
            if batch.run_kind[r] == SAMPLE and edge not in (batch.run_start[r], batch.run_start[r + 1]):
                raise ValueError(f"rows {k_begin}..{k_end} cut the SAMPLE run {r}")
        limits = kept_limits(batch, k_begin, k_end)
        sizes = {
            "rows": len(batch.row_forced), "runs": len(batch.run_params),
            "mask_rows": 0 if masks is None else len(masks),
            "top_width": max((p.top_logprobs for p in batch.run_params), default=0),
        }  # fmt: skip
        for name, size in (*sizes.items(), ("kept_width", int(limits.max(initial=0)))):
            if size > (most := self._limits.get(name, self._kept_width)):
                raise ValueError(f"{name}: {size} is more than the {most} that this sampler was made for")
        self._fill(logits, batch, k_begin, k_end, masks, limits, sizes)
        self._inputs.upload()

    def _fill(
        self, logits: Any, batch: StepBatch, k_begin: int, k_end: int, masks: U32 | None, limits: Array,
        sizes: dict[str, int],
    ) -> None:  # fmt: skip
        wanting, kept_width = np.flatnonzero(limits), int(limits.max(initial=0))
        rows, runs, top_width = sizes["rows"], sizes["runs"], sizes["top_width"]
        self._inputs.lay(self._input_fields(rows, runs, sizes["mask_rows"]))
        self._outputs.lay(_output_fields(rows, runs, rows * top_width, len(wanting) * kept_width))
        host = self._inputs.host
        for name in ("row_forced", "row_draft", "row_mask", "run_start", "run_kind", "run_slot", "run_draw", "run_mu"):
            host[name][:] = getattr(batch, name)
        host["kept_at"][:] = -1
        host["kept_at"][wanting] = np.arange(len(wanting))
        host["params"][:] = np.frombuffer(self._packed.of(batch.run_params), CONSTANTS)
        if masks is not None:
            host["masks"][:] = masks
        args = host["args"][0]
        for arena in (self._inputs, self._outputs):
            for name, address in arena.address.items():
                if name != "args":
                    args[name] = address
        args["logits"], args["slots"], args["kept_width"] = logits.data_ptr(), self._table.data_ptr(), kept_width
        args["vocabulary"], args["row_begin"], args["row_end"] = self.vocabulary_size, k_begin, k_end
        args["runs"], args["mask_words"], args["top_width"] = runs, self._words, top_width
        args["bf16"] = logits.dtype == torch.bfloat16

    def launch(self) -> None:
        """Samples what was staged, on torch's current stream; no allocation, no synchronisation: can be captured."""
        self._kernel(self._grid, np.uint64(self._inputs.address["args"]), np.uint64(self._buffers.data_ptr()))

    def collect(self, batch: StepBatch, k_begin: int, k_end: int, result: StepResult) -> None:
        """Waits for the launch and fills rows k_begin..k_end of the result, and the mu of their runs."""
        self._outputs.download()
        self._cuda.synchronize()
        host, rows = self._outputs.host, slice(k_begin, k_end)
        for name in ("token", "error", "logprob", "sampling_logprob", "kept"):
            getattr(result, name)[rows] = host[name][rows]
        for name in ("top_ids", "top_logprobs"):
            table = getattr(result, name)
            table[rows] = host[name].reshape(table.shape)[rows]
        inside = (batch.run_start[:-1] >= k_begin) & (batch.run_start[1:] <= k_end) & (batch.run_kind == SAMPLE)
        result.run_mu[inside] = host["run_mu_after"][inside]
        limits = kept_limits(batch, k_begin, k_end)
        wanting = np.flatnonzero(limits)
        kept_ids = host["kept_ids"].reshape(len(wanting), limits.max(initial=0))
        for k, ids in zip(wanting.tolist(), kept_ids, strict=True):
            if 0 < result.kept[k] <= limits[k]:
                forced = batch.row_forced[k : k + 1]
                result.kept_ids[k] = (forced if forced[0] >= 0 else ids[: result.kept[k]]).copy()

    def sample(
        self, logits: Any, batch: StepBatch, k_begin: int, k_end: int, masks: U32 | None, result: StepResult
    ) -> None:
        """As ``Sampler.sample``, with the logits in a CUDA tensor."""
        if k_begin < k_end:
            self.stage(logits, batch, k_begin, k_end, masks)
            self.launch()
            self.collect(batch, k_begin, k_end, result)

    def close(self) -> None:
        """Frees the device memory; calling it twice is fine."""
        self._entries = []
        self._buffers = self._table = torch.empty(0)


def _output_fields(rows: int, runs: int, alternatives: int, kept_ids: int) -> Fields:
    by_row = (np.int32, (rows,))
    return {
        "token": by_row, "error": (np.uint8, (rows,)), "logprob": (np.float32, (rows,)),
        "sampling_logprob": (np.float32, (rows,)), "kept": by_row, "run_mu_after": (np.float32, (runs,)),
        "top_ids": (np.int32, (alternatives,)), "top_logprobs": (np.float32, (alternatives,)),
        "kept_ids": (np.int32, (kept_ids,)),
    }  # fmt: skip
