"""Text to token ids, and token ids to exact bytes.

Rules of this file: pure, no trio; the ``tokenizers`` library encodes (it lets go of the GIL while it does), but text is
always rebuilt from each id's own bytes, so that a stream and a plain answer cannot differ.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from ..kernels.spec import ModelSpec

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads once constructed."""

    def __init__(self, tokenizer_json: str, spec: ModelSpec) -> None:
        """``tokenizer_json`` is in the format of the ``tokenizers`` library. Raises ValueError when it is not."""
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:
            raise ValueError(f"the model's tokenizer cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._kind = _kind(json.loads(tokenizer_json))
        self._rows = spec.vocabulary_size
        self._missing = self._missing_bytes()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items() if token_id < self._rows}
        self._special = frozenset(token_id for token_id in self._added if added[token_id].special)
        self._ids = {text: token_id for token_id, text in self._added.items()}
        self.bos_id = spec.bos_id
        self.eos_ids = spec.eos_ids
        self._prefix = [spec.bos_id] if spec.add_bos and spec.bos_id is not None else []

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written in it are parsed, with ``bos``, BOS comes first where the model
        wants one and the text does not begin with it.

        Raises ValueError for text that is not Unicode (lone surrogates) or that this model has no token or row for.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds a lone surrogate at character {error.start}") from None
        if self._missing and len(data.translate(None, self._missing)) < len(data):
            at = next(i for i, character in enumerate(text) if set(character.encode()) & set(self._missing))
            raise ValueError(f"the text holds {text[at]!a} at character {at}, for which this model has no token")
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if ids and max(ids) >= self._rows:
            raise ValueError(f"the text holds token {max(ids)}, which this model's vocabulary of {self._rows} lacks")
        return [*self._prefix, *ids] if bos and ids[:1] != self._prefix else ids

    def _missing_bytes(self) -> bytes:
        """The bytes that a byte-level vocabulary lacks; the library would drop them from the text without a word."""
        if self._kind != "byte-level":
            return b""
        return bytes(ord(byte) for code, byte in _ALPHABET.items() if self._tokenizer.token_to_id(chr(code)) is None)

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly the bytes that the token adds to the output; empty for an id that stands for no token.

        A special token gives its surface form. Raises IndexError outside the model's vocabulary.
        """
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token (BOS, EOS, chat markers), not text."""
        return token_id in self._special

    def id_of(self, text: str) -> int | None:
        """The id of the special or added token whose surface form is ``text``, if there is one."""
        return self._ids.get(text)

    @cached_property
    def vocabulary_size(self) -> int:
        """How many ids stand for a token (the model may have more rows)."""
        return sum(1 for text in self._bytes if text)

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self._rows
        decode = _byte_level_bytes if self._kind == "byte-level" else _sentencepiece_bytes
        for text, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if token_id < self._rows:
                table[token_id] = decode(text)
        for token_id, text in self._added.items():
            table[token_id] = text.encode()
        return table


def _kind(layout: dict[str, Any]) -> str:
    """Whether pieces are written in GPT-2's byte alphabet or in SentencePiece's. Raises ValueError for others."""
    parts = json.dumps([layout.get("pre_tokenizer"), layout.get("decoder")])
    if '"ByteLevel"' in parts:
        return "byte-level"
    if (layout.get("model") or {}).get("byte_fallback") or '"Metaspace"' in parts or '"ByteFallback"' in parts:
        return "sentencepiece"
    raise ValueError("the model's tokenizer is neither byte-level nor SentencePiece, which is not supported")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's alphabet, undone: code point -> the Latin-1 character of the byte that it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {code: chr(code) for code in printable} | {256 + i: chr(byte) for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # a piece that was never meant to be in the alphabet: its own text
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
