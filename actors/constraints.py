"""Grammars compiled once, beside the event loop, within a time limit.

Rules of this file: at most a few compilations run at a time, and a caller waits for its own only so long; one that
outlives its limit finishes in its thread and is then forgotten or, if it was good after all, kept for the next caller.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import msgspec
import trio

from .config import EngineConfig
from .errors import Failure, InvalidRequest
from .grammar import Constraint, ConstraintError, Tokens, Vocabulary, compile_constraint
from .request import ResponseFormat


class Constraints:
    """All compiled response formats of an engine, the most recently used ones kept."""

    def __init__(self, config: EngineConfig, tokenizer: Tokens, eos_ids: tuple[int, ...], rows: int) -> None:
        self._config = config
        self._make_vocabulary = partial(Vocabulary, tokenizer, eos_ids, rows)
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[bytes, Constraint] = OrderedDict()
        self._compiling = trio.CapacityLimiter(config.grammar_compilers)
        self._encode = msgspec.json.Encoder().encode  # property order is part of a schema

    async def get(self, fmt: ResponseFormat | None) -> Constraint | None:
        """The constraint for a response format, None where it constrains nothing. Raises InvalidRequest (400)."""
        if fmt is None or fmt == ResponseFormat(type="text"):
            return None
        key = self._encode(fmt)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept
        with trio.move_on_after(self._config.grammar_compile_s):
            return await trio.to_thread.run_sync(
                self._compile, key, fmt, abandon_on_cancel=True, limiter=self._compiling
            )
        message = f"the grammar took more than {self._config.grammar_compile_s:g} s to compile: simplify it"
        raise InvalidRequest(Failure(("response_format",), message, "too_complex"), status=400)

    def _compile(self, key: bytes, fmt: ResponseFormat) -> Constraint | None:
        """In a worker thread. A constraint enters the cache here, whole, so that two threads cannot disagree."""
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        config = self._config
        try:
            made = compile_constraint(
                fmt, self._vocabulary, lenient=config.grammar_lenient, bytes_max=config.grammar_bytes_max
            )
        except (ConstraintError, ValueError) as error:
            loc = error.loc if isinstance(error, ConstraintError) else ("response_format",)
            raise InvalidRequest(Failure(tuple(loc), str(error), "constraint"), status=400) from None
        if made is not None:
            self._kept[key] = made
            while len(self._kept) > config.grammars_kept:
                self._kept.popitem(last=False)
        return made
