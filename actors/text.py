"""Tokens into text, one token at a time: whole characters only, stop strings out, special tokens unseen.

Rules of this file. There is one byte stream per choice, and one decoder: bytes that are not UTF-8 become U+FFFD as
Python's incremental decoder with ``errors="replace"`` does it; bytes that may still become a character are held, and
dropped at the end. A special token ends a character that is incomplete before it. Stop strings are matched on the
text in which special tokens are written out (so ``<|im_end|>`` works as a stop string), yet written special tokens
never appear in the returned text. Every call costs time in proportion to its own token, not to the text before it.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from .stops import StopMatcher


class Surface(msgspec.Struct, frozen=True, gc=False):
    """How one token is written."""

    data: bytes
    text: str  # on its own: broken characters show as U+FFFD
    whole: bool  # data is complete, valid UTF-8, so that text is exact
    special: bool


class Surfaces:
    """Every token's written form, worked out once; one per tokenizer, shared by all choices and by log-prob rows.

    ``token_bytes`` gives any token's bytes, a special token's being its written form; ids that the tokenizer does not
    know (a padded vocabulary) are to give ``b""``.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], is_special: Callable[[int], bool]) -> None:
        self._token_bytes = token_bytes
        self._is_special = is_special
        self._known: dict[int, Surface] = {}

    def __getitem__(self, token_id: int) -> Surface:
        found = self._known.get(token_id)
        if found is None:
            data = self._token_bytes(token_id)
            text = data.decode("utf-8", "replace")
            special = self._is_special(token_id)
            found = Surface(data, text, special or text.encode() == data, special)
            self._known[token_id] = found
        return found

    def piece(self, token_id: int) -> tuple[str, bytes]:
        """A token shown alone, for log-prob rows: its text (U+FFFD where it is not whole characters) and its bytes."""
        surface = self[token_id]
        return surface.text, surface.data


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one token added.

    ``text`` may now be shown. ``offset`` is where the token begins in the returned text, in code points; a token that
    continues a character begins where that character does, and the tokens of a removed stop string keep the offset
    that they would have had in the uncut text. ``raw_text`` is what the token added to the raw text: special tokens
    written out, stop strings kept and never held back.
    """

    text: str
    offset: int
    raw_text: str
    stopped: bool = False


class ChoiceText:
    """The text of one choice while it grows. After a piece with ``stopped`` or after ``finish``, it is over."""

    __slots__ = ("_length", "_partial", "_released", "_stops", "_surfaces", "_waiting", "_waiting_chars", "stopped")

    def __init__(self, surfaces: Surfaces, stops: tuple[str, ...] = (), *, start_offset: int = 0) -> None:
        """``start_offset``: code points that the caller has already put before this text (an echoed prompt)."""
        self._surfaces = surfaces
        self._stops = StopMatcher(stops) if stops else None
        self._length = start_offset  # code points of returned text, the waiting ones included
        self._partial = b""  # the beginning of a character
        # Text that may still become a stop string, oldest first: (written text, shown?). The first entry's
        # characters before _released have left already.
        self._waiting: deque[tuple[str, bool]] = deque()
        self._waiting_chars = 0
        self._released = 0
        self.stopped = False

    @property
    def partial(self) -> bytes:
        """The bytes, at most three, that wait for the rest of their character."""
        return self._partial

    def push(self, token_id: int, *, may_stop: bool = True) -> Piece:
        """Add a generated token. ``may_stop`` false (below a minimum length): stop strings that complete with this
        token are ordinary text. A token that ends the generation goes to ``finish`` instead."""
        surface = self._surfaces[token_id]
        offset = self._length
        if surface.special:
            broken = "\ufffd" if self._partial else ""
            self._partial = b""
            raw = broken + surface.text
            if self._stops is None:
                self._length += len(broken)
                return Piece(broken, offset, raw)
            text = self._pass_stops(((broken, True), (surface.text, False)), may_stop)
        else:
            raw = surface.text
            if self._partial or not surface.whole:
                data = self._partial + surface.data
                raw, used = utf_8_decode(data, "replace", False)
                self._partial = data[used:]
            if self._stops is None:
                self._length += len(raw)
                return Piece(raw, offset, raw)
            text = self._pass_stops(((raw, True),), may_stop)
        return Piece(text, offset, raw, self.stopped)

    def finish(self, end_id: int | None = None, *, may_stop: bool = True) -> Piece:
        """Nothing follows: text that waited is released, an incomplete character dropped. ``end_id`` is the token
        that ended the generation (EOS), unless it was pushed: it counts for stop strings and for ``raw_text``."""
        self._partial = b""
        piece = Piece("", self._length, "") if end_id is None else self.push(end_id, may_stop=may_stop)
        if self.stopped:
            return piece
        rest = self._release(self._waiting_chars)
        return Piece(piece.text + rest, piece.offset, piece.raw_text)

    def _pass_stops(self, parts: Iterable[tuple[str, bool]], may_stop: bool) -> str:
        """Queue the token's parts, look for stop strings in them, and return what may be shown now."""
        written = ""
        for text, shown in parts:
            if text:
                written += text
                self._waiting.append((text, shown))
                if shown:
                    self._length += len(text)
        self._waiting_chars += len(written)
        assert self._stops is not None
        begins = self._stops.feed(written, may_stop)
        if begins is None:
            return self._release(self._waiting_chars - self._stops.held)
        self.stopped = True
        text = self._release(self._waiting_chars - begins)
        self._waiting.clear()
        return text

    def _release(self, chars: int) -> str:
        """Let the oldest ``chars`` characters of the written text go; returns the shown ones among them."""
        self._waiting_chars -= chars
        out: list[str] = []
        while chars:
            text, shown = self._waiting[0]
            begin = self._released
            end = min(len(text), begin + chars)
            chars -= end - begin
            if shown:
                out.append(text[begin:end])
            if end == len(text):
                self._waiting.popleft()
                end = 0
            self._released = end
        return "".join(out)


def decode_all(surfaces: Surfaces, ids: Iterable[int], *, specials: bool) -> tuple[str, list[int]]:
    """The text of a whole token sequence (an echoed prompt) and the offset, in code points, at which each token begins
    in it. ``specials``: write special tokens out. An incomplete character at the end shows as U+FFFD."""
    choice = ChoiceText(surfaces)
    out: list[str] = []
    offsets: list[int] = []
    length = 0
    for token_id in ids:
        piece = choice.push(token_id)
        text = piece.raw_text if specials else piece.text
        offsets.append(length)
        out.append(text)
        length += len(text)
    if choice.partial:
        out.append("\ufffd")
    return "".join(out), offsets
