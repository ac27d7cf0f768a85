"""Options to configuration, log lines, progress: what the command line promises without starting anything."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from offbook.actors.config import EngineConfig
from offbook.server import cli
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
