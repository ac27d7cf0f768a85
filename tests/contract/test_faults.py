"""Faults of the machine: no memory, no disk, no compiler, files that vanish, ports taken, processes killed.

Whole processes where the fault is the process's, the simulated device where it is the device's. Each ends in one clear
line and a known exit code, or in one request that fails while the server lives.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from door import MODEL, door_on
from process_faults import SMALL, ask, compiler, final_names
from raw_http import connect, request_bytes
from server_process import server_process
from sim_device import SimDevice
from sim_executor import SimExecutor

from offbook.actors.execution import ThreadExecutor
from offbook.kernels.step import Device, StepBatch

Fault = Callable[[StepBatch], None]


def complete(model: Path, limit_s: float = 60, **popen: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "offbook.server", "complete", "the sky", "--model", str(model), *SMALL]
    return subprocess.run(
        [*line, "--temperature", "0", "--max-tokens", "4"], capture_output=True, text=True, timeout=limit_s, **popen
    )


def one_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("offbook: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), ended.stderr
    assert "Traceback" not in ended.stderr


# -- memory ----------------------------------------------------------------------------------------------------------


async def test_a_request_larger_than_all_kv_memory_is_refused_at_the_door() -> None:
    """4 blocks hold 64 tokens, so that is the context: a longer prompt never waits for room that cannot come."""
    async with door_on(blocks=4) as door:
        answer = await door.completion([5] * 64, max_tokens=1)
        assert answer.status == 400 and "prompt" in answer.json["error"]["message"]
        whole = await door.completion([5] * 60, max_tokens=100, ignore_eos=True)
        assert (whole.status, whole.json["usage"]["completion_tokens"]) == (200, 4)


async def test_more_than_kv_memory_holds_takes_turns() -> None:
    """Eight requests of three blocks each in four blocks: all are answered, as they are alone."""
    async with door_on(blocks=4, prefix_cache=False) as door:
        alone = [(await door.completion([i + 1] * 20, max_tokens=20, seed=i)).json["choices"] for i in range(8)]
        together: list[Any] = [None] * 8

        async def one(i: int) -> None:
            together[i] = (await door.completion([i + 1] * 20, max_tokens=20, seed=i)).json["choices"]

        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(one, i)
        assert together == alone
        await door.settled()


class _RealThread:
    """The production executor over the simulated device, for the faults that only a device's own thread has."""

    def __init__(self) -> None:
        self.device = SimDevice(blocks=64)
        self.executor = ThreadExecutor(lambda: self.device)
        self.run = self.executor.run


@pytest.mark.parametrize("error", [MemoryError("planted"), RuntimeError("CUDA out of memory (planted)")])
async def test_memory_that_runs_out_in_a_step_fails_its_requests_and_no_others(error: Exception) -> None:
    real = _RealThread()
    await real.executor.open()
    poisoned = 13

    def fault(batch: StepBatch) -> None:
        if poisoned in batch.token_ids:
            raise error

    async with door_on(real) as door:  # type: ignore[arg-type]  # an executor with a device, as it asks for
        before = await door.canary()
        real.device.fault = fault
        failed = await door.completion([poisoned, 5], max_tokens=2)
        assert (failed.status, failed.json["error"]["code"]) == (500, "internal_server_error")
        assert "planted" in failed.json["error"]["message"]
        assert await door.canary() == before
        assert (await door.get("/health")).status == 200
        assert b"offbook_failed_steps_total 1.0" in (await door.get("/metrics")).body
        await door.settled()
    await real.executor.aclose()


async def test_a_closed_executor_leaves_no_thread_behind() -> None:
    """Threads that still free a device when the interpreter goes away abort the process; so they are waited for."""

    class SlowToFree(SimDevice):
        def __del__(self) -> None:
            threading.Event().wait(0.05)

    def device() -> Device:
        made: Device = SlowToFree()
        return made

    before = set(threading.enumerate())
    executor = ThreadExecutor(device)
    await executor.open()
    await executor.aclose()
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("offbook")]


