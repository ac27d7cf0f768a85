"""Small automata over characters, to compare what two pieces of a grammar do with the same text.

Rules of this file: characters are grouped into classes that no piece tells apart, and a set of classes is the bits of
an int; everything counts against a budget, and running out raises TooLarge.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from .grammar_gbnf import Chars, Choice, Literal, Node, Repeat, Rule, Sequence

DEPTH_MAX = 100  # rules within rules of one piece
POSITIONS_MAX = 400  # characters of one piece, written out
BUDGET = 200_000  # elementary operations of one grammar's analysis: well under a second

State = frozenset[int]


class TooLarge(Exception):
    """The analysis would take too long."""


class Alphabet:
    """The classes of characters of a set of nodes, and the budget of work on them."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        edges = {0, 0x80}
        for node in nodes:
            if isinstance(node, Chars):
                edges.update(edge for low, high in node.ranges for edge in (low, high + 1))
            elif isinstance(node, Literal):
                edges.update(edge for c in node.text for edge in (ord(c), ord(c) + 1))
        self._edges = sorted(edges)
        self.wide = ~((1 << bisect_right(self._edges, 0x7F)) - 1)  # classes beyond ASCII: several bytes each
        self.left = BUDGET
        self._known: dict[tuple[tuple[int, int], ...], int] = {}

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise TooLarge

    def mask(self, ranges: tuple[tuple[int, int], ...]) -> int:
        """The classes of inclusive code-point ranges."""
        if ranges not in self._known:
            bits = 0
            for low, high in ranges:
                first, last = bisect_right(self._edges, low) - 1, bisect_right(self._edges, high) - 1
                bits |= (1 << (last + 1)) - (1 << first)
            self._known[ranges] = bits
        return self._known[ranges]

    def meet(self, one: int, other: int) -> bool:
        """Whether two sets of characters may begin with the same byte (of wide characters, all may)."""
        return bool(one & other or (one & self.wide and other & self.wide))


class Automaton:
    """A deterministic automaton of a node, made as far as it is walked. States are sets of positions (Glushkov, "The
    abstract theory of automata", 1961): the characters that may have been read last."""

    def __init__(self, node: Node, rules: Mapping[str, Node], alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._rules = rules
        self._depth = 0
        self._masks: list[int] = [0]  # position 0 = nothing read
        self._follow: list[set[int]] = [set()]
        _, first, last = self._build(node)
        self._follow[0] = set(first)
        self._last = frozenset(last)
        self._steps: dict[State, list[tuple[int, State]]] = {}
        self.start: State = frozenset((0,))
        self.first = self.leaving(self.start)

    def accepts(self, state: State) -> bool:
        return not self._last.isdisjoint(state)

    def leaving(self, state: State) -> int:
        """The characters that lead on from a state."""
        return self._or(self._masks[p] for p in self._after(state))

    def steps(self, state: State) -> list[tuple[int, State]]:
        """(characters, next state) for each way on; the sets of characters are apart."""
        if state not in self._steps:
            groups = {self.leaving(state): frozenset[int]()}
            for p in self._after(state):
                self._alphabet.spend(len(groups))
                split: dict[int, State] = {}
                for mask, target in groups.items():
                    if inside := mask & self._masks[p]:
                        split[inside] = target | {p}
                    if outside := mask & ~self._masks[p]:
                        split[outside] = target
                groups = split
            self._steps[state] = [(mask, target) for mask, target in groups.items() if mask]
        return self._steps[state]

    def _after(self, state: State) -> set[int]:
        self._alphabet.spend(len(state))
        return set().union(*(self._follow[p] for p in state))

    @staticmethod
    def _or(masks: Iterable[int]) -> int:
        bits = 0
        for mask in masks:
            bits |= mask
        return bits

    def _build(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """Whether the node can be empty, the positions that it may begin with, and those that it may end with."""
        self._alphabet.spend(1)
        if isinstance(node, Rule):
            if self._depth == DEPTH_MAX:
                raise TooLarge
            self._depth += 1
            built = self._build(self._rules[node.name])
            self._depth -= 1
            return built
        if isinstance(node, Chars):
            return self._position(self._alphabet.mask(node.ranges))
        if isinstance(node, Literal):
            return self._chain([self._position(self._alphabet.mask(((ord(c),) * 2,))) for c in node.text])
        if isinstance(node, Sequence):
            return self._chain([self._build(p) for p in node.parts])
        if isinstance(node, Choice):
            parts = [self._build(p) for p in node.parts]
            return any(p[0] for p in parts), set().union(*(p[1] for p in parts)), set().union(*(p[2] for p in parts))
        return self._repeated(node)

    def _position(self, mask: int) -> tuple[bool, set[int], set[int]]:
        if len(self._masks) > POSITIONS_MAX:
            raise TooLarge
        self._masks.append(mask)
        self._follow.append(set())
        return False, {len(self._masks) - 1}, {len(self._masks) - 1}

    def _chain(self, parts: list[tuple[bool, set[int], set[int]]]) -> tuple[bool, set[int], set[int]]:
        empty, first, last = True, set[int](), set[int]()
        for part_empty, part_first, part_last in parts:
            self._alphabet.spend(len(last) * len(part_first) + 1)
            for p in last:
                self._follow[p] |= part_first
            first = first | part_first if empty else first
            last = last | part_last if part_empty else part_last
            empty = empty and part_empty
        return empty, first, last

    def _repeated(self, node: Repeat) -> tuple[bool, set[int], set[int]]:
        if node.most is None:
            parts = [self._build(node.node) for _ in range(max(1, node.least))]
            _, first, last = parts[-1]
            self._alphabet.spend(len(first) * len(last))
            for p in last:
                self._follow[p] |= first
        else:
            parts = [self._build(node.node) for _ in range(node.most)]
        parts = [(empty or i >= node.least, first, last) for i, (empty, first, last) in enumerate(parts)]
        return self._chain(parts)
