"""Constrained decoding: a response format compiled once, then one matcher a choice that says which tokens may come.

Why a layer over ``llguidance``: everything that a user can write is bounded before the library sees it, what cannot be
enforced is refused, and the rest of the engine knows five verbs only. Rules of this file: no clocks;
compiling is safe in a worker thread, a constraint may be shared, a matcher belongs to one thread at a time. Masks let
a token through only if some valid answer goes on with it; the end token passes only where the answer is complete.

JSON is written with at most one space, or one new line and its indentation, between two parts, and nothing around the
whole, so that no model can go on writing white space for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from .grammar_gbnf import GbnfError
from .grammar_lark import gbnf_to_lark
from .grammar_matcher import ConstraintError, Matcher, reason
from .grammar_meter import Meter
from .grammar_schema import Loc, SchemaError, from_text, normalise
from .grammar_stack import with_deep_stack
from .request import ResponseFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher

WHITE_SPACE = r"\x20|\x0A\x20{0,16}"

_FIELDS: dict[str, tuple[str, ...]] = {
    "text": (), "json_object": ("schema",), "json_schema": ("json_schema", "schema"), "grammar": ("grammar",),
}  # fmt: skip


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    bos_id: int | None

    def encode(self, text: str) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class Vocabulary:
    """The tokens as the grammar library wants them: built once an engine (0.2 s for 50 000 tokens)."""

    def __init__(self, tokens: Tokens, eos_ids: Iterable[int], rows: int) -> None:
        """``rows``: width of the logits, V; ids that stand for no token are never allowed."""
        from llguidance import LLParserLimits, LLTokenizer

        self.rows = rows
        self.words = -(-rows // 32)
        self.eos_ids = tuple(sorted(eos_ids))
        if not self.eos_ids:
            raise ValueError("a model without an end token cannot be constrained")
        self.tokenizer = LLTokenizer(_Wrapper(tokens, self.eos_ids, rows), eos_token=list(self.eos_ids))  # type: ignore[arg-type]
        # States and items bound the memory of one matcher (1 to 2 kB a state) and the time of one mask.
        self.limits = LLParserLimits(max_lexer_states=50_000)


class _Wrapper:
    """The interface that LLTokenizer takes a tokenizer by."""

    is_tokenizer_wrapper = True

    def __init__(self, tokens: Tokens, eos_ids: tuple[int, ...], rows: int) -> None:
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokens.bos_id
        self.tokens = [tokens.token_bytes(i) for i in range(rows)]
        self.special_token_ids = [i for i in range(rows) if tokens.is_special(i)]
        self._tokens = tokens

    def __call__(self, text: str) -> list[int]:
        ids = self._tokens.encode(text)
        return ids[1:] if ids and ids[0] == self.bos_token_id else ids


class Constraint:
    """A compiled response format. ``source``: the grammar or schema in force, as text; ``warnings``: what a lenient
    compilation left out."""

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary, source: str, warnings: tuple[str, ...]) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self.source = source
        self.warnings = warnings

    def matcher(self, meter: Meter | None = None) -> Matcher:
        """A fresh matcher at the beginning of an answer; without a ``meter`` it may take what time it likes."""
        return Matcher(self._start, self._vocabulary.tokenizer, self._vocabulary.eos_ids, meter or Meter())


def compile_constraint(
    fmt: ResponseFormat, vocabulary: Vocabulary, *, lenient: bool = False, bytes_max: int = 256 * 1024
) -> Constraint | None:
    """Compile a response format; None for ``text``. Takes milliseconds as a rule, a few seconds at the limits.

    Raises ConstraintError for what is malformed, too large, unsatisfiable or not enforceable; ``lenient`` leaves the
    unenforceable out instead and says so in ``warnings``.
    """
    for field in ("schema", "json_schema", "grammar"):
        if getattr(fmt, field) is not None and field not in _FIELDS[fmt.type]:
            raise ConstraintError(f"not allowed with type '{fmt.type}'", ("response_format", field))
    if fmt.type == "text":
        return None
    if fmt.type == "grammar":
        return _grammar(fmt.grammar, vocabulary, bytes_max)
    schema, loc = _schema_of(fmt, bytes_max)
    try:
        schema, warnings = normalise(schema, lenient=lenient)
    except SchemaError as error:
        raise ConstraintError(error.message, (*loc, *error.loc)) from None
    source = _text(schema, loc)
    if len(source) > 2 * bytes_max:
        raise ConstraintError(f"the schema is longer than {bytes_max} bytes", loc)
    return _json(source, vocabulary, warnings, loc, lenient)


def _grammar(text: str | None, vocabulary: Vocabulary, bytes_max: int) -> Constraint:
    loc = ("response_format", "grammar")
    if text is None:
        raise ConstraintError("Field required", loc)
    if len(text) > bytes_max:
        raise ConstraintError(f"the grammar is longer than {bytes_max} bytes", loc)
    try:
        lark = gbnf_to_lark(text)
    except GbnfError as error:
        raise ConstraintError(str(error), loc) from None
    return _compile(lark, vocabulary, text, [], loc)


def _json(source: str, vocabulary: Vocabulary, warnings: list[str], loc: Loc, lenient: bool) -> Constraint:
    from llguidance import LLMatcher

    overrides: Any = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient, "coerce_one_of": lenient}
    try:
        grammar = LLMatcher.grammar_from_json_schema(source, overrides=overrides)
    except ValueError as error:
        raise ConstraintError(f"the schema cannot be used: {error}", loc) from None
    return _compile(grammar, vocabulary, source, warnings, loc)


def _compile(grammar: str, vocabulary: Vocabulary, source: str, warnings: list[str], loc: Loc) -> Constraint:
    import numpy as np
    from llguidance import LLMatcher

    try:
        start = with_deep_stack(lambda: LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=vocabulary.limits))
    except MemoryError as error:
        raise ConstraintError(f"{error}; try again later", loc) from None
    row = np.zeros(vocabulary.words, np.uint32)
    if not start.is_error():
        start.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)  # also warms what all its copies begin with
    if start.is_error():
        raise ConstraintError(reason(start), loc)
    if not row.any():
        raise ConstraintError("nothing that this model can write satisfies it", loc)
    return Constraint(start, vocabulary, source, (*warnings, *start.get_grammar_warnings()))


def _schema_of(fmt: ResponseFormat, bytes_max: int) -> tuple[dict[str, Any], Loc]:
    """The schema of a JSON format as an object, and where it was."""
    given = [f for f in _FIELDS[fmt.type] if getattr(fmt, f) is not None]
    if not given and fmt.type == "json_object":
        return {"type": "object"}, ("response_format",)
    loc: Loc = ("response_format", given[0] if given else "json_schema")
    if len(given) != 1:
        raise ConstraintError("give either json_schema or schema, not both" if given else "Field required", loc)
    value = _decoded(getattr(fmt, given[0]), loc, bytes_max)
    if isinstance(value, dict) and "schema" in value and value.keys() <= {"name", "schema", "strict", "description"}:
        for key, kind in (("name", str), ("strict", bool), ("description", str)):
            if not isinstance(value.get(key), kind | None):
                raise ConstraintError(f"must be of type {kind.__name__}", (*loc, key))
        loc = (*loc, "schema")
        value = _decoded(value["schema"], loc, bytes_max)
    if not isinstance(value, dict):
        raise ConstraintError("a schema must be a JSON object", loc)
    return value, loc


def _decoded(value: object, loc: Loc, bytes_max: int) -> object:
    if not isinstance(value, str):
        return value
    if len(value) > bytes_max:
        raise ConstraintError(f"the schema is longer than {bytes_max} bytes", loc)
    return from_text(value, lambda message: ConstraintError(message, loc))


def _text(schema: dict[str, Any], loc: Loc) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (ValueError, RecursionError, TypeError) as error:
        reason = "it holds a lone surrogate" if isinstance(error, UnicodeEncodeError) else str(error)
        raise ConstraintError(f"the schema cannot be written as JSON: {reason}", loc) from None
    return text
