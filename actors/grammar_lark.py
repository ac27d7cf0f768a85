"""A GBNF grammar written out as Lark for ``llguidance``.

Why not the library's own translation: its lexer takes the longest lexeme, so that ``"ab" "d" | "a" "bc"`` would lose
"abc". Rules of this file: the language is exactly the one written. A grammar without recursion becomes one single
lexeme; one with recursion becomes rules over lexemes for which the longest is the only one (``grammar_lexemes.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from .grammar_gbnf import Chars, Choice, GbnfError, Literal, Node, Repeat, Rule, Sequence, parse
from .grammar_lexemes import Lexeme, Split, split
from .grammar_tree import callees_first, check, reachable, walk

RULES_MAX = 512  # the library recurses along chains of rules (``grammar_stack.py``)
NODES_MAX = 20_000  # symbols of a grammar of rules; the library's own limit is 65 000, and takes seconds to reach
LEXEME_CHARS_MAX = 200_000  # characters of a single lexeme with every rule and repetition written out
LEXEME_LENGTH_MAX = 2000  # of these, one after the other: a mask's time grows with them


def gbnf_to_lark(text: str) -> str:
    """Translate a grammar with a ``root`` rule. Raises GbnfError when it is not one, or says nothing."""
    rules = parse(text)
    if len(rules) > RULES_MAX:
        raise GbnfError(f"the grammar has {len(rules)} rules; at most {RULES_MAX} are supported")
    check(rules)
    plain = callees_first(rules)
    terminals = {name: f"R{i}" for i, name in enumerate(plain)}
    lines = [f"{terminals[name]}: {_terminal(rules[name], terminals)}" for name in plain]
    if "root" in terminals and _fits_one_lexeme(rules, plain):
        return "\n".join([f"start: {terminals['root']}", *lines, ""])
    names = reachable(rules)
    if sum(len(n.text) if isinstance(n, Literal) else 1 for name in names for n in walk(rules[name])) > NODES_MAX:
        raise GbnfError(f"the grammar is too large: it has more than {NODES_MAX} symbols")
    return _rules(split(rules, plain), lines, terminals)


def _rules(bodies: Mapping[str, Split], lines: list[str], terminals: dict[str, str]) -> str:
    """A grammar of rules over lexemes, which may use the terminals that ``lines`` define."""
    names = {name: f"r{i}" for i, name in enumerate(bodies)}
    lexemes: dict[Lexeme, str] = {}
    out = [f"{names[name]}: {_rule(body, names, lexemes)}" for name, body in bodies.items()]
    out += [f"{name}: {_terminal(lexeme.node, terminals)}" for lexeme, name in lexemes.items()]
    if any(isinstance(n, Rule) for lexeme in lexemes for n in walk(lexeme.node)):
        out += lines
    return "\n".join([f"start: {names['root']}", *out, ""])


def _rule(part: Split, names: dict[str, str], lexemes: dict[Lexeme, str]) -> str:
    if isinstance(part, Lexeme):
        return lexemes.setdefault(part, f"L{len(lexemes)}")
    if isinstance(part, Rule):
        return names[part.name]
    if part.repeat is not None:
        return _rule(part.parts[0], names, lexemes) + _sign(*part.repeat)
    sign = " | " if part.choice else " "
    return "(" + sign.join(_rule(p, names, lexemes) for p in part.parts) + ")" if part.parts else '""'


def _terminal(node: Node, names: dict[str, str]) -> str:
    if isinstance(node, Chars):
        return "/[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges) + "]/"
    if isinstance(node, Literal):
        return "/" + "".join(f"\\x{{{ord(c):x}}}" for c in node.text) + "/"
    if isinstance(node, Rule):
        return names[node.name]
    if isinstance(node, Sequence | Choice):
        sign = " " if isinstance(node, Sequence) else " | "
        return "(" + sign.join(_terminal(p, names) for p in node.parts) + ")" if node.parts else '""'
    return _terminal(node.node, names) + _sign(node.least, node.most) if node.most != 0 else '""'


def _sign(least: int, most: int | None) -> str:
    sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return sign or f"{{{least},{'' if most is None else most}}}"


def _fits_one_lexeme(rules: Mapping[str, Node], order: list[str]) -> bool:
    """Whether the whole stays small with every rule and every repetition written out."""
    sizes: dict[str, tuple[int, int]] = {}  # rule -> (characters, characters one after the other)

    def size(node: Node) -> tuple[int, int]:
        if isinstance(node, Chars | Literal):
            return (len(node.text),) * 2 if isinstance(node, Literal) else (1, 1)
        if isinstance(node, Rule):
            return sizes[node.name]
        if isinstance(node, Repeat):
            times = max(1, node.least, node.most or 0)
            total, length = size(node.node)
            return total * times, length * times
        parts = [size(p) for p in node.parts] or [(0, 0)]
        total, lengths = sum(p[0] for p in parts), [p[1] for p in parts]
        return total, max(lengths) if isinstance(node, Choice) else sum(lengths)

    for name in order:
        sizes[name] = size(rules[name])
        if sizes[name][0] > LEXEME_CHARS_MAX or sizes[name][1] > LEXEME_LENGTH_MAX:
            return False
    return True
