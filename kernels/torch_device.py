"""The reference device in plain torch: on the CPU also where no C++ compiler is found, on CUDA where CuPy is missing.

Rules of this file: a row's bits come from its own token, position and KV alone. Products run in tiles of a fixed number
of rows (see torch_model.py); attention runs row by row over exactly the row's own positions, gathered from its blocks
in order; so neighbours, prefill chunks and physical block numbers cannot show. The promise holds for one thread count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from .sampler import Sampler, new_result
from .spec import ModelSpec
from .step import BLOCK_TOKENS, I32, U32, StepBatch, StepResult
from .step_arrays import logits_tiles
from .torch_model import TorchModel, attend
from .weights import Weights

TILE_ROWS = {"cpu": (8, 4), "cuda": (64, 16)}  # tried in this order; 1 where none keeps rows independent
LOGITS_ROWS_MAX = 64  # rows of logits in memory at once, unless one SAMPLE run has more
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchDevice:
    """The protocol ``Device`` in plain torch."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        kv_bytes: int,
        threads: int,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        slots: int,
        kind: Literal["cpu", "cuda"] = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Loads the weights; "auto" is float32 on the CPU and bfloat16 on CUDA. Sets torch's thread count.

        Raises ModelFileError, ValueError (kv_bytes under one block), MemoryError, torch.OutOfMemoryError.
        """
        chosen = dtype if dtype != "auto" else "float32" if kind == "cpu" else "bfloat16"
        torch.set_num_threads(threads)
        if kind == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._device = torch.device(kind)
        with torch.inference_mode():
            self._model = TorchModel(spec, weights, device=self._device, dtype=_DTYPES[chosen], progress=progress)
            tiles = (rows for rows in TILE_ROWS[kind] if self._model.rows_are_independent(rows))
            self._tile = next(tiles, 1)
        what = torch.cuda.get_device_name() if kind == "cuda" else f"CPU, {threads} threads"
        self.name = f"torch {chosen}, {what}"
        self.vocabulary_size = spec.vocabulary_size
        self.context_length = spec.context_length
        self.slots_total = slots
        self.weight_bytes = self._model.weight_bytes
        block_bytes = 2 * spec.n_layers * spec.n_kv_heads * BLOCK_TOKENS * spec.head_dim * _DTYPES[chosen].itemsize
        self.blocks_total = kv_bytes // block_bytes
        if self.blocks_total < 1:
            raise ValueError(f"kv_bytes: {kv_bytes} bytes of KV memory are less than one block of {block_bytes}")
        self.kv_bytes = self.blocks_total * block_bytes
        shape = (spec.n_layers, spec.n_kv_heads, self.blocks_total * BLOCK_TOKENS, spec.head_dim)
        self._keys = torch.zeros(shape, dtype=_DTYPES[chosen], device=self._device)
        self._values = torch.zeros(shape, dtype=_DTYPES[chosen], device=self._device)
        self._sampler = Sampler(spec.vocabulary_size, slots)
        self._hidden = torch.empty(0, spec.hidden)  # of the latest forward's logits rows, [K, hidden]
        self._forward_ms = 0.0

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> None:
        """See ``Device``."""
        start = time.perf_counter()
        self._copy_blocks(batch.copies)
        for opening in batch.slot_opens:
            self._sampler.open_slot(opening)
        step = _Placement(batch, self._tile, self._device)
        tiles = [self._model.embed(ids) for ids in step.token_ids]
        for index, layer in enumerate(self._model.layers):
            keys, values = self._keys[index], self._values[index]
            queries: list[torch.Tensor] = []
            for x, positions, slots in zip(tiles, step.positions, step.slots, strict=True):
                q, k, v = self._model.attention_inputs(layer, x, positions)
                keys[:, slots] = k[: len(slots)].transpose(0, 1).to(keys.dtype)
                values[:, slots] = v[: len(slots)].transpose(0, 1).to(values.dtype)
                queries.extend(q.unbind())
            attended = [torch.zeros(0)] * len(queries)
            for history, rows in step.sequences:
                k, v = keys[:, history].float(), values[:, history].float()
                for row, length in rows:
                    attended[row] = attend(queries[row].clone(), k[:, :length], v[:, :length])
            padding = torch.zeros(queries[0].numel() if queries else 0, device=self._device)
            attended = [a if a.numel() else padding for a in attended]
            for i, x in enumerate(tiles):
                rows_of_tile = torch.stack(attended[i * self._tile : (i + 1) * self._tile])
                tiles[i] = self._model.rest_of_layer(layer, x, rows_of_tile)
        picked = torch.from_numpy(batch.logit_rows.astype(np.int64)).to(self._device)
        self._hidden = torch.cat(tiles)[picked] if tiles else self._hidden[:0]
        self._forward_ms = (time.perf_counter() - start) * 1e3

    def _copy_blocks(self, copies: I32) -> None:
        for source, target in copies.tolist():
            source_at, target_at = source * BLOCK_TOKENS, target * BLOCK_TOKENS
            for cache in (self._keys, self._values):
                cache[:, :, target_at : target_at + BLOCK_TOKENS] = cache[:, :, source_at : source_at + BLOCK_TOKENS]

    @torch.inference_mode()
    def sample(self, batch: StepBatch, masks: U32 | None) -> StepResult:
        """See ``Device``."""
        start = time.perf_counter()
        result = new_result(batch)
        for begin, end in logits_tiles(batch, LOGITS_ROWS_MAX):
            logits = self._logits(begin, end).contiguous()
            self._sampler.sample(logits.cpu().numpy(), batch, begin, end, masks, result)
        result.forward_ms = self._forward_ms
        result.sample_ms = (time.perf_counter() - start) * 1e3
        return result

    def _logits(self, begin: int, end: int) -> torch.Tensor:
        hidden = _padded(self._hidden[begin:end], self._tile)
        parts = [self._model.head(tile.clone()) for tile in _tiles(hidden, self._tile)]
        return torch.cat(parts)[: end - begin]

    def close(self) -> None:
        """See ``Device``."""
        self._sampler.close()
        empty = torch.empty(0)
        self._keys = self._values = self._hidden = empty
        self._model.layers.clear()
        self._model.embedding = self._model.head_weight = empty
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Placement:
    """Where a step's rows go: in tiles, in the KV cache, and by sequence."""

    def __init__(self, batch: StepBatch, tile: int, device: torch.device) -> None:
        def tiles(values: I32) -> list[torch.Tensor]:
            padded = _padded(torch.from_numpy(values.astype(np.int64)), tile)
            return [part.clone().to(device) for part in _tiles(padded, tile)]

        self.token_ids = tiles(batch.token_ids)  # each [T]
        self.positions = tiles(batch.positions)
        blocks = batch.block_tables[batch.row_sequence, batch.positions // BLOCK_TOKENS]
        slots = torch.from_numpy(blocks.astype(np.int64) * BLOCK_TOKENS + batch.positions % BLOCK_TOKENS)
        self.slots = [part.to(device) for part in _tiles(slots, tile)]  # the last one is shorter
        self.sequences: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []
        """Per sequence: the cache's places of its positions in order, and (row, how many of them it attends to)."""
        for sequence in np.unique(batch.row_sequence):
            rows = np.flatnonzero(batch.row_sequence == sequence)
            lengths = batch.positions[rows] + 1
            table = batch.block_tables[sequence, : -(-int(lengths.max()) // BLOCK_TOKENS)].astype(np.int64)
            history = (table[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
            pairs = list(zip(rows.tolist(), lengths.tolist(), strict=True))
            self.sequences.append((torch.from_numpy(history).to(device), pairs))


def _tiles(rows: torch.Tensor, tile: int) -> list[torch.Tensor]:
    """Views of ``tile`` rows each; the last one may have fewer."""
    return [rows[begin : begin + tile] for begin in range(0, len(rows), tile)]


def _padded(rows: torch.Tensor, tile: int) -> torch.Tensor:
    """``rows`` with rows of zeros up to a multiple of ``tile``."""
    missing = -len(rows) % tile
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
