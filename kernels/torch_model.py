"""A decoder-only transformer in plain torch, as functions of tiles: the reference that other devices are held to.

Rules of this file: every function takes a *tile*, always the same number of rows, in memory of its own, so that each
matrix product has one shape for ever and a library cannot choose another summation for a fuller batch. Whether a row's
bits then depend on its place in the tile or on its neighbours is not assumed but tried out when the model is loaded
(``rows_are_independent``); a tile of one row is independent by construction. The residual stream, the norms, the
softmax and the head are float32; ``dtype`` is what the layers' products take and give, and what the KV cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from .rope import inverse_frequencies
from .spec import ModelSpec
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights; ``qkv`` and ``gate_up`` are stacked along their outputs."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attn_output: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    ffn_down: torch.Tensor


class TorchModel:
    """The weights on a torch device and the model's functions of them. Shapes: T rows a tile, H heads of D values."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head_dtype: torch.dtype = torch.float32,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Decodes all weights, embedding and head to ``head_dtype``; ``progress`` gets (layers done, layers in all).
        Raises ModelFileError."""
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self._weights = weights
        self.layers: list[Layer] = []
        for index in range(spec.n_layers):
            self.layers.append(self._layer(f"blk.{index}."))
            if progress:
                progress(index + 1, spec.n_layers)
        self.embedding = self._load(head_dtype, "token_embd.weight")
        self.head_weight = self.embedding if spec.tied_head else self._load(head_dtype, "output.weight")
        self.output_norm = self._load(torch.float32, "output_norm.weight")
        angles = np.outer(np.arange(spec.context_length), inverse_frequencies(spec.rope, spec.head_dim))
        self.cos = torch.from_numpy(np.cos(angles).astype(np.float32)).to(device)  # [context, D / 2]
        self.sin = torch.from_numpy(np.sin(angles).astype(np.float32)).to(device)
        del self._weights

    def _load(self, dtype: torch.dtype, *names: str) -> torch.Tensor:
        """The named tensors, stacked along their outputs."""
        parts = [torch.from_numpy(np.array(self._weights[name].dense())) for name in names]
        return torch.cat(parts).to(self.device, dtype)

    def _layer(self, at: str) -> Layer:
        spec, f32 = self.spec, torch.float32
        qkv = ("attn_q", "attn_k", "attn_v")
        return Layer(
            attn_norm=self._load(f32, f"{at}attn_norm.weight"),
            qkv=self._load(self.dtype, *(f"{at}{name}.weight" for name in qkv)),
            qkv_bias=self._load(f32, *(f"{at}{name}.bias" for name in qkv)) if spec.qkv_bias else None,
            q_norm=self._load(f32, f"{at}attn_q_norm.weight") if spec.qk_norm else None,
            k_norm=self._load(f32, f"{at}attn_k_norm.weight") if spec.qk_norm else None,
            attn_output=self._load(self.dtype, f"{at}attn_output.weight"),
            ffn_norm=self._load(f32, f"{at}ffn_norm.weight"),
            gate_up=self._load(self.dtype, f"{at}ffn_gate.weight", f"{at}ffn_up.weight"),
            ffn_down=self._load(self.dtype, f"{at}ffn_down.weight"),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device."""
        tensors = [getattr(layer, name) for layer in self.layers for name in Layer.__slots__]
        tensors += [self.embedding, self.output_norm] + ([] if self.spec.tied_head else [self.head_weight])
        return sum(t.nbytes for t in tensors if t is not None)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, float32 (https://arxiv.org/abs/1910.07467)."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.norm_eps) * weight

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(weight.dtype), weight).float()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] ids -> [T, hidden]."""
        return self.embedding[token_ids]

    def attention_inputs(
        self, layer: Layer, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, hidden] and [T] positions -> queries [T, H, D], keys and values [T, KV heads, D], rotated."""
        spec = self.spec
        y = self._product(self._norm(x, layer.attn_norm), layer.qkv)
        if layer.qkv_bias is not None:
            y = y + layer.qkv_bias
        y = y.view(len(x), -1, spec.head_dim)
        q, k, v = torch.tensor_split(y, (spec.n_heads, spec.n_heads + spec.n_kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def rest_of_layer(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream [T, hidden] after attention's output [T, H * D] and the SwiGLU MLP."""
        x = x + self._product(attended, layer.attn_output)
        gate, up = self._product(self._norm(x, layer.ffn_norm), layer.gate_up).chunk(2, 1)
        return x + self._product(F.silu(gate) * up, layer.ffn_down)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> logits [T, V], float32."""
        return F.linear(self._norm(x, self.output_norm), self.head_weight)

    def rows_are_independent(self, rows: int) -> bool:
        """Whether in tiles of ``rows`` every row gets the same bits at any place and beside any neighbours; tried on
        random rows."""
        spec, layer = self.spec, self.layers[0]
        random = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, spec.hidden, generator=random).to(self.device)
        attended = torch.randn(rows, spec.n_heads * spec.head_dim, generator=random).to(self.device)
        positions = torch.arange(rows, device=self.device) % spec.context_length

        def outputs(pick: torch.Tensor) -> torch.Tensor:
            a, b, c = x[pick], attended[pick], positions[pick]
            qkv = torch.cat(self.attention_inputs(layer, a, c), 1).flatten(1)
            return torch.cat((qkv, self.rest_of_layer(layer, a, b), self.head(a)), 1)

        return alike_in_company(outputs, rows, self.device)


def alike_in_company(outputs: Callable[[torch.Tensor], torch.Tensor], rows: int, device: torch.device) -> bool:
    """Whether each of ``rows`` rows, repeated over a whole tile, has the bits that it has among all of them.

    ``outputs`` of the rows of these numbers, [rows] -> [rows, ...].
    """
    mixed = outputs(torch.arange(rows, device=device))
    alone = (outputs(torch.full((rows,), row, device=device)) for row in range(rows))
    return all(torch.equal(bits, mixed[row].expand_as(bits)) for row, bits in enumerate(alone))


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row's attention: [H, D] over keys and values [KV heads, L, D], all float32 -> [H * D].

    Its shapes depend on the row's own position alone, and so do its bits. H / KV heads query heads share a KV head.
    """
    grouped = query.reshape(len(keys), -1, query.shape[1])
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * query.shape[1] ** -0.5
    return torch.bmm(torch.softmax(scores, -1), values).flatten()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split layout (https://arxiv.org/abs/2104.09864): pairs are (i, i + D / 2)."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
