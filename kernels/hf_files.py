"""Opens Hugging Face directories: config.json, safetensors, tokenizer.json, generation_config.json.

Rules of this file: tensors are views of the memory-mapped files under canonical (GGUF's) names; rows of Q and K are
half-split already. A setting that would change the arithmetic and is not known is refused, never ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .model_checks import Metadata, ModelFileError, check_model, display_name
from .spec import ModelSpec, RopeSpec
from .weights import Tensor, Weights

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
KINDS = {"F32": 4, "F16": 2, "BF16": 2}  # safetensors' dtype names are GGUF's; bytes per value

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class SafetensorsWeights:
    """The tensors of a directory's safetensors files (the protocol ``Weights``)."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._path = path
        self._tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelFileError(f"{self._path}: tensor {name!r} is missing; download the model again")
        tensor = self._tensors[name]
        if len(tensor.shape) == 1 and tensor.kind != "F32":
            return Tensor(name, "F32", tensor.shape, tensor.dense().view(np.uint8).reshape(1, -1))
        return tensor

    def close(self) -> None:
        """Lets go of the memory maps; they are unmapped once no tensor of them is in use."""
        self._tensors = {}


def open_hugging_face(path: Path) -> tuple[ModelSpec, Weights, str]:
    """(spec, weights, tokenizer as ``tokenizers`` JSON) of the directory. Raises ModelFileError, OSError."""
    config = Metadata(path / "config.json", _json(path, "config.json"))
    tokenizer_text = _text(path, "tokenizer.json")
    tensors = {t.name: t for file in _weight_files(path) for t in _read_safetensors(file)}
    spec = _spec(path, config, tensors, tokenizer_text)
    if spec.tied_head:
        tensors.pop("output.weight", None)
    check_model(path, spec, lambda name: tensors[name].shape if name in tensors else None, list(tensors))
    return spec, SafetensorsWeights(path, tensors), tokenizer_text


def _text(path: Path, name: str) -> str:
    try:
        return (path / name).read_text("utf-8")
    except FileNotFoundError:
        hint = "write one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        problem = f"no {name}; {hint if name == 'tokenizer.json' else 'give a complete Hugging Face directory'}"
        raise ModelFileError(f"{path}: {problem}") from None
    except UnicodeDecodeError:
        raise ModelFileError(f"{path / name}: not UTF-8; download the model again") from None


