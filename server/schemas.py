"""The shapes on the wire: responses, chunks, models and error envelopes, in the order in which clients see them.

Rules of this file: names and order are the API's; an UNSET field is left out, a None is sent as null; nothing is here
that the API document does not have (extras travel in headers).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType


class Wire(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """Base of everything that is sent."""


class TopLogProb(Wire, frozen=True, kw_only=True):
    token: str
    logprob: float
    token_id: int
    bytes: tuple[int, ...]


class NewLogProbsContent(Wire, frozen=True, kw_only=True):
    """One returned token, in nats. ``sampling_logprob`` is null on echoed tokens."""

    token: str
    logprob: float
    sampling_logprob: float | None
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogProb, ...]
    token_id: int
    text_offset: int
    sampling_mask_count: int | UnsetType = UNSET
    sampling_mask: tuple[int, ...] | str | UnsetType = UNSET


class NewLogProbs(Wire, frozen=True, kw_only=True):
    content: list[NewLogProbsContent]


class LogProbs(Wire, frozen=True, kw_only=True):
    """The legacy format: parallel arrays. The first token of a full echo has 0.0 and no alternatives."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    token_ids: list[int]


# LogProbs | NewLogProbs | None: a union of two records, which the encoder takes and its own type checker does not.
AnyLogProbs = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"$ref": "#/components/schemas/LogProbs"},
                {"$ref": "#/components/schemas/NewLogProbs"},
                {"type": "null"},
            ]
        }
    ),
]


class RawOutput(Wire, frozen=True, kw_only=True):
    """What the model saw and said, the echoed part included."""

    prompt_fragments: tuple[str | int, ...]
    prompt_token_ids: tuple[int, ...]
    completion: str
    completion_token_ids: list[int]
    completion_logprobs: NewLogProbs | None
    images: list[str] | None = None
    videos: list[str] | None = None
    grammar: str | None = None


class WireChoice(Wire, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: AnyLogProbs = None
    finish_reason: Literal["stop", "length", "error"] | None = None
    raw_output: RawOutput | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class PromptTokensDetails(Wire, frozen=True, kw_only=True):
    cached_tokens: int


class UsageInfo(Wire, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


PerfMetrics = dict[str, Any]  # see the parameter perf_metrics_in_response


class CompletionResponse(Wire, frozen=True, kw_only=True):
    """The answer to a request that is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[WireChoice]
    usage: UsageInfo
    perf_metrics: PerfMetrics | UnsetType = UNSET


class WireError(Wire, frozen=True, kw_only=True):
    """Why a request failed, in the engine's words or in the gateway's (which name a ``param``)."""

    message: str
    type: str
    code: str
    object: Literal["error"] | UnsetType = UNSET
    param: str | None = None
    status_code: int | UnsetType = UNSET


class ErrorDetail(Wire, frozen=True, kw_only=True):
    """One failure of a body that breaks the schema."""

    loc: list[str | int]
    msg: str
    type: str


class ErrorResponse(Wire, frozen=True, kw_only=True):
    error: WireError
    request_id: str | UnsetType = UNSET
    detail: list[ErrorDetail] | UnsetType = UNSET


class CompletionChunk(Wire, frozen=True, kw_only=True):
    """One event of a stream: one choice, or none in the usage chunk and in an error."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[WireChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    perf_metrics: PerfMetrics | UnsetType = UNSET
    error: WireError | UnsetType = UNSET


class Model(Wire, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "offbook"
    kind: str = "HF_BASE_MODEL"
    supports_chat: bool = False
    supports_image_input: bool = False
    supports_tools: bool = False
    context_length: int


class ModelList(Wire, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(Wire, frozen=True, kw_only=True):
    status: Literal["starting", "ready", "draining"]
