"""Questions about a GBNF tree: what uses what, what can end, what goes round.

Rules of this file: no recursion over chains of rules (there may be hundreds); trees are at most a few dozen deep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from .grammar_gbnf import Chars, Choice, GbnfError, Literal, Node, Repeat, Rule, Sequence


def walk(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Sequence | Choice):
            stack += reversed(node.parts)
        elif isinstance(node, Repeat) and node.most != 0:
            stack.append(node.node)


def uses(node: Node) -> list[str]:
    """The rules that a body refers to, as often as it does."""
    return [n.name for n in walk(node) if isinstance(n, Rule)]


def reachable(rules: Mapping[str, Node]) -> list[str]:
    found = {"root": None}
    stack = ["root"]
    while stack:
        for name in uses(rules[stack.pop()]):
            if name not in found:
                found[name] = None
                stack.append(name)
    return list(found)


def callees_first(rules: Mapping[str, Node]) -> list[str]:
    """The reachable rules that never come back to themselves, each after those that it uses."""
    names = reachable(rules)
    waits = {name: set(uses(rules[name])) for name in names}
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
    return order


def check(rules: Mapping[str, Node]) -> None:
    """Every rule that is used exists and can end, and the whole can say something. Raises GbnfError."""
    for name, body in rules.items():
        for other in uses(body):
            if other not in rules:
                raise GbnfError(f"rule '{name}' uses '{other}', which is not defined")
    ending = closure(rules, _can_end)
    for name in reachable(rules):
        if name not in ending:
            raise GbnfError(f"rule '{name}' can never end")
    if "root" not in closure(rules, _can_speak):
        raise GbnfError("the grammar allows nothing but the empty text")


def closure(rules: Mapping[str, Node], holds: Callable[[Node, set[str]], bool]) -> set[str]:
    """The rules for which ``holds``, which may rest on other rules for which it does: the least such set."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, body in rules.items():
        for other in set(uses(body)):
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


def can_be_empty(node: Node, empty: set[str]) -> bool:
    """For ``closure``: whether a body may say nothing."""
    if isinstance(node, Rule):
        return node.name in empty
    if isinstance(node, Sequence):
        return all(can_be_empty(p, empty) for p in node.parts)
    if isinstance(node, Choice):
        return any(can_be_empty(p, empty) for p in node.parts)
    return isinstance(node, Repeat) and (node.least == 0 or can_be_empty(node.node, empty))


def _can_speak(node: Node, speaking: set[str]) -> bool:
    if isinstance(node, Rule):
        return node.name in speaking
    if isinstance(node, Sequence | Choice):
        return any(_can_speak(p, speaking) for p in node.parts)
    return isinstance(node, Chars | Literal) or (node.most != 0 and _can_speak(node.node, speaking))
