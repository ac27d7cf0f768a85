"""A real ``offbook serve`` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

READY_S = 120.0  # a first start compiles the kernels


class ServerProcess:
    """``lines``: what it has said on standard output."""

    def __init__(self, *arguments: str, code: str | None = None) -> None:
        command = ["-c", code] if code else ["-m", "offbook.server", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._said: queue.Queue[str | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=("stdout",), daemon=True),
            threading.Thread(target=self._read, args=("stderr",), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, name)
        for line in stream:
            if name == "stderr":
                self.errors.append(line)
            else:
                self.lines.append(line)
                self._said.put(line)
        if name == "stdout":
            self._said.put(None)

    def wait_for(self, text: str, limit_s: float = READY_S) -> str:
        """The next line that holds ``text``."""
        until = time.monotonic() + limit_s
        while True:
            line = self._said.get(timeout=max(0.0, until - time.monotonic()))
            if line is None:
                raise AssertionError(f"it ended without saying {text!r}: {self.lines} {self.errors}")
            if text in line:
                return line

    @property
    def url(self) -> str:
        return next(line for line in self.lines if "listens on" in line).split()[3]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, limit_s: float = 20.0) -> int:
        """Waits for its end."""
        code = self.process.wait(limit_s)
        for thread in self._threads:
            thread.join(5)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def server_process(*arguments: str, code: str | None = None, ready: bool = True) -> Iterator[ServerProcess]:
    """Started, ready unless told otherwise, and certainly gone at the end."""
    server = ServerProcess(*arguments, code=code)
    try:
        if ready:
            server.wait_for("ready; try")
        yield server
    finally:
        server.close()
