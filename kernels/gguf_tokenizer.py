"""Builds a tokenizer for the ``tokenizers`` library out of a GGUF file's vocabulary.

Rules of this file: ids are the file's own. Two kinds exist: byte-level BPE with merges ("gpt2"), whose pre-tokenizer is
named and must be known (a wrong one gives plausible wrong ids), and SentencePiece BPE with scores ("llama").
"""

from __future__ import annotations

import json
from typing import Any

from .model_checks import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _split(*patterns: str) -> list[dict[str, Any]]:
    """Each pattern's matches become pieces of their own, and so does what lies between them."""
    return [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]


_DIGITS = {"type": "Digits", "individual_digits": True}

# Pre-tokenizers by the names that llama.cpp's converter gives them.
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": _split(*_DEFAULT),
    "smollm": [_DIGITS, *_split(_GPT2)],
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "gpt-2": _split(_GPT2),
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "gpt2": "gpt-2"}


def tokenizer_json(metadata: Metadata) -> str:
    """The file's tokenizer as ``tokenizers`` JSON. Raises ModelFileError."""
    tokens = metadata.need("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if len(types) != len(tokens) or not all(isinstance(t, str) for t in tokens):
        metadata.fail("its vocabulary is broken; convert the model again")
    kind = metadata.need("tokenizer.ggml.model", str)
    if kind == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif kind == "llama":
        parts = _sentencepiece(metadata, tokens, types)
    else:
        metadata.fail(f"tokenizer {kind!r} is not supported; use the model's Hugging Face directory instead")
    added = [
        {"id": i, "content": text, "special": types[i] != USER_DEFINED, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for i, text in enumerate(tokens)
        if types[i] in (CONTROL, USER_DEFINED) and text
    ]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
    return json.dumps(whole | parts, ensure_ascii=False)


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    vocabulary: dict[str, int] = {}
    for i, text in enumerate(tokens):
        vocabulary.setdefault(text, i)
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, "dropout": None, "unk_token": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False} | options  # fmt: skip


def _byte_level(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    named = metadata.get("tokenizer.ggml.pre", str, "default")
    pre = ALIASES.get(named, named)
    if pre not in PRE_TOKENIZERS:
        metadata.fail(f"pre-tokenizer {named!r} is not supported; use the model's Hugging Face directory instead")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # The space that parts a merge's halves cannot occur in them: byte-level text writes it as another character.
    merges = [(left, right) for left, _, right in (str(m).partition(" ") for m in _merges(metadata))]
    known = set(tokens)
    for left, right in merges:
        if left not in known or right not in known or left + right not in known:
            metadata.fail(f"its merge {left + ' ' + right!r} is not of its vocabulary; convert the model again")
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*PRE_TOKENIZERS[pre], byte_level]},
        "decoder": byte_level,
        "model": _bpe(tokens, merges, ignore_merges=pre == "llama-bpe"),
    }


def _merges(metadata: Metadata) -> list[Any]:
    return metadata.need("tokenizer.ggml.merges", list)


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = metadata.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        metadata.fail("its vocabulary's scores are broken; convert the model again")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    undo: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), replace],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": undo},
        "model": _bpe(
            tokens, _merges_by_score(tokens, types, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece does: any two pieces that make a piece, the best-scored first."""
    pieces = {text: i for i, text in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED) and text}
    found: list[tuple[float, int, int, str, str]] = []
    for text, i in pieces.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pieces and right in pieces:
                found.append((-scores[i], pieces[left], pieces[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(found)]
