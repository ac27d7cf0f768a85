"""What any model file must hold, whatever its format: typed metadata, a supported family, every tensor in its shape.

Rules of this file: a file that cannot be served is refused here with one line that names the file, what is wrong and
what to do; nothing later has to doubt a ``ModelSpec`` or its weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .spec import ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

T = TypeVar("T")

_QUANT_SUFFIX = re.compile(r"[-._](i?q\d\w*|bf16|fp?16|fp?32)$", re.IGNORECASE)


class ModelFileError(Exception):
    """A model file or directory that cannot be served; the message is one line that says what to do."""


class Metadata:
    """A file's key-value part with typed access; every failure is a ModelFileError that names the key."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {problem}")

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of ``key``, or ``default`` where the file has none (or a null)."""
        return self.need(key, kind) if key in self else default

    def need(self, key: str, kind: type[T]) -> T:
        """The value of ``key`` as ``kind`` (an int is taken for a float). Raises ModelFileError."""
        value = self.values.get(key)
        if value is None:
            self.fail(f"{key!r} is missing from its metadata; convert the model again")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(f"{key!r} should be {kind.__name__}, not {value!r:.60}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """A size: an int of at least 1."""
        value = self.need(key, int) if default is None else self.get(key, int, default)
        if value < 1:
            self.fail(f"{key!r} should be at least 1, not {value}")
        return value


def display_name(path: Path) -> str:
    """The served id of a model: its file's or folder's name, lower case, without the quantisation's suffix."""
    name = path.name
    if path.suffix == ".gguf":
        name = _QUANT_SUFFIX.sub("", path.stem)
    elif path.parent.name == "snapshots":  # the hub's cache: models--<owner>--<name>/snapshots/<commit>
        name = path.parent.parent.name.rsplit("--", 1)[-1]
    return name.lower() or "model"


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape ([out, in] or [n]) of every tensor that a device reads."""
    q_out, kv_out = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (spec.vocabulary_size, spec.hidden),
        "output_norm.weight": (spec.hidden,),
    }
    if not spec.tied_head:
        shapes["output.weight"] = (spec.vocabulary_size, spec.hidden)
    for layer in range(spec.n_layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (spec.hidden,),
            "attn_q.weight": (q_out, spec.hidden),
            "attn_k.weight": (kv_out, spec.hidden),
            "attn_v.weight": (kv_out, spec.hidden),
            "attn_output.weight": (spec.hidden, q_out),
            "ffn_norm.weight": (spec.hidden,),
            "ffn_gate.weight": (spec.ffn, spec.hidden),
            "ffn_up.weight": (spec.ffn, spec.hidden),
            "ffn_down.weight": (spec.hidden, spec.ffn),
        }
        if spec.qkv_bias:
            block |= {"attn_q.bias": (q_out,), "attn_k.bias": (kv_out,), "attn_v.bias": (kv_out,)}
        if spec.qk_norm:
            block |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def check_model(
    path: Path, spec: ModelSpec, shape_of: Callable[[str], tuple[int, ...] | None], names: list[str]
) -> None:
    """Raises ModelFileError unless the sizes fit each other and the file holds exactly the tensors of ``spec``.

    ``shape_of`` gives a canonical tensor's shape or None; ``names`` are all the file's tensors, canonical where known.
    """
    if spec.n_heads % spec.n_kv_heads:
        raise ModelFileError(f"{path}: {spec.n_heads} heads cannot share {spec.n_kv_heads} KV heads evenly")
    if spec.head_dim % 2:
        raise ModelFileError(f"{path}: rotary embeddings need an even head size, not {spec.head_dim}")
    if spec.n_layers > len(names):
        raise ModelFileError(f"{path}: it holds {len(names)} tensors, too few for {spec.n_layers} layers")
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        found = shape_of(name)
        if found is None:
            raise ModelFileError(f"{path}: tensor {name!r} is missing; download or convert the model again")
        if found != shape:
            raise ModelFileError(f"{path}: tensor {name!r} has shape {list(found)}, its metadata says {list(shape)}")
    for token in (*spec.eos_ids, *(() if spec.bos_id is None else (spec.bos_id,))):
        if not 0 <= token < spec.vocabulary_size:
            raise ModelFileError(f"{path}: BOS or EOS id {token} is outside the vocabulary of {spec.vocabulary_size}")
    for name in names:
        if name not in expected and name not in ("rope_freqs.weight", "output.weight"):
            raise ModelFileError(f"{path}: tensor {name!r} is of a model variant that is not supported")
