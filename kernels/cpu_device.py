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
from .step import BLOCK_TOKENS, F32, U32, StepBatch, StepResult
from .step_arrays import checked_arrays, logits_tiles
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
            raise ValueError(f"kv_bytes: {kv_bytes} bytes of KV memory are less than one block of {block}")
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
        if not self._handle:
            raise ValueError("the device is closed")
        arrays = checked_arrays(batch, vocabulary_size=self.vocabulary_size, positions=self._model.positions,
                                blocks=self.blocks_total)  # fmt: skip
        at = {name: array.ctypes.data for name, array in arrays.items()}
        call = c.Batch(
            rows=len(batch.token_ids), table_width=batch.block_tables.shape[1], copies=len(batch.copies),
            logit_rows=len(batch.logit_rows), tokens=at["token_ids"], positions=at["positions"],
            row_sequence=at["row_sequence"], block_tables=at["block_tables"], copy_pairs=at["copies"],
            logit_row=at["logit_rows"],
        )  # fmt: skip
        if self._library.offbook_forward(self._handle, ctypes.byref(call)):
            raise MemoryError(f"no memory for a step of {len(batch.token_ids)} rows")
        self._forward_ms = 1e3 * (time.perf_counter() - started)

    def sample(self, batch: StepBatch, masks: U32 | None) -> StepResult:
        """See ``Device``: the head and the sampler, some logits rows at a time."""
        started = time.perf_counter()
        result = new_result(batch)
        for begin, end in logits_tiles(batch, LOGITS_TILE):
            self._sampler.sample(self.logits(begin, end), batch, begin, end, masks, result)
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
