"""Options to configuration, log lines, progress: what the command line promises without starting anything."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest

from offbook.actors.config import EngineConfig
from offbook.actors.events import ModelCard
from offbook.server import cli, serve
from offbook.server.app import Keys
from offbook.server.logs import JsonFormatter, TextFormatter
from offbook.server.progress import ProgressBar


def test_no_options_are_the_defaults_of_the_engine() -> None:
    assert cli.engine_config(cli.parser().parse_args(["serve"])) == EngineConfig()
    assert cli.engine_config(cli.parser().parse_args(["complete", "x"])) == EngineConfig()


def test_options_reach_the_engine() -> None:
    line = "serve --model m.gguf --alias a --alias b --kv-memory 1.5G --context 2048 --client-share 3 --deadline 2.5"
    config = cli.engine_config(cli.parser().parse_args([*line.split(), "--no-prefix-cache", "--logprobs-max", "20"]))
    assert (config.model, config.model_aliases, config.kv_bytes) == ("m.gguf", ("a", "b"), 3 * 2**29)
    assert (config.context_length, config.client_share_max, config.deadline_s) == (2048, 3, 2.5)
    assert (config.prefix_cache, config.logprobs_max) == (False, 20)


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 2**29), ("2GiB", 2**31), ("1k", 1024), ("7", 7), ("0.5 MB", 2**19)]
)
def test_sizes(text: str, size: int) -> None:
    assert cli.size(text) == size


@pytest.mark.parametrize("command", ["serve", "complete"])
def test_every_option_says_what_it_is_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert "--kv-memory" in capsys.readouterr().out
    actions = cli.parser()._subparsers._group_actions[0].choices[command]._actions  # type: ignore[union-attr,index]
    assert all(action.help for action in actions)


@pytest.mark.parametrize("port", ["0", "65535"])
def test_ports(port: str) -> None:
    assert cli.parser().parse_args(["serve", "--port", port]).port == int(port)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["serve", "--api-key", ""], "argument --api-key: the key is empty: is a variable of the shell unset?"),
        (["serve", "--api-key", " "], "argument --api-key: the key is empty: is a variable of the shell unset?"),
        (["serve", "--port", "65536"], "argument --port: '65536' is no whole number from 0 to 65535"),
        (["serve", "--threads", "0"], "argument --threads: '0' is no whole number of at least 1"),
        (["complete", "a", "--prompt", "x"], None),  # not --prompt-lookup
    ],
)
def test_a_wrong_value_is_one_line(line: list[str], told: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert told is None or printed.err == f"offbook serve: {told} (add --help for all options)\n"


def test_keys_come_from_both_places() -> None:
    options = cli.parser().parse_args(["serve", "--api-key", " one ", "--api-key", "two"])
    assert cli.api_keys(options.api_keys, None) == ("one", "two")
    assert cli.api_keys(options.api_keys, "three, four ,,") == ("one", "two", "three", "four")


@pytest.mark.parametrize("environment", ["", " ", ","])
def test_a_variable_without_a_key_opens_nothing(
    environment: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_API_KEYS", environment)
    assert cli.main(["serve", "--port", "0"]) == 2
    told = "$OFFBOOK_API_KEYS is set and holds no key: unset it to serve everybody"
    assert capsys.readouterr().err == f"offbook: {told}\n"


def test_the_help_tells_defaults_that_are_values(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["--version"], ["serve", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(line)
    printed = " ".join(capsys.readouterr().out.split())
    assert re.match(r"offbook \d", printed)
    assert "(default: 512M)" in printed and "(default: 8000)" in printed
    assert not any(f"(default: {what})" in printed for what in ("True", "False", "None", "[]"))


@pytest.mark.parametrize("keys", [0, 2])
def test_start_up_says_whether_keys_are_in_force(keys: int, capsys: pytest.CaptureFixture[str]) -> None:
    card = ModelCard(
        id="m", aliases=(), context_length=1, vocabulary_size=1, created=0, device="d", weight_bytes=0, kv_bytes=0,
        kv_tokens=1, load_s=0,
    )  # fmt: skip
    serve.announce(card, "http://h", keys)
    _, told, _, curl = capsys.readouterr().out.splitlines()
    assert told == ("keys: 2" if keys else "no keys: anybody who reaches this port may use it")
    assert ("-H 'authorization: Bearer YOUR_KEY'" in curl) == bool(keys)


def test_one_exception_is_found_inside_groups() -> None:
    error = ValueError("x")
    assert cli.sole(ExceptionGroup("a", [ExceptionGroup("b", [error])])) is error
    two = ExceptionGroup("a", [error, KeyError()])
    assert cli.sole(two) is two


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("offbook.access", logging.INFO, "", 0, message, None, None)
    made.fields = fields
    return made


def test_log_lines_are_lines() -> None:
    text = TextFormatter().format(record("GET /a\nb 200", request_id="r1", status=200))
    assert text.endswith("INFO GET /a\\nb 200 request_id=r1")
    line = JsonFormatter().format(record("GET /a\nb 200", request_id="r1", status=200))
    assert "\n" not in line
    assert json.loads(line).items() >= {"message": "GET /a\nb 200", "request_id": "r1", "status": 200}.items()


def test_keys_are_told_by_fingerprint() -> None:
    from werkzeug.datastructures import Headers

    assert Keys(()).client_of(Headers({"Authorization": "Bearer anything"})) is None
    keys = Keys(("a", "b"))
    one = keys.client_of(Headers({"Authorization": "Bearer a"}))
    two = keys.client_of(Headers({"X-Api-Key": "b"}))
    assert one != two and one == keys.client_of(Headers({"X-Api-Key": "a"}))
    for headers in ({}, {"Authorization": "Basic a"}, {"Authorization": "Bearer c"}, {"X-Api-Key": "\udcff"}):
        with pytest.raises(PermissionError):
            keys.client_of(Headers(headers))


def test_progress_without_a_terminal_is_a_line_per_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProgressBar() as report:
        for done in range(3):
            report("fetching", done, 3)
        report("loading", 1, 1)
    assert capsys.readouterr().err == "fetching ...\nloading ...\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar() as report:
        report("fetching", 0, 0)
        report("fetching", 5, 10)
        report.close()
