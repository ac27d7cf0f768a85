"""An HTTP/1.1 client of bare sockets, for what proper clients never do; and servers to point it at.

Why: half of the door's duties (stuck readers, early leavers, malformed bytes) cannot be provoked through a library.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from offbook.server.hypercorn_adapter import DoorConfig, serve


class Answered:
    """One HTTP response."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The chunks of a stream; asserts the framing byte for byte and the end mark."""
        *events, done, nothing = self.body.split(b"\n\n")
        assert (done, nothing) == (b"data: [DONE]", b"")
        assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
        return [json.loads(event.removeprefix(b"data: ")) for event in events]


class RawClient:
    """One connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def request(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Answered:
        """Send one request and read its whole response."""
        await self.send(request_bytes(method, path, body, headers))
        return await self.response(head=method == "HEAD")

    async def response(self, *, head: bool = False) -> Answered:
        status, headers = await self.response_head()
        return Answered(status, headers, b"") if head else await self.body(status, headers)

    async def response_head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (lower case); 1xx responses are skipped."""
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        if status < 200:
            return await self.response_head()
        return status, {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines[1:] if line)}

    async def body(self, status: int, headers: dict[str, str]) -> Answered:
        """The rest of a response whose head was read."""
        if headers.get("transfer-encoding") != "chunked":
            return Answered(status, headers, await self._take(int(headers["content-length"])))
        parts = []
        while chunk := await self.chunk():
            parts.append(chunk)
        return Answered(status, headers, b"".join(parts))

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; empty at its end."""
        size = int((await self._until(b"\r\n")).strip(), 16)
        data = await self._take(size)
        await self._take(2)
        return data

    async def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        while data := await self.stream.receive_some(65536):
            self._buffer += data
        out, self._buffer = self._buffer, b""
        return out

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            await self._more()
        head, self._buffer = self._buffer.split(mark, 1)
        return head

    async def _take(self, n: int) -> bytes:
        while len(self._buffer) < n:
            await self._more()
        data, self._buffer = self._buffer[:n], self._buffer[n:]
        return data

    async def _more(self) -> None:
        data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError("the server closed the connection")
        self._buffer += data


def request_bytes(
    method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> bytes:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = {"host": "test"}
    if data is not None:
        lines |= {"content-type": "application/json", "content-length": str(len(data))}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + (data or b"")


@asynccontextmanager
async def connect(port: int, *, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    """A connection that is gone at the end of the block."""
    plain = socket.socket()
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.setblocking(False)
    opened = trio.socket.from_stdlib_socket(plain)
    with opened:
        await opened.connect(("127.0.0.1", port))
        yield RawClient(trio.SocketStream(opened))


class Served:
    """A server in this process."""

    def __init__(self, port: int, config: DoorConfig, scope: trio.CancelScope) -> None:
        self.port = port
        self.config = config
        self.scope = scope
        self.stop = trio.Event()
        self.ended = trio.Event()

    async def get(self, path: str, **headers: str) -> Answered:
        return await self.ask("GET", path, None, **headers)

    async def ask(self, method: str, path: str, body: bytes | dict[str, Any] | None, **headers: str) -> Answered:
        """One request on a connection of its own."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with connect(self.port) as client:
            return await client.request(method, path, body, names)

    async def complete(self, **fields: Any) -> Answered:
        """POST /v1/completions."""
        return await self.ask("POST", "/v1/completions", fields)


@asynccontextmanager
async def serving(app: Any, **limits: Any) -> AsyncIterator[Served]:
    """Serve an application on a free port; ``limits`` are attributes of the configuration."""
    config = DoorConfig()
    config.bind = ["127.0.0.1:0"]
    config.linger_s = 0.3
    config.graceful_timeout = 5.0
    for name, value in limits.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    async with trio.open_nursery() as nursery:
        served = Served(0, config, nursery.cancel_scope)

        async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await partial(serve, shutdown_trigger=served.stop.wait, task_status=task_status)(app, config)
            served.ended.set()

        (url,) = await nursery.start(run)
        served.port = int(url.rsplit(":", 1)[1])
        yield served
        served.stop.set()
