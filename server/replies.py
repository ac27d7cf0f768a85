"""Errors as clients read them: one envelope for the engine, one for the gateway, one event for a stream.

Rules of this file: pure; every error is JSON with a string message at ``error.message``; a message never holds a key, a
stack trace or a whole prompt.
"""

from __future__ import annotations

import math
import re
import secrets

import msgspec
from msgspec import UNSET

from ..actors.errors import CompletionError, InvalidRequest, ModelNotFound
from .body import BadBody
from .schemas import ErrorDetail, ErrorResponse, WireError
from .translate import encode

JSON_TYPE = "application/json"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

GATEWAY_CODES = {401: "UNAUTHORIZED", 404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}
ENGINE_CODES = {
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "internal_server_error",
    503: "unavailable",
}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is complete."""

    status: int
    body: bytes
    code: str  # for the log: what went wrong in one word
    headers: dict[str, str] = {}


def request_id_of(header: str | None) -> str:
    """The client's own id when it is a plain token, else a new one."""
    return header if header and _REQUEST_ID.fullmatch(header) else f"cmpl-{secrets.token_hex(16)}"


def failure(error: CompletionError | BadBody, request_id: str) -> Reply:
    """The reply to a request that was refused or failed before the first byte."""
    if isinstance(error, BadBody):
        return http_error(error.status, error.message, request_id)
    if isinstance(error, ModelNotFound):
        return gateway_error(404, error.message, request_id, param="model")
    invalid = isinstance(error, InvalidRequest)
    body = ErrorResponse(
        error=wire_error(error),
        detail=_details(error) if isinstance(error, InvalidRequest) and error.status == 422 else UNSET,
    )
    headers = {"x-request-id": request_id}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    code = "invalid_request_error" if invalid else error.code
    return Reply(status=error.status, body=encode(body), code=code, headers=headers)


def wire_error(error: CompletionError, *, in_stream: bool = False) -> WireError:
    """The engine's envelope; in a stream it also says which status it would have been."""
    param = None
    if isinstance(error, InvalidRequest) and error.failures and error.failures[0].loc:
        param = str(error.failures[0].loc[0])  # a field's name, whatever lies below it
    kind = error.code if error.status in (400, 422) or error.status >= 500 else "invalid_request_error"
    return WireError(
        object="error",
        type=kind,
        code=error.code,
        message=error.message,
        param=param,
        status_code=error.status if in_stream else UNSET,
    )


def http_error(status: int, message: str, request_id: str) -> Reply:
    """An error that HTTP itself names: a path, a method, a body that cannot be read."""
    if status in GATEWAY_CODES:
        return gateway_error(status, message, request_id)
    code = ENGINE_CODES.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    body = ErrorResponse(error=WireError(object="error", type=code, code=code, message=message))
    return Reply(status=status, body=encode(body), code=code, headers={"x-request-id": request_id})


def gateway_error(status: int, message: str, request_id: str, *, param: str | None = None) -> Reply:
    """The envelope in which the service's gateway speaks of keys, models and paths."""
    code = GATEWAY_CODES[status]
    error = WireError(message=message, param=param, code=code, type="error")
    headers = {"x-request-id": request_id}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    body = encode(ErrorResponse(error=error, request_id=request_id))
    return Reply(status=status, body=body, code=code, headers=headers)


def _details(error: InvalidRequest) -> list[ErrorDetail]:
    return [ErrorDetail(loc=["body", *f.loc], msg=f.message, type=f.kind) for f in error.failures]
