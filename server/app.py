"""The routes: Quart-Trio around one engine.

Rules of this file: a handler reads, asks, translates and writes; it decides nothing about scheduling. A streamed
response has no time limit of its own; leaving early closes the answer, and with it everything that it held.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from prometheus_client import generate_latest
from quart import Response
from quart import request as quart_request
from quart_trio import QuartTrio
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException

from ..actors.answer import Answer
from ..actors.errors import CompletionError, EngineUnavailable, Failure, InvalidRequest
from ..actors.events import Context
from ..actors.request import CompletionRequest, from_fields
from . import replies, translate
from .body import BadBody, check_media, parse
from .exchange import SCOPE_KEY, DoorMetrics, Exchange, with_metrics
from .http11 import body_writer
from .openapi import document
from .replies import JSON_TYPE, Reply
from .schemas import Health, Model, ModelList
from .stream import AnswerBody

if TYPE_CHECKING:
    from ..actors.engine import Engine

DEADLINE_HEADER = "x-request-timeout-s"
_SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
_KEY_INVALID = "The API key you provided is invalid."
_KEY_MISSING = "No API key was sent: put one into the header 'authorization: Bearer <key>'."


class DoorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the door itself may refuse."""

    api_keys: tuple[str, ...] = ()  # empty: any key or none
    body_bytes_max: int = 8 * 2**20
    body_timeout_s: int = 30  # for a body to arrive
    deadline_max_s: float = 86_400.0
    debug: bool = False  # whether GET /debug exists


class Door:
    """The engine behind the routes, once there is one."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self.connections: Callable[[], int] = int  # how many are open, where somebody counts them

    @property
    def state(self) -> Literal["starting", "ready", "draining"]:
        return "starting" if self.engine is None else self.engine.state

    def open_engine(self) -> Engine:
        """The engine, if it takes requests. Raises EngineUnavailable."""
        if self.engine is None:
            raise EngineUnavailable("the server is starting: the model is being loaded", 5.0)
        if self.engine.state != "ready":
            raise EngineUnavailable("the server is draining: send this elsewhere, or again later", 5.0)
        return self.engine


class Keys:
    """API keys, compared in constant time; a client is known by its key's fingerprint."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def client_of(self, headers: Headers) -> str | None:
        """The fingerprint of the caller's key, None where no key is needed. Raises PermissionError with the reason."""
        if not self._digests:
            return None
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        matches = sum(hmac.compare_digest(digest, known) for known in self._digests)  # all of them, whichever fits
        if not matches:
            raise PermissionError(_KEY_INVALID if given else _KEY_MISSING)
        return "key-" + digest.hex()[:12]


def create_app(door: Door, settings: DoorSettings | None = None) -> QuartTrio:
    """The ASGI application. The caller sets ``door.engine`` when the engine is ready."""
    settings = settings or DoorSettings()
    app = QuartTrio("offbook", static_folder=None)
    app.config.update(
        MAX_CONTENT_LENGTH=settings.body_bytes_max, BODY_TIMEOUT=settings.body_timeout_s, RESPONSE_TIMEOUT=None,
        PROPAGATE_EXCEPTIONS=False,
    )  # fmt: skip
    metrics = DoorMetrics()
    app.asgi_http_class = with_metrics(metrics)
    routes = _Routes(door, settings, metrics)
    for prefix in ("", "/inference"):
        app.add_url_rule(f"{prefix}/v1/completions", f"completions{prefix}", routes.completions, methods=["POST"])
        app.add_url_rule(f"{prefix}/v1/models", f"models{prefix}", routes.models)
        app.add_url_rule(f"{prefix}/v1/models/<path:name>", f"model{prefix}", routes.model)
    app.add_url_rule("/health", "health", routes.health)
    app.add_url_rule("/metrics", "metrics", routes.metrics)
    if settings.debug:
        app.add_url_rule("/debug", "debug", routes.debug)
    app.add_url_rule("/openapi.json", "openapi", routes.openapi)
    app.register_error_handler(HTTPException, _http_exception)
    return app


