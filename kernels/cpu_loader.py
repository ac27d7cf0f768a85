"""A model's weights -> the C++ library's ``Model``: one packed copy of every matrix, in one array of huge pages.

Rules of this file: each tensor is decoded, packed and forgotten before the next, so that loading never holds two
copies; what the file calls a tensor is known here and nowhere below.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from . import cpu_layout as c
from .blocks_memory import huge_array
from .packing import Layout, decode, interleave, layout_of, matrix_bytes, pack
from .rope import inverse_frequencies
from .spec import ModelSpec
from .step import BLOCK_TOKENS, F32, U8
from .weights import Tensor, Weights

Progress = Callable[[int, int], None]
Source = tuple[Layout, tuple[Tensor, ...]]

MATRIX_TENSORS = {
    "q": ("attn_q",), "k": ("attn_k",), "v": ("attn_v",), "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",),
}  # fmt: skip


class CpuModel:
    """Owns the memory of a loaded model; ``struct`` is what the library reads.

    ``kv`` holds ``kv_blocks`` blocks. ``progress(done, total)`` counts bytes of packed weights.
    """

    def __init__(
        self, library: ctypes.CDLL, spec: ModelSpec, weights: Weights, bf16: bool, kv_blocks: int, kv: U8,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._spec, self._weights = spec, weights
        self._layers = (c.Layer * spec.n_layers)()
        self._kept: list[F32 | U8] = [kv]
        self.positions = min(spec.context_length, kv_blocks * BLOCK_TOKENS)
        self.struct = c.Model(
            n_layers=spec.n_layers, hidden=spec.hidden, hidden_padded=_padded(spec.hidden), heads=spec.n_heads,
            kv_heads=spec.n_kv_heads, head_dim=spec.head_dim, ffn_padded=_padded(spec.ffn),
            vocabulary=spec.vocabulary_size, bf16=bf16, norm_epsilon=spec.norm_eps, layers=self._layers,
            kv=kv.ctypes.data, kv_blocks=kv_blocks,
        )  # fmt: skip
        self._load_matrices(library, progress)
        self._load_vectors()
        angles = np.arange(self.positions)[:, None] * inverse_frequencies(spec.rope, spec.head_dim)
        self.struct.rope_cos = self._keep(np.cos(angles).astype(np.float32))
        self.struct.rope_sin = self._keep(np.sin(angles).astype(np.float32))
        del self._weights  # the file may be closed

    def _load_matrices(self, library: ctypes.CDLL, progress: Progress | None) -> None:
        plan = self._plan()
        self.weight_bytes = sum(matrix_bytes(matrix) for matrix, _ in plan)
        arena = huge_array(self.weight_bytes)
        self._kept.append(arena)
        done = 0
        for matrix, (layout, tensors) in plan:
            codes = [decode(tensor, layout) for tensor in tensors]
            size = matrix_bytes(matrix)
            pack(library, matrix, interleave(*codes) if len(codes) == 2 else codes[0], arena[done : done + size])
            done += size
            if progress is not None:
                progress(done, self.weight_bytes)
        if self._spec.tied_head:
            self.struct.head = self.struct.embedding

    def _plan(self) -> list[tuple[c.Matrix, Source]]:
        """Every matrix of the model, sized but empty, in the order of use, and the tensors that fill it."""
        plan: list[tuple[c.Matrix, Source]] = []

        def place(owner: c.Layer | c.Model, field: str, *names: str) -> None:
            tensors = tuple(self._weights[name] for name in names)
            layout = layout_of(*tensors)
            rows = sum(_padded(t.shape[0]) for t in tensors)
            setattr(owner, field, layout.matrix(rows, tensors[0].shape[1]))
            plan.append((getattr(owner, field), (layout, tensors)))

        place(self.struct, "embedding", "token_embd.weight")
        for i, layer in enumerate(self._layers):
            for field, names in MATRIX_TENSORS.items():
                place(layer, field, *(f"blk.{i}.{name}.weight" for name in names))
        if not self._spec.tied_head:
            place(self.struct, "head", "output.weight")
        return plan

    def _load_vectors(self) -> None:
        spec = self._spec
        self.struct.output_norm = self._vector("output_norm.weight")
        for i, layer in enumerate(self._layers):
            layer.attention_norm = self._vector(f"blk.{i}.attn_norm.weight")
            layer.ffn_norm = self._vector(f"blk.{i}.ffn_norm.weight")
            for part in "qkv" if spec.qkv_bias else "":
                setattr(layer, f"{part}_bias", self._vector(f"blk.{i}.attn_{part}.bias"))
            for part in "qk" if spec.qk_norm else "":
                setattr(layer, f"{part}_norm", self._vector(f"blk.{i}.attn_{part}_norm.weight"))

    def _vector(self, name: str) -> int:
        values = self._weights[name].dense().reshape(-1)
        return self._keep(np.pad(values, (0, -len(values) % 32)))

    def _keep(self, array: F32) -> int:
        """The array's address; it lives as long as the model."""
        self._kept.append(np.ascontiguousarray(array, np.float32))
        return int(self._kept[-1].ctypes.data)


def _padded(n: int) -> int:
    return -(-n // 32) * 32
