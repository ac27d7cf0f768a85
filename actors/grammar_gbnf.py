"""GBNF, the grammar notation of llama.cpp, read into a small tree.

Rules of this file: the tree means exactly what the text says; depth and counts are bounded before anything is built,
and every refusal says where in the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEPTH_MAX = 24  # nested parentheses
COUNT_MAX = 10_000  # the largest n and m of {n,m}

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNT = re.compile(r"\{\s*(\d{1,20})\s*(?:(,)\s*(\d{1,20})?\s*)?\}")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_PLAIN = re.compile(r'[^"\\\r\n]+')  # the part of a string that stands for itself
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)


class GbnfError(Exception):
    """The text is not a grammar that can be used; the message says why and where."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of inclusive code-point ranges (sorted, apart)."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Literal:
    """Characters one after the other; at least one."""

    text: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    node: Node
    least: int
    most: int | None  # None = no limit


Node = Chars | Literal | Rule | Sequence | Choice | Repeat


def parse(text: str) -> dict[str, Node]:
    """Name -> body of each rule, in order. Raises GbnfError for text that is not GBNF."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GbnfError(f"the grammar holds a lone surrogate at character {error.start}") from None
    return _Parser(text).grammar()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def grammar(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(lines=True)
        while self.at < len(self.text):
            name = self._name()
            if name in rules:
                raise self._error(f"rule '{name}' is defined twice")
            self._skip(lines=False)
            if not self.text.startswith("::=", self.at):
                raise self._error(f"expected '::=' after '{name}'")
            self.at += 3
            self._skip(lines=True)
            rules[name] = self._choice()
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self._error("expected the end of the line")
            self._skip(lines=True)
        if "root" not in rules:
            raise GbnfError("the grammar has no rule named 'root'")
        return rules

    def _choice(self) -> Node:
        parts = [self._sequence()]
        while self._peek() == "|":
            self.at += 1
            self._skip(lines=True)
            parts.append(self._sequence())
        return _choice(parts)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while True:
            char = self._peek()
            if char == '"':
                parts.append(self._literal())
            elif char == "[":
                parts.append(self._class())
            elif char == "(":
                parts.append(self._group())
            elif char == ".":
                self.at += 1
                parts.append(Chars(_complement(())))
            elif _NAME.match(char):
                parts.append(Rule(self._name()))
            else:
                break
            self._skip(lines=self.depth > 0)
            self._repeat(parts)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _group(self) -> Node:
        if self.depth == DEPTH_MAX:
            raise self._error(f"parentheses are nested more than {DEPTH_MAX} deep")
        self.at += 1
        self.depth += 1
        self._skip(lines=True)
        node = self._choice()
        if self._peek() != ")":
            raise self._error("expected ')'")
        self.at += 1
        self.depth -= 1
        return node

    def _repeat(self, parts: list[Node]) -> None:
        char = self._peek()
        if char == "{":
            least, most = self._count()
        elif char in _REPEATS:
            least, most = _REPEATS[char]
            self.at += 1
        else:
            return
        parts[-1] = Repeat(parts[-1], least, most)
        self._skip(lines=self.depth > 0)
        if self._peek() in ("*", "+", "?", "{"):
            raise self._error("one repetition directly after another; use parentheses")

    def _count(self) -> tuple[int, int | None]:
        found = _COUNT.match(self.text, self.at)
        if found is None:
            raise self._error("expected {n}, {n,} or {n,m}")
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if max(least, most or 0) > COUNT_MAX:
            raise self._error(f"repetition counts are limited to {COUNT_MAX}")
        if most is not None and most < least:
            raise self._error(f"{found[0]} has its maximum below its minimum")
        self.at = found.end()
        return least, most

    def _literal(self) -> Node:
        begin = self.at
        self.at += 1
        parts: list[str] = []
        while (char := self._peek()) != '"':
            if char in ("", "\n", "\r"):
                self.at = begin
                raise self._error("the string is not closed")
            if (plain := _PLAIN.match(self.text, self.at)) is not None:
                parts.append(plain[0])
                self.at = plain.end()
            else:
                parts.append(chr(self._char()))
        self.at += 1
        return Literal("".join(parts)) if parts else Sequence(())

    def _class(self) -> Node:
        begin = self.at
        self.at += 1
        negated = self._peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            if not self._peek():
                self.at = begin
                raise self._error("the character class is not closed")
            low = high = self._char()
            if self._peek() == "-" and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self._char()
                if high < low:
                    raise self._error("the range of the character class is upside down")
            ranges.append((low, high))
        self.at += 1
        merged = _merge(ranges)
        chars = Chars(_complement(merged) if negated else merged)
        if not chars.ranges:
            self.at = begin
            raise self._error("the character class matches nothing")
        return chars

    def _char(self) -> int:
        """One character or escape, as a code point."""
        char = self._peek()
        if not char:
            raise self._error("unexpected end of the grammar")
        self.at += 1
        code = ord(char)
        if char == "\\":
            kind = self._peek()
            self.at += 1
            if kind in _ESCAPES:
                return ord(_ESCAPES[kind])
            digits = self.text[self.at : self.at + _HEX_DIGITS.get(kind, 0)]
            if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) != _HEX_DIGITS[kind]:
                self.at -= 2
                raise self._error("unknown or incomplete escape")
            self.at += len(digits)
            code = int(digits, 16)
        if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise self._error(f"U+{code:04X} is not a character")
        return code

    def _name(self) -> str:
        found = _NAME.match(self.text, self.at)
        if found is None:
            raise self._error("expected a rule's name")
        self.at = found.end()
        return found[0]

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip(self, *, lines: bool) -> None:
        found = (_BLANK_LINES if lines else _BLANK).match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def _error(self, what: str) -> GbnfError:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - self.text.rfind("\n", 0, self.at)
        return GbnfError(f"line {line}, column {column}: {what}")


def _merge(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted ranges without overlaps, without surrogates."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    first, last = _SURROGATES
    kept = [part for low, high in out for part in ((low, min(high, first - 1)), (max(low, last + 1), high))]
    return tuple((low, high) for low, high in dict.fromkeys(kept) if low <= high)


def _complement(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    edges = [-1, *[edge for low, high in ranges for edge in (low, high)], _LAST + 1]
    return _merge([(a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a + 1 <= b - 1])


def _choice(parts: list[Node]) -> Node:
    """Alternatives as one node; characters side by side become one class."""
    if all(isinstance(p, Chars) for p in parts):
        return Chars(_merge([r for p in parts if isinstance(p, Chars) for r in p.ranges]))
    return Choice(tuple(parts))