class _Routes:
    def __init__(self, door: Door, settings: DoorSettings, metrics: DoorMetrics) -> None:
        self._door = door
        self._settings = settings
        self._metrics = metrics
        self._keys = Keys(settings.api_keys)
        self._document: bytes | None = None

    async def completions(self) -> Response:
        """POST /v1/completions."""
        return await self._guarded(self._complete)

    async def _guarded(self, handler: Callable[[Exchange], Any]) -> Response:
        """Runs a handler for a caller with a right to it; expected errors become replies."""
        exchange = _exchange()
        try:
            exchange.client = self._keys.client_of(quart_request.headers)
            response: Response = await handler(exchange)
            return response
        except PermissionError as error:
            return _reply(replies.gateway_error(401, str(error), _request_id(exchange)), exchange)
        except (CompletionError, BadBody) as error:
            return _reply(replies.failure(error, _request_id(exchange)), exchange)

    async def _complete(self, exchange: Exchange) -> Response:
        engine = self._door.open_engine()
        headers = quart_request.headers
        check_media(headers.get("Content-Type"), headers.get("Content-Encoding"))
        data = await quart_request.get_data(cache=False, as_text=False)
        fields = parse(cast(bytes, data))
        request = from_fields(fields)
        context = self._context(exchange, request)
        if request.stream:
            return await self._stream(engine, request, context, exchange)
        async with engine.complete(request, context=context) as answer:
            exchange.answer = answer
            deltas = await answer.choices()
            body = translate.encode(translate.completion(answer, engine.surfaces.piece, deltas))
        headers_out = translate.opening_headers(answer) | translate.closing_headers(answer)
        return _response(200, body, headers_out | _id_header(exchange, answer))

    async def _stream(
        self, engine: Engine, request: CompletionRequest, context: Context, exchange: Exchange
    ) -> Response:
        # Held by the exchange: a client may leave after this function has returned and before Quart enters the body.
        answer = await exchange.resources.enter_async_context(engine.complete(request, context=context))
        exchange.answer = answer
        writer = translate.StreamWriter(answer, engine.surfaces.piece)
        response = Response(AnswerBody(answer, writer, exchange, body_writer(quart_request.scope)), 200)
        response.timeout = None
        response.headers.update(_SSE_HEADERS | translate.opening_headers(answer) | _id_header(exchange, answer))
        return response

    def _context(self, exchange: Exchange, request: CompletionRequest) -> Context:
        headers = quart_request.headers
        return Context(
            request_id=headers.get("x-request-id") and _request_id(exchange),
            client=exchange.client or request.user,
            isolation_key=headers.get("x-prompt-cache-isolation-key"),
            session=headers.get("x-multi-turn-session-id") or headers.get("x-session-affinity"),
            deadline_s=_deadline(headers.get(DEADLINE_HEADER), self._settings.deadline_max_s),
        )

    async def models(self) -> Response:
        """GET /v1/models: the served model under each of its names."""

        async def handle(exchange: Exchange) -> Response:
            card = self._door.open_engine().card
            names = (card.id, *card.aliases)
            listed = [Model(id=name, created=card.created, context_length=card.context_length) for name in names]
            return _response(200, translate.encode(ModelList(data=listed)))

        return await self._guarded(handle)

    async def model(self, name: str) -> Response:
        """GET /v1/models/<id>."""

        async def handle(exchange: Exchange) -> Response:
            engine = self._door.open_engine()
            engine.check_model(name)
            card = engine.card
            found = Model(id=name, created=card.created, context_length=card.context_length)
            return _response(200, translate.encode(found))

        return await self._guarded(handle)

    async def health(self) -> Response:
        """GET /health: 200 only when ready."""
        state = self._door.state
        headers = {} if state == "ready" else {"retry-after": "5"}
        return _response(200 if state == "ready" else 503, translate.encode(Health(status=state)), headers)

    async def metrics(self) -> Response:
        """GET /metrics in Prometheus' text format."""
        engine = self._door.engine
        self._metrics.ready.set(self._door.state == "ready")
        self._metrics.connections.set(self._door.connections())
        if engine is not None:
            self._metrics.model.info({"model": engine.card.id, "device": engine.card.device})
        text = generate_latest(self._metrics.registry) + (generate_latest(engine.registry) if engine else b"")
        return Response(text, 200, content_type="text/plain; version=0.0.4; charset=utf-8")

    async def debug(self) -> Response:
        """GET /debug: what every actor and request is doing. For those with a key, where there are keys."""

        async def handle(exchange: Exchange) -> Response:
            engine = self._door.engine
            if engine is None:
                raise EngineUnavailable("the server is starting: there is nothing to look at yet", 5.0)
            return _response(200, msgspec.json.format(msgspec.json.encode(engine.inspect()), indent=1))

        return await self._guarded(handle)

    async def openapi(self) -> Response:
        """GET /openapi.json."""
        if self._document is None:
            self._document = translate.encode(document())
        return _response(200, self._document)


def _exchange() -> Exchange:
    exchange: Exchange = cast(Any, quart_request.scope)[SCOPE_KEY]
    return exchange


def _request_id(exchange: Exchange) -> str:
    if exchange.request_id is None:
        exchange.request_id = replies.request_id_of(quart_request.headers.get("x-request-id"))
    return exchange.request_id


def _id_header(exchange: Exchange, answer: Answer) -> dict[str, str]:
    """The client's id if it sent one, else the answer's."""
    if exchange.request_id is None and "x-request-id" not in quart_request.headers:
        exchange.request_id = answer.id
    return {"x-request-id": _request_id(exchange)}


def _deadline(text: str | None, longest_s: float) -> float | None:
    """Seconds from now. Raises InvalidRequest (400)."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= longest_s:
        message = f"Header should be a number of seconds above 0 and at most {longest_s:g}"
        raise InvalidRequest(Failure((DEADLINE_HEADER,), message, "value_error", repr(text[:40])), status=400)
    return seconds


def _response(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    response = Response(body, status, content_type=JSON_TYPE)
    if headers:
        response.headers.update(headers)
    return response


def _reply(reply: Reply, exchange: Exchange) -> Response:
    exchange.error = reply.code
    return _response(reply.status, reply.body, reply.headers)


async def _http_exception(error: HTTPException) -> Response:
    """Werkzeug's errors (no such path, wrong method, body too large or too slow, a bug) in the one envelope."""
    exchange = _exchange()
    status = error.code or 500
    messages = {
        404: f"There is nothing at {quart_request.path[:200]!r}; completions are at /v1/completions",
        405: f"{quart_request.method[:20]} is not allowed here",
        408: "The request's body did not arrive in time",
        413: "The request's body is too large",
        500: "The server failed on this request",
    }
    reply = replies.http_error(status, messages.get(status, error.name), _request_id(exchange))
    response = _reply(reply, exchange)
    for name, value in error.get_headers():
        if name.lower() == "allow":
            response.headers["allow"] = value
    return response
