"""GGUF files: what they hold comes out unchanged, and broken ones are refused with one line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from offbook.kernels.gguf_tokenizer import tokenizer_json
from offbook.kernels.model_checks import Metadata, expected_shapes
from offbook.kernels.model_files import ModelFileError, open_model
from offbook.kernels.rope import frequency_divisors
from offbook.kernels.spec import RopeSpec

F32 = npt.NDArray[np.float32]


def permuted(rows: F32, heads: int) -> F32:
    """What llama.cpp's converter does to Q and K of the llama family."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    source: Path,
    family: str,
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    without: tuple[str, ...] = (),
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Converts the Hugging Face directory ``source`` as llama.cpp would; matrices in encoding ``kind`` (None: F32)."""
    files = open_model(source)
    spec = files.spec
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_key_length(spec.head_dim)
    add_vocabulary(writer, json.loads(files.tokenizer_json), spec.eos_ids[0])
    for name in files.weights.names():
        if name in without:
            continue
        rows = files.weights[name].dense()
        if family == "llama" and (".attn_q." in name or ".attn_k." in name):
            rows = permuted(rows, spec.n_heads if ".attn_q." in name else spec.n_kv_heads)
        if kind is not None and rows.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(rows))
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, layout: dict[str, Any], eos_id: int) -> None:
    tokens = sorted(layout["model"]["vocab"], key=layout["model"]["vocab"].get)
    special = {token["id"] for token in layout["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in layout["model"]["merges"]])
    writer.add_eos_token_id(eos_id)


@pytest.fixture(scope="module")
def llama_gguf(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Tiny-Q8.F32.gguf", tiny_model_dir, "llama")


def test_llama_equals_its_source_with_q_and_k_back_in_order(llama_gguf: Path, tiny_model_dir: Path) -> None:
    ours, source = open_model(llama_gguf), open_model(tiny_model_dir)
    assert sorted(ours.weights.names()) == sorted(source.weights.names())
    for name in source.weights.names():
        assert np.array_equal(ours.weights[name].dense(), source.weights[name].dense()), name
    assert ours.spec.name == "tiny-q8"
    same = ("hidden", "ffn", "n_heads", "n_kv_heads", "head_dim", "n_layers", "vocabulary_size", "tied_head", "rope")
    assert [getattr(ours.spec, f) for f in same] == [getattr(source.spec, f) for f in same]
    assert ours.spec.eos_ids == (2, 0)  # the metadata's own first, then the other token that always ends


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_rows_stay_as_they_are(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source = request.getfixturevalue(f"tiny_{family}_dir")
    ours, theirs = open_model(write_gguf(tmp_path / "m.gguf", source, family)), open_model(source)
    assert ours.spec.qkv_bias == (family == "qwen2")
    assert ours.spec.qk_norm == (family == "qwen3")
    assert ours.spec.head_dim == theirs.spec.head_dim
    for name in theirs.weights.names():
        assert np.array_equal(ours.weights[name].dense(), theirs.weights[name].dense()), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_raw_rows_are_the_file_s_own(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    encoding = gguf.GGMLQuantizationType[kind]
    files = open_model(write_gguf(tmp_path / "m.gguf", tiny_model_dir, "llama", kind=encoding))
    for name in ("blk.0.attn_q.weight", "blk.1.attn_k.weight", "blk.0.ffn_down.weight", "token_embd.weight"):
        tensor, exact = files.weights[name], open_model(tiny_model_dir).weights[name].dense()
        assert tensor.kind == kind
        assert np.array_equal(tensor.raw, np.asarray(gguf.quants.quantize(exact, encoding)).view(np.uint8)), name
        assert tensor.dense().shape == tensor.shape == exact.shape


def test_f16_norms_come_as_f32(tiny_model_dir: Path, tmp_path: Path) -> None:
    name, half = "output_norm.weight", np.linspace(0.5, 2, 64).astype(np.float16)
    path = write_gguf(tmp_path / "m.gguf", tiny_model_dir, "llama", without=(name,),
                      extra=lambda writer: writer.add_tensor(name, half))  # fmt: skip
    tensor = open_model(path).weights[name]
    assert (tensor.kind, tensor.raw.shape) == ("F32", (1, 256))
    assert np.array_equal(tensor.dense(), half.astype(np.float32))


def test_llama3_rope_is_found_behind_its_divisors(tiny_model_dir: Path, tmp_path: Path) -> None:
    rope = RopeSpec(theta=10000.0, scaling="llama3", factor=32.0)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", frequency_divisors(rope, 16).astype(np.float32))

    path = write_gguf(tmp_path / "m.gguf", tiny_model_dir, "llama", extra=extra)
    assert open_model(path).spec.rope == rope

    def strange(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array([1, 7, 2, 9, 1, 1, 3, 4], np.float32))

    with pytest.raises(ModelFileError, match=r"rope_freqs.weight.*Llama 3.1"):
        open_model(write_gguf(tmp_path / "n.gguf", tiny_model_dir, "llama", extra=strange))


def test_linear_rope_and_other_metadata(tiny_model_dir: Path, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_eot_token_id(1)
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_sliding_window(128)
        writer.add_float32("general.sampling.temp", 0.5)

    spec = open_model(write_gguf(tmp_path / "m.gguf", tiny_model_dir, "llama", extra=extra)).spec
    assert spec.rope == RopeSpec(theta=10000.0, scaling="linear", factor=4.0)
    assert (spec.eos_ids, spec.bos_id, spec.add_bos, spec.context_length) == ((2, 1, 0), 0, True, 128)
    assert spec.generation_defaults == {"temperature": 0.5}


def refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_what_cannot_be_served_is_refused(tiny_model_dir: Path, tmp_path: Path, llama_gguf: Path) -> None:
    bare = write_gguf(tmp_path / "a.gguf", tiny_model_dir, "llama", without=("blk.1.ffn_up.weight",))
    assert "'blk.1.ffn_up.weight' is missing" in refused(bare)
    assert "architecture 'mamba' is not supported" in refused(write_gguf(tmp_path / "b.gguf", tiny_model_dir, "mamba"))

    def experts(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(8)

    def layers(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["llama.block_count"].value = 2**31

    assert "too few" in refused(write_gguf(tmp_path / "g.gguf", tiny_model_dir, "llama", extra=layers))
    assert "mixture-of-experts" in refused(write_gguf(tmp_path / "c.gguf", tiny_model_dir, "llama", extra=experts))

    def stray(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_output.bias", np.zeros(64, np.float32))

    assert "variant" in refused(write_gguf(tmp_path / "d.gguf", tiny_model_dir, "llama", extra=stray))

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    assert "'yarn'" in refused(write_gguf(tmp_path / "e.gguf", tiny_model_dir, "llama", extra=yarn))
    not_gguf = tmp_path / "f.gguf"
    not_gguf.write_bytes(b"<html>404 not found</html>" * 10)
    assert "not a GGUF file" in refused(not_gguf)
    not_gguf.write_bytes(b"")
    assert "not a GGUF file" in refused(not_gguf)


def test_a_file_cut_anywhere_is_refused(llama_gguf: Path, tmp_path: Path) -> None:
    whole = llama_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, 200, 7), *range(200, len(whole) - 1, len(whole) // 60), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        message = refused(cut)
        assert size < 24 or "truncated" in message, message


@pytest.mark.parametrize("seed", range(3))
def test_a_file_with_wrong_bytes_never_crashes(seed: int, llama_gguf: Path, tmp_path: Path) -> None:
    whole = llama_gguf.read_bytes()
    header = whole.index(b"blk.0.attn_norm") + 2000
    chance = random.Random(seed)
    broken = tmp_path / "broken.gguf"
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4))):
            data[chance.randrange(4, header)] = chance.choice((0, 255, chance.randrange(256)))
        broken.write_bytes(data)
        try:
            files = open_model(broken)
        except ModelFileError as error:
            assert "\n" not in str(error), (seed, str(error))
        else:  # a wrong byte in a string or a norm's epsilon shows nowhere here: all tensors are there all the same
            assert set(expected_shapes(files.spec)) <= set(files.weights.names())


def byte_level(pre: str | None) -> Tokenizer:
    values: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": []}
    values["tokenizer.ggml.tokens"] = ["a", "b"]
    if pre is not None:
        values["tokenizer.ggml.pre"] = pre
    return Tokenizer.from_str(tokenizer_json(Metadata(Path("m.gguf"), values)))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", ",", "ĠDON", "'", "T", "!!", "ĊĊ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", ",", "ĠDON", "'T", "!!ĊĊ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", ",", "ĠDON", "'T", "!!ĊĊ"]),
        ("gpt-2", ["It", "'s", "Ġ1234", ",", "ĠDON", "'", "T", "!!", "ĊĊ"]),
        ("default", ["It", "'", "s", "Ġ", "123", "4", ",", "ĠDON", "'", "T", "!!", "ĊĊ"]),
        (None, ["It", "'", "s", "Ġ", "123", "4", ",", "ĠDON", "'", "T", "!!", "ĊĊ"]),
    ],
)
def test_pre_tokenizers(pre: str | None, pieces: list[str]) -> None:
    found = byte_level(pre).pre_tokenizer.pre_tokenize_str("It's 1234, DON'T!!\n\n")
    assert [piece for piece, _ in found] == pieces


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"pre-tokenizer 'jamba' .* Hugging Face directory"):
        byte_level("jamba")


PIECES = ["▁", "a", "b", "c", "t", "ab", "bc", "at", "▁a", "▁ab", "cat", "abc", "▁b", "tt", "caat", "aa"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
SPM_VALUES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
}


def sentencepiece_ids(text: str) -> list[int]:
    """SentencePiece's BPE in its plainest form: merge the adjacent pair with the best score until none is left."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(PIECES.index(a + b), i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in PIECES]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    out: list[int] = []
    for symbol in symbols:
        out += [259 + PIECES.index(symbol)] if symbol in PIECES else [3 + byte for byte in symbol.encode()]
    return out


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet="abct é日\n", min_size=1, max_size=24))
def test_sentencepiece_merges_like_sentencepiece(text: str) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(Metadata(Path("m.gguf"), SPM_VALUES)))
    assert tokenizer.encode(text, add_special_tokens=False).ids == sentencepiece_ids(text)


def test_sentencepiece_without_the_leading_space() -> None:
    values = SPM_VALUES | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_str(tokenizer_json(Metadata(Path("m.gguf"), values)))
    assert tokenizer.encode("ab</s>").tokens == ["ab", "</s>"]
