"""Attention over a random paged cache, with its float64 truth, for fibers and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from offbook.kernels.cuda import Cuda
from offbook.kernels.cuda_device import ATTENTION
from offbook.kernels.cuda_items import PARTITION, attention_items
from offbook.kernels.cuda_model import THREADS, group_rows, kernel_defines
from offbook.kernels.spec import ModelSpec, RopeSpec

F64 = npt.NDArray[np.float64]
MIXED = [(0, 1), (PARTITION - 3, 7), (0, 37), (2 * PARTITION + 5, 1), (15, 2), (PARTITION - 1, 1), (31, 1)]


def spec_of(head_dim: int, heads: int, kv_heads: int) -> ModelSpec:
    return ModelSpec(
        architecture="llama", name="kernels", n_layers=1, hidden=heads * head_dim, n_heads=heads, n_kv_heads=kv_heads,
        head_dim=head_dim, ffn=48, vocabulary_size=64, context_length=4096, norm_eps=1e-5, rope=RopeSpec(),
        tied_head=True,
    )  # fmt: skip


def pointer(tensor: torch.Tensor | None) -> np.uint64:
    return np.uint64(0 if tensor is None else tensor.data_ptr())


@dataclass
class Attention:
    """Random queries, keys and values of sequences, in a cache whose other places hold NaN."""

    spec: ModelSpec
    parts: list[tuple[int, int]]  # of each sequence: first position of the step's rows, how many
    dtype: torch.dtype = torch.float32
    seed: int = 0
    tables: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        spec, random = self.spec, np.random.default_rng(self.seed)
        self.lengths = [start + n for start, n in self.parts]
        self.positions = np.concatenate([np.arange(s, s + n) for s, n in self.parts]).astype(np.int32)
        self.sequences = np.repeat(np.arange(len(self.parts)), [n for _, n in self.parts]).astype(np.int32)
        width = -(-max(self.lengths) // 16)
        self.blocks = len(self.parts) * width + 1
        self.tables = random.permutation(self.blocks - 1).astype(np.int32).reshape(-1, width)
        self.queries = torch.from_numpy(random.standard_normal((len(self.positions), spec.hidden)).astype(np.float32))
        shape = (spec.n_kv_heads, self.blocks * 16, spec.head_dim)
        self.keys = torch.full(shape, torch.nan, dtype=self.dtype)
        self.values = torch.full(shape, torch.nan, dtype=self.dtype)
        for sequence, length in enumerate(self.lengths):
            size = (spec.n_kv_heads, length, spec.head_dim)
            at = self.places(sequence, length)
            self.keys[:, at] = torch.from_numpy(random.standard_normal(size)).to(self.dtype)
            self.values[:, at] = torch.from_numpy(random.standard_normal(size)).to(self.dtype)

    def places(self, sequence: int, length: int) -> npt.NDArray[np.int64]:
        positions = np.arange(length)
        found: npt.NDArray[np.int64] = self.tables[sequence, positions // 16].astype(np.int64) * 16 + positions % 16
        return found

    def truth(self) -> F64:
        """[rows, heads * head_dim]"""
        spec, out = self.spec, []
        for row, (position, sequence) in enumerate(zip(self.positions, self.sequences, strict=True)):
            at = self.places(int(sequence), int(position) + 1)
            query = self.queries[row].double().numpy().reshape(spec.n_kv_heads, -1, spec.head_dim)
            keys, values = self.keys[:, at].double().numpy(), self.values[:, at].double().numpy()
            scores = np.einsum("khd,kpd->khp", query, keys) * spec.head_dim**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out.append(np.einsum("khp,kpd->khd", weights, values).ravel())
        return np.stack(out)

    def run(self, cuda: Cuda, *, rows_max: int | None = None, partials: int = 4096, blocks: int = 5) -> torch.Tensor:
        """What the kernels attend to, [rows, heads * head_dim], on ``cuda``'s device."""
        spec, put = self.spec, cuda.put
        items, folds = attention_items(self.positions, self.sequences, table_width=self.tables.shape[1],
                                       rows_max=rows_max or group_rows(spec), partials=partials)  # fmt: skip
        counts = np.array([len(items), len(folds)], np.int32)
        arrays = {"items": put(items), "folds": put(folds), "tables": put(self.tables), "counts": put(counts)}
        entries = cuda.zeros((max(partials, 1), spec.n_heads * (spec.head_dim + 2)), torch.float32)
        entries.fill_(torch.nan)
        record = np.zeros(1, ATTENTION)
        for name, tensor in {**arrays, "partials": entries}.items():
            record[name] = tensor.data_ptr()
        record["cache_places"], record["partition"] = self.blocks * 16, PARTITION
        record["heads"], record["kv_heads"], record["scale"] = spec.n_heads, spec.n_kv_heads, spec.head_dim**-0.5
        step = put(record.view(np.uint8))
        queries, keys, values = (t.to(cuda.device) for t in (self.queries, self.keys, self.values))
        out: torch.Tensor = cuda.zeros((len(self.positions), spec.hidden), self.dtype)
        out.fill_(torch.nan)
        kernel = cuda.kernels("transformer.cu", THREADS, kernel_defines(spec, self.dtype))
        kernel("offbook_attend")(blocks, pointer(step), pointer(queries), pointer(keys), pointer(values), pointer(out))
        kernel("offbook_fold")(3, pointer(step), pointer(out))
        cuda.synchronize()
        return out.cpu()
