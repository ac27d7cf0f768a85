"""Every error a caller can meet, in one shallow tree.

Rules of this file: each class carries ``status``, the HTTP status a door should use, as a hint; messages name the
field and the reason and say what to do next. Any other exception that leaves the engine is a bug.
"""

from __future__ import annotations

import msgspec

FAILURES_TOLD = 64


class Failure(msgspec.Struct, frozen=True):
    """One thing wrong with a request: where (``("logit_bias", "abc")``), what, and the value if it is short."""

    loc: tuple[str | int, ...]
    message: str
    kind: str = "value_error"
    value: str | None = None  # a short repr, or None when it would not help


class CompletionError(Exception):
    """Base of everything the engine raises on purpose."""

    status = 500
    code = "internal_server_error"
    retry_after_s: float | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(CompletionError):
    """The request breaks the schema (422) or is one that this model cannot serve (400): of a grammar, that may show in
    the midst of an answer. All failures at once, in so far as they are fewer than ``FAILURES_TOLD``: a body can hold a
    hundred thousand."""

    code = "invalid_request_error"

    def __init__(self, *failures: Failure, status: int = 422) -> None:
        self.failures = failures[:FAILURES_TOLD]
        self.status = status
        texts = [describe(f) for f in self.failures]
        many = f"{len(failures)} request validation errors: " if len(failures) > 1 else ""
        super().__init__(many + "; ".join(texts))

    @property
    def param(self) -> str | None:
        """The first failing field, dotted, for envelopes that name one."""
        return path(self.failures[0].loc) if self.failures else None


class ModelNotFound(CompletionError):
    status = 404
    code = "NOT_FOUND"


class EngineOverloaded(CompletionError):
    """The queue is full: another replica may have room."""

    status = 503
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineOverloaded):
    """Starting or draining: nothing new is taken."""

    code = "unavailable"


class ClientOverShare(EngineOverloaded):
    """This one client has more in flight than its share."""

    status = 429
    code = "rate_limit_exceeded"


class DeadlineExceeded(CompletionError):
    status = 504
    code = "timeout"


class StepFailed(CompletionError):
    """The device failed while it worked on this request."""


def path(loc: tuple[str | int, ...]) -> str:
    """``("prompt", 0, 1)`` -> ``prompt[0][1]``."""
    out = ""
    for part in loc:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def describe(failure: Failure) -> str:
    """One failure as the service's clients expect it: ``<message>, field: '<path>', value: <repr>``."""
    text = failure.message
    if failure.loc:
        text += f", field: '{path(failure.loc)}'"
    if failure.value is not None:
        text += f", value: {failure.value}"
    return text
