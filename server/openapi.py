"""The OpenAPI 3.1 document, generated from the very types that requests are read into and answers are written from.

Rules of this file: no field is described by hand; what is written here is only which route answers what, when.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from ..actors.request import CompletionRequest
from .schemas import CompletionChunk, CompletionResponse, ErrorResponse, Health, LogProbs, Model, ModelList, NewLogProbs

Json = dict[str, Any]

_ERRORS = {
    "400": "The body is no JSON, has unknown fields only, or asks for what this model cannot do",
    "401": "The API key is missing or wrong (only where the server has keys)",
    "404": "No such model",
    "405": "Wrong method",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not announced as JSON in UTF-8",
    "422": "The body breaks the schema; every failure is in `detail`",
    "429": "This client has more in flight than its share; see `Retry-After`",
    "500": "The server failed",
    "503": "The server is starting, draining or full; see `Retry-After`",
    "504": "The request's deadline passed",
}
_REQUEST_HEADERS = {
    "x-request-id": "Echoed in the response; else the answer's id is sent",
    "x-request-timeout-s": "Seconds that the answer is worth waiting for; then 504, or an error event in a stream",
    "x-session-affinity": "Retention hint for the prefix cache",
    "x-multi-turn-session-id": "The same; wins over `x-session-affinity`",
    "x-prompt-cache-isolation-key": "Prefix-cache namespace; the body's `prompt_cache_isolation_key` wins",
}
_TEXT = {"type": "string"}
_SCHEMAS = {"x-request-timeout-s": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400}}
_RESPONSE_HEADERS = {
    "x-request-id": "The request's id",
    "fireworks-seed": "The seed that was used: send it to get the same answer again",
    "fireworks-sampling-options": "The effective sampling options, as JSON",
    "fireworks-prompt-tokens": "Tokens of all prompts",
}


def document() -> Json:
    """The whole document, as JSON values."""
    types = [
        CompletionRequest, CompletionResponse, CompletionChunk, LogProbs, NewLogProbs, ErrorResponse, Model, ModelList,
        Health,
    ]  # fmt: skip
    _, schemas = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}", schema_hook=_free_json
    )
    metrics = _plain("metrics", "Metrics in Prometheus' text format", "text/plain", {"type": "string"})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "offbook",
            "version": package_version(),
            "description": "Text completions, self-hosted; the Fireworks completions API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}],
        "paths": {
            "/v1/completions": {"post": _complete("createCompletion")},
            "/inference/v1/completions": {"post": _complete("createCompletionInference")},
            **_model_paths("/v1", ""),
            **_model_paths("/inference/v1", "Inference"),
            "/health": {"get": _health()},
            "/metrics": {"get": metrics},
            "/openapi.json": {"get": _plain("openapi", "This document", "application/json", {"type": "object"})},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {
                code: {"description": text, "content": _json("ErrorResponse")} for code, text in _ERRORS.items()
            },
        },
    }


def _free_json(kind: type) -> Json:
    """``object`` stands for any JSON value."""
    if kind is object:
        return {"description": "any JSON value"}
    raise NotImplementedError  # how a hook says that it has nothing for this type


def package_version() -> str:
    """This package's."""
    try:
        return version("offbook")
    except PackageNotFoundError:  # run in place
        return "0"


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str) -> Json:
    return {"application/json": {"schema": _ref(name)}}


def _errors(*codes: str) -> Json:
    return {code: {"$ref": f"#/components/responses/{code}"} for code in codes}


def _headers(texts: dict[str, str]) -> Json:
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in texts.items()}


def _complete(operation: str) -> Json:
    events = {
        "text/event-stream": {
            "schema": {"type": "string"},
            "x-event-schema": _ref("CompletionChunk"),
            "example": 'data: {"id":"cmpl-1","object":"text_completion", ...}\n\ndata: [DONE]\n\n',
        }
    }
    answer = {
        "description": "The completion; with `stream` an event stream of chunks that ends with `data: [DONE]`",
        "headers": _headers(_RESPONSE_HEADERS),
        "content": {**_json("CompletionResponse"), **events},
    }
    return {
        "operationId": operation,
        "summary": "Create a completion",
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": _SCHEMAS.get(name, _TEXT)}
            for name, text in _REQUEST_HEADERS.items()
        ],
        "requestBody": {"required": True, "content": _json("CompletionRequest")},
        "responses": {"200": answer, **_errors(*_ERRORS)},
    }


def _model_paths(prefix: str, suffix: str) -> Json:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        f"{prefix}/models": {
            "get": {
                "operationId": f"listModels{suffix}",
                "summary": "The served model, under each of its names",
                "responses": {
                    "200": {"description": "Models", "content": _json("ModelList")},
                    **_errors("401", "405", "503"),
                },
            }
        },
        f"{prefix}/models/{{model}}": {
            "get": {
                "operationId": f"getModel{suffix}",
                "summary": "One model",
                "parameters": [name],
                "responses": {
                    "200": {"description": "The model", "content": _json("Model")},
                    **_errors("401", "404", "405", "503"),
                },
            }
        },
    }


def _health() -> Json:
    return {
        "operationId": "health",
        "summary": "Whether requests are taken",
        "security": [],
        "responses": {
            "200": {"description": "Ready", "content": _json("Health")},
            "503": {"description": "Starting or draining", "content": _json("Health")},
        },
    }


def _plain(operation: str, summary: str, media: str, schema: Json) -> Json:
    content = {media: {"schema": schema}}
    return {
        "operationId": operation,
        "summary": summary,
        "security": [],
        "responses": {"200": {"description": summary, "content": content}},
    }
