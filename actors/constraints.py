"""Grammars compiled once, beside the event loop, within a time limit.

Rules of this file: at most a few compilations run at a time, and a caller waits for its own only so long; one that
outlives its limit finishes in its thread and is then forgotten or, if it was good after all, kept for the next caller.
Who had to wait for others' is told so, not that its own grammar is at fault.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import msgspec
import trio

from .config import EngineConfig
from .errors import EngineOverloaded, Failure, InvalidRequest
from .grammar import Constraint, Tokens, Vocabulary, compile_constraint
from .grammar_matcher import ConstraintError
from .request import ResponseFormat

HAD_ITS_TIME = 0.9  # of the limit, in its thread: a compilation that got so much is itself what takes long


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
        if (kept := self._kept.pop(key, None)) is not None:  # threads use this dictionary too: one call at a time
            self._kept[key] = kept
            return kept
        limit, began = self._config.grammar_compile_s, list[float]()
        with trio.move_on_after(limit):
            return await trio.to_thread.run_sync(
                self._compile, key, fmt, began, abandon_on_cancel=True, limiter=self._compiling
            )
        if not began or trio.current_time() - began[0] < limit * HAD_ITS_TIME:
            raise EngineOverloaded("other requests' grammars are being compiled: send this again", limit)
        message = f"the grammar took more than {limit:g} s to compile: simplify it"
        raise InvalidRequest(Failure(("response_format",), message, "too_complex"), status=400)

    def _compile(self, key: bytes, fmt: ResponseFormat, began: list[float]) -> Constraint | None:
        """In a worker thread. A constraint enters the cache here, whole, so that two threads cannot disagree."""
        began.append(trio.from_thread.run_sync(trio.current_time))
        if (kept := self._kept.get(key)) is not None:  # somebody else wanted the same while this one waited
            return kept
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
