"""Which parts of a recursive grammar may be read as one lexeme each.

Why: masks are many times faster over long lexemes, but the grammar library's lexer takes the longest one that it can,
which loses texts where a shorter one was meant. A lexeme is safe when that never matters: where it is complete, no
character that may follow it in the grammar goes on with it, or with another lexeme that reads the same so far.
Rules of this file: unsafe parts are broken into smaller ones, down to single characters, which are always safe; when
the proof would take too long, everything is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .grammar_automata import Alphabet, Automaton, State, TooLarge
from .grammar_gbnf import Chars, Choice, Literal, Node, Repeat, Rule, Sequence
from .grammar_tree import can_be_empty, closure, uses, walk

LEXEMES_MAX = 200


@dataclass(frozen=True, slots=True, eq=False)
class Lexeme:
    """A part without recursion, never empty, that is read as one. The same part is the same object."""

    node: Node


@dataclass(frozen=True, slots=True)
class Join:
    """Parts one after the other, as a choice, or one part repeated (least, most)."""

    parts: tuple[Split, ...]
    choice: bool = False
    repeat: tuple[int, int | None] | None = None


Split = Lexeme | Join | Rule
EMPTY = Join(())


def split(rules: Mapping[str, Node], plain: list[str]) -> dict[str, Split]:
    """The rules that ``root`` needs, over safe lexemes. ``plain``: the rules that never come back to themselves."""
    splitter = _Splitter(rules, frozenset(plain))
    try:
        alphabet = Alphabet(n for body in rules.values() for n in walk(body))
        while unsafe := _unsafe(bodies := splitter.bodies(), rules, alphabet):
            splitter.broken |= unsafe
    except TooLarge:
        splitter = _Splitter(rules, frozenset(), chars_only=True)
        bodies = splitter.bodies()
    return bodies


class _Splitter:
    def __init__(self, rules: Mapping[str, Node], plain: frozenset[str], chars_only: bool = False) -> None:
        self._rules = rules
        self._plain = plain
        self._chars_only = chars_only
        self._empty = closure(rules, can_be_empty)
        self._lexemes: dict[Node, Lexeme] = {}
        self.broken: set[Node] = set()

    def bodies(self) -> dict[str, Split]:
        """Every rule that is still a rule, split as far as ``broken`` demands."""
        out: dict[str, Split] = {}
        todo = ["root"]
        while todo:
            name = todo.pop()
            if name not in out:
                out[name] = self._split(self._rules[name])
                todo += _rules_in(out[name])
        return out

    def _whole(self, node: Node) -> bool:
        if isinstance(node, Chars):
            return True
        if self._chars_only or node in self.broken or can_be_empty(node, self._empty):
            return False
        return all(name in self._plain for name in uses(node))

    def _split(self, node: Node) -> Split:
        if self._whole(node):
            return self._lexemes.setdefault(node, Lexeme(node))
        if isinstance(node, Literal):
            return Join(tuple(self._split(Chars(((ord(c),) * 2,))) for c in node.text))
        if isinstance(node, Sequence | Choice):
            return Join(tuple(self._split(p) for p in node.parts), choice=isinstance(node, Choice))
        if isinstance(node, Repeat):
            if node.most == 0:
                return EMPTY
            some = Repeat(node.node, 1, node.most)
            if node.least == 0 and self._whole(some):
                return Join((EMPTY, self._split(some)), choice=True)
            return Join((self._split(node.node),), repeat=(node.least, node.most))
        assert isinstance(node, Rule)
        return node


def _rules_in(part: Split) -> list[str]:
    if isinstance(part, Join):
        return [name for p in part.parts for name in _rules_in(p)]
    return [part.name] if isinstance(part, Rule) else []


def _unsafe(bodies: Mapping[str, Split], rules: Mapping[str, Node], alphabet: Alphabet) -> set[Node]:
    """Lexemes to break. Raises TooLarge."""
    followers = _Followers(bodies, rules, alphabet)
    automata, follow = followers.automata, followers.of_lexemes
    if len(automata) > LEXEMES_MAX:
        raise TooLarge
    unsafe: set[Node] = set()
    for one, a in automata.items():
        for other, b in automata.items():
            if a.first & b.first and _clash(a, b, follow[one], alphabet):
                unsafe |= {lexeme.node for lexeme in (one, other) if not isinstance(lexeme.node, Chars)}
    return unsafe


def _clash(a: Automaton, b: Automaton, follow: int, alphabet: Alphabet) -> bool:
    """Whether some text is complete for ``a`` while ``b`` goes on with a character that may follow ``a``."""
    seen: set[tuple[State, State]] = {(a.start, b.start)}
    todo = list(seen)
    while todo:
        at, bt = todo.pop()
        if a.accepts(at) and alphabet.meet(b.leaving(bt), follow):
            return True
        for a_chars, a_next in a.steps(at):
            for b_chars, b_next in b.steps(bt):
                alphabet.spend(1)
                if a_chars & b_chars and (a_next, b_next) not in seen:
                    seen.add((a_next, b_next))
                    todo.append((a_next, b_next))
    return False


class _Followers:
    """The characters that may come directly after each lexeme, by the usual fixed point over the grammar."""

    def __init__(self, bodies: Mapping[str, Split], rules: Mapping[str, Node], alphabet: Alphabet) -> None:
        self._rules, self._alphabet = rules, alphabet
        self.automata: dict[Lexeme, Automaton] = {}
        self.of_lexemes: dict[Lexeme, int] = {}
        self._first: dict[str, tuple[int, bool]] = dict.fromkeys(bodies, (0, False))
        self._of_rules: dict[str, int] = dict.fromkeys(bodies, 0)
        while (found := {name: self._begin(body) for name, body in bodies.items()}) != self._first:
            self._first = found
        while True:
            before = dict(self._of_rules)
            for name, body in bodies.items():
                self._visit(body, self._of_rules[name])
            if before == self._of_rules:
                break

    def _begin(self, part: Split) -> tuple[int, bool]:
        """The characters that a part may begin with, and whether it may be empty."""
        self._alphabet.spend(1)
        if isinstance(part, Lexeme):
            if part not in self.automata:
                self.automata[part] = Automaton(part.node, self._rules, self._alphabet)
                self.of_lexemes[part] = 0
            return self.automata[part].first, False
        if isinstance(part, Rule):
            return self._first[part.name]
        chars, empty = 0, not part.choice
        for p in part.parts:
            first, may_be_empty = self._begin(p)
            if part.choice:
                chars, empty = chars | first, empty or may_be_empty
            elif empty:
                chars, empty = chars | first, may_be_empty
        return chars, empty or (part.repeat is not None and part.repeat[0] == 0)

    def _visit(self, part: Split, after: int) -> None:
        if isinstance(part, Lexeme):
            self.of_lexemes[part] |= after
        elif isinstance(part, Rule):
            self._of_rules[part.name] |= after
        elif part.choice:
            for p in part.parts:
                self._visit(p, after)
        else:
            if part.repeat is not None and part.repeat[1] != 1:
                after |= self._begin(part)[0]
            for p in reversed(part.parts):
                self._visit(p, after)
                first, empty = self._begin(p)
                after = first | (after if empty else 0)
