"""A server process under load, looked at from outside: its memory, and what it still holds of anybody."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import trio
from raw_http import Answered, connect
from server_process import ServerProcess, server_process

IMPATIENT = ("--write-timeout", "1", "--keep-alive", "1", "--body-timeout", "1", "--debug", "--log-level", "warning")


class Stressed:
    """A server process, looked at from outside."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        self.server = server
        self.port = server.port
        self.model = model
        self.process = psutil.Process(server.process.pid)

    @property
    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    async def get(self, path: str) -> Answered:
        async with connect(self.port) as client:
            return await client.request("GET", path)

    async def settled(self) -> None:
        """Waits until nothing is left of anybody: no request, block, mail, connection."""
        with trio.move_on_after(20) as waiting:
            while await self._held():  # noqa: ASYNC110  # another process: nothing tells us
                await trio.sleep(0.1)  # another process: nothing tells us
        assert not waiting.cancelled_caught, await self._held()

    async def _held(self) -> list[str]:
        lines = (await self.get("/metrics")).body.decode().splitlines()
        gauges = ("requests_waiting", "sequences_running", "sequences_queued", "kv_blocks_used", "http_connections")
        values = {
            name: float(line.split()[1]) for line in lines for name in gauges if line.startswith(f"offbook_{name} ")
        }
        assert set(values) == set(gauges)
        values["http_connections"] -= 1  # ours
        view = (await self.get("/debug")).json
        values["tickets"] = view["tickets_total"]
        values |= {f"mailbox {name}": box["messages"] for name, box in view["mailboxes"].items()}
        return [f"{name}={value:g}" for name, value in values.items() if value]


@contextmanager
def stressed(model: str, *options: str) -> Iterator[Stressed]:
    with server_process(*options, *IMPATIENT) as server:
        yield Stressed(server, model)
        assert server.process.poll() is None
        assert not [line for line in server.errors if "Traceback" in line or " ERROR " in line], server.errors


def tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
