"""Text to ids and back to exact bytes, on tokenizers of both kinds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.actors.tokens import Tokenizer
from offbook.kernels.model_files import open_model
from offbook.kernels.spec import ModelSpec, RopeSpec

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True)


def spec_of(vocabulary_size: int, **values: Any) -> ModelSpec:
    return ModelSpec(
        architecture="llama", name="m", n_layers=1, hidden=2, n_heads=1, n_kv_heads=1, head_dim=2, ffn=2,
        vocabulary_size=vocabulary_size, context_length=8, norm_eps=1e-5, rope=RopeSpec(), tied_head=True, **values
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> Tokenizer:
    files = open_model(tiny_model_dir)
    return Tokenizer(files.tokenizer_json, files.spec)


@pytest.fixture(scope="module")
def smollm2(default_model_path: Path) -> Tokenizer:
    files = open_model(default_model_path)
    return Tokenizer(files.tokenizer_json, files.spec)


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(i) for i in ids)


TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|", "the sky ", "12345", "\r\n\t  ", "日本", "🎭", "é"]),
             max_size=12).map("".join),
)  # fmt: skip


@SETTINGS
@given(text=TEXT)
def test_bytes_of_ids_are_the_text(tiny: Tokenizer, text: str) -> None:
    assert joined(tiny, tiny.encode(text)) == text.encode()


@pytest.mark.model
@SETTINGS
@given(text=TEXT)
def test_bytes_of_ids_are_the_text_with_the_default_model(smollm2: Tokenizer, text: str) -> None:
    lacking = "\x04\x06\x13\x14\x16\x1d"  # its training data never held these, nor planes 4 to 11 of Unicode
    text = "".join(c for c in text if c not in lacking and not 0x40000 <= ord(c) < 0xC0000)
    assert joined(smollm2, smollm2.encode(text)) == text.encode()


@pytest.mark.model
def test_golden_ids(smollm2: Tokenizer, golden: dict[str, Any]) -> None:
    assert len(golden["cases"]) == 20
    for case in golden["cases"]:
        assert smollm2.encode(case["prompt"]) == case["prompt_token_ids"], case["prompt"]
        ids = case["greedy_token_ids"]
        text = joined(smollm2, [i for i in ids if not smollm2.is_special(i)]).decode(errors="replace")
        assert text == case["greedy_text"]
    assert set(smollm2.eos_ids) == set(golden["eos_token_ids"])


@pytest.mark.model
def test_the_default_model_s_table(smollm2: Tokenizer, default_model_path: Path) -> None:
    files = open_model(default_model_path)
    fresh = Tokenizer(files.tokenizer_json, files.spec)
    begin = time.process_time()
    assert fresh.token_bytes(2) == b"<|im_end|>"
    assert time.process_time() - begin < 1.0  # about 0.1 s on a quiet machine
    assert fresh.vocabulary_size == 49152


@pytest.mark.model
@pytest.mark.parametrize(("text", "where"), [("a\x04", r"'\\x04' at character 1"), ("é😀\U00040000", "at character 2")])
def test_text_that_the_vocabulary_cannot_express_is_refused(smollm2: Tokenizer, text: str, where: str) -> None:
    with pytest.raises(ValueError, match=where):  # the library alone would drop it from the prompt
        smollm2.encode(text)


def test_special_tokens(tiny: Tokenizer) -> None:
    assert [tiny.is_special(i) for i in (0, 1, 2, 3, 299, 10**6)] == [True, True, True, False, False, False]
    assert (tiny.id_of("<|im_end|>"), tiny.id_of("the"), tiny.bos_id, tiny.eos_ids) == (2, None, None, (2, 0))
    assert tiny.encode("<|im_start|>a<|im_end|>") == [1, *tiny.encode("a"), 2]
    assert tiny.vocabulary_size == 300


def test_bos_comes_first_where_the_model_wants_one(tiny_model_dir: Path) -> None:
    text = (tiny_model_dir / "tokenizer.json").read_text()
    with_bos = Tokenizer(text, spec_of(300, bos_id=1, add_bos=True))
    without = Tokenizer(text, spec_of(300, bos_id=1))
    assert with_bos.encode("a") == [1, *without.encode("a")]
    assert (with_bos.encode(""), without.encode("")) == ([1], [])


def test_b046_a_bos_that_is_written_in_the_text_is_not_doubled(tiny_model_dir: Path) -> None:
    text = (tiny_model_dir / "tokenizer.json").read_text()
    with_bos = Tokenizer(text, spec_of(300, bos_id=1, add_bos=True))
    written = with_bos.token_bytes(1).decode()
    assert with_bos.encode(written + "a") == with_bos.encode("a")
    assert with_bos.encode(2 * written + "a") == [1, *with_bos.encode("a")]


def test_truncation_padding_and_templates_of_the_file_are_not_ours(tiny_model_dir: Path, tiny: Tokenizer) -> None:
    layout = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    layout["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    layout["padding"] = {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    layout["padding"] |= {"pad_type_id": 0, "pad_token": "<|endoftext|>"}
    layout["post_processor"] = {"type": "TemplateProcessing", "pair": [], "single": [
        {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}}}  # fmt: skip
    text = "the sky and the sea"
    assert Tokenizer(json.dumps(layout), spec_of(300)).encode(text) == tiny.encode(text)


def test_rows_beyond_the_tokens_and_tokens_beyond_the_rows(tiny_model_dir: Path) -> None:
    text = (tiny_model_dir / "tokenizer.json").read_text()
    padded = Tokenizer(text, spec_of(320))
    assert (padded.vocabulary_size, padded.token_bytes(319)) == (300, b"")
    short = Tokenizer(text, spec_of(299))
    assert short.encode("a") == padded.encode("a")
    with pytest.raises(ValueError, match="token 299"):
        short.encode(" d")
    for outside in (299, -1):
        with pytest.raises(IndexError):
            short.token_bytes(outside)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\udc80 and more"])
def test_lone_surrogates_are_refused(tiny: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character"):
        tiny.encode(text)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "Nothing"}}'])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tokenizer cannot be read"):
        Tokenizer(text, spec_of(3))


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [["▁", "a"], ["a", "b"], ["▁a", "b"]]
    layout = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": pieces[i], "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for i in range(3)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "ByteFallback"},
        "model": {"type": "BPE", "vocab": {p: i for i, p in enumerate(pieces)}, "merges": merges,
                  "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
    }  # fmt: skip
    return Tokenizer(json.dumps(layout), spec_of(len(pieces), bos_id=1, add_bos=True, eos_ids=(2,)))


@SETTINGS
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_sentencepiece_bytes(text: str) -> None:
    tokenizer = SENTENCEPIECE
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert joined(tokenizer, ids[1:]) == text.encode()


SENTENCEPIECE = sentencepiece()


def test_sentencepiece_pieces() -> None:
    assert [SENTENCEPIECE.token_bytes(i) for i in (3 + 0x0A, 3 + 0xFF, 259, 262, 2)] == [
        b"\n", b"\xff", b" ", b" a", b"</s>"
    ]  # fmt: skip
    assert SENTENCEPIECE.encode(" ab</s>") == [1, 264, 2]
