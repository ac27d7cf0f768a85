"""Small random models with their float64 truth, and steps in one line, for the tests of devices.

Rules of this file: everything seeded; the truth shares no code with any device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from offbook.kernels.spec import ModelSpec, RopeSpec
from offbook.kernels.step import StepBatch
from offbook.kernels.weights import Tensor

F64 = npt.NDArray[np.float64]
K_QUANT_BYTES = {"Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


# Token ids, the position of the first, block table: one sequence's part of a step.
SequenceRows = tuple[Sequence[int], int, Sequence[int]]


class DictWeights:
    """Weights held in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def close(self) -> None:
        self._tensors = {}


@dataclass(frozen=True)
class RandomModel:
    spec: ModelSpec
    weights: DictWeights

    def truth(self, ids: Sequence[int]) -> F64:
        """Logits [len(ids), V] of one sequence in float64."""
        return _forward(self.spec, self.weights, np.array(ids))


class ModelLab:
    """What the ``lab`` fixture offers."""

    def model(self, *, seed: int = 0, kind: str | dict[str, str] = "F32", **overrides: Any) -> RandomModel:
        """A model whose matrices have ``kind`` (or by a part of their name; "" for the others)."""
        fields: dict[str, Any] = {
            "architecture": "llama", "name": "random", "n_layers": 2, "hidden": 64, "n_heads": 4, "n_kv_heads": 2,
            "head_dim": 32, "ffn": 96, "vocabulary_size": 150, "context_length": 512, "norm_eps": 1e-5,
            "rope": RopeSpec(), "tied_head": True,
        }  # fmt: skip
        spec = ModelSpec(**(fields | overrides))
        kinds = {"": kind} if isinstance(kind, str) else kind
        return RandomModel(spec, DictWeights(_random_tensors(spec, kinds, seed)))

    def batch(self, *rows: SequenceRows, last_only: bool = False, copies: Any = ()) -> StepBatch:
        """A step that wants the logits of all its rows, or of each sequence's last one."""
        lengths = [len(ids) for ids, _, _ in rows]
        ends = np.cumsum(lengths)
        width = max(len(table) for _, _, table in rows)
        return StepBatch(
            step_id=0,
            token_ids=_i32(t for ids, _, _ in rows for t in ids),
            positions=_i32(start + i for ids, start, _ in rows for i in range(len(ids))),
            row_sequence=np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
            block_tables=np.array([[*table, *[-1] * (width - len(table))] for _, _, table in rows], np.int32),
            copies=np.array(copies, np.int32).reshape(-1, 2),
            logit_rows=(ends - 1).astype(np.int32) if last_only else np.arange(ends[-1], dtype=np.int32),
        )


@pytest.fixture(scope="session")
def lab() -> ModelLab:
    return ModelLab()


