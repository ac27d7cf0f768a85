"""The command line: ``offbook serve`` and ``offbook complete``.

Rules of this file: every option has a sane default and says what it is for; what a user can get wrong ends in one clear
line and exit code 2, a crash in a traceback and exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..actors.config import EngineConfig

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_ENGINE = EngineConfig()


def size(text: str) -> int:
    """``512M``, ``2GiB``, ``1048576`` -> bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if not match or (value := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512M or 2G")
    return value


def count(least: int, most: float = float("inf")) -> Callable[[str], int]:
    """An integer of at least ``least``, and of ``most`` at most."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or not least <= int(text) <= most:
            wanted = f"of at least {least}" if most == float("inf") else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {wanted}")
        return int(text)

    return parse


def api_key(text: str) -> str:
    """A key, which is not empty: an unset variable of a shell would open the server to everybody."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the key is empty: is a variable of the shell unset?")
    return text.strip()


def seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


class _Parser(argparse.ArgumentParser):
    """Options by their whole names only; what is wrong in one line, without the usage of every option above it."""

    def __init__(self, **named: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **named)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (add --help for all options)\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults where there is one to tell: what a switch or an option without a value does, its own words say."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default is not None and action.default != [] and not isinstance(action.default, bool)
        return super()._get_help_string(action) if told else action.help


