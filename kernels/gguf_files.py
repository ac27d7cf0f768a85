"""Opens GGUF files of the llama family: metadata into a ModelSpec, tensors by canonical name, the tokenizer.

Rules of this file: quantised rows are views of the memory map; only the rows of Q and K that a converter has permuted
are copied, back into half-split order, when they are asked for. Vectors come as F32 whatever their encoding.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from .gguf_format import GgufContainer, TensorExtent, read_container
from .gguf_tokenizer import tokenizer_json
from .model_checks import FAMILIES, Metadata, ModelFileError, check_model, display_name
from .rope import frequency_divisors
from .spec import ModelSpec, RopeSpec
from .weights import Tensor, Weights

PERMUTED_FAMILIES = ("llama", "mistral")  # llama.cpp's converter interleaves each head's halves in Q and K
PERMUTED_NAMES = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")

# Tokens by which llama.cpp, too, ends a generation wherever a vocabulary marks them as control tokens.
END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<EOT>", "</s>",
)  # fmt: skip
SAMPLING_KEYS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
                 "penalty_repeat": "repetition_penalty"}  # fmt: skip
CONTROL = 3  # GGUF's token type


class GgufWeights:
    """The tensors of an open GGUF file (the protocol ``Weights``)."""

    def __init__(self, path: Path, container: GgufContainer, spec: ModelSpec) -> None:
        self._path = path
        self._container: GgufContainer | None = container
        self._spec = spec

    @property
    def _open(self) -> GgufContainer:
        if self._container is None:
            raise ModelFileError(f"{self._path}: closed")
        return self._container

    def __contains__(self, name: object) -> bool:
        return name in self._open.tensors

    def names(self) -> list[str]:
        return list(self._open.tensors)

    def __getitem__(self, name: str) -> Tensor:
        extent = self._open.tensors.get(name)
        if extent is None:
            raise ModelFileError(f"{self._path}: tensor {name!r} is missing; download or convert the model again")
        n_rows = extent.shape[0] if len(extent.shape) > 1 else 1
        raw = self._open.data[extent.start : extent.start + n_rows * extent.row_bytes].reshape(n_rows, -1)
        tensor = Tensor(name, extent.kind, extent.shape, raw)
        if len(extent.shape) == 1 and extent.kind != "F32":
            tensor = Tensor(name, "F32", extent.shape, tensor.dense().view(np.uint8).reshape(1, -1))
        return self._half_split(tensor)

    def _half_split(self, tensor: Tensor) -> Tensor:
        """Undoes the converter's permutation: row (head, pair, half) of the file is row (head, half, pair) here."""
        match = PERMUTED_NAMES.fullmatch(tensor.name)
        if match is None or self._spec.architecture not in PERMUTED_FAMILIES:
            return tensor
        heads = self._spec.n_heads if match[1] == "q" else self._spec.n_kv_heads
        rows = tensor.raw.reshape(heads, self._spec.head_dim // 2, 2, -1).swapaxes(1, 2)
        return Tensor(tensor.name, tensor.kind, tensor.shape, np.ascontiguousarray(rows).reshape(tensor.raw.shape))

    def close(self) -> None:
        """Lets go of the memory map; it is unmapped once no tensor of it is in use."""
        self._container = None


def open_gguf(path: Path) -> tuple[ModelSpec, Weights, str]:
    """(spec, weights, tokenizer as ``tokenizers`` JSON) of the file at ``path``. Raises ModelFileError, OSError."""
    container = read_container(path)
    metadata = Metadata(path, container.metadata)
    spec = _spec(metadata, container)
    tensors = container.tensors
    check_model(path, spec, lambda name: tensors[name].shape if name in tensors else None, list(tensors))
    return spec, GgufWeights(path, container, spec), tokenizer_json(metadata)


def _spec(metadata: Metadata, container: GgufContainer) -> ModelSpec:
    family = metadata.need("general.architecture", str)
    if family not in FAMILIES:
        metadata.fail(f"architecture {family!r} is not supported; choose a model of {', '.join(FAMILIES)}")
    _refuse_variants(metadata, family)
    embedding = container.tensors.get("token_embd.weight")
    if embedding is None:
        metadata.fail("tensor 'token_embd.weight' is missing; download or convert the model again")
    hidden = metadata.positive(f"{family}.embedding_length")
    n_heads = metadata.positive(f"{family}.attention.head_count")
    head_dim = metadata.positive(f"{family}.attention.key_length", hidden // n_heads or 1)
    for key in ("rope.dimension_count", "attention.value_length"):
        if metadata.get(f"{family}.{key}", int, head_dim) != head_dim:
            metadata.fail(f"'{family}.{key}' differs from the head size {head_dim}, which is not supported")
    context = metadata.positive(f"{family}.context_length")
    window = metadata.get(f"{family}.attention.sliding_window", int, 0)
    bos_id, add_bos, eos_ids = _end_and_start(metadata)
    return ModelSpec(
        architecture=family,
        name=display_name(metadata.path),
        n_layers=metadata.positive(f"{family}.block_count"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=metadata.positive(f"{family}.attention.head_count_kv", n_heads),
        head_dim=head_dim,
        ffn=metadata.positive(f"{family}.feed_forward_length"),
        vocabulary_size=embedding.shape[0],
        context_length=min(context, window) if window else context,  # inside the window, full attention is the same
        norm_eps=metadata.need(f"{family}.attention.layer_norm_rms_epsilon", float),
        rope=_rope(metadata, family, head_dim, context, container),
        tied_head="output.weight" not in container.tensors,
        qkv_bias="blk.0.attn_q.bias" in container.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in container.tensors,
        bos_id=bos_id,
        add_bos=add_bos,
        eos_ids=eos_ids,
        generation_defaults=_generation_defaults(metadata),
    )


def _refuse_variants(metadata: Metadata, family: str) -> None:
    if metadata.get("split.count", int, 0) > 1:
        metadata.fail("is one part of a split model; join the parts first (llama-gguf-split --merge)")
    if metadata.get(f"{family}.expert_count", int, 0):
        metadata.fail("mixture-of-experts models are not supported yet; choose a dense model")


def _generation_defaults(metadata: Metadata) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, name in SAMPLING_KEYS.items():
        if f"general.sampling.{key}" in metadata:
            found[name] = metadata.need(f"general.sampling.{key}", float)
    return found


def _end_and_start(metadata: Metadata) -> tuple[int | None, bool, tuple[int, ...]]:
    """(BOS id, whether text prompts start with it, EOS ids with the main one first)."""
    tokens, types = metadata.get("tokenizer.ggml.tokens", list, []), metadata.get("tokenizer.ggml.token_type", list, [])
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = [metadata.need(key, int) for key in keys if key in metadata]
    control = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL}
    ends += [control[text] for text in END_TOKENS if text in control]
    sentencepiece = metadata.get("tokenizer.ggml.model", str, "") == "llama"
    llama3 = metadata.get("tokenizer.ggml.pre", str, "") in ("llama-bpe", "llama3", "llama-v3")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", bool, sentencepiece or llama3)
    if "tokenizer.ggml.bos_token_id" not in metadata:
        return None, False, tuple(dict.fromkeys(ends))
    return metadata.need("tokenizer.ggml.bos_token_id", int), add_bos, tuple(dict.fromkeys(ends))


def _rope(metadata: Metadata, family: str, head_dim: int, context: int, container: GgufContainer) -> RopeSpec:
    theta = metadata.get(f"{family}.rope.freq_base", float, 10000.0)
    extent = container.tensors.get("rope_freqs.weight")
    if extent is not None:
        return _llama3_rope(metadata, theta, head_dim, context, container, extent)
    kind = metadata.get(f"{family}.rope.scaling.type", str, "none")
    factor = metadata.get(f"{family}.rope.scaling.factor", float, 0.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeSpec(theta=theta)
    if kind == "linear" and factor > 0:
        return RopeSpec(theta=theta, scaling="linear", factor=factor)
    return metadata.fail(f"rotary scaling {kind!r} (factor {factor}) is not supported; none, linear and llama3 are")


def _llama3_rope(
    metadata: Metadata, theta: float, head_dim: int, context: int, container: GgufContainer, extent: TensorExtent
) -> RopeSpec:
    """The rule whose divisors the file's rope_freqs tensor holds; the file does not tell the rule's parameters."""
    if extent.kind != "F32" or extent.shape != (head_dim // 2,):
        metadata.fail(f"'rope_freqs.weight' should be F32 of [{head_dim // 2}]; convert the model again")
    found = container.data[extent.start : extent.start + extent.row_bytes].view(np.float32).astype(np.float64)
    for original in (8192, context):
        rope = RopeSpec(theta=theta, scaling="llama3", factor=float(found.max()), original_context=original)
        if np.allclose(frequency_divisors(rope, head_dim), found, rtol=1e-4):
            return rope
    return metadata.fail("'rope_freqs.weight' does not follow Llama 3.1's rule; use its Hugging Face directory instead")
