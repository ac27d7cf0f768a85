"""One HTTP exchange: what it holds open, how it ended, and its line in the log.

Rules of this file: whatever a handler opens for the response is closed when the request's task ends, whichever way it
ends, before or after the first byte; the log line has figures and ids, never a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from typing import Any, cast
from urllib.parse import quote

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector
from quart_trio.asgi import TrioASGIHTTPConnection

from ..actors.answer import Answer
from .hypercorn_adapter import Send

access_log = logging.getLogger("offbook.access")
QUIET = ("/health", "/metrics")  # polled all day: logged at DEBUG
SCOPE_KEY = "offbook.exchange"


class DoorMetrics:
    """HTTP's own figures and the process's; no label that a client chooses."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "offbook_http_responses", "Responses by status; 499: the client left first", ("status",),
            registry=self.registry,
        )  # fmt: skip
        self.connections = Gauge("offbook_http_connections", "Open connections", registry=self.registry)
        self.ready = Gauge("offbook_ready", "1 when /health is 200: loaded and not draining", registry=self.registry)
        self.model = Info("offbook_model", "What is served, and on what", registry=self.registry)
        ProcessCollector(registry=self.registry)  # memory, CPU time and open files of the process


class Exchange:
    """What is known of one request; the handler fills it in as it learns."""

    def __init__(self, method: str, path: str) -> None:
        self.resources = AsyncExitStack()
        self.method = method
        self.path = path
        self.began = time.monotonic()
        self.status = 0
        self.complete = False
        self.request_id: str | None = None
        self.client: str | None = None
        self.answer: Answer | None = None
        self.error: str | None = None

    def watch(self, send: Send) -> Send:
        """``send``, noting the status and whether the end got out."""

        async def watching(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.complete = True

        return watching

    def close(self, metrics: DoorMetrics | None) -> None:
        """Count it and log it, once."""
        if not self.complete:
            self.error = self.error or "client_gone"
        if metrics is not None:
            metrics.responses.labels(str(self.status if self.complete else 499)).inc()
        level = logging.DEBUG if self.path in QUIET else logging.INFO
        if access_log.isEnabledFor(level):
            line = (self.method, self.path[:200], self.status)
            access_log.log(level, "%s %s %s", *line, extra={"fields": self._fields()})

    def _fields(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "request_id": self.request_id, "method": self.method, "path": self.path[:200], "status": self.status,
            "duration_ms": round((time.monotonic() - self.began) * 1e3, 1), "error": self.error, "client": self.client,
        }  # fmt: skip
        if (answer := self.answer) is not None:
            fields |= {
                "answer_id": answer.id, "model": answer.model, "stream": bool(answer.request.stream),
                "choices": len(answer.prompts) * answer.n, "seed": answer.seed,
                "prompt_tokens": answer.usage.prompt_tokens, "completion_tokens": answer.usage.completion_tokens,
                "cached_tokens": answer.usage.cached_tokens,
                "first_token_ms": round(answer.timings.first_token_s * 1e3, 1) or None,  # known at the answer's end
            }  # fmt: skip
        return {name: value for name, value in fields.items() if value is not None}


class ExchangeConnection(TrioASGIHTTPConnection):
    """Quart-Trio's side of one request, inside an exchange.

    Stock, a request that is cancelled after the handler has returned and before the body is entered closes nothing.
    """

    metrics: DoorMetrics | None = None

    async def handle_request(self, nursery: trio.Nursery, request: Any, send: Any) -> None:  # type: ignore[override]
        exchange = Exchange(request.method, quote(request.path))  # quoted: it cannot pose as fields of the log line
        request.scope[SCOPE_KEY] = exchange
        try:
            async with exchange.resources:
                await super().handle_request(nursery, request, cast(Any, exchange.watch(send)))
        finally:
            exchange.close(self.metrics)


def with_metrics(metrics: DoorMetrics) -> type[ExchangeConnection]:
    """The connection class of one application."""
    return type("ExchangeConnection", (ExchangeConnection,), {"metrics": metrics})
