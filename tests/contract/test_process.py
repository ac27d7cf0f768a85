"""The process: start-up lines, exit codes, signals. Real processes, real signals, a tiny model."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from server_process import ServerProcess, server_process

SMALL = ("--kv-memory", "64M", "--threads", "1")
LONG = {"prompt": "the sky", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "offbook.server", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def wait_until_running(server: ServerProcess, sequences: int) -> None:
    until = time.monotonic() + 20
    while f"offbook_sequences_running {sequences}.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < until


@pytest.fixture
def arguments(tiny_model_dir: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_model_dir), *SMALL)


def test_start_up_says_what_was_loaded_and_what_to_try(arguments: tuple[str, ...]) -> None:
    with server_process(*arguments) as server:
        (loaded,) = [line for line in server.lines if line.startswith("loaded ")]
        assert all(word in loaded for word in ("tiny", "weights", "KV memory", "context 512"))
        try_this = server.wait_for("curl").strip()
        answer = subprocess.run(try_this, shell=True, capture_output=True, text=True, timeout=30, check=True)
        assert json.loads(answer.stdout)["object"] == "text_completion"
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        assert any("POST /v1/completions 200" in line for line in server.errors)


def test_b226_a_signal_drains_what_is_in_progress(arguments: tuple[str, ...]) -> None:
    with server_process(*arguments) as server, ThreadPoolExecutor(2) as pool:
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]

        def ask(stream: bool) -> str:
            body = {**LONG, "model": model, "stream": stream}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().text

        plain, stream = pool.submit(ask, False), pool.submit(ask, True)
        wait_until_running(server, 2)
        server.send(signal.SIGINT)
        server.wait_for("draining 2 requests")
        assert json.loads(plain.result(30))["usage"]["completion_tokens"] == 300
        assert stream.result(30).endswith("data: [DONE]\n\n")
        assert server.exit_code() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def ask_for_long(server: ServerProcess, *, stream: bool) -> httpx.Response:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {**LONG, "model": model, "n": 32, "stream": stream}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def assert_told(plain: httpx.Response, stream: httpx.Response) -> None:
    """Whoever had to be left behind knows it: a 503 that says when to come again, an error event and the end mark."""
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "unavailable")
    assert int(plain.headers["retry-after"]) >= 1
    *events, error, done, nothing = stream.text.split("\n\n")
    assert len(events) > 1 and (done, nothing) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"


def test_a_second_signal_tells_those_who_read(arguments: tuple[str, ...]) -> None:
    with server_process(*arguments) as server, ThreadPoolExecutor(2) as pool:
        plain, stream = (pool.submit(ask_for_long, server, stream=stream) for stream in (False, True))
        wait_until_running(server, 64)
        server.send(signal.SIGTERM)
        server.wait_for("draining 2 requests")
        server.send(signal.SIGTERM)
        assert server.exit_code() == 128 + signal.SIGTERM
        assert_told(plain.result(5), stream.result(5))


def test_a_second_signal_stops_at_once(arguments: tuple[str, ...]) -> None:
    with server_process(*arguments) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        body = json.dumps({**LONG, "model": model, "n": 64, "logprobs": 5, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        client.recv(100)  # and never again: writes to it will block
        server.send(signal.SIGTERM)
        server.wait_for("draining 1 request;")
        began = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.exit_code() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 5


def test_b227_idle_connections_do_not_hold_up_the_end(arguments: tuple[str, ...]) -> None:
    with server_process(*arguments) as server, httpx.Client(base_url=server.url) as client:
        client.get("/health")
        with socket.create_connection(("127.0.0.1", server.port)):
            began = time.monotonic()
            server.send(signal.SIGTERM)
            assert server.exit_code() == 0
            assert time.monotonic() - began < 4


def test_the_drain_has_a_deadline(arguments: tuple[str, ...]) -> None:
    with server_process(*arguments, "--drain", "0.2") as server, ThreadPoolExecutor(2) as pool:
        plain, stream = (pool.submit(ask_for_long, server, stream=stream) for stream in (False, True))
        wait_until_running(server, 64)
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        assert_told(plain.result(5), stream.result(5))
        assert sum("error=unavailable" in line for line in server.errors) == 2


def test_a_port_in_use_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = command("serve", *arguments, "--port", port)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"offbook: port {port} on 127.0.0.1 is in use: choose another with --port\n"


@pytest.mark.parametrize("what", ["missing", "broken", "empty"])
@pytest.mark.parametrize("subcommand", [("serve", "--port", "0"), ("complete", "hello")])
def test_a_model_that_cannot_be_read_is_one_line_and_exit_code_2(
    tmp_path: Path, what: str, subcommand: tuple[str, ...]
) -> None:
    model = tmp_path / "model.gguf"
    if what != "missing":
        model.write_bytes(b"GGUF nonsense" if what == "broken" else b"")
    ended = command(*subcommand, "--model", str(model))
    assert ended.returncode == 2
    errors = ended.stderr.splitlines()
    assert errors[-1].startswith("offbook: ") and str(model) in errors[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "options", [["--port", "x"], ["--kv-memory", "lots"], ["--threads", "0"], ["--drain", "-1"], ["--nope"]]
)
def test_bad_options_are_exit_code_2(options: list[str]) -> None:
    ended = command("serve", *options)
    assert ended.returncode == 2
    assert options[0] in ended.stderr


CRASH = """
import sys
from offbook.server import cli, serve
from offbook.actors import engine
from sim_device import SimDevice, loaded_with
from sim_executor import SimExecutor

executor = SimExecutor(SimDevice())
def die(step):
    raise RuntimeError("planted: the executor is dead")
executor.before = die
serve.open_engine = lambda config, progress: engine.open_engine(config, loaded=loaded_with(executor, executor.device))
sys.path.insert(0, "")
sys.exit(cli.main(["serve", "--port", "0"]))
"""


def test_a_dead_actor_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: a server that goes on answering 200 while its engine is dead."""
    support = str(Path(__file__).parent.parent / "support")
    monkeypatch.setenv("PYTHONPATH", ":".join([support, *(p for p in sys.path if p)]))
    with server_process(code=CRASH) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{server.url}/v1/completions", json={"model": "simulated", "prompt": "a"}, timeout=20)
        assert server.exit_code() == 1
        assert any("planted: the executor is dead" in line for line in server.errors)


def test_complete_streams_to_the_terminal(arguments: tuple[str, ...]) -> None:
    asked = ("complete", "the sky", *arguments, "--temperature", "0", "--max-tokens", "5")
    first, second = command(*asked), command(*asked)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert first.stdout == second.stdout and first.stdout.startswith("the sky")
    wrong = command("complete", "the sky", *arguments, "--temperature", "9")
    assert wrong.returncode == 2
    assert wrong.stderr.endswith("Input should be less than or equal to 2, field: 'temperature', value: 9.0\n")
