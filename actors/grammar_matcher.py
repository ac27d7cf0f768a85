"""Where one answer stands in its grammar: masks, moves, and looking ahead for drafts.

Rules of this file: a matcher belongs to one thread at a time, and whatever it has the library do, its meter is charged
for. What looking ahead meets, it forgets: drafts never change what an answer may be, not even where the grammar becomes
too complex for the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..kernels.step import U32
from . import grammar_meter
from .grammar_meter import Meter
from .grammar_schema import Loc

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class ConstraintError(Exception):
    """The response format cannot be served: why, and the path of the field (``("response_format", "grammar")``)."""

    def __init__(self, message: str, loc: Loc) -> None:
        super().__init__(message)
        self.message = message
        self.loc = loc


FORCED_BYTES = 256  # of forced text, looked at before each token: about what a step drafts; spelling 10 kB takes 8 ms
TOO_DEAR = (
    "the grammar takes too long to follow: a text in it is very long, or what is written can be read in too many ways; "
    "simplify it so that each text has one reading (write a list as item* or item+, not as list ::= list list)"
)


class Matcher:
    """Where one choice stands in its grammar. A place that is too complex for the library leaves its matcher unusable:
    when that is met while looking ahead, it starts again from the beginning, and never looks ahead after that."""

    __slots__ = ("_eos_ids", "_far_sighted", "_matcher", "_meter", "_start", "_taken", "_tokenizer", "_too_complex")

    def __init__(self, start: LLMatcher, tokenizer: LLTokenizer, eos_ids: tuple[int, ...], meter: Meter) -> None:
        self._start = start
        self._tokenizer = tokenizer
        self._matcher = start.deep_copy()
        self._taken: list[int] = []
        self._far_sighted = True
        self._eos_ids = eos_ids
        self._meter = meter
        self._too_complex: ConstraintError | None = None

    @property
    def failure(self) -> ConstraintError | None:
        """Why the answer cannot go on, once it cannot."""
        if self._meter.overspent:
            return ConstraintError(TOO_DEAR, ("response_format",))
        return self._too_complex

    @property
    def finished(self) -> bool:
        """The answer is complete and nothing but an end token may follow (or one has been consumed)."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def accepting(self) -> bool:
        """The answer so far is a complete one."""
        return self._matcher.is_accepting()

    def fill(self, row: U32, *, end: bool = True) -> None:
        """Write the mask of the next token into ``row`` (uint32 [ceil(V / 32)], contiguous). With ``end`` false (end
        tokens ignored, or a minimum length not reached) they are let through only where nothing else may follow.

        Raises ConstraintError when the grammar turns out too complex at this place.
        """
        self._meter.earn()
        began = grammar_meter.clock()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._meter.charge(began, on_loop=False)
        if self._matcher.is_error():
            raise _too_complex(self._matcher)
        if not end and not self._matcher.is_stopped():
            kept = row.copy()
            for token_id in self._eos_ids:
                row[token_id >> 5] &= ~(1 << (token_id & 31)) & 0xFFFFFFFF
            if not row.any():
                row[:] = kept

    def consume(self, token_id: int) -> bool:
        """Move on by a token; False, and no move, when it is not allowed here (or what follows is too complex: then
        ``fill`` says so)."""
        taken = self._try(token_id, on_loop=True)
        if taken:
            self._taken.append(token_id)
        return taken

    def fill_ahead(self, rows: U32, drafts: Sequence[int], *, end_from: int | None = 0) -> int:
        """Masks for the next token and for the one after each draft: rows [len(drafts) + 1, ceil(V / 32)], as far as
        the drafts fit; nothing is allowed in the others. Returns how many fit; the matcher does not move. ``end_from``:
        the first row at which an end token counts as one (see ``fill``), None for none.

        Raises ConstraintError when the grammar turns out too complex for the next token, or has failed already.
        """
        if self.failure is not None:  # it may not be back where it stood: no token is to come of that
            raise self.failure
        fits = 0
        try:
            self.fill(rows[0], end=end_from == 0)
        except ConstraintError as error:
            self._too_complex = error
            raise
        rows[1:] = 0
        for draft in drafts:
            if not self._foresee(draft, on_loop=False):
                break
            fits += 1
            try:
                self.fill(rows[fits], end=end_from is not None and fits >= end_from)
            except ConstraintError:
                rows[fits] = 0
                break
        self._back(fits, on_loop=False)
        return fits

    def accepts(self, drafts: Sequence[int]) -> int:
        """How many of the drafts fit, one after the other, from here; the matcher does not move. End tokens fit not:
        nothing can be drafted after them."""
        fits = 0
        for draft in drafts:
            if not self._foresee(draft, on_loop=True):
                break
            fits += 1
        self._back(fits, on_loop=True)
        return fits

    def forced_tokens(self) -> list[int]:
        """The next tokens that the grammar leaves no choice about, spelled as the tokenizer would spell them: drafts,
        since another spelling of the same text is allowed too. Empty when there is a choice, or when finished."""
        if self._matcher.is_stopped() or not self._far_sighted:
            return []
        began = grammar_meter.clock()
        text = self._matcher.compute_ff_bytes()
        if len(text) > FORCED_BYTES:
            forced = self._tokenizer.tokenize_bytes(text[:FORCED_BYTES])[:-2]  # the cut may have changed the last ones
        else:
            forced = self._matcher.compute_ff_tokens()
        self._meter.charge(began, on_loop=True)
        self._back(0, on_loop=True)
        ends = (i for i, token_id in enumerate(forced) if token_id in self._eos_ids)
        return forced[: next(ends, len(forced))]

    def _try(self, token_id: int, *, on_loop: bool) -> bool:
        began = grammar_meter.clock()
        taken = self._matcher.try_consume_tokens([token_id]) == 1
        self._meter.charge(began, on_loop=on_loop)
        return taken

    def _foresee(self, draft: int, *, on_loop: bool) -> bool:
        """Look ahead by one more token, if there is a way and time for it."""
        if not self._far_sighted or self._meter.overspent or draft in self._eos_ids:
            return False
        return self._try(draft, on_loop=on_loop)

    def _back(self, count: int, *, on_loop: bool) -> None:
        """From looking ahead by so many tokens to where it stood; not all the way if there is no time for it, when the
        answer fails anyway."""
        if self._matcher.is_error() or (count and not self._matcher.rollback(count)):
            self._far_sighted = False
            self._matcher = self._start.deep_copy()
            for token_id in self._taken:
                if self._meter.overspent or not self._try(token_id, on_loop=on_loop):
                    break


def reason(matcher: LLMatcher) -> str:
    """The library's message, without its dump of the parser's state."""
    message = matcher.get_error().split("<state>")[0].split("<backtrace>")[0].strip()
    if "oneOf" in message:
        return "oneOf whose branches can hold at the same time is not supported; anyOf is"
    return message[:300] or "it is too complex"


def _too_complex(matcher: LLMatcher) -> ConstraintError:
    return ConstraintError(f"the constraint became too complex: {reason(matcher)}", ("response_format",))
