"""Hypercorn made safe for long streams on Trio; with http11.py the only file that knows its insides (hence the exact
version pins).

What it changes, and why:
- a client that stops reading is cut after ``write_timeout_s`` without progress, and a blocked write can be cancelled
  (stock: writes are shielded from cancellation and have no time limit);
- the end of a response is out before the request's task can be cancelled, so that connections are recycled, closed and
  timed out as they should be (stock: Quart-Trio cancels the very task that is doing that);
- connections are counted, and one too many gets an honest 503;
- an early answer to a request whose body is still coming is not lost to a TCP reset: what comes is thrown away for
  ``linger_s`` before the socket closes;
- a write that fits the kernel's buffer costs one system call.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, cast

import h11
import hypercorn.trio
import hypercorn.trio.run
import trio
from hypercorn.config import Config, Sockets
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from .http11 import BODY_WRITER, Protocol, Scope, error_reply

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_WRITE_SLICE = 64 * 1024  # bytes that have to leave within one write timeout
_FAIR_EVERY = 8  # writes between two turns of the event loop, at most
_logger = logging.getLogger("offbook.http")


class DoorConfig(Config):
    """Hypercorn's settings for this door, and the limits that it lacks."""

    include_server_header = False
    accesslog = None
    errorlog = _logger
    keep_alive_timeout = 15.0  # also the time that a request's headers may take
    keep_alive_max_requests = 100_000
    read_timeout = None  # would count a client's silence while we are sending to it
    h11_max_incomplete_size = 32 * 1024  # bytes of headers

    write_timeout_s = 30.0
    linger_s = 1.0
    connections_max = 1000

    def __init__(self) -> None:
        self.alpn_protocols = ["http/1.1"]
        self.connections = 0
        self.listening: Sockets | None = None
        self._blocked_writes: set[trio.CancelScope] = set()
        self._aborted = False

    def create_sockets(self) -> Sockets:
        """The sockets to serve on, made once, so that a port in use is found before anything is loaded."""
        if self.listening is None:
            self.listening = super().create_sockets()
        return self.listening

    def abort_writes(self) -> None:
        """Give up at once on every client that is not reading, now and from now on: for a shutdown in a hurry."""
        self._aborted = True
        for scope in self._blocked_writes:
            scope.cancel(reason="the server stops at once")

    async def write(self, stream: trio.SocketStream, data: memoryview) -> bool:
        """Send all of it, or False when it made no progress for ``write_timeout_s``."""
        for start in range(0, len(data), _WRITE_SLICE):
            with trio.move_on_after(0 if self._aborted else self.write_timeout_s) as scope:
                self._blocked_writes.add(scope)
                try:
                    await stream.send_all(data[start : start + _WRITE_SLICE])
                finally:
                    self._blocked_writes.discard(scope)
            if scope.cancelled_caught:
                return False
        return True


