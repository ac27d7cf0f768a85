"""From what was asked to what will be done, for the model that is loaded.

Rules of this file: pure; every failure of a request is found before any is reported; nothing is silently changed except
``max_tokens``, which is lowered to fit (the API's documented default) or refused (on request).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..kernels.params import SamplingParams
from .blocks import Namespace
from .choice import Wants
from .config import EngineConfig
from .errors import Failure, InvalidRequest
from .events import Context, PromptInfo
from .request import CompletionRequest, PredictedOutput
from .thinking import Markers, ThinkingPlan, plan_thinking
from .tokens import Tokenizer

SEED_BITS = 64
DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "typical_p")  # a model's generation_config may set these
KEPT_IDS_MAX = 1000  # the API leaves the ids of a sampling mask out above this


class Limits(msgspec.Struct, frozen=True):
    """What the loaded model can do."""

    context_length: int
    vocabulary_size: int
    defaults: Mapping[str, float]


class PromptPlan(msgspec.Struct, frozen=True):
    """One prompt, ready to run."""

    info: PromptInfo
    text: str | None
    max_tokens: int


class RequestPlan(msgspec.Struct, frozen=True):
    """All of a request that comes out of a tokenizer."""

    prompts: list[PromptPlan]
    prediction: list[int]
    thinking: ThinkingPlan | None


def plan_request(
    request: CompletionRequest, tokenizer: Tokenizer, config: EngineConfig, limits: Limits, markers: Markers | None
) -> RequestPlan:
    """What tokenizing says. Raises InvalidRequest (400; 422 for thinking options that are never right)."""
    prompts = plan_prompts(request, tokenizer, config, limits)
    prediction = predicted_ids(request, tokenizer, limits)
    return RequestPlan(prompts, prediction, plan_thinking(request, markers, tokenizer))


def check_request(request: CompletionRequest, config: EngineConfig, limits: Limits) -> None:
    """What can be refused without tokenizing. Raises InvalidRequest: 422 for what the schema's own bounds would say,
    400 for what only this server or model cannot do."""
    schema = [*_check_logprobs(request, config), *_check_seed(request), *_check_bias_keys(request)]
    if schema:
        raise InvalidRequest(*schema, status=422)
    served = [*_check_unserved(request), *_check_bias_ids(request, limits), *_check_numbers(request, config)]
    if served:
        raise InvalidRequest(*served, status=400)


def _check_logprobs(request: CompletionRequest, config: EngineConfig) -> list[Failure]:
    most, failures = config.logprobs_max, []
    if not isinstance(request.logprobs, bool | None) and request.logprobs > most:
        message = f"logprobs must be between 0 and {most}: {request.logprobs}"
        failures.append(Failure(("logprobs",), message, "less_than_equal"))
    if request.top_logprobs is not None and request.top_logprobs > most:
        message = f"top_logprobs must be between 0 and {most}: {request.top_logprobs}"
        failures.append(Failure(("top_logprobs",), message, "less_than_equal"))
    return failures


def _check_seed(request: CompletionRequest) -> list[Failure]:
    if request.seed is None or -(2 ** (SEED_BITS - 1)) <= request.seed < 2**SEED_BITS:
        return []
    return [Failure(("seed",), f"Input should be an integer of at most {SEED_BITS} bits", "int_range")]


def _check_bias_keys(request: CompletionRequest) -> list[Failure]:
    message = "Input should be a token id in decimal digits"
    keys = request.logit_bias or {}
    return [
        Failure(("logit_bias", key[:40]), message, "int_parsing", repr(key[:40])) for key in keys if not _is_id(key)
    ]


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10 and (key == "0" or key[0] != "0")


def _check_bias_ids(request: CompletionRequest, limits: Limits) -> list[Failure]:
    v = limits.vocabulary_size
    return [
        Failure(("logit_bias", key), f"Token id is outside the model's vocabulary of {v}", "token_id", key)
        for key in request.logit_bias or {}
        if int(key) >= v
    ]


def _check_unserved(request: CompletionRequest) -> list[Failure]:
    failures = []
    if request.images:
        failures.append(Failure(("images",), "This model takes no images", "not_supported"))
    if request.include_routing_matrix:
        message = "This model has no experts, so there is no routing matrix"
        failures.append(Failure(("include_routing_matrix",), message, "not_supported"))
    if request.stream_options is not None and request.stream_options.continuous_usage_stats and request.stream:
        message = "Usage comes once, in the last chunk: continuous usage is not supported"
        failures.append(Failure(("stream_options", "continuous_usage_stats"), message, "not_supported"))
    return failures


def _check_numbers(request: CompletionRequest, config: EngineConfig) -> list[Failure]:
    prompts = request.prompt
    count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    failures = []
    if count > config.prompts_max:
        message = f"At most {config.prompts_max} prompts fit in one request, not {count}"
        failures.append(Failure(("prompt",), message, "too_long"))
    elif count * (request.n or 1) > config.choices_max:
        message = f"At most {config.choices_max} choices fit in one request, not {count} prompts x n={request.n}"
        failures.append(Failure(("n",), message, "too_many"))
    longest = request.max_tokens if request.max_tokens is not None else request.max_completion_tokens
    if request.min_tokens and longest is not None and request.min_tokens > longest:
        message = f"min_tokens {request.min_tokens} is more than max_tokens {longest}"
        failures.append(Failure(("min_tokens",), message, "value_error"))
    return failures


# -- prompts ---------------------------------------------------------------------------------------------------------


def list_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts, one each; a list of ids is one prompt."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[t for t in prompt if isinstance(t, int)]]
    return [p for p in prompt if not isinstance(p, int)]


def text_bytes(request: CompletionRequest) -> int:
    """How much text there is to tokenize, in characters: a prediction can be as long as a prompt."""
    _, prediction = _prediction(request)
    bridge = request.thinking.budget_end_str if request.thinking is not None else None
    texts = (*list_prompts(request), prediction, bridge)
    return sum(len(text) for text in texts if isinstance(text, str))


def estimate_tokens(request: CompletionRequest) -> int:
    """Prompt tokens, roughly, before anything is tokenized: 4 characters of text count as one."""
    return sum(len(p) // 4 + 1 if isinstance(p, str) else len(p) for p in list_prompts(request))


def plan_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, config: EngineConfig, limits: Limits
) -> list[PromptPlan]:
    """Tokenize and fit every prompt. Raises InvalidRequest (400)."""
    plans, failures = [], []
    prompts = list_prompts(request)
    single = len(prompts) == 1 and not (isinstance(request.prompt, list) and isinstance(request.prompt[0], str | list))
    for i, prompt in enumerate(prompts):
        loc: tuple[str | int, ...] = ("prompt",) if single else ("prompt", i)
        try:
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        except ValueError as error:
            failures.append(Failure(loc, str(error), "value_error"))
            continue
        failure, max_tokens = _fit(ids, loc, request, config, limits)
        if failure is not None:
            failures.append(failure)
            continue
        text = prompt if isinstance(prompt, str) else None
        fragments: tuple[str | int, ...] = (text,) if text is not None else tuple(ids)
        plans.append(PromptPlan(PromptInfo(tuple(ids), fragments), text, max_tokens))
    if failures:
        raise InvalidRequest(*failures, status=400)
    return plans


def _fit(
    ids: list[int], loc: tuple[str | int, ...], request: CompletionRequest, config: EngineConfig, limits: Limits
) -> tuple[Failure | None, int]:
    context, vocabulary = limits.context_length, limits.vocabulary_size
    if not ids:
        return Failure(loc, "The prompt has no tokens, and this model has no BOS token to start from", "too_short"), 0
    wrong = next((i for i, t in enumerate(ids) if t >= vocabulary), None)
    if wrong is not None:
        message = f"Token id {ids[wrong]} is outside the model's vocabulary of {vocabulary}"
        return Failure((*loc, wrong), message, "token_id", str(ids[wrong])), 0
    asked = request.max_tokens if request.max_tokens is not None else request.max_completion_tokens
    wanted = config.default_max_tokens if asked is None else asked
    if len(ids) + min(wanted, 1) > context:
        message = f"The prompt is too long: {len(ids)}, model maximum context length: {context}"
        return Failure(loc, message, "too_long"), 0
    if request.context_length_exceeded_behavior == "error" and asked is not None and len(ids) + asked > context:
        message = (
            f"The prompt's {len(ids)} tokens and {asked} more exceed the model's maximum context length of {context}"
        )
        field = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        return Failure((field,), message, "too_long"), 0
    return None, min(wanted, context - len(ids))


def predicted_ids(request: CompletionRequest, tokenizer: Tokenizer, limits: Limits) -> list[int]:
    """The predicted output as token ids, BOS not among them; empty when there is none. Raises InvalidRequest (400)."""
    field, given = _prediction(request)
    if given is None:
        return []
    if isinstance(given, str):
        try:
            return tokenizer.encode(given, bos=False)
        except ValueError as error:
            raise InvalidRequest(Failure((field,), str(error), "value_error"), status=400) from None
    wrong = next((i for i, t in enumerate(given) if t >= limits.vocabulary_size), None)
    if wrong is not None:
        message = f"Token id {given[wrong]} is outside the model's vocabulary of {limits.vocabulary_size}"
        raise InvalidRequest(Failure((field, wrong), message, "token_id", str(given[wrong])), status=400)
    return given


def _prediction(request: CompletionRequest) -> tuple[str, str | list[int] | None]:
    """The field that predicts, and what it predicts. Raises InvalidRequest (400)."""
    if request.speculation is None and request.prediction is not None:
        return "prediction", _prediction_text(request.prediction)
    return "speculation", request.speculation


def _prediction_text(prediction: PredictedOutput | str) -> str:
    if isinstance(prediction, str):
        return prediction
    if isinstance(prediction.content, str):
        return prediction.content
    bad = [
        Failure(("prediction", "content", i), "A prediction is made of text parts", "not_supported", repr(part.type))
        for i, part in enumerate(prediction.content)
        if part.type != "text" or part.text is None
    ]
    if bad:
        raise InvalidRequest(*bad, status=400)
    return "".join(part.text or "" for part in prediction.content)


# -- sampling and output ---------------------------------------------------------------------------------------------


def effective_options(request: CompletionRequest, limits: Limits) -> dict[str, float | int]:
    """The sampling options that apply: the request's, else the model's own defaults, else neutral ones."""
    neutral = SamplingParams()
    out: dict[str, float | int] = {}
    for name in DEFAULTED:
        asked = getattr(request, name)
        value = asked if asked is not None else limits.defaults.get(name, getattr(neutral, name))
        out[name] = int(value) if name == "top_k" else float(value)
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        asked = getattr(request, name)
        if asked is not None:
            out[name] = asked
    if request.mirostat_target:
        out["mirostat_target"] = request.mirostat_target
        out["mirostat_lr"] = neutral.mirostat_lr if request.mirostat_lr is None else request.mirostat_lr
    return out


def sampling_params(
    request: CompletionRequest, options: Mapping[str, float | int], seed: int, wants: Wants
) -> SamplingParams:
    """The sampler's parameters of the first sample of every prompt; the others differ in ``choice`` alone."""
    bias = tuple(sorted((int(k), float(v)) for k, v in (request.logit_bias or {}).items() if v))
    return msgspec.convert(
        {
            **options,
            "seed": seed,
            "logit_bias": bias,
            "logprobs": wants.rows,
            "top_logprobs": wants.top,
            "kept_ids_max": KEPT_IDS_MAX if wants.kept_ids else 0,
        },
        SamplingParams,
    )


def wants_of(request: CompletionRequest, plan: PromptPlan) -> Wants:
    """What comes back for each choice of a prompt."""
    rows = request.logprobs is not None and request.logprobs is not False
    modern = request.logprobs is True
    default_top = 0 if isinstance(request.logprobs, bool | None) else request.logprobs
    top = default_top if request.top_logprobs is None else request.top_logprobs
    length = len(plan.info.token_ids)
    echo = min(request.echo_last, length) if request.echo_last is not None else length if request.echo else 0
    mask = request.sampling_mask if modern else None
    return Wants(
        rows=rows, top=top if rows else 0, kept=mask is not None,
        kept_ids=mask in ("non_zero_list", "non_zero_buffer"), raw_text=bool(request.raw_output), echo=echo,
        echo_text=plan.text if echo == length else None,
    )  # fmt: skip


def stop_strings(request: CompletionRequest) -> tuple[str, ...]:
    stop = request.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def namespace_of(request: CompletionRequest, context: Context) -> Namespace:
    """The prefix-cache namespace: the body's key, else the header's; the empty string is a key like any other."""
    key = request.prompt_cache_isolation_key
    return context.isolation_key if key is None else key
