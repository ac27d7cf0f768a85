"""What one may ask: every field of the API document, for both transports.

Rules of this file: this is the vocabulary of a completion request, shared by the HTTP door and the embedded API, so
that both refuse the same things with the same words. Shapes and ranges live in the types; what one field says about
another is in ``request_rules.py``, what depends on the loaded model in ``resolve.py``. ``None`` means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .errors import Failure, InvalidRequest
from .field_errors import EXTRA, missing, struct_failures
from .request_rules import prompt_failures, rule_failures, storage_mask, storage_routing

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Prompt = str | Annotated[list[TokenId | str | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
StopString = Annotated[str, Meta(min_length=1)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Nats = Annotated[float, Meta(ge=0, le=1e6)]
ThinkingTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Effort = Literal["low", "medium", "high", "xhigh", "max", "none", "adaptive"] | ThinkingTokens | bool
JsonObject = dict[str, object]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all request objects: closed (an unknown key is an error) and immutable."""


class StreamOptions(Part, frozen=True, kw_only=True):
    """How a stream is cut into chunks. ``continuous_usage_stats`` is accepted because a common client always sends it;
    it is refused when true."""

    include_usage: bool | None = None
    include_internal_content: bool | None = None
    buffer_tokens: Count | None = None
    buffer_ms: Annotated[float, Meta(ge=0, le=3_600_000)] | None = None
    buffer_mode: Literal["any", "all"] | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Part, frozen=True, kw_only=True):
    """Constrained decoding. ``json_schema`` may be a schema, its JSON text, or OpenAI's ``{name, schema, strict}``."""

    type: Literal["json_object", "json_schema", "grammar", "text"]
    schema: JsonObject | str | None = None
    grammar: str | None = None
    json_schema: JsonObject | str | None = None


class MediaUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A link to a picture or a clip; parsed so that it can be refused by name."""

    url: str
    detail: str | None = None


class ContentPart(Part, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    image_url: MediaUrl | None = None
    video_url: MediaUrl | None = None


class PredictedOutput(Part, frozen=True, kw_only=True):
    """OpenAI's predicted output: turned into ``speculation``."""

    content: str | list[ContentPart]
    type: Literal["content"] = "content"


class Thinking(Part, frozen=True, kw_only=True):
    """Extended thinking; which keys go with which ``type`` is in ``request_rules.py``."""

    type: Literal["enabled", "disabled", "adaptive"] = "enabled"
    budget_tokens: Annotated[int, Meta(ge=1024, le=2**31 - 1)] | None = None
    keep: Literal["all"] | None = None
    budget_end_str: str | None = None
    effort: Effort | None = None


class CompletionRequest(Part, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions`` and the arguments of ``Engine.complete``; see the README's field table."""

    model: str
    prompt: Prompt
    # length and number
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    context_length_exceeded_behavior: Literal["error", "truncate"] | None = None
    # where to stop
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    ignore_eos: bool | None = None
    # the draw
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=100)] | None = None
    top_p: Unit | None = None
    min_p: Unit | None = None
    typical_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=2)] | None = None
    mirostat_target: Nats | None = None
    mirostat_lr: Nats | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None
    # what comes back
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Count | bool | None = None
    top_logprobs: Count | None = None
    sampling_mask: Literal["count", "non_zero_list", "non_zero_buffer"] | None = None
    echo: bool | None = None
    echo_last: Count | None = None
    return_token_ids: bool | None = None
    raw_output: bool | None = None
    perf_metrics_in_response: bool | None = None
    include_routing_matrix: bool | None = None
    # constraint, prediction, thinking
    response_format: ResponseFormat | None = None
    speculation: str | list[TokenId] | None = None
    prediction: PredictedOutput | str | None = None
    reasoning_effort: Effort | None = None
    reasoning_history: Literal["disabled", "interleaved", "preserved"] | None = None
    thinking: Thinking | None = None
    # who asks, caching and urgency
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_isolation_key: str | None = None
    prompt_cache_max_len: Count | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    metadata: dict[str, str] | None = None
    images: list[str | list[str]] | None = None


def from_fields(fields: Mapping[str, object]) -> CompletionRequest:
    """The request that these fields describe; an absent field and None are the same.

    Raises InvalidRequest with every failure at once: status 400 when fields that do not exist are all that is wrong,
    else 422.
    """
    request: CompletionRequest | None
    try:
        request = msgspec.convert(fields, CompletionRequest)
    except msgspec.ValidationError:
        request = None
    if request is not None:
        failures = [*prompt_failures(request.prompt), *rule_failures(fields)]
    elif alone := storage_routing(fields):
        failures = [alone]
    else:
        failures = _all_failures(fields)
    if failures:
        raise InvalidRequest(*failures, status=400 if all(f.kind == EXTRA for f in failures) else 422)
    assert request is not None
    return request


def _all_failures(fields: Mapping[str, object]) -> list[Failure]:
    """The slow path, field by field; the prompt has rules of its own because its type alone decides too little."""
    known = CompletionRequest.__struct_fields__
    given = {name: value for name, value in fields.items() if value is not None or name not in known}
    mask = storage_mask(given)
    schema = struct_failures(CompletionRequest, given, skip=frozenset({"prompt", *(["sampling_mask"] if mask else [])}))
    prompt = prompt_failures(given["prompt"]) if "prompt" in given else [missing("prompt")]
    return [*prompt, *schema, *mask, *rule_failures(given)]
