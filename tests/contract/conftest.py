"""Servers that many tests share: one on a tiny random model, one on the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, server_process


@pytest.fixture(scope="session")
def tiny_server(tiny_model_dir: Path) -> Iterator[ServerProcess]:
    with server_process("--model", str(tiny_model_dir), "--kv-memory", "64M", "--threads", "1") as server:
        yield server


@pytest.fixture(scope="session")
def default_server(default_model_path: Path) -> Iterator[ServerProcess]:
    with server_process("--kv-memory", "256M") as server:
        yield server
