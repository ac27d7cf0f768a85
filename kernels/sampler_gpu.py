"""The sampler on a GPU: our own cubin of ``sampler.cu``, launched through CuPy on torch's stream.

Rules of this file: one host-to-device copy, one launch and one device-to-host copy a step; nothing is allocated after
the constructor, and every address that the kernel reads is the same in every step, so that ``launch`` can be captured
in a CUDA graph (launch once before capturing: loading a module is not allowed inside). CuPy and torch are imported when
a sampler is made, never before.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from .nvrtc import cached_cubin
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

Array = npt.NDArray[Any]

LANES = 512  # threads of a block: block_scratch.h
BLOCKS_PER_MULTIPROCESSOR = 2
_SLOT_N = 6  # the field n of a Slot record, in 32-bit words


class _Arena:
    """Named arrays in one piece of device memory, with a pinned twin on the host at the same offsets."""

    def __init__(self, torch: Any, fields: dict[str, tuple[Any, tuple[int, ...]]]) -> None:
        offsets, end = {}, 0
        for name, (dtype, shape) in fields.items():
            offsets[name] = end
            end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 256) * 256
        self._device = torch.zeros(max(end, 1), dtype=torch.uint8, device="cuda")
        self._host = torch.zeros(max(end, 1), dtype=torch.uint8, pin_memory=True)
        self.offset, base, flat = offsets, self._device.data_ptr(), self._host.numpy()
        self.address = {name: base + offset for name, offset in offsets.items()}
        self.host: dict[str, Array] = {}
        for name, (dtype, shape) in fields.items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.host[name] = flat[offsets[name] : offsets[name] + size].view(dtype).reshape(shape)

    def upload(self, end: int) -> None:
        """The first ``end`` bytes."""
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def download(self) -> None:
        self._host.copy_(self._device, non_blocking=True)


class GpuSampler:
    """``Sampler`` on the current CUDA device, for at most ``rows`` logits rows and ``runs`` runs a step.

    ``top_width`` and ``kept_width`` bound the alternatives and the ids of survivors a row may ask for, ``mask_rows``
    the masks of a step. Device memory: 12 * V bytes a slot and 12 * V a block in flight. Raises ImportError without
    CuPy, RuntimeError without a GPU, NvrtcError when the kernel cannot be compiled.
    """

    def __init__(
        self, vocabulary_size: int, slots: int, *, rows: int, runs: int, mask_rows: int = 0, top_width: int = 5,
        kept_width: int = 1000,
    ) -> None:  # fmt: skip
        if not 1 <= vocabulary_size <= LARGEST_VOCABULARY:
            raise ValueError(f"vocabulary_size: {vocabulary_size} is outside 1..{LARGEST_VOCABULARY}")
        self._torch = torch = importlib.import_module("torch")
        self._cupy = importlib.import_module("cupy")
        self.vocabulary_size, self._slots_total = vocabulary_size, slots
        self._limits = {"rows": rows, "runs": runs, "mask_rows": mask_rows, "top_width": top_width}
        self._kept_width = kept_width
        self._packed = PackedParams()
        self._load_kernel()
        self._words = -(-vocabulary_size // 32)
        by_row, by_run = (np.int32, (rows,)), (np.int32, (runs,))
        self._inputs = _Arena(torch, {
            "args": (STEP_ARGS, (1,)), "params": (CONSTANTS, (runs,)), "row_forced": by_row, "row_draft": by_row,
            "row_mask": by_row, "kept_at": by_row, "run_start": (np.int32, (runs + 1,)), "run_kind": by_run,
            "run_slot": by_run, "run_draw": by_run, "run_mu": (np.float32, (runs,)),
            "masks": (np.uint32, (mask_rows, self._words)),  # last, so that what is not used need not be sent
        })  # fmt: skip
        self._outputs = _Arena(torch, {
            "token": by_row, "error": (np.uint8, (rows,)), "logprob": (np.float32, (rows,)),
            "sampling_logprob": (np.float32, (rows,)), "kept": by_row, "run_mu_after": (np.float32, (runs,)),
            "top_ids": (np.int32, (rows * top_width,)), "top_logprobs": (np.float32, (rows * top_width,)),
        })  # fmt: skip
        self._kept_ids = torch.zeros((rows, max(kept_width, 1)), dtype=torch.int32, device="cuda")
        self._make_slots(slots)

    def _load_kernel(self) -> None:
        torch = self._torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        cubin = cached_cubin("sampler.cu", 10 * properties.major + properties.minor)
        module = self._cupy.cuda.function.Module()
        module.load(cubin.read_bytes())
        self._kernel = module.get_function("offbook_sample")
        self._grid = BLOCKS_PER_MULTIPROCESSOR * properties.multi_processor_count
        size = self._grid * 3 * self.vocabulary_size
        self._buffers = torch.empty(size, dtype=torch.float32, device="cuda")

    def _make_slots(self, slots: int) -> None:
        """Three arrays [slots, V] and the table of Slot records that points into them."""
        torch, v = self._torch, self.vocabulary_size
        self._entries = [torch.empty((slots, v), dtype=torch.int32, device="cuda") for _ in range(3)]
        table = np.zeros(slots, SLOT)
        for name, array in zip(("ids", "marks", "bias"), self._entries, strict=True):
            table[name] = array.data_ptr() + np.arange(slots, dtype=np.uint64) * np.uint64(4 * v)
        self._table = torch.from_numpy(table.view(np.int32).reshape(slots, SLOT.itemsize // 4).copy()).to("cuda")

    def open_slot(self, opening: SlotOpen) -> None:
        """As ``Sampler.open_slot``."""
        if not 0 <= opening.slot < self._slots_total:
            raise ValueError(f"slot: {opening.slot} is outside 0..{self._slots_total - 1}")
        start = slot_entries(opening, self.vocabulary_size)
        for array, values in zip(self._entries, start, strict=True):
            array[opening.slot, : len(values)].copy_(self._torch.from_numpy(values.view(np.int32)))
        self._table[opening.slot, _SLOT_N] = len(start[0])

    def stage(self, logits: Any, batch: StepBatch, k_begin: int, k_end: int, masks: U32 | None) -> None:
        """Checks a step and sends its arrays to the device. ``logits``: float32 or bfloat16 CUDA tensor [n, V].

        Raises ValueError as ``Sampler.sample`` does, and for a step larger than the constructor was told.
        """
        torch, v = self._torch, self.vocabulary_size
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
        self._inputs.upload(self._inputs.offset["masks"] + 4 * self._words * sizes["mask_rows"])

    def _fill(
        self, logits: Any, batch: StepBatch, k_begin: int, k_end: int, masks: U32 | None, limits: Array,
        sizes: dict[str, int],
    ) -> None:  # fmt: skip
        host = self._inputs.host
        for name in ("row_forced", "row_draft", "row_mask", "run_start", "run_kind", "run_slot", "run_draw", "run_mu"):
            values = getattr(batch, name)
            host[name][: len(values)] = values
        wanting = np.flatnonzero(limits)
        host["kept_at"][: len(limits)] = -1
        host["kept_at"][wanting] = wanting
        host["params"][: sizes["runs"]] = np.frombuffer(self._packed.of(batch.run_params), CONSTANTS)
        if masks is not None:
            host["masks"][: len(masks)] = masks
        args = host["args"][0]
        for arena in (self._inputs, self._outputs):
            for name, address in arena.address.items():
                if name != "args":
                    args[name] = address
        args["logits"], args["slots"] = logits.data_ptr(), self._table.data_ptr()
        args["kept_ids"], args["kept_width"] = self._kept_ids.data_ptr(), self._kept_ids.shape[1]
        args["vocabulary"], args["row_begin"], args["row_end"] = self.vocabulary_size, k_begin, k_end
        args["runs"], args["mask_words"], args["top_width"] = sizes["runs"], self._words, sizes["top_width"]
        args["bf16"] = logits.dtype == self._torch.bfloat16

    def launch(self) -> None:
        """Samples what was staged, on torch's current stream; no allocation, no synchronisation: can be captured."""
        stream = self._cupy.cuda.Stream.from_external(_Stream(self._torch.cuda.current_stream().cuda_stream))
        pointers = (np.uint64(self._inputs.address["args"]), np.uint64(self._buffers.data_ptr()))
        self._kernel((self._grid,), (LANES,), pointers, 0, stream)

    def collect(self, batch: StepBatch, k_begin: int, k_end: int, result: StepResult) -> None:
        """Waits for the launch and fills rows k_begin..k_end of the result, and the mu of their runs."""
        self._outputs.download()
        self._torch.cuda.current_stream().synchronize()
        host, rows = self._outputs.host, slice(k_begin, k_end)
        for name in ("token", "error", "logprob", "sampling_logprob", "kept"):
            getattr(result, name)[rows] = host[name][rows]
        width = result.top_ids.shape[1]
        for name in ("top_ids", "top_logprobs"):
            table = host[name][: len(result.token) * width].reshape(len(result.token), width)
            getattr(result, name)[rows] = table[rows]
        inside = (batch.run_start[:-1] >= k_begin) & (batch.run_start[1:] <= k_end) & (batch.run_kind == SAMPLE)
        result.run_mu[inside] = host["run_mu_after"][: len(inside)][inside]
        limits = kept_limits(batch, k_begin, k_end)
        for k in np.flatnonzero(limits).tolist():
            if 0 < result.kept[k] <= limits[k]:
                forced = batch.row_forced[k : k + 1].copy()
                listed = self._kept_ids[k, : int(result.kept[k])].cpu().numpy()
                result.kept_ids[k] = forced if forced[0] >= 0 else listed

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
        self._buffers = self._kept_ids = self._table = self._torch.empty(0)


class _Stream:
    """A raw stream handle under the ``__cuda_stream__`` protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)