class _Version(argparse.Action):
    """``--version``: looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from .openapi import package_version

        sys.stdout.write(f"offbook {package_version()}\n")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    main = _Parser(prog="offbook", description="Text completions on Trio actors: one seed, one answer.")
    main.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = main.add_subparsers(dest="command", required=True, metavar="serve|complete")
    serve = commands.add_parser("serve", help="serve POST /v1/completions over HTTP")
    _model_options(serve)
    _listen_options(serve)
    _limit_options(serve)
    complete = commands.add_parser("complete", help="complete one prompt here, without a server")
    _complete_options(complete)
    _model_options(complete)
    return main


def _model_options(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("model")
    add = group.add_argument
    add("--model", metavar="PATH", help="GGUF file or Hugging Face directory; without it SmolLM2-135M is fetched once")
    add("--model-id", metavar="NAME", help="name to serve it under; without it the file's own")
    add("--alias", dest="model_aliases", action="append", default=[], metavar="NAME", help="another name for it")
    add("--device", default=_ENGINE.device, choices=["auto", "cpu", "torch-cpu", "cuda"], help="what computes")
    add("--dtype", default=_ENGINE.dtype, choices=["auto", "bfloat16", "float32"], help="what it computes in")
    add(
        "--threads", type=count(1), default=None, metavar="N", help="threads of the CPU device; without it one per core"
    )
    add("--context", dest="context_length", type=count(1), metavar="TOKENS", help="at most the model's own context")
    add("--kv-memory", dest="kv_bytes", type=size, default=f"{_ENGINE.kv_bytes // 2**20}M", metavar="SIZE",
        help="for KV pages; bounds the longest context too")  # fmt: skip
    add("--no-prefix-cache", dest="prefix_cache", action="store_false", help="compute every prompt anew: no cache")
    add("--prompt-lookup", action="store_true", help="draft every answer from its prompt: same answers, often sooner")
    add("--draft-tokens-max", type=count(1), default=_ENGINE.draft_tokens_max, metavar="N", help="draft tokens a step")
    add("--think-start", metavar="TEXT", help="text that opens a model's thinking; without it its own <think>")
    add("--think-end", metavar="TEXT", help="text that closes it")


def _listen_options(to: argparse.ArgumentParser) -> None:
    add = to.add_argument_group("door").add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    add("--port", type=count(0, 65535), default=8000, help="port to listen on; 0 picks a free one")
    add("--api-key", dest="api_keys", type=api_key, action="append", default=[], metavar="KEY",
        help="take only requests with one of these; or $OFFBOOK_API_KEYS (commas), which ps hides")  # fmt: skip
    add("--connections-max", type=count(1), default=1000, metavar="N", help="more get a 503")
    add(
        "--body-max",
        dest="body_bytes_max",
        type=size,
        default="8M",
        metavar="SIZE",
        help="larger bodies get a 413",
    )
    add("--body-timeout", dest="body_timeout_s", type=count(1), default=30, metavar="S", help="for a body to arrive")
    add("--write-timeout", dest="write_timeout_s", type=seconds, default=30.0, metavar="S",
        help="a client that does not read for so long is cut")  # fmt: skip
    add("--keep-alive", dest="keep_alive_s", type=seconds, default=15.0, metavar="S", help="for an idle connection")
    add(
        "--drain", dest="drain_s", type=seconds, default=60.0, metavar="S", help="for requests in progress at a SIGTERM"
    )
    add("--drain-delay", dest="drain_delay_s", type=seconds, default=0.0, metavar="S",
        help="keep the port open, refusing, for load balancers that poll /health")  # fmt: skip
    add("--debug", action="store_true", help="GET /debug shows mailboxes, requests and sequences")
    add("--log-format", choices=["text", "json"], default="text", help="of the log on standard error")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info", help="info: a line per request")


def _limit_options(to: argparse.ArgumentParser) -> None:
    add = to.add_argument_group("limits").add_argument
    add("--running-max", type=count(1), default=_ENGINE.running_max, metavar="N", help="sequences in a step")
    add("--step-tokens-max", type=count(1), default=_ENGINE.step_tokens_max, metavar="N", help="tokens in a step")
    add("--queue-max", type=count(1), default=_ENGINE.queue_max, metavar="N", help="requests waiting; more get a 503")
    add(
        "--queue-tokens-max", type=count(1), default=_ENGINE.queue_tokens_max, metavar="N", help="prompt tokens waiting"
    )
    add("--client-share", dest="client_share_max", type=count(1), metavar="N",
        help="requests in progress of one API key, or of one `user` where there are no keys; more get a 429; a request "
        "with neither is not limited")  # fmt: skip
    add("--prompts-max", type=count(1), default=_ENGINE.prompts_max, metavar="N", help="prompts in one request")
    add("--choices-max", type=count(1), default=_ENGINE.choices_max, metavar="N", help="prompts x n of one request")
    add(
        "--deadline", dest="deadline_s", type=seconds, metavar="S", help="for a whole answer, where a request sets none"
    )
    add(
        "--default-max-tokens",
        type=count(0),
        default=_ENGINE.default_max_tokens,
        metavar="N",
        help="max_tokens, if unset",
    )
    add("--logprobs-max", type=count(0), default=_ENGINE.logprobs_max, metavar="N", help="alternatives per token")
    add("--grammar-lenient", action="store_true", help="leave out what a schema cannot enforce, and say so in a header")


def _complete_options(to: argparse.ArgumentParser) -> None:
    to.add_argument("prompt", help="text to go on from")
    add = to.add_argument_group("completion").add_argument
    add("--max-tokens", type=count(0), default=64, metavar="N", help="at most so many tokens")
    add("--temperature", type=float, metavar="T", help="0 = always the likeliest; without it the model's own default")
    add("--top-p", type=float, metavar="P", help="nucleus")
    add("--top-k", type=int, metavar="K", help="best so many only")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    add("--stop", action="append", metavar="TEXT", help="end before this text; up to 4 times")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's part of the options; what a command does not offer keeps its default."""
    given = {name: value for name, value in vars(options).items() if name in EngineConfig.__struct_fields__}
    return EngineConfig(**{**given, "model_aliases": tuple(options.model_aliases)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command](options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        found = sole(error)
        if isinstance(found, _user_errors()):
            sys.stderr.write(f"offbook: {found}\n")
            return 2
        raise


def sole(error: BaseException) -> BaseException:
    """The one exception inside nested groups; a group that holds several stays as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _user_errors() -> tuple[type[Exception], ...]:
    from ..actors.errors import CompletionError
    from ..kernels.default_model import DefaultModelError
    from ..kernels.devices import DeviceError
    from ..kernels.model_checks import ModelFileError
    from .serve import PortError

    return UsageError, PortError, ModelFileError, DefaultModelError, DeviceError, CompletionError


class UsageError(Exception):
    """The environment asks for something that cannot be meant."""


def api_keys(options: Sequence[str], environment: str | None) -> tuple[str, ...]:
    """The keys of the options and of $OFFBOOK_API_KEYS. Raises UsageError when that is set and holds none."""
    listed = [key.strip() for key in (environment or "").split(",") if key.strip()]
    if environment is not None and not listed:
        raise UsageError("$OFFBOOK_API_KEYS is set and holds no key: unset it to serve everybody")
    return (*options, *listed)


def _serve(options: argparse.Namespace) -> int:
    import trio

    from . import logs, serve
    from .app import DoorSettings

    door = DoorSettings(
        api_keys=api_keys(options.api_keys, os.environ.get("OFFBOOK_API_KEYS")), body_bytes_max=options.body_bytes_max,
        body_timeout_s=options.body_timeout_s, debug=options.debug,
    )  # fmt: skip
    logs.configure(options.log_level, as_json=options.log_format == "json")
    fields = serve.ServeSettings.__struct_fields__
    settings = serve.ServeSettings(**{name: value for name, value in vars(options).items() if name in fields})
    return trio.run(serve.run, engine_config(options), door, settings)


def _complete(options: argparse.Namespace) -> int:
    import trio

    from . import logs

    logs.configure("info", as_json=False)
    wanted = ("prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    fields: dict[str, Any] = {name: getattr(options, name) for name in wanted if getattr(options, name) is not None}
    return trio.run(_stream_to_terminal, engine_config(options), fields)


async def _stream_to_terminal(config: EngineConfig, fields: dict[str, Any]) -> int:
    from ..actors.engine import open_engine
    from .progress import ProgressBar

    with ProgressBar() as report:
        async with open_engine(config, progress=report) as engine:
            report.close()
            async with engine.complete(**fields) as answer:
                sys.stdout.write(fields["prompt"])
                async for delta in answer:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                sys.stdout.write("\n")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"serve": _serve, "complete": _complete}