def _i32(values: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(values, np.int32)


def _random_tensors(spec: ModelSpec, kinds: dict[str, str], seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = next(kinds[part] for part in sorted(kinds, key=len, reverse=True) if part in name)
        tensors[f"{name}.weight"] = encode(rng, f"{name}.weight", kind, rows, columns)

    def vector(name: str, size: int, centre: float) -> None:
        values = (centre + 0.2 * rng.standard_normal(size)).astype(np.float32)
        tensors[name] = Tensor(name, "F32", (size,), values.view(np.uint8).reshape(1, -1))

    matrix("token_embd", spec.vocabulary_size, spec.hidden)
    if not spec.tied_head:
        matrix("output", spec.vocabulary_size, spec.hidden)
    vector("output_norm.weight", spec.hidden, 1.0)
    for i in range(spec.n_layers):
        blk = f"blk.{i}."
        for name, rows, columns in (
            ("attn_q", q, spec.hidden), ("attn_k", kv, spec.hidden), ("attn_v", kv, spec.hidden),
            ("attn_output", spec.hidden, q), ("ffn_gate", spec.ffn, spec.hidden), ("ffn_up", spec.ffn, spec.hidden),
            ("ffn_down", spec.hidden, spec.ffn),
        ):  # fmt: skip
            matrix(blk + name, rows, columns)
        vector(blk + "attn_norm.weight", spec.hidden, 1.0)
        vector(blk + "ffn_norm.weight", spec.hidden, 1.0)
        for part, size in (("q", q), ("k", kv), ("v", kv)):
            if spec.qkv_bias:
                vector(f"{blk}attn_{part}.bias", size, 0.0)
            if spec.qk_norm and part != "v":
                vector(f"{blk}attn_{part}_norm.weight", spec.head_dim, 1.0)
    return tensors


def encode(rng: np.random.Generator, name: str, kind: str, rows: int, columns: int) -> Tensor:
    """Random weights of about 1 / sqrt(columns) in a GGUF format (K-quants: random bytes under small scales)."""
    from gguf import GGMLQuantizationType, quants

    if kind in K_QUANT_BYTES:
        size = K_QUANT_BYTES[kind]
        raw = rng.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
        small = np.array([0.3 / (columns**0.5 * 16 * 63), 0.2 / (columns**0.5 * 63)], np.float16)
        if kind in ("Q3_K", "Q6_K"):
            raw[..., -2:] = small[:1].view(np.uint8)
        else:
            raw[..., 0:4] = small.view(np.uint8)
        return Tensor(name, kind, (rows, columns), raw.reshape(rows, -1))
    values = (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
    if kind == "F32":
        raw = values.view(np.uint8)
    elif kind == "BF16":
        raw = np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    else:
        raw = quants.quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    return Tensor(name, kind, (rows, columns), raw.reshape(rows, -1))


def _forward(spec: ModelSpec, weights: DictWeights, ids: npt.NDArray[np.int64]) -> F64:
    def w(name: str) -> F64:
        return weights[name].dense().astype(np.float64)

    def norm(x: F64, name: str) -> F64:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps)
        return np.asarray(x / scale * w(name), np.float64)

    def heads(x: F64, blk: str, part: str, count: int) -> F64:
        y = x @ w(f"{blk}attn_{part}.weight").T
        if spec.qkv_bias:
            y = y + w(f"{blk}attn_{part}.bias")
        return np.asarray(y.reshape(len(x), count, spec.head_dim).transpose(1, 0, 2), np.float64)

    half = spec.head_dim // 2
    positions = np.arange(len(ids))[:, None] / (spec.rope.factor if spec.rope.scaling == "linear" else 1.0)
    angles = positions * spec.rope.theta ** (-np.arange(half) / half)

    def turn(x: F64, name: str) -> F64:
        if spec.qk_norm:
            x = norm(x, name)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    x = w("token_embd.weight")[ids]
    later = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(spec.n_layers):
        blk = f"blk.{i}."
        h = norm(x, blk + "attn_norm.weight")
        q = turn(heads(h, blk, "q", spec.n_heads), blk + "attn_q_norm.weight")
        k = turn(heads(h, blk, "k", spec.n_kv_heads), blk + "attn_k_norm.weight")
        v = heads(h, blk, "v", spec.n_kv_heads)
        k, v = (np.repeat(a, spec.n_heads // spec.n_kv_heads, 0) for a in (k, v))
        scores = q @ k.transpose(0, 2, 1) / spec.head_dim**0.5 + later
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = (p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(ids), -1)
        x = x + out @ w(blk + "attn_output.weight").T
        h = norm(x, blk + "ffn_norm.weight")
        gate = h @ w(blk + "ffn_gate.weight").T
        x = x + gate / (1 + np.exp(-gate)) * (h @ w(blk + "ffn_up.weight").T) @ w(blk + "ffn_down.weight").T
    head = "token_embd.weight" if spec.tied_head else "output.weight"
    return np.asarray(norm(x, "output_norm.weight") @ w(head).T, np.float64)
