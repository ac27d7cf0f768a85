"""A GBNF tree checked, and written out as Lark for ``llguidance``.

Why not the library's own translation: its lexer takes the longest lexeme, so that ``"ab" "d" | "a" "bc"`` would lose
"abc". Rules of this file: the language is exactly the one written. A grammar without recursion becomes one single
lexeme; one with recursion becomes rules over lexemes of one character each, where longest means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .grammar_gbnf import Chars, Choice, GbnfError, Literal, Node, Repeat, Rule, Sequence, parse

RULES_MAX = 512  # the library recurses along chains of rules, and a chain of 1500 ends the process
NODES_MAX = 20_000  # symbols of a grammar of rules; the library's own limit is 65 000, and takes seconds to reach
LEXEME_CHARS_MAX = 200_000  # characters of a single lexeme with every rule and repetition written out
LEXEME_LENGTH_MAX = 2000  # of these, one after the other: a mask's time grows with them


def gbnf_to_lark(text: str) -> str:
    """Translate a grammar with a ``root`` rule. Raises GbnfError when it is not one, or says nothing."""
    rules = parse(text)
    if len(rules) > RULES_MAX:
        raise GbnfError(f"the grammar has {len(rules)} rules; at most {RULES_MAX} are supported")
    _check(rules)
    order = _callees_first(rules)
    lexeme = order is not None and _fits_one_lexeme(rules, order)
    if order is None or not lexeme:
        order = _reachable(rules)
        if sum(len(n.text) if isinstance(n, Literal) else 1 for name in order for n in _walk(rules[name])) > NODES_MAX:
            raise GbnfError(f"the grammar is too large: it has more than {NODES_MAX} symbols")
    names = {name: f"{'R' if lexeme else 'r'}{i}" for i, name in enumerate(order)}
    lines = [f"{names[name]}: {_write(rules[name], names, lexeme)}" for name in order]
    return f"start: {names['root']}\n" + "\n".join(lines) + "\n"


def _walk(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Sequence | Choice):
            stack += reversed(node.parts)
        elif isinstance(node, Repeat) and node.most != 0:
            stack.append(node.node)


def _uses(node: Node) -> list[str]:
    """The rules that a body refers to, as often as it does."""
    return [n.name for n in _walk(node) if isinstance(n, Rule)]


def _reachable(rules: dict[str, Node]) -> list[str]:
    found = {"root": None}
    stack = ["root"]
    while stack:
        for name in _uses(rules[stack.pop()]):
            if name not in found:
                found[name] = None
                stack.append(name)
    return list(found)


def _callees_first(rules: dict[str, Node]) -> list[str] | None:
    """The reachable rules, each after those that it uses; None when some rule uses itself in the end."""
    names = _reachable(rules)
    waits = {name: set(_uses(rules[name])) for name in names}
    users: dict[str, list[str]] = {name: [] for name in names}
    for name, others in waits.items():
        for other in others:
            users[other].append(name)
    order = [name for name in names if not waits[name]]
    for name in order:
        for user in users[name]:
            waits[user].discard(name)
            if not waits[user]:
                order.append(user)
    return order if len(order) == len(names) else None


def _fits_one_lexeme(rules: dict[str, Node], order: list[str]) -> bool:
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


def _check(rules: dict[str, Node]) -> None:
    """Every rule that is used exists and can end, and the whole can say something. Raises GbnfError."""
    for name, body in rules.items():
        for other in _uses(body):
            if other not in rules:
                raise GbnfError(f"rule '{name}' uses '{other}', which is not defined")
    ending = _closure(rules, _can_end)
    for name in _reachable(rules):
        if name not in ending:
            raise GbnfError(f"rule '{name}' can never end")
    if "root" not in _closure(rules, _can_speak):
        raise GbnfError("the grammar allows nothing but the empty text")


def _closure(rules: dict[str, Node], holds: Callable[[Node, set[str]], bool]) -> set[str]:
    """The rules for which ``holds``, which may rest on other rules for which it does: the least such set."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, body in rules.items():
        for other in set(_uses(body)):
            users[other].append(name)
    found: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in found and holds(rules[name], found):
            found.add(name)
            todo += users[name]
    return found


def _can_end(node: Node, ending: set[str]) -> bool:
    if isinstance(node, Rule):
        return node.name in ending
    if isinstance(node, Sequence):
        return all(_can_end(p, ending) for p in node.parts)
    if isinstance(node, Choice):
        return any(_can_end(p, ending) for p in node.parts)
    return isinstance(node, Chars | Literal) or node.least == 0 or _can_end(node.node, ending)


def _can_speak(node: Node, speaking: set[str]) -> bool:
    if isinstance(node, Rule):
        return node.name in speaking
    if isinstance(node, Sequence | Choice):
        return any(_can_speak(p, speaking) for p in node.parts)
    return isinstance(node, Chars | Literal) or (node.most != 0 and _can_speak(node.node, speaking))


def _write(node: Node, names: dict[str, str], lexeme: bool) -> str:
    if isinstance(node, Chars):
        return "/[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges) + "]/"
    if isinstance(node, Literal):
        chars = [f"\\x{{{ord(c):x}}}" for c in node.text]
        return "/" + "".join(chars) + "/" if lexeme else "(" + " ".join(f"/{c}/" for c in chars) + ")"
    if isinstance(node, Rule):
        return names[node.name]
    if isinstance(node, Sequence | Choice):
        sign = " " if isinstance(node, Sequence) else " | "
        return "(" + sign.join(_write(p, names, lexeme) for p in node.parts) + ")" if node.parts else '""'
    if node.most == 0:
        return '""'
    sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most), "")
    most = "" if node.most is None else node.most
    return _write(node.node, names, lexeme) + (sign or f"{{{node.least},{most}}}")
