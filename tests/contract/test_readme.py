"""What the README says can be run, is run: its blocks as they stand, with only the server's address replaced."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from readme import README, blocks
from server_process import ServerProcess

from offbook.actors.errors import CompletionError
from offbook.actors.request import CompletionRequest
from offbook.server import cli

ROOT = README.parent
PRINTED = "http://127.0.0.1:8000"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.model
def test_the_first_question(default_server: ServerProcess) -> None:
    command = blocks("sh")[1]
    assert PRINTED in command
    line = command.replace(PRINTED, default_server.url)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=True)
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["finish_reason"] == "length" and re.search("[a-z]{3}", choice["text"])


@pytest.mark.model
def test_a_client_of_python(default_server: ServerProcess) -> None:
    (code,) = [block for block in blocks("python") if "import OpenAI" in block]
    assert re.search("[a-z]{3}", run_python(code.replace(PRINTED, default_server.url)))


@pytest.mark.model
def test_the_embedded_engine(default_server: ServerProcess) -> None:
    """It prints its text, then usage. (The server's fixture is here so that the model's file is there.)"""
    (code,) = [block for block in blocks("python") if "open_engine" in block]
    *text, usage = run_python(code).splitlines()
    assert re.search("[a-z]{3}", " ".join(text)) and re.fullmatch(r"Usage\(.*completion_tokens=\d+.*\)", usage)


def test_the_install_commands_name_what_exists() -> None:
    """They run in CI as they stand (``.ci/run``), in an environment that is made for them; here: their parts."""
    install, _, tests, *_ = blocks("sh")
    assert "-c constraints.txt" in install and "-c constraints.txt" in tests and (ROOT / "constraints.txt").exists()
    assert ".venv/bin/offbook serve" in install and ".[test]" in tests
    assert "blocks" in (ROOT / "tests/support/readme.py").read_text()
    for number in (0, 1, 2):
        assert f"readme.py sh {number}" in (ROOT / ".ci/run").read_text()


def table(title: str) -> list[str]:
    """First cells of the table under a heading."""
    section = README.read_text().split(f"\n{title}\n", 1)[1]
    rows = re.search(r"((?:^\|.*\n)+)", section, re.MULTILINE)
    assert rows is not None
    return [row.split("|")[1] for row in rows[1].splitlines()[2:]]


def test_every_field_is_in_the_table_and_nothing_else() -> None:
    named = [name for cell in table("## Every field") for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(CompletionRequest.__struct_fields__)


def test_the_options_of_the_table_exist_with_their_defaults() -> None:
    section = README.read_text().split("## Running it", 1)[1]
    options = vars(cli.parser().parse_args(["serve"]))
    flags = {flag for action in serve_actions() for flag in action}
    for row in re.findall(r"^\| (`--.*)$", section, re.MULTILINE):
        names, default, _ = (cell.strip() for cell in row.split("|", 2))
        found = re.findall(r"`(--[\w-]+)", names)
        assert set(found) <= flags
        if len(found) == 1 and re.fullmatch(r"[\d.]+M?|auto|text", default):
            value = cli.size(default) if default.endswith("M") else default
            assert str(value).removesuffix(".0") in {str(v).removesuffix(".0") for v in options.values()}, row


def test_what_an_embedder_may_import_has_what_is_said() -> None:
    section = README.read_text().split("What there is to import", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(offbook[\w.]+)` \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 10
    elsewhere = {"None", "logprobs", "raw_output"}  # a value, and fields of the request
    for dotted, told in rows:
        found = pkgutil.resolve_name(dotted)
        known = {*dir(found), *re.findall(r"self\.(\w+)", inspect.getsource(found)), *elsewhere}
        assert set(re.findall(r"`(\w+)[`(]", told)) - {"for"} <= known, dotted
    named = re.findall(r"`([A-Z]\w+)`", section.split("Its children", 1)[1].split("`open_engine`", 1)[0])
    assert {pkgutil.resolve_name(f"offbook.actors.errors.{name}") for name in named} == set(below(CompletionError))
    for dotted in re.findall(r"`(offbook\.kernels[\w.]+)`", section):
        assert issubclass(pkgutil.resolve_name(dotted), Exception)


def below(kind: type[Exception]) -> list[type[Exception]]:
    return [one for child in kind.__subclasses__() for one in (child, *below(child))]


def serve_actions() -> list[list[str]]:
    commands = next(a for a in cli.parser()._actions if a.choices)
    assert isinstance(commands.choices, dict)
    return [action.option_strings for action in commands.choices["serve"]._actions]


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:actors|server|kernels|tests)/[\w./]+)`", README.read_text())))
)
def test_the_files_it_names_are_there(path: str) -> None:
    assert (Path(ROOT) / path).exists()
