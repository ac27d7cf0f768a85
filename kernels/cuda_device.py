"""The device on CUDA: a step is two graph launches, one upload each, and one wait.

Rules of this file: ``forward`` sends a step and returns while the GPU works, so that masks are made meanwhile;
``sample`` sends the masks, and waits once. Steps are padded to a few sizes (buckets), each captured in a CUDA graph of
its own; rows of padding write into a KV block of their own and are read by nobody. Everything that can refuse a step
does so before anything is sent: an index out of range on a GPU would take the whole process down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch

from .cuda import Arena, Cuda, Fields
from .cuda_items import PARTITION, attention_items
from .cuda_model import CudaModel
from .sampler import new_result
from .sampler_gpu import GpuSampler
from .spec import ModelSpec
from .step import BLOCK_TOKENS, F32, I32, U32, StepBatch, StepLimits, StepResult
from .step_arrays import checked_arrays, logits_tiles
from .torch_model import TorchModel
from .weights import Weights

LOGITS_ROWS = 256  # logits rows in memory at once, unless one SAMPLE run has more
PARTIAL_ROWS = 4096  # results of split attention walks: 16 KiB each for 32 heads of 128

ATTENTION = np.dtype(
    [(name, "u8") for name in ("items", "folds", "tables", "counts", "partials")]
    + [("cache_places", "i8"), ("heads", "i4"), ("kv_heads", "i4"), ("partition", "i4"), ("scale", "f4")]
)
_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class CudaDevice:
    """The protocol ``Device`` on a CUDA device, for steps of at most ``slots`` sequences within ``limits``."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        kv_bytes: int,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        slots: int,
        limits: StepLimits,
        progress: Callable[[int, int], None] | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        """Loads the weights, compiles the kernels and captures the graphs; "auto" is bfloat16. ``progress`` gets
        (layers done, layers in all).

        Raises ImportError without CuPy, ModelFileError, NvrtcError, ValueError (kv_bytes under one block, heads that
        the kernels have no room for), torch.OutOfMemoryError.
        """
        self._cuda = cuda = cuda or Cuda()
        self._dtype = _DTYPES[dtype]
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._spec, self._limits = spec, limits
        self.vocabulary_size, self.context_length, self.slots_total = spec.vocabulary_size, spec.context_length, slots
        block_bytes = 2 * spec.n_layers * spec.n_kv_heads * BLOCK_TOKENS * spec.head_dim * self._dtype.itemsize
        self.blocks_total = kv_bytes // block_bytes
        if self.blocks_total < 1:
            raise ValueError(f"kv_bytes: {kv_bytes} bytes of KV memory are less than one block of {block_bytes}")
        self.kv_bytes = self.blocks_total * block_bytes
        with cuda.active():
            loaded = TorchModel(spec, weights, device=cuda.device, dtype=self._dtype, head_dtype=self._dtype,
                                progress=progress)  # fmt: skip
            self.weight_bytes = loaded.weight_bytes
            self._logits_rows = max(LOGITS_ROWS, limits.run_rows)
            self._model = CudaModel(cuda, loaded, blocks=self.blocks_total, rows=limits.rows,
                                    logits_rows=self._logits_rows)  # fmt: skip
            self._sampler = GpuSampler(
                cuda, spec.vocabulary_size, slots, rows=limits.rows, runs=2 * slots, mask_rows=limits.rows,
                top_width=limits.alternatives, kept_width=limits.kept_ids,
            )  # fmt: skip
            self._make_arenas()
            self._capture()
        tiles = ", ".join(map(str, self._model.products.tiles))
        self.name = f"{cuda.name}, {str(self._dtype).removeprefix('torch.')}, products in tiles of {tiles} rows"
        self._forward_ms = 0.0

    def _make_arenas(self) -> None:
        spec, rows = self._spec, self._model.rows
        tables = self.slots_total * -(-spec.context_length // BLOCK_TOKENS)
        self._inputs = Arena(self._cuda, Arena.size_of(_fields(rows, rows + PARTIAL_ROWS, rows, tables)))
        self._picks = Arena(self._cuda, Arena.size_of(_pick_fields(self._model.logits_buckets[-1])))
        entry = spec.n_heads * (spec.head_dim + 2)  # outputs, largest scores, sums of weights: paged_attention.cuh
        self._partials = self._cuda.zeros((PARTIAL_ROWS, entry), torch.float32)

    def _capture(self) -> None:
        nothing = np.empty(0, np.int32)
        self._bodies: dict[int, Callable[[], None]] = {}
        for rows in self._model.buckets:
            self._stage(rows, nothing, nothing, nothing, np.empty((0, 0), np.int32))
            self._bodies[rows] = self._cuda.capture(partial(self._model.body, rows, self._inputs.address))
        self._tails: dict[int, Callable[[], None]] = {}
        for rows in self._model.logits_buckets:
            self._picks.lay(_pick_fields(rows))
            self._tails[rows] = self._cuda.capture(partial(self._tail, rows, self._picks.address["picks"]))

    def _tail(self, rows: int, picks: int) -> None:
        self._model.tail(rows, picks)
        self._sampler.launch()

    def forward(self, batch: StepBatch) -> None:
        """See ``Device``: returns while the GPU works. Raises ValueError for a row outside the model, its table or the
        KV, and for a step larger than the device was opened for."""
        started = time.perf_counter()
        arrays = checked_arrays(batch, vocabulary_size=self.vocabulary_size, positions=self.context_length,
                                blocks=self.blocks_total)  # fmt: skip
        if (rows := len(batch.token_ids)) > self._limits.rows:
            raise ValueError(f"token_ids: {rows} rows are more than the {self._limits.rows} of a step")
        if len(batch.block_tables) > self.slots_total:
            raise ValueError(f"block_tables: {len(batch.block_tables)} are more than the {self.slots_total} of a step")
        with self._cuda.active():
            for opening in batch.slot_opens:
                self._sampler.open_slot(opening)
            for source, target in arrays["copies"].tolist():
                self._model.copy_block(source, target)
            if rows:
                self._run_body(arrays)
        self._forward_ms = 1e3 * (time.perf_counter() - started)

    def _run_body(self, arrays: dict[str, I32]) -> None:
        bucket = self._model.padded(len(arrays["token_ids"]))
        tables = arrays["block_tables"][:, : arrays["positions"].max() // BLOCK_TOKENS + 1]
        self._stage(bucket, arrays["token_ids"], arrays["positions"], arrays["row_sequence"], tables)
        if bucket in self._bodies:
            self._bodies[bucket]()
        else:
            self._model.body(bucket, self._inputs.address)

    def _stage(self, bucket: int, token_ids: I32, positions: I32, row_sequence: I32, tables: I32) -> None:
        """Sends a step's arrays, filled up with padding to ``bucket`` rows."""
        rows, padding = len(token_ids), bucket - len(token_ids)
        items, folds = attention_items(positions, row_sequence, table_width=tables.shape[1],
                                       rows_max=self._model.group_rows, partials=PARTIAL_ROWS)  # fmt: skip
        self._inputs.lay(_fields(bucket, len(items), len(folds), tables.size))
        host, address = self._inputs.host, self._inputs.address
        host["token_ids"][:rows], host["token_ids"][rows:] = token_ids, 0
        host["positions"][:rows], host["positions"][rows:] = positions, 0
        blocks = tables[row_sequence, positions // BLOCK_TOKENS]
        host["places"][:rows] = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        host["places"][rows:] = self.blocks_total * BLOCK_TOKENS + np.arange(padding) % BLOCK_TOKENS
        host["counts"][:] = len(items), len(folds)
        host["items"][:], host["folds"][:], host["tables"][:] = items, folds, tables.ravel()
        step, spec = host["attention"][0], self._spec
        for name in ("items", "folds", "tables", "counts"):
            step[name] = address[name]
        step["partials"], step["cache_places"] = self._partials.data_ptr(), self._model.cache_places
        step["heads"], step["kv_heads"], step["partition"] = spec.n_heads, spec.n_kv_heads, PARTITION
        step["scale"] = spec.head_dim**-0.5
        self._inputs.upload()

    def sample(self, batch: StepBatch, masks: U32 | None) -> StepResult:
        """See ``Device``: waits for the step. Most of the GPU's time for it shows here, little in ``forward_ms``."""
        started = time.perf_counter()
        result = new_result(batch)
        with self._cuda.active():
            try:
                for begin, end in logits_tiles(batch, self._logits_rows):
                    self._sample_rows(batch, begin, end, masks, result)
            finally:
                self._cuda.synchronize()  # even a step without logits or refused has read its inputs by the next one
        result.forward_ms = self._forward_ms
        result.sample_ms = 1e3 * (time.perf_counter() - started)
        return result

    def _sample_rows(self, batch: StepBatch, begin: int, end: int, masks: U32 | None, result: StepResult) -> None:
        bucket = self._pick(batch.logit_rows[begin:end])
        self._sampler.stage(self._model.logits[: end - begin], batch, begin, end, masks)
        self._tails[bucket]()
        self._sampler.collect(batch, begin, end, result)

    def _pick(self, logit_rows: I32) -> int:
        """Sends the numbers of the rows whose logits are wanted; how many rows that is with padding."""
        rows = len(logit_rows)
        if rows > self._logits_rows:
            raise ValueError(f"run_start: a SAMPLE run of {rows} rows is longer than {self._logits_rows}")
        bucket = next(b for b in self._tails if b >= rows)
        self._picks.lay(_pick_fields(bucket))
        picks = self._picks.host["picks"]
        picks[:rows], picks[rows:] = logit_rows, 0
        self._picks.upload()
        return bucket

    def logits(self, logit_rows: I32) -> F32:
        """[K, V]: those of the latest forward's rows of these numbers, for checks."""
        parts = [np.empty((0, self.vocabulary_size), np.float32)]
        with self._cuda.active():
            for begin in range(0, len(logit_rows), self._logits_rows):
                rows = logit_rows[begin : begin + self._logits_rows]
                self._model.tail(self._pick(rows), self._picks.address["picks"])
                parts.append(self._model.logits[: len(rows)].cpu().numpy().copy())
        return np.concatenate(parts)

    def close(self) -> None:
        """See ``Device``."""
        self._bodies, self._tails = {}, {}
        with self._cuda.active():
            self._sampler.close()
            self._model.close()
            self._partials = torch.empty(0)
            self._cuda.release()


def _fields(rows: int, items: int, folds: int, tables: int) -> Fields:
    """A step's arrays. The first four have places that depend on ``rows`` alone: a graph knows them by address."""
    by_row = (np.int32, (rows,))
    return {
        "attention": (ATTENTION, (1,)), "token_ids": by_row, "positions": by_row, "places": by_row,
        "counts": (np.int32, (2,)), "items": (np.int32, (items, 8)), "folds": (np.int32, (folds, 4)),
        "tables": (np.int32, (tables,)),
    }  # fmt: skip


def _pick_fields(rows: int) -> Fields:
    return {"picks": (np.int32, (rows,))}
