"""Hugging Face directories: every layout opens alike, and what would change the arithmetic is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from offbook.kernels.model_files import ModelFileError, open_model
from offbook.kernels.spec import RopeSpec


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "Copy-Of-Tiny"))


def change(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (old | values).items() if v is not ...}))


def refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_spec_and_tensors(folder: Path) -> None:
    files = open_model(folder)
    spec, source = files.spec, load_file(folder / "model.safetensors")
    assert (spec.architecture, spec.name, spec.n_layers, spec.n_heads, spec.n_kv_heads) == (
        "llama", "copy-of-tiny", 2, 4, 2)  # fmt: skip
    assert (spec.hidden, spec.head_dim, spec.ffn, spec.vocabulary_size) == (64, 16, 160, 300)
    assert (spec.tied_head, spec.bos_id, spec.add_bos, spec.eos_ids) == (True, None, False, (2, 0))
    assert spec.generation_defaults == {"temperature": 0.8}
    assert np.array_equal(
        files.weights["blk.1.attn_q.weight"].dense(), source["model.layers.1.self_attn.q_proj.weight"]
    )
    assert np.array_equal(files.weights["token_embd.weight"].dense(), source["model.embed_tokens.weight"])
    assert files.tokenizer_json == (folder / "tokenizer.json").read_text()
    files.weights.close()
    assert files.weights.names() == []


def test_several_files_with_an_index(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    before = open_model(folder)
    expected = {name: before.weights[name].dense().copy() for name in before.weights.names()}
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    where = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: whole[name] for name in names if where[name] == file}, folder / file)
    change(folder, "model.safetensors.index.json", weight_map=where, metadata={})
    weights = open_model(folder).weights
    assert sorted(weights.names()) == sorted(expected)
    assert all(np.array_equal(weights[name].dense(), rows) for name, rows in expected.items())
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "no model-00002-of-00003.safetensors" in refused(folder)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_half_precision(dtype: torch.dtype, kind: str, folder: Path) -> None:
    source = {n: torch.from_numpy(a).to(dtype) for n, a in load_file(folder / "model.safetensors").items()}
    save_torch_file(source, folder / "model.safetensors")
    weights = open_model(folder).weights
    down, norm = weights["blk.0.ffn_down.weight"], weights["blk.0.ffn_norm.weight"]
    assert (down.kind, down.raw.shape, norm.kind) == (kind, (64, 320), "F32")
    assert np.array_equal(down.dense(), source["model.layers.0.mlp.down_proj.weight"].float().numpy())
    assert np.array_equal(norm.dense(), source["model.layers.0.post_attention_layernorm.weight"].float().numpy())


def test_rotary_settings(folder: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    expected = RopeSpec(theta=5e5, scaling="llama3", factor=8.0)
    change(folder, rope_scaling=llama3, rope_theta=500000)
    assert open_model(folder).spec.rope == expected
    change(folder, rope_scaling=..., rope_theta=..., rope_parameters=llama3 | {"rope_theta": 5e5})
    assert open_model(folder).spec.rope == expected
    change(folder, rope_parameters=..., rope_scaling={"type": "linear", "factor": 2}, rope_theta=1e4)
    assert open_model(folder).spec.rope == RopeSpec(scaling="linear", factor=2.0)
    change(folder, rope_scaling={"type": "yarn", "factor": 2.0})
    assert "'yarn' is not supported" in refused(folder)


def test_the_window_bounds_the_context(make_tiny_model: Callable[..., Path]) -> None:
    assert open_model(make_tiny_model("MistralForCausalLM", sliding_window=128)).spec.context_length == 128
    assert open_model(make_tiny_model("MistralForCausalLM", sliding_window=None)).spec.context_length == 512
    assert open_model(make_tiny_model("Qwen3ForCausalLM", sliding_window=128)).spec.context_length == 512


def test_bos_comes_from_the_tokenizer(folder: Path) -> None:
    change(folder, bos_token_id=1)
    assert (open_model(folder).spec.bos_id, open_model(folder).spec.add_bos) == (1, False)
    template: dict[str, Any] = {"type": "TemplateProcessing", "pair": []}
    template |= {"single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A"}}]}
    template["special_tokens"] = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    nested = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    for post_processor in (template, nested):
        change(folder, "tokenizer.json", post_processor=post_processor)
        assert (open_model(folder).spec.bos_id, open_model(folder).spec.add_bos) == (0, True)
    change(folder, "tokenizer_config.json", add_bos_token=False)
    assert open_model(folder).spec.add_bos is False


def test_eos_falls_back_to_the_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    spec = open_model(folder).spec
    assert (spec.eos_ids, spec.generation_defaults) == ((2,), {})


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": None}, "not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "GGUF"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": "2"}, "should be int"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"num_hidden_layers": 10**9}, "too few"),
        ({"num_hidden_layers": 3}, "'blk.2.attn_norm.weight' is missing"),
        ({"num_hidden_layers": 1}, "variant"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"head_dim": 15}, "even head size"),
        ({"vocab_size": 301}, "shape [300, 64], its metadata says [301, 64]"),
        ({"bos_token_id": 300}, "outside the vocabulary"),
    ],
)
def test_configs_that_are_refused(values: dict[str, Any], problem: str, folder: Path) -> None:
    change(folder, **values)
    assert problem in refused(folder)


def test_broken_directories_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty")
    for name, hint in (("tokenizer.json", "AutoTokenizer"), ("model.safetensors", "download the model again")):
        (folder / name).rename(folder / "aside")
        assert hint in refused(folder)
        (folder / "aside").rename(folder / name)
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in refused(folder)


def test_a_cut_safetensors_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in [*range(0, 300, 11), *range(300, len(whole), len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert "model.safetensors: " in refused(folder), size
