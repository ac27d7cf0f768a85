"""How many schemas of a corpus are enforced or refused, and whether an enforced one ever lets a wrong answer through.

    PYTHONPATH=.typing:tests/support python tests/benchmarks/corpus_schemas.py PATH ... [--answers 3] [--list]

A PATH is a schema, a file of the JSON Schema Test Suite, or a folder of such. Each enforced schema writes answers at
random under its masks, byte by byte, which ``jsonschema`` judges; the suite's own instances are tried too: one that is
wrong must be refused (a violation otherwise), one that is right may be (the grammar has its own order and spacing).
Exit code 1 when anything was violated.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
from byte_tokens import EOS, TABLE, accepts, allowed, byte_vocabulary, schema
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from offbook.actors.grammar import Constraint
from offbook.actors.grammar_matcher import ConstraintError

VOCABULARY = byte_vocabulary()
DRAFTS = {"draft7": jsonschema.Draft7Validator, "draft2019-09": jsonschema.Draft201909Validator}
LONG = 300  # tokens after which an answer takes what closes it
CLOSING = (b'"', b"}", b"]", b"e", b"l", b",")
Case = tuple[str, Any, list[tuple[Any, bool]]]  # name, schema, instances and whether they are valid


def cases(paths: list[Path]) -> Iterator[Case]:
    for path in paths:
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            content = json.loads(file.read_text())
            if isinstance(content, list):
                for group in content:
                    tests = [(test["data"], test["valid"]) for test in group["tests"]]
                    yield f"{file}: {group['description']}", group["schema"], tests
            else:
                yield file.name, content, []


def answer(constraint: Constraint, chance: random.Random) -> str | None:
    """A random complete answer, or None where none ends in time."""
    matcher = constraint.matcher()
    out = bytearray()
    for length in range(3 * LONG):
        if matcher.accepting and (length > LONG or chance.random() < 0.5):
            return out.decode()
        choices = [piece for piece in allowed(VOCABULARY, matcher, end=False) if piece != TABLE[EOS]]
        if not choices:
            return out.decode() if matcher.accepting else None
        closing = [piece for piece in choices if piece in CLOSING]
        readable = [piece for piece in choices if piece.isascii() and piece.decode().isprintable()]
        likely = closing if closing and (length > LONG or chance.random() < 0.3) else readable or choices
        piece = chance.choice(likely)
        out += piece
        matcher.consume(TABLE.index(piece))
    return None


def judge(case: Case, answers: int, told: Counter[str], violations: list[str]) -> str:
    name, value, tests = case
    try:
        constraint = schema(VOCABULARY, value)
    except ConstraintError as error:
        return f"refused: {error}"
    chance = random.Random(name)
    default = next((judge for draft, judge in DRAFTS.items() if draft in name), jsonschema.Draft202012Validator)
    validator = validator_for(value, default=default)(value)
    for _ in range(answers):
        text = answer(constraint, chance)
        told["answers"] += text is not None
        told["answers that do not end"] += text is None
        try:
            wrong = text is not None and not validator.is_valid(json.loads(text))
        except (re.error, Unresolvable):  # what Python's judge does not know: \\p{...}, a reference to another document
            told["answers that cannot be judged"] += 1
            continue
        if wrong:
            violations.append(f"{name}: wrote {text}")
    for instance, valid in tests:
        taken = accepts(constraint, json.dumps(instance, ensure_ascii=False, separators=(",", ":")))
        told[f"{'right' if valid else 'wrong'} instances {'taken' if taken else 'refused'}"] += 1
        if taken and not valid:
            violations.append(f"{name}: takes {instance!r}")
    return "enforced"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--answers", type=int, default=3)
    parser.add_argument("--list", action="store_true", help="say what became of each schema")
    options = parser.parse_args()
    told: Counter[str] = Counter()
    violations: list[str] = []
    for case in cases(options.paths):
        outcome = judge(case, options.answers, told, violations)
        told[outcome.split(":")[0]] += 1
        if options.list:
            sys.stdout.write(f"{case[0]}: {outcome}\n")
    for line in violations:
        sys.stdout.write(f"VIOLATED {line}\n")
    count = told["enforced"] + told["refused"]
    sys.stdout.write(f"{count} schemas: {dict(told)}, {len(violations)} violations\n")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