async def serve(
    app: AsgiApp,
    config: DoorConfig,
    *,
    shutdown_trigger: Callable[[], Awaitable[None]] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``shutdown_trigger`` returns; then no new connections, and ``config.graceful_timeout`` for the rest.

    Starts with the list of bound addresses. Raises OSError when an address cannot be bound.
    """
    await hypercorn.trio.serve(
        cast(Any, shield_final(app)), config, shutdown_trigger=shutdown_trigger, task_status=task_status, mode="asgi"
    )


def shield_final(app: AsgiApp) -> AsgiApp:
    """The same app, whose last send of a response is not cut short by the cancellation which that send sets off."""

    async def shielded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return

        async def send_whole(message: MutableMapping[str, Any]) -> None:
            if message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            with trio.CancelScope(shield=True):  # bounded by the write timeout and the linger time
                await send(message)

        await app(scope, receive, send_whole)

    return shielded


class Connection(TCPServer):
    """One client connection, from accept to close."""

    config: DoorConfig
    stream: trio.SocketStream  # type: ignore[assignment]  # stock: also TLS, which belongs to a proxy in front

    async def run(self) -> None:
        self._reading = trio.CancelScope()
        self._reader_done = trio.Event()
        self._closing = False
        self._writes = 0
        if self.config.connections >= self.config.connections_max:
            await self._turn_away()
            return
        self.config.connections += 1
        try:
            await self._converse()
        except OSError:
            pass  # the client went while its addresses were asked for
        finally:
            self.config.connections -= 1

    async def _converse(self) -> None:
        socket = self.stream.socket
        client = parse_socket_addr(socket.family, socket.getpeername())
        server = parse_socket_addr(socket.family, socket.getsockname())
        try:
            async with TaskGroup() as task_group:
                self._task_group = task_group
                state = ConnectionState(self.state.copy())
                protocol = Protocol(
                    self.app, self.config, self.context, task_group, state, False, client, server, self.protocol_send
                )
                state[BODY_WRITER] = protocol.write_body
                self.protocol = cast(Any, protocol)
                await self.idle_task.restart(task_group, self._idle_timeout)
                with self._reading:
                    await self._read_data()
                await self.protocol.handle(Closed())
                await self.idle_task.stop()
        finally:
            with trio.move_on_after(2 * self.config.linger_s, shield=True):
                await self._close()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            await self._close()
            await self.protocol.handle(Closed())
            self._reading.cancel(reason="the connection is closed")
        elif not self._reader_done.is_set():  # nobody waits on a connection that is over
            await super().protocol_send(event)

    async def _write(self, data: bytes) -> None:
        # Cancellable before any byte leaves, and fair: without a real checkpoint now and then an endless response that
        # finds the kernel's buffer empty, or nobody there, starves everybody else.
        self._writes += 1
        if self._closing or self._writes % _FAIR_EVERY == 0:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        if self._closing or not data:
            return
        rest = memoryview(data)
        if not self.send_lock.locked():
            sent = self._write_now(rest)
            if sent == len(rest):
                return
            rest = rest[sent:]
        try:
            async with self.send_lock:
                alive = await self.config.write(self.stream, rest)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            alive = False
        except trio.Cancelled:
            self._cut()  # part of a message may be out: nothing sensible can follow it
            raise
        if not alive:
            self._cut()
            await self.protocol.handle(Closed())

    def _write_now(self, data: memoryview) -> int:
        """As many bytes as the kernel takes without waiting; errors are left to the careful way to find again."""
        try:
            return os.write(self.stream.socket.fileno(), data)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                _logger.debug("write: %s", error)
            return 0

    def _cut(self) -> None:
        self._closing = True
        self.stream.socket.close()
        self._reading.cancel(reason="the connection was cut")  # a reader that waits for its turn reads no end of file

    async def _read_data(self) -> None:
        try:
            while True:
                try:
                    data = await self.stream.receive_some(MAX_RECV)
                except (trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError):
                    return
                if not self._closing:  # what comes after the last answer is thrown away
                    await self.protocol.handle(RawData(bytes(data)))
                if not data:
                    return
        finally:
            self._reader_done.set()

    async def _close(self) -> None:
        if not self._closing:
            self._closing = True
            if self._is_unread():
                await self._linger()
        await super()._close()

    def _is_unread(self) -> bool:
        connection = cast(Any, self.protocol).connection
        return connection.their_state in (h11.SEND_BODY, h11.ERROR)

    async def _linger(self) -> None:
        """Let the client finish sending and read our answer: closing on unread bytes would reset the connection."""
        with (
            trio.move_on_after(self.config.linger_s, shield=True),
            suppress(trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            await self.stream.send_eof()
            try:
                while await self.stream.receive_some(MAX_RECV):
                    pass
            except trio.BusyResourceError:
                await self._reader_done.wait()

    async def _turn_away(self) -> None:
        headers, body = error_reply(503)
        lines = [b"HTTP/1.1 503 Service Unavailable", *(name + b": " + value for name, value in headers), b"", body]
        with trio.move_on_after(self.config.linger_s), suppress(trio.BrokenResourceError):
            await self.stream.send_all(b"\r\n".join(lines))
        await self._linger()
        await trio.aclose_forcefully(self.stream)


def _connection(app: Any, config: Config, context: Any, state: Any, stream: Any) -> TCPServer:
    """Ours for our configuration, stock for anybody else who serves with Hypercorn in this process."""
    kind = Connection if isinstance(config, DoorConfig) else TCPServer
    return kind(app, config, context, state, stream)


hypercorn.trio.run.TCPServer = _connection  # type: ignore[attr-defined,assignment]
