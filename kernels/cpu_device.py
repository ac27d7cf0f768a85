"""The CPU device: a whole step of the model in one call of our C++ library, without the GIL.

Rules of this file: it loads weights into one packed copy, checks a batch before C++ sees it, and calls; arithmetic
lives in ``csrc/`` (its contract: ``csrc/matmul.h``, ``csrc/attention.h``). A row's bits depend on its own token,
position and KV alone: not on the batch, chunking, thread count, block numbers or CPU level.
"""

from __future__ import annotations

import ctypes
import time
from typing import Literal

import numpy as np

from . import cpu_layout as c
from .blocks_memory import huge_array
from .build import load_library
from .cpu_loader import CpuModel, Progress
from .sampler import Sampler, new_result
from .spec import ModelSpec
from .step import BLOCK_TOKENS, F32, I32, SAMPLE, U32, StepBatch, StepResult
from .weights import Weights

SOURCES = ("step_bf16.cpp", "step_f32.cpp", "step.cpp", "step_pack.cpp")
LOGITS_TILE = 64  # logits rows in memory at once (a SAMPLE run may stretch a tile)


class CpuDevice:
    """A model on the CPU (``Device`` of kernels/step.py).

    ``dtype``: what KV and activations are rounded to ("bfloat16": where weights are integer codes, activations are
    16-bit integers with a scale for each 32); weights are always exact. "auto" is "float32" for a model whose layers
    are all F32 or F16, else "bfloat16". ``progress(done, total)`` counts bytes of packed weights. Raises ValueError for
    a shape that the kernels cannot do, MemoryError, NoCompilerError (kernels/build.py).
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        kv_bytes: int,
        threads: int,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        slots: int,
        progress: Progress | None = None,
        level: str | None = None,
    ) -> None:
        _check_shape(spec, threads)
        self._library = _library(level)
        self.vocabulary_size = spec.vocabulary_size
        self.context_length = spec.context_length
        self.slots_total = slots
        bf16 = dtype == "bfloat16" or (dtype == "auto" and not _full_precision(spec, weights))
        block = spec.n_layers * spec.n_kv_heads * spec.head_dim * 2 * BLOCK_TOKENS * (2 if bf16 else 4)
        self.blocks_total = kv_bytes // block
        if self.blocks_total < 1:
            raise ValueError(f"kv_bytes: {kv_bytes} is less than one block of {block} bytes")
        self.kv_bytes = self.blocks_total * block
        kv = huge_array(self.kv_bytes)
        self._model = CpuModel(self._library, spec, weights, bf16, self.blocks_total, kv, progress)
        self.weight_bytes = self._model.weight_bytes
        self._handle = ctypes.c_void_p(self._library.offbook_device_create(ctypes.byref(self._model.struct), threads))
        if not self._handle:
            raise MemoryError("no memory for the CPU device")
        address = ctypes.cast(self._library.offbook_parallel_for, ctypes.c_void_p).value
        self._sampler = Sampler(spec.vocabulary_size, slots, address)
        self._logits: F32 = np.empty((0, spec.vocabulary_size), np.float32)
        self._forward_ms = 0.0
        vectors = self._library.offbook_vector_name().decode()
        kind = "bfloat16" if bf16 else "float32"
        self.name = f"CPU, {vectors}, {kind}, {threads} thread{'s' if threads > 1 else ''}"

    def forward(self, batch: StepBatch) -> None:
        """See ``Device``. Raises ValueError for a row outside the model, its table or the KV; MemoryError."""
        started = time.perf_counter()
        for opening in batch.slot_opens:
            self._sampler.open_slot(opening)
        arrays = self._checked(batch)
        call = c.Batch(
            rows=len(batch.token_ids), table_width=batch.block_tables.shape[1], copies=len(batch.copies),
            logit_rows=len(batch.logit_rows), **{name: a.ctypes.data for name, a in arrays.items()},
        )  # fmt: skip
        if self._library.offbook_forward(self._handle, ctypes.byref(call)):
            raise MemoryError(f"no memory for a step of {len(batch.token_ids)} rows")
        self._forward_ms = 1e3 * (time.perf_counter() - started)

    def sample(self, batch: StepBatch, masks: U32 | None) -> StepResult:
        """See ``Device``: the head and the sampler, some logits rows at a time."""
        started = time.perf_counter()
        result = new_result(batch)
        begin = 0
        for end in _tiles(batch):
            logits = self.logits(begin, end)
            self._sampler.sample(logits, batch, begin, end, masks, result)
            begin = end
        result.forward_ms = self._forward_ms
        result.sample_ms = 1e3 * (time.perf_counter() - started)
        return result

    def logits(self, begin: int, end: int) -> F32:
        """[end - begin, V]: the latest forward's logits rows begin..end-1; valid until the next call."""
        if len(self._logits) < end - begin:
            size = 4 * (end - begin) * self.vocabulary_size
            self._logits = huge_array(size).view(np.float32).reshape(end - begin, self.vocabulary_size)
        self._library.offbook_head(self._handle, begin, end, ctypes.c_void_p(self._logits.ctypes.data))
        return self._logits[: end - begin]

    def close(self) -> None:
        if self._handle:
            self._library.offbook_device_destroy(self._handle)
            self._handle = ctypes.c_void_p()
            self._sampler.close()

    def _checked(self, batch: StepBatch) -> dict[str, I32]:
        if not self._handle:
            raise ValueError("the device is closed")
        arrays = {
            "tokens": batch.token_ids, "positions": batch.positions, "row_sequence": batch.row_sequence,
            "block_tables": batch.block_tables, "copy_pairs": batch.copies, "logit_row": batch.logit_rows,
        }  # fmt: skip
        arrays = {name: np.ascontiguousarray(a, np.int32) for name, a in arrays.items()}
        tables = arrays["block_tables"]
        positions = min(self._model.positions, tables.shape[1] * BLOCK_TOKENS)
        _check_range("token_ids", arrays["tokens"], self.vocabulary_size)
        _check_range("positions", arrays["positions"], positions)
        _check_range("row_sequence", arrays["row_sequence"], len(tables))
        _check_range("copies", arrays["copy_pairs"], self.blocks_total)
        _check_range("logit_rows", arrays["logit_row"], len(batch.token_ids))
        used = np.zeros(len(tables), np.int32)
        np.maximum.at(used, arrays["row_sequence"], arrays["positions"] // BLOCK_TOKENS + 1)
        in_use = np.arange(tables.shape[1]) < used[:, None]
        _check_range("block_tables", tables[in_use], self.blocks_total)
        return arrays


def _check_range(name: str, values: I32, limit: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= limit):
        raise ValueError(f"{name}: {values.min()}..{values.max()} is outside 0..{limit - 1}")


def _tiles(batch: StepBatch) -> list[int]:
    """Ends of the tiles of logits rows: at most LOGITS_TILE rows, SAMPLE runs whole."""
    total, ends = len(batch.logit_rows), []
    starts = batch.run_start
    inside = {k for r in np.flatnonzero(batch.run_kind == SAMPLE) for k in range(starts[r] + 1, starts[r + 1])}
    begin = 0
    while begin < total:
        end = min(begin + LOGITS_TILE, total)
        cut = next((k for k in range(end, begin, -1) if k not in inside), None)
        if cut is None:
            cut = next(k for k in range(end, total + 1) if k not in inside)
        ends.append(cut)
        begin = cut
    return ends


def _full_precision(spec: ModelSpec, weights: Weights) -> bool:
    return all(weights[f"blk.{i}.ffn_down.weight"].kind in ("F32", "F16") for i in range(spec.n_layers))


def _check_shape(spec: ModelSpec, threads: int) -> None:
    if threads < 1:
        raise ValueError(f"threads: {threads} is less than 1")
    if spec.head_dim % 16 or spec.head_dim > 512:
        raise ValueError(f"head_dim: {spec.head_dim} is not a multiple of 16 up to 512")
    if spec.n_heads % spec.n_kv_heads:
        raise ValueError(f"n_heads: {spec.n_heads} is not a multiple of {spec.n_kv_heads} KV heads")


def _library(level: str | None) -> ctypes.CDLL:
    library = load_library("step", SOURCES, level=level)
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    library.offbook_vector_name.restype = ctypes.c_char_p
    library.offbook_device_create.restype = pointer
    library.offbook_device_create.argtypes = (pointer, i32)
    library.offbook_device_destroy.argtypes = (pointer,)
    library.offbook_forward.restype = i32
    library.offbook_forward.argtypes = (pointer, pointer)
    library.offbook_head.argtypes = (pointer, i32, i32, pointer)
    library.offbook_pack.argtypes = (pointer, i32, i32, pointer, pointer, pointer)
    return library
