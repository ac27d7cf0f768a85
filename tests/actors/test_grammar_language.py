"""GBNF means exactly what it says: random grammars against a naive recogniser that shares no code with the engine, and
hostile ones within bounds of time and memory, in a process of their own.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from byte_tokens import accepts, allowed, byte_vocabulary, grammar

from offbook.actors.grammar_lark import gbnf_to_lark
from offbook.actors.grammar_matcher import ConstraintError

VOCABULARY = byte_vocabulary()
ALPHABET = "abéè"  # é and è begin with the same byte

# A node of a random grammar: (kind, ...). Kinds: text, set, rule, seq, alt, rep (node, least, most or None).
Tree = tuple[object, ...]


def random_tree(rng: random.Random, rules: list[str], depth: int) -> Tree:
    kind = rng.choice(["text", "set", "rule"] if depth == 0 else ["text", "set", "rule", "seq", "seq", "alt", "rep"])
    if kind == "text":
        return ("text", "".join(rng.choices(ALPHABET, k=rng.randrange(1, 4))))
    if kind == "set":
        return ("set", "".join(sorted(rng.sample(ALPHABET, rng.randrange(1, 4)))))
    if kind == "rule":
        return ("rule", rng.choice(rules))
    if kind == "rep":
        least, most = rng.choice([(0, None), (1, None), (0, 1), (0, 2), (2, 2), (1, 3), (2, None)])
        return ("rep", random_tree(rng, rules, depth - 1), least, most)
    return (kind, *(random_tree(rng, rules, depth - 1) for _ in range(rng.randrange(2, 4))))


def write(tree: Tree) -> str:
    kind, *rest = tree
    if kind == "text":
        return f'"{rest[0]}"'
    if kind == "set":
        return f"[{rest[0]}]"
    if kind == "rule":
        return str(rest[0])
    if kind == "rep":
        node, least, most = rest
        return f"({write(node)}){{{least},{'' if most is None else most}}}"  # type: ignore[arg-type]
    return "(" + (" " if kind == "seq" else " | ").join(write(t) for t in rest) + ")"  # type: ignore[arg-type]


def ends(tree: Tree, rules: dict[str, Tree], text: str, at: int, known: dict[tuple[str, int], set[int]]) -> set[int]:
    """Where a match of ``tree`` that begins at ``at`` may end; ``known`` holds what is known of the rules so far."""
    kind, *rest = tree
    if kind == "text":
        return {at + len(str(rest[0]))} if text.startswith(str(rest[0]), at) else set()
    if kind == "set":
        return {at + 1} if text[at : at + 1] and text[at] in str(rest[0]) else set()
    if kind == "rule":
        return known.setdefault((str(rest[0]), at), set())
    if kind == "alt":
        return set().union(*(ends(t, rules, text, at, known) for t in rest))  # type: ignore[arg-type]
    if kind == "seq":
        places = {at}
        for part in rest:
            places = set().union(*(ends(part, rules, text, p, known) for p in places))  # type: ignore[arg-type]
        return places
    node, least, most = rest
    places, out = {at}, {at} if least == 0 else set[int]()
    for i in range(1, (most or least + len(text) + 1) + 1):  # type: ignore[operator]
        places = set().union(*(ends(node, rules, text, p, known) for p in places))  # type: ignore[arg-type]
        if i >= least:  # type: ignore[operator]
            out |= places
    return out


def recognises(rules: dict[str, Tree], text: str) -> bool:
    """By a fixed point over (rule, begin) -> ends."""
    known: dict[tuple[str, int], set[int]] = {("root", 0): set()}
    while True:
        before = {key: set(value) for key, value in known.items()}
        for name, at in list(known):
            known[name, at] |= ends(rules[name], rules, text, at, known)
        if known == before:
            return len(text) in known["root", 0]


def check(text: str, rules: dict[str, Tree], longest: int) -> int:
    """Compare on every text up to a length; how many of them the grammar has."""
    constraint = grammar(VOCABULARY, text)
    found = 0
    for n in range(longest + 1):
        for chars in itertools.product(ALPHABET, repeat=n):
            word = "".join(chars)
            expected = recognises(rules, word)
            assert accepts(constraint, word) == expected, (text, word, gbnf_to_lark(text))
            found += expected
    return found


@pytest.mark.parametrize("seed", range(60))
def test_random_grammars_have_the_texts_that_a_naive_recogniser_finds(seed: int) -> None:
    rng = random.Random(seed)
    names = ["root", "x", "y"]
    rules = {name: random_tree(rng, names if seed % 3 else ["y", "y", "y"], 2) for name in names}
    if not seed % 3:
        rules["y"] = ("set", "ab")  # no recursion
    text = "\n".join(f"{name} ::= {write(tree)}" for name, tree in rules.items())
    try:
        check(text, rules, 4)
    except ConstraintError as error:
        assert "can never end" in error.message or "nothing" in error.message, (seed, text)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= "ab" "d" | "a" "bc"', ["abd", "abc"], ["ab", "a", "abcd"]),
        ('root ::= "ab" "d" | "a" "bc" | "(" root ")"', ["((abc))", "(abd)"], ["(abc", "abc)"]),
        ('root ::= w "a" | "(" root ")"\nw ::= [a-z]*', ["a", "bba", "(aa)"], ["b", ""]),
        ('root ::= "é"+ "è" | "(" root ")"', ["éè", "(ééè)"], ["é", "è"]),
        ('root ::= "if" " " e | id "=" e\nid ::= [a-z]+\ne ::= id | "(" e ")"', ["if x", "iffy=(x)", "if=y"], ["if"]),
        ('root ::= n ("+" root)?\nn ::= [0-9]+ ("." [0-9]+)?', ["1+2.5", "10"], ["1.", "+1"]),
    ],
)
def test_a_shorter_lexeme_is_found_where_it_is_meant(text: str, good: list[str], bad: list[str]) -> None:
    constraint = grammar(VOCABULARY, text)
    assert [w for w in good if not accepts(constraint, w)] == []
    assert [w for w in bad if accepts(constraint, w)] == []


def test_json_in_gbnf_is_read_in_long_lexemes() -> None:
    """Strings, numbers and words stay whole: what makes masks fast."""
    lark = gbnf_to_lark(Path(__file__).with_name("data").joinpath("json.gbnf").read_text())
    lexemes = [line for line in lark.splitlines() if line.startswith("L")]
    assert len(lexemes) < 16
    constraint = grammar(VOCABULARY, Path(__file__).with_name("data").joinpath("json.gbnf").read_text())
    assert accepts(constraint, '{"a": [1, -2.5e3, "x\\n\\u00e9", true, null], "b": {}}')
    assert not accepts(constraint, '{"a": [1,]}') and not accepts(constraint, '{"a": "\t"}')


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\"\\\\"', ['Aé\U0001f600\t"\\'], ["A"]),
        ("root ::= [a-c\\]x-] .", ["]a", "-\n", "b\U0001f600"], ["d ", "a"]),
        ("root ::= [^a-c]", ["d", "é", "\n", "\U0010ffff"], ["a", ""]),
        ('# first\nroot ::= ( # why\n "a" |\n\n "b"\n) ws\nws ::= | " " | "\\n" # end', ["a", "b ", "a\n"], ["a  "]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{0,0}', ["aab", "aabbcc"], ["ab", "aabccc", "aabd"]),
        ('root ::= "a" |', ["a", ""], ["aa"]),
        ('my-rule ::= "x"\r\nroot ::= my-rule my-rule\r\n', ["xx"], ["x"]),
    ],
)
def test_notation(text: str, good: list[str], bad: list[str]) -> None:
    constraint = grammar(VOCABULARY, text)
    assert [w for w in good if not accepts(constraint, w)] == []
    assert [w for w in bad if accepts(constraint, w)] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('Root ::= "a"', "no rule named 'root'"),
        ("root ::= missing", "'missing', which is not defined"),
        ("root ::=", "nothing but the empty text"),
        ("", "no rule named 'root'"),
        ('root ::= "a', "line 1, column 10: the string is not closed"),
        ("root ::= [a", "not closed"),
        ("root ::= [z-a]", "upside down"),
        ('root ::= "\\u12"', "escape"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\ud800"', "not a character"),
        ("\x00", "expected a rule's name"),
        ("root ::= (", "expected ')'"),
        ('root ::= "a" )', "expected the end of the line"),
        ('root ::= "a"{7,2}', "maximum below its minimum"),
        ('root ::= "a"{,}', "expected {n}"),
        ('root ::= "a"{-1,2}', "expected {n}"),
        ('root ::= "a"{1000000000}', "limited to"),
        ('root ::= "a"{0,4294967296}', "limited to"),
        ('root ::= "a"{1,2}{2,3}', "repetition"),
        ('root ::= "a"{0,0}', "nothing but the empty text"),
        ("root ::= a\na ::= a", "can never end"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ("root ::= [^\\x00-\\U0010ffff]", "matches nothing"),
        ('root ::= "\ud800"', "surrogate"),
        ("root ::= <think>", "expected the end of the line"),
        ("root ::= " + "(" * 999 + '"a"' + ")" * 999, "nested"),
    ],
)
def test_b173_b179_refusals_say_why(text: str, why: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammar(VOCABULARY, text)
    assert why in caught.value.message and caught.value.loc == ("response_format", "grammar")


def test_b194_nothing_may_follow_but_the_end() -> None:
    constraint = grammar(VOCABULARY, 'root ::= "a" | "aa"')
    matcher = constraint.matcher()
    assert allowed(VOCABULARY, matcher) == [b"a"]
    assert matcher.consume(ord("a")) and matcher.accepting and not matcher.finished
    assert allowed(VOCABULARY, matcher) == [b"a", b"<end>"]
    assert allowed(VOCABULARY, matcher, end=False) == [b"a"]
    assert matcher.consume(ord("a")) and matcher.finished
    assert allowed(VOCABULARY, matcher) == allowed(VOCABULARY, matcher, end=False) == [b"<end>"]


HOSTILE = {
    "a long chain of rules": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(5000)),
    "a chain that comes back": "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{(i + 1) % 500}' for i in range(500))
    + '\nr500 ::= "a"',
    "doubling": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"',
    "doubling of nothing": 'root ::= "x" root | "b" r0\n'
    + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"?',
    "repetition of repetitions": 'root ::= (("a"{1000}){1000}){1000}',
    "optional repetitions, recursive": 'root ::= (("a"?){0,1000}){0,1000} ("b" | root)',
    "a long text": 'root ::= "' + "ab" * 60_000 + '"',
    "many words": "root ::= " + "|".join(f'"word{i}"' for i in range(12_000)),
    "many words, recursive": 'root ::= "(" root ")" | ' + "|".join(f'"word{i}"' for i in range(1500)),
    "ambiguity": "root ::= [ab]* | root root root",
    "many states": "root ::= [ab]* [a] [ab]{40} | [(] root [)]",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_bounded(name: str) -> None:
    """Refused, or compiled and masked within a few seconds and half a gigabyte; never the end of the
    process, even where threads have small stacks."""
    script = textwrap.dedent(f"""
        import resource, sys, threading, time
        sys.path[:0] = {sys.path!r}
        import numpy as np
        from byte_tokens import byte_vocabulary, grammar
        from offbook.actors.grammar_matcher import ConstraintError
        vocabulary = byte_vocabulary()
        def main():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                matcher = grammar(vocabulary, {HOSTILE[name]!r}).matcher()
                row = np.zeros(vocabulary.words, np.uint32)
                for _ in range(20):
                    matcher.fill(row)
                    if not matcher.consume(ord("a")):
                        break
            except ConstraintError as error:
                assert error.message
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024, "memory"
            assert time.process_time() < 8, "time"
            done.append(True)
        done = []
        threading.stack_size(512 * 1024)
        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
        assert done
    """)
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_room_for_the_compiler_is_an_error_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConstraintError, match="no room"):
        grammar(VOCABULARY, 'root ::= "a"')
