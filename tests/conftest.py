"""Models for the tests: the default one, tiny random ones that open in milliseconds, and the golden truth.

Rules of this file: fixtures that several rooms need; everything random is seeded.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings

from offbook.kernels.default_model import fetch_default_model

Arrays = dict[str, npt.NDArray[np.float32]]

TINY_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_MERGES = (
    "t h", "th e", "Ġ t", "Ġt h", "Ġth e", "i n", "e r", "Ġ a", "o n", "r e", "a t", "e n", "Ġ s", "Ġ w", "o r",
    "i s", "Ġ i", "Ġi s", "Ġ o", "Ġo f", "a n", "an d", "Ġ and", "e s", "in g", "Ġ c", "Ġ b", "Ġ f", "o u", "Ġ m",
    "s k", "sk y", "Ġ sky", "l o", "Ġ l", "l l", "e d", "Ġ p", "a r", "Ġ h", "Ġ d",
)  # fmt: skip

# The same examples every time, so that a red run means a change; OFFBOOK_FUZZ=1 looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("fuzz" if os.environ.get("OFFBOOK_FUZZ") else "steady")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, fetched into the cache directory the first time."""
    return fetch_default_model()


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Prompts, ids, greedy continuations and logprobs of the default model in float32, by another implementation."""
    packed = Path(__file__).parent / "kernels" / "data" / "golden.json.gz"
    value: dict[str, Any] = json.loads(gzip.decompress(packed.read_bytes()))
    return value


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_tiny_model(architecture="LlamaForCausalLM", seed=0, bias=False, **config)``: a new Hugging Face directory.

    2 layers, hidden 64, 4 heads over 2 KV heads, 300 tokens of byte-level BPE; ``config`` overrides config.json's keys.
    """

    def make(architecture: str = "LlamaForCausalLM", *, seed: int = 0, bias: bool = False, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp("tiny") / "tiny"
        folder.mkdir()
        write_tiny_model(folder, architecture, seed, bias, config)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_tiny_model: Callable[..., Path]) -> Path:
    """A random Llama: tied head, no BOS, EOS ``<|im_end|>``."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def tiny_qwen2_dir(make_tiny_model: Callable[..., Path]) -> Path:
    """A random Qwen2: biases on Q, K and V, untied head."""
    return make_tiny_model("Qwen2ForCausalLM", seed=2, bias=True, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tiny_qwen3_dir(make_tiny_model: Callable[..., Path]) -> Path:
    """A random Qwen3: norms on Q and K, a head size that is not hidden / heads."""
    return make_tiny_model("Qwen3ForCausalLM", seed=3, head_dim=32)


def write_tiny_model(folder: Path, architecture: str, seed: int, bias: bool, config: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    tokenizer = tiny_tokenizer()
    whole: dict[str, Any] = {
        "architectures": [architecture],
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    } | config
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.8}))
    save_file(tiny_weights(whole, seed, bias, qk_norm=architecture.startswith("Qwen3")), folder / "model.safetensors")


def tiny_weights(config: dict[str, Any], seed: int, bias: bool, *, qk_norm: bool) -> Arrays:
    random = np.random.default_rng(seed)
    hidden, ffn, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_out, kv_out = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(out: int, inputs: int, scale: float = 1.5) -> npt.NDArray[np.float32]:
        return np.asarray(random.standard_normal((out, inputs)) * scale / np.sqrt(inputs), np.float32)

    def norm(n: int) -> npt.NDArray[np.float32]:
        return np.asarray(1 + 0.2 * random.standard_normal(n), np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden, 4.0), "model.norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocabulary, hidden, 4.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {"self_attn.q_proj": (q_out, hidden), "self_attn.k_proj": (kv_out, hidden)}
        shapes |= {"self_attn.v_proj": (kv_out, hidden), "self_attn.o_proj": (hidden, q_out)}
        shapes |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
        for name, (out, inputs) in shapes.items():
            tensors[f"{at}{name}.weight"] = matrix(out, inputs)
            if bias and name[10:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{at}{name}.bias"] = (random.standard_normal(out) * 0.5).astype(np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = norm(hidden)
        for name in ("self_attn.q_norm", "self_attn.k_norm") if qk_norm else ():
            tensors[f"{at}{name}.weight"] = norm(head)
    return tensors


def tiny_tokenizer() -> dict[str, Any]:
    """A byte-level BPE of 300 tokens: three special ones, the 256 bytes, TINY_MERGES."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(code) for code in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [*TINY_SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in TINY_MERGES)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": i, "content": text, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for i, text in enumerate(TINY_SPECIAL)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in TINY_MERGES],
        },
    }