# -- model files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model directory to spoil."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "tiny"))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("config.json", "cut"),
        ("config.json", "a folder"),
        ("generation_config.json", "cut"),
        ("tokenizer.json", "missing"),
        ("model.safetensors", "missing"),
        ("model.safetensors", "cut"),
    ],
)
def test_a_spoilt_model_directory_is_one_line_and_exit_code_2(model: Path, name: str, fault: str) -> None:
    file = model / name
    data = file.read_bytes()
    file.unlink()
    if fault == "a folder":
        file.mkdir()
    elif fault == "cut":
        file.write_bytes(data[: len(data) // 2])
    one_line(complete(model), str(model))


def test_a_model_that_vanishes_while_it_is_served_is_not_missed(model: Path) -> None:
    """Weights are in memory once it says ready: neither a cut nor a deleted file reaches the answers."""
    with server_process("--model", str(model), *SMALL) as server:
        before = ask(server).json()["choices"]
        os.truncate(model / "model.safetensors", 16)
        shutil.rmtree(model)
        assert ask(server).json()["choices"] == before
        assert ask(server, prompt="and now?", seed=3).status_code == 200


# -- disk and compiler -----------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory with nothing in it."""
    monkeypatch.setenv("OFFBOOK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))


def test_a_full_disk_costs_speed_only(
    cache: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow beyond 64 KiB, so no library fits: the slow device answers, nothing half-written has a name."""
    monkeypatch.setenv("CXX", compiler(tmp_path, 'exec dd if=/dev/zero of="$2" bs=1k count=200'))
    ended = complete(tiny_model_dir, preexec_fn=small_files)
    assert ended.returncode == 0, ended.stderr
    assert "the CPU library cannot be built" in ended.stderr and "Traceback" not in ended.stderr
    assert not final_names(cache)


def test_no_compiler_costs_speed_only(cache: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with server_process("--model", str(tiny_model_dir), *SMALL) as server:
        assert ask(server).status_code == 200
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
    warnings = [line for line in server.errors if "the CPU library cannot be built" in line]
    assert len(warnings) == 1 and "no C++ compiler found" in warnings[0]


def test_a_compiler_that_fails_costs_speed_only(
    cache: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo planted: no such luck >&2; exit 1"))
    ended = complete(tiny_model_dir)
    assert ended.returncode == 0 and "planted: no such luck" in ended.stderr
    assert not final_names(cache)


@pytest.mark.parametrize("what", ["a file", "nowhere"])
def test_a_cache_directory_that_cannot_be_is_one_line(
    what: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for by name, so it is not replaced behind the user's back."""
    place = tmp_path / "file" if what == "a file" else Path("/proc/nowhere")
    if what == "a file":
        place.write_text("")
    monkeypatch.setenv("OFFBOOK_CACHE_DIR", str(place))
    one_line(complete(tiny_model_dir), str(place), "OFFBOOK_CACHE_DIR")


def test_a_home_that_cannot_be_written_is_no_trouble(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc takes no file from anybody, root included; the temporary directory steps in."""
    monkeypatch.delenv("OFFBOOK_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    seen = tmp_path / "seen"
    monkeypatch.setenv("CXX", compiler(tmp_path, f'echo "$2" >> {seen}; exit 1'))
    ended = complete(tiny_model_dir)
    assert ended.returncode == 0, ended.stderr
    assert {Path(line).parent for line in seen.read_text().split()} == {tmp_path / f"offbook-{os.getuid()}" / "lib"}


# -- too many files --------------------------------------------------------------------------------------------------


def test_more_connections_than_file_descriptors_wait_and_the_server_lives(tiny_model_dir: Path) -> None:
    """The limit on connections is set above what the system allows: accepting pauses until some have left."""
    arguments = ["serve", "--port", "0", "--model", str(tiny_model_dir), *SMALL]
    code = (
        "import resource, sys; from offbook.server.cli import main; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); sys.exit(main({arguments!r}))"
    )
    with server_process(code=code) as server:
        before = ask(server).json()["choices"]
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        for connection in held:
            connection.close()
        assert ask(server).json()["choices"] == before


async def test_a_reader_that_stays_away_holds_up_no_shutdown() -> None:
    """The engine closes while a stream's client does not read: the door's own time limit ends it."""
    executor = SimExecutor(SimDevice(blocks=512), step_s=0.0005)
    async with door_on(executor, limits={"write_timeout_s": 0.3, "graceful_timeout": 1.0}) as door:
        async with connect(door.port, receive_buffer=4096) as client:
            long = {"model": MODEL, "prompt": "a", "max_tokens": 4000, "n": 16, "ignore_eos": True, "stream": True}
            await client.send(request_bytes("POST", "/v1/completions", long | {"logprobs": 5}))
            await client.response_head()
            await door.settled()
            assert json.loads((await door.get("/health")).body) == {"status": "ready"}
