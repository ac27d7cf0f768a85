"""Servers that many tests share: one on a tiny random model, one on the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Live, ended_well
from server_process import ServerProcess


@pytest.fixture(scope="session")
def tiny_server(tiny_model_dir: Path) -> Iterator[ServerProcess]:
    with ended_well("--model", str(tiny_model_dir), "--kv-memory", "64M", "--threads", "1") as server:
        yield server


@pytest.fixture(scope="session")
def default_server(default_model_path: Path) -> Iterator[ServerProcess]:
    with ended_well("--kv-memory", "256M") as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tiny_server: ServerProcess) -> Iterator[Live]:
    with Live(tiny_server.url, vocabulary=300, eos=(2, "<|im_end|>")) as live:
        yield live


@pytest.fixture(scope="session")
def smollm2(default_server: ServerProcess) -> Iterator[Live]:
    with Live(default_server.url, vocabulary=49152, eos=(2, "<|im_end|>")) as live:
        yield live


@pytest.fixture(scope="session")
def exact(default_model_path: Path) -> Iterator[Live]:
    """The default model in float32 throughout."""
    with ended_well("--dtype", "float32", "--kv-memory", "256M") as server:
        with Live(server.url, vocabulary=49152, eos=(2, "<|im_end|>")) as live:
            yield live


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.model)])
def live(request: pytest.FixtureRequest) -> Live:
    """Both models, one after the other."""
    found: Live = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def whole(tiny_model_dir: Path) -> Iterator[Live]:
    """The tiny model, telling the log-probability of every token: filters can be checked against formulas."""
    wide = ("--logprobs-max", "300", "--threads", "1")
    with ended_well("--model", str(tiny_model_dir), "--kv-memory", "64M", *wide) as server:
        with Live(server.url, vocabulary=300, eos=(2, "<|im_end|>")) as live:
            yield live
