"""A vocabulary of the 256 bytes, a few longer pieces and one end token: any text can be spelled, token by token."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from offbook.actors.grammar import Constraint, Vocabulary, compile_constraint
from offbook.actors.grammar_matcher import Matcher
from offbook.actors.request import ResponseFormat

PIECES = ["ab", "ba", '{"', '":', "é", "b" * 3]
TABLE = [*(bytes([i]) for i in range(256)), *(p.encode() for p in PIECES), b"<end>"]
EOS = len(TABLE) - 1


class ByteTokens:
    bos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return TABLE[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


def byte_vocabulary() -> Vocabulary:
    return Vocabulary(ByteTokens(), (EOS,), len(TABLE))


def grammar(vocabulary: Vocabulary, text: str) -> Constraint:
    made = compile_constraint(ResponseFormat(type="grammar", grammar=text), vocabulary)
    assert made is not None
    return made


def schema(vocabulary: Vocabulary, value: object, **options: Any) -> Constraint:
    # through JSON text, as a request would bring it
    fmt = ResponseFormat(type="json_schema", json_schema=json.dumps(value, ensure_ascii=False))
    made = compile_constraint(fmt, vocabulary, **options)
    assert made is not None
    return made


def accepts(constraint: Constraint, text: str | bytes) -> bool:
    """Whether the text is a complete answer, fed byte by byte."""
    matcher = constraint.matcher()
    data = text.encode() if isinstance(text, str) else text
    return all(matcher.consume(byte) for byte in data) and matcher.accepting


def allowed(vocabulary: Vocabulary, matcher: Matcher, *, end: bool = True) -> list[bytes]:
    """The tokens that the mask lets through."""
    row = np.zeros(vocabulary.words, np.uint32)
    matcher.fill(row, end=end)
    ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    return [TABLE[i] for i in ids]
