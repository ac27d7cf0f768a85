"""A model family described once: which norms, which products, which attention. No tensors here.

Rules of this file: everything a device needs in order to build a decoder-only transformer, under the names of the
Hugging Face ``config.json`` where it has one. A family that differs in an ordinary way sets a field; it adds no code.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding, half-split ("NeoX") layout. ``llama3``: the piecewise rule of Llama 3.1's config."""

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer: pre-norm blocks of attention and a gated MLP, RMSNorm everywhere."""

    architecture: str  # "llama", "qwen2", "qwen3", "mistral"
    name: str  # for people and for /v1/models
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocabulary_size: int
    context_length: int
    norm_eps: float
    rope: RopeSpec
    tied_head: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    add_bos: bool = False  # whether text prompts start with BOS
    eos_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, float] = msgspec.field(default_factory=dict)  # generation_config.json's sampling
