"""A transformer's step on CUDA: torch's matrix products, our kernels between them, in memory that never moves.

Rules of this file: a row's bits come from its own token, position and KV alone. Products run in tiles
(cuda_products.py), everything between them works on single rows, and attention adds up in an order that neighbours do
not enter. Buffers are made once and hold the largest step; ``body`` and ``tail`` launch on them and neither allocate
nor wait, so that they can be captured in CUDA graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch

from .cuda import Cuda
from .cuda_products import TiledProducts
from .spec import ModelSpec
from .step import BLOCK_TOKENS
from .torch_model import Layer, TorchModel

THREADS = 128  # of a block: transformer_math.cuh
GROUP_ROWS_MAX = 16
GROUP_QUERIES = 32  # query heads of an item, about: what a block of four warps keeps in registers
SHARED_BYTES = 48 * 1024  # static shared memory ends here
BLOCKS_PER_MULTIPROCESSOR = 8  # of attention
GRAPH_ROWS_MAX = 1024  # the largest bucket, about: larger steps take longer than launching them kernel by kernel
TILE_ROWS, LARGER_TILE_ROWS = (64, 16), (256, 1024)

ROTATION = np.dtype(
    [(name, "u8") for name in ("cosines", "sines", "bias", "q_norm", "k_norm")]
    + [("cache_places", "i8"), ("heads", "i4"), ("kv_heads", "i4"), ("eps", "f4"), ("_", "i4")]
)


class CudaModel:
    """The weights, the KV cache and the buffers of a step of at most ``rows`` rows, ``logits_rows`` of them wanted.

    ``model``'s embedding must have its dtype. One block of the cache more than ``blocks`` takes what rows of padding
    write. Raises ValueError for heads that the kernels have no room for, NvrtcError, torch.OutOfMemoryError.
    """

    def __init__(self, cuda: Cuda, model: TorchModel, *, blocks: int, rows: int, logits_rows: int) -> None:
        self._cuda, self._model, spec = cuda, model, model.spec
        self.group_rows = group_rows(spec)
        kernel = cuda.kernels("transformer.cu", THREADS, kernel_defines(spec, model.dtype))
        self._embed, self._norm, self._rotate = (kernel(f"offbook_{name}") for name in ("embed", "norm", "rotate"))
        self._attend, self._fold, self._gate = (kernel(f"offbook_{name}") for name in ("attend", "fold", "gate"))
        self._attention_blocks = BLOCKS_PER_MULTIPROCESSOR * cuda.multiprocessors
        layer = model.layers[0]
        weights = [(w, model.dtype) for w in (layer.qkv, layer.attn_output, layer.gate_up, layer.ffn_down)]
        self.products = TiledProducts(cuda, weights, bases=TILE_ROWS, larger=LARGER_TILE_ROWS)
        self._head = TiledProducts(cuda, [(model.head_weight, torch.float32)], bases=TILE_ROWS, larger=())
        self.cache_places = (blocks + 1) * BLOCK_TOKENS
        cache = (spec.n_layers, spec.n_kv_heads, self.cache_places, spec.head_dim)
        self._keys, self._values = cuda.zeros(cache, model.dtype), cuda.zeros(cache, model.dtype)
        self.buckets = buckets(self.products.base, min(rows, GRAPH_ROWS_MAX))
        self.logits_buckets = buckets(self._head.base, logits_rows)
        self.rows = max(self.padded(rows), self.buckets[-1])  # of the largest step, with its padding
        self._make_buffers(self.rows, self.logits_buckets[-1])
        records = np.concatenate([self._rotation(layer) for layer in model.layers])
        self._rotations = cuda.put(records.view(np.uint8))

    def _make_buffers(self, rows: int, logits_rows: int) -> None:
        spec, dtype, zeros = self._model.spec, self._model.dtype, self._cuda.zeros
        size = spec.n_heads * spec.head_dim
        self._x = zeros((rows, spec.hidden), torch.float32)  # the residual stream, without the latest product
        self._added = zeros((rows, spec.hidden), dtype)  # that product
        self._normed = zeros((rows, spec.hidden), dtype)
        self._qkv = zeros((rows, size + 2 * spec.n_kv_heads * spec.head_dim), dtype)
        self._queries = zeros((rows, size), torch.float32)
        self._attended = zeros((rows, size), dtype)
        self._gate_up = zeros((rows, 2 * spec.ffn), dtype)
        self._gated = zeros((rows, spec.ffn), dtype)
        self._picked = zeros((logits_rows, spec.hidden), dtype)
        self.logits = zeros((logits_rows, spec.vocabulary_size), torch.float32)

    def padded(self, rows: int) -> int:
        """How many rows a step of ``rows`` runs with: a bucket, or the next multiple of the products' base."""
        base = self.products.base
        return next((bucket for bucket in self.buckets if bucket >= rows), -(-rows // base) * base)

    def _rotation(self, layer: Layer) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        spec, record = self._model.spec, np.zeros(1, ROTATION)
        tensors = {
            "cosines": self._model.cos, "sines": self._model.sin, "bias": layer.qkv_bias, "q_norm": layer.q_norm,
            "k_norm": layer.k_norm,
        }  # fmt: skip
        for name, tensor in tensors.items():
            record[name] = 0 if tensor is None else tensor.data_ptr()
        record["cache_places"], record["eps"] = self.cache_places, spec.norm_eps
        record["heads"], record["kv_heads"] = spec.n_heads, spec.n_kv_heads
        return record

    def copy_block(self, source: int, target: int) -> None:
        """One KV block of all layers over another."""
        begin, end = source * BLOCK_TOKENS, target * BLOCK_TOKENS
        for cache in (self._keys, self._values):
            cache[:, :, end : end + BLOCK_TOKENS] = cache[:, :, begin : begin + BLOCK_TOKENS]

    def body(self, rows: int, at: Mapping[str, int]) -> None:
        """All layers for ``rows`` rows, a multiple of the products' base. ``at``: device addresses of token_ids,
        positions and places [rows] and of the step's AttentionStep."""
        model, product = self._model, self.products.product
        ids, positions, places, step = (
            np.uint64(at[name]) for name in ("token_ids", "positions", "places", "attention")
        )  # fmt: skip
        hidden, x, added = np.int32(model.spec.hidden), self._x[:rows], self._added[:rows]
        normed, qkv, attended = self._normed[:rows], self._qkv[:rows], self._attended[:rows]
        queries, gate_up, gated = self._queries[:rows], self._gate_up[:rows], self._gated[:rows]
        self._embed(rows, ids, _at(model.embedding), _at(x), hidden)
        for index, layer in enumerate(model.layers):
            keys, values = _at(self._keys[index]), _at(self._values[index])
            rotation = np.uint64(self._rotations.data_ptr() + index * ROTATION.itemsize)
            self._add_and_norm(rows, layer.attn_norm, normed, added=added if index else None)
            product(normed, layer.qkv, qkv)
            self._rotate(rows, rotation, positions, places, _at(qkv), _at(queries), keys, values)
            self._attend(self._attention_blocks, step, _at(queries), keys, values, _at(attended))
            self._fold(self._attention_blocks, step, _at(attended))
            product(attended, layer.attn_output, added)
            self._add_and_norm(rows, layer.ffn_norm, normed, added=added)
            product(normed, layer.gate_up, gate_up)
            self._gate(rows, _at(gate_up), _at(gated), np.int32(model.spec.ffn))
            product(gated, layer.ffn_down, added)

    def tail(self, rows: int, picks: int) -> None:
        """``logits`` of the ``rows`` rows (one of ``logits_buckets``) whose numbers are at address ``picks``."""
        picked = self._picked[:rows]
        self._add_and_norm(rows, self._model.output_norm, picked, added=self._added, picks=picks)
        self._head.product(picked, self._model.head_weight, self.logits[:rows])

    def _add_and_norm(
        self, rows: int, weight: torch.Tensor, out: torch.Tensor, *, added: torch.Tensor | None, picks: int = 0
    ) -> None:
        sizes = (np.int32(self._model.spec.hidden), np.float32(self._model.spec.norm_eps))
        self._norm(rows, np.uint64(picks), _at(self._x), _at(added), _at(weight), _at(out), *sizes)

    def close(self) -> None:
        """Frees the device's memory."""
        self._model.layers.clear()
        self._model.embedding = self._model.head_weight = torch.empty(0)
        for name, value in list(vars(self).items()):
            if isinstance(value, torch.Tensor):
                setattr(self, name, torch.empty(0))


def buckets(base: int, most: int) -> list[int]:
    """Numbers of rows that steps are padded to: ``base`` times 1, 2, 3, 4, 6, 8, 12, ... until ``most`` fits."""
    sizes = (base * times for power in itertools.count() for times in (2**power, 3 * 2**power // 2))
    found = [base]
    while found[-1] < most:
        found.append(next(size for size in sizes if size > found[-1]))
    return found


def group_rows(spec: ModelSpec) -> int:
    """Rows that an item of attention may have. Raises ValueError when not even one has room."""
    repeat = spec.n_heads // spec.n_kv_heads
    for rows in range(min(GROUP_ROWS_MAX, max(GROUP_QUERIES // repeat, 1)), 0, -1):
        queries = rows * repeat
        # AttentionShared: queries, a tile of keys, a tile of weights
        if 4 * (queries * spec.head_dim + 32 * (spec.head_dim + 1) + queries * 32) <= SHARED_BYTES:
            return rows
    raise ValueError(f"head_dim: {repeat} query heads of {spec.head_dim} for a KV head are too many for the kernels")


def kernel_defines(spec: ModelSpec, dtype: torch.dtype) -> tuple[str, ...]:
    """What transformer.cu is compiled with for a model."""
    repeat, rows = spec.n_heads // spec.n_kv_heads, group_rows(spec)
    bf16 = int(dtype == torch.bfloat16)
    return (f"HEAD_DIM={spec.head_dim}", f"GROUP={repeat}", f"GROUP_ROWS={rows}", f"BF16={bf16}")


def _at(tensor: torch.Tensor | None) -> np.uint64:
    """The tensor's address as a kernel's argument; null for None."""
    return np.uint64(0 if tensor is None else tensor.data_ptr())
