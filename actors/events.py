"""What an answer is made of: the typed events that a caller of the engine receives, on either transport.

Rules of this file: plain frozen records, no behaviour, nothing about HTTP. Text never ends inside a character.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]


class TokenRow(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Log-probability data of one returned token; echoed tokens first, then generated ones.

    ``logprob`` is the raw model's log-softmax, in nats, finite, at least -9999 (0.0 on the first row of a full echo).
    ``sampling_logprob`` is under the distribution drawn from (None on echoed rows). ``kept`` counts the tokens that the
    filters left; ``kept_ids`` are their ids, ascending, where there are at most 1000 and they were asked for.
    """

    token_id: int
    logprob: float
    sampling_logprob: float | None
    text_offset: int  # code points, in the returned text
    top: tuple[tuple[int, float], ...] = ()  # (token id, raw logprob), best first
    kept: int | None = None
    kept_ids: tuple[int, ...] | None = None


class Delta(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one choice gained since its last delta. The joined deltas of a choice are its whole answer."""

    index: int  # prompt number * n + sample number
    text: str = ""
    token_ids: tuple[int, ...] = ()  # generated tokens, the ones whose text is held back or cut included
    echoed_ids: tuple[int, ...] = ()  # echoed prompt tokens (first delta of the choice only)
    rows: tuple[TokenRow, ...] = ()  # only when the request asks for logprobs; echoed rows first
    raw_text: str = ""  # as text, but special tokens written out and stop strings kept; only with raw_output
    finish_reason: FinishReason | None = None


class PromptInfo(msgspec.Struct, frozen=True):
    """One prompt as the model saw it. ``fragments``: the text as given, or the ids for a token prompt."""

    token_ids: tuple[int, ...]
    fragments: tuple[str | int, ...]


class Usage(msgspec.Struct, frozen=True):
    """``prompt_tokens`` counts each prompt once; ``completion_tokens`` every generated token of every choice."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timings(msgspec.Struct, kw_only=True):
    """Where a request's time went, in seconds; the six stages follow one another and add up to ``processing_s``."""

    tokenizer_queue_s: float = 0.0  # asked -> admitted to tokenize
    tokenizer_s: float = 0.0
    prefill_queue_s: float = 0.0  # tokenized -> first step
    prefill_s: float = 0.0  # first step -> first token of the first choice
    generation_queue_s: float = 0.0  # time in which no choice was in a step, after the first token
    generation_s: float = 0.0  # the rest, up to the last token
    first_token_s: float = 0.0  # asked -> first token
    processing_s: float = 0.0  # asked -> last token


class Speculation(msgspec.Struct, kw_only=True):
    """How a predicted output fared, summed over the choices."""

    prompt_tokens: int = 0  # tokens of the prediction, once
    matched_tokens: int = 0  # how many of them were drafted and accepted
    drafted_tokens: int = 0  # draft tokens fed to the model, whatever their source
    accepted: tuple[tuple[int, int], ...] = ()  # per draft position: (accepted, tried)


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What comes with a request but not in its body: who asks, and how long the answer is worth waiting for."""

    request_id: str | None = None
    client: str | None = None  # whose share this counts against: an API key's fingerprint, else the body's user
    isolation_key: str | None = None  # prefix-cache namespace from a header; the body's key wins
    session: str | None = None  # retention hint: multi-turn session id, else session affinity
    deadline_s: float | None = None  # from now


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, for /v1/models and for start-up lines."""

    id: str
    aliases: tuple[str, ...]
    context_length: int
    vocabulary_size: int
    created: int  # unix seconds
    device: str
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    load_s: float
