"""What a client may say, and how it is answered: Hypercorn's HTTP/1.1, without what this door does not serve.

What it changes, and why:
- HTTP/1.1 only: HTTP/2 has no back-pressure here and cannot be switched off by settings; WebSockets are refused;
- whatever is malformed gets a JSON error like every other one;
- a response that has begun may write more of its body straight to the connection (``body_writer``).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import h11
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol

Scope = Mapping[str, Any]
WriteBody = Callable[[bytes], Awaitable[None]]
BODY_WRITER = "offbook.body_writer"  # in an ASGI scope's state

# What the layers above take apart without a check of their own: anything else would end there as a 500.
_TARGET = re.compile(rb"/.*|https?://[^/?#\[\]]+(/.*)?|\*", re.DOTALL)
_HOST = re.compile(rb"([\w-]{1,63}(\.[\w-]{1,63})*\.?|\[[0-9a-f:.]{2,45}\])?(:\d{1,5})?", re.IGNORECASE)


def body_writer(scope: Scope) -> WriteBody | None:
    """What writes more of the body of a response, of no stated length, that has begun; None behind another server.

    Each layer in between only hands a piece on, which for 64 streams costs the event loop a millisecond a step.
    """
    writer: WriteBody | None = scope.get("state", {}).get(BODY_WRITER)
    return writer


class _Refused(Exception):
    """A request that is well-formed HTTP and still not taken."""

    def __init__(self, status: int) -> None:
        self.status = status


class Protocol(H11Protocol):
    """HTTP/1.1 and nothing else on the connection."""

    async def handle(self, event: Event) -> None:
        try:
            await super().handle(event)
        except _Refused as refusal:
            await self._send_error_response(refusal.status)
            await self.send(Closed())

    async def _check_protocol(self, event: h11.Request) -> None:
        """Stock: switches to HTTP/2 here. An ``Upgrade: h2c`` is ignored, as HTTP allows."""
        names = [name.lower() for name, _ in event.headers]
        if event.method == b"PRI":
            raise _Refused(505)
        if b"content-length" in names and b"transfer-encoding" in names:
            raise _Refused(400)  # two ideas of where the body ends: a smuggling vector behind proxies
        hosts = [value for name, value in event.headers if name.lower() == b"host"]
        if not _TARGET.fullmatch(event.target) or not all(map(_HOST.fullmatch, hosts)):
            raise _Refused(400)
        if any(name.lower() == b"upgrade" and value.lower() == b"websocket" for name, value in event.headers):
            raise _Refused(400)

    async def write_body(self, data: bytes) -> None:
        """More of a body without Content-Length, framed as h11 does it: chunks for HTTP/1.1, bare bytes before."""
        assert isinstance(self.connection, h11.Connection)
        chunked = (self.connection.their_http_version or b"") >= b"1.1"
        await self.send(RawData(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data))

    async def _send_h11_event(self, event: Any) -> None:
        """Stock: raises when a request that is cancelled while its response begins is to be answered with a 500."""
        late = isinstance(event, h11.Response) and self.connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        await (self.send(Closed()) if late else super()._send_h11_event(event))

    async def _send_error_response(self, status_code: int) -> None:
        head, body = error_reply(status_code)
        headers = [*head, *self.config.response_headers("h11")]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


_REASONS = {
    400: "The request is not valid HTTP/1.1 for this server",
    431: "The request's headers are too large",
    501: "Of the transfer encodings only chunked is understood",
    503: "Too many connections: try again in a second",
    505: "Only HTTP/1.1 is served here",
}


def error_reply(status: int) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and JSON body of an error that no application saw."""
    message = _REASONS.get(status, "The request could not be read")
    kind = b"overloaded" if status == 503 else b"invalid_request_error"
    body = b'{"error":{"object":"error","type":"%s","code":"%s","message":"%s"}}' % (kind, kind, message.encode())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    return ([*headers, (b"retry-after", b"1")] if status == 503 else headers), body