def _json(path: Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    if optional and not (path / name).exists():
        return {}
    try:
        value = json.loads(_text(path, name))
    except ValueError as error:
        raise ModelFileError(f"{path / name}: not valid JSON ({error}); download the model again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path / name}: should be a JSON object; download the model again")
    return value


def _weight_files(path: Path) -> list[Path]:
    if (path / "model.safetensors.index.json").exists():
        index = Metadata(path / "model.safetensors.index.json", _json(path, "model.safetensors.index.json"))
        names = sorted(set(map(str, index.need("weight_map", dict).values())))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (path / name).is_file():
            raise ModelFileError(f"{path}: no {name}; download the model again (safetensors, not pickled .bin files)")
    return [path / name for name in names]


def _read_safetensors(path: Path) -> Iterator[Tensor]:
    """Every tensor of one file, as views. Format: https://github.com/huggingface/safetensors (8-byte length, JSON)."""

    def fail(problem: str) -> ModelFileError:
        return ModelFileError(f"{path}: {problem}; download the model again")

    if path.stat().st_size < 10:
        raise fail("not a safetensors file")
    data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
    start = 8 + int(data[:8].view("<u8")[0])
    if start > len(data):
        raise fail("broken or truncated: its header does not fit the file")
    try:
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        entries = [
            (n, e["dtype"], tuple(map(int, e["shape"])), *map(int, e["data_offsets"])) for n, e in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise fail("broken: its header cannot be read") from None
    for name, kind, shape, begin, end in entries:
        if kind not in KINDS:
            raise ModelFileError(f"{path}: tensor {name!r} is {kind}; only F32, F16 and BF16 are supported")
        if not 0 <= begin <= end <= len(data) - start:
            raise fail(f"truncated: tensor {name!r} ends at byte {start + end}, the file has {len(data)}")
        if not 1 <= len(shape) <= 2 or end - begin != math.prod(shape) * KINDS[kind] or end == begin:
            raise fail(f"broken: tensor {name!r} does not have the size of its shape {list(shape)}")
        rows = data[start + begin : start + end].reshape(shape[0] if len(shape) > 1 else 1, -1)
        yield Tensor(_canonical(name), kind, shape, rows)


def _canonical(name: str) -> str:
    match = LAYER_NAME.fullmatch(name)
    if match and match[2] in LAYER_NAMES:
        return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return TOP_NAMES.get(name, name)


def _spec(path: Path, config: Metadata, tensors: dict[str, Tensor], tokenizer_text: str) -> ModelSpec:
    family = _family(config)
    hidden, n_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    generation = Metadata(path / "generation_config.json", _json(path, "generation_config.json", optional=True))
    context = config.positive("max_position_embeddings")
    window = config.get("sliding_window", int, 0) if config.get("use_sliding_window", bool, family == "mistral") else 0
    bos_id, add_bos = _bos(path, config, tokenizer_text)
    return ModelSpec(
        architecture=family,
        name=display_name(path.resolve()),
        n_layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=config.positive("num_key_value_heads", n_heads),
        head_dim=config.positive("head_dim", hidden // n_heads or 1),
        ffn=config.positive("intermediate_size"),
        vocabulary_size=config.positive("vocab_size"),
        context_length=min(context, window) if window else context,  # inside the window, full attention is the same
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        rope=_rope(config),
        tied_head=config.get("tie_word_embeddings", bool, False) or "output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        bos_id=bos_id,
        add_bos=add_bos,
        eos_ids=_ids(generation, "eos_token_id") or _ids(config, "eos_token_id"),
        generation_defaults={key: generation.need(key, float) for key in SAMPLING_KEYS if key in generation},
    )


def _family(config: Metadata) -> str:
    names = config.get("architectures", list, []) or ["(none named)"]
    family = FAMILIES.get(str(names[0]))
    if family is None:
        config.fail(f"architecture {names[0]} is not supported; choose a model of {', '.join(FAMILIES)}")
    if "quantization_config" in config:
        config.fail("quantised safetensors are not supported; choose the unquantised model or a GGUF file of it")
    if config.get("hidden_act", str, "silu") != "silu":
        config.fail(f"activation {config.values['hidden_act']!r} is not supported; 'silu' is")
    return family


def _ids(config: Metadata, key: str) -> tuple[int, ...]:
    """A token id or a list of them."""
    if isinstance(config.values.get(key), list):
        values = config.need(key, list)
        if not all(isinstance(v, int) for v in values):
            config.fail(f"{key!r} should hold token ids, not {values!r:.60}")
        return tuple(values)
    return (config.need(key, int),) if key in config else ()


def _bos(path: Path, config: Metadata, tokenizer_text: str) -> tuple[int | None, bool]:
    """(BOS id, whether text prompts start with it): tokenizer_config.json's word, else the tokenizer's template."""
    try:
        post_processor = json.loads(tokenizer_text).get("post_processor")
    except (ValueError, AttributeError):
        raise ModelFileError(f"{path / 'tokenizer.json'}: not a tokenizer; download the model again") from None
    template = _template_start(post_processor or {})
    settings = Metadata(path / "tokenizer_config.json", _json(path, "tokenizer_config.json", optional=True))
    bos_id = template if template is not None else next(iter(_ids(config, "bos_token_id")), None)
    return bos_id, settings.get("add_bos_token", bool, template is not None) and bos_id is not None


def _template_start(post_processor: dict[str, Any]) -> int | None:
    """The id of the special token that a TemplateProcessing post-processor puts first, if it does."""
    for part in post_processor.get("processors", [post_processor]):
        if part.get("type") == "TemplateProcessing" and part.get("single"):
            special = part["single"][0].get("SpecialToken")
            if special is not None:
                return int(part["special_tokens"][special["id"]]["ids"][0])
    return None


def _rope(config: Metadata) -> RopeSpec:
    """From ``rope_theta`` and ``rope_scaling``, or the newer ``rope_parameters`` that holds both."""
    values = config.get("rope_parameters", dict, {}) or config.get("rope_scaling", dict, {})
    scaling = Metadata(config.path, values)
    theta = scaling.get("rope_theta", float, config.get("rope_theta", float, 10000.0))
    kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=scaling.need("factor", float))
    if kind != "llama3":
        config.fail(f"rotary scaling {kind!r} is not supported; default, linear and llama3 are")
    return RopeSpec(
        theta=theta,
        scaling="llama3",
        factor=scaling.need("factor", float),
        low_freq_factor=scaling.need("low_freq_factor", float),
        high_freq_factor=scaling.need("high_freq_factor", float),
        original_context=scaling.positive("original_max_position_embeddings"),
    )
