"""From an answer's events to the wire and to headers. Pure: no I/O, no clocks, no waiting.

Rules of this file: the joined chunks of a choice say the same as the plain answer; a chunk costs one encoding of what
is new in it; what only the end of a stream can tell (raw output) is gathered here, and only when it was asked for.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
from collections.abc import Callable, Iterable

import msgspec
from msgspec import UNSET, UnsetType

from ..actors.answer import Answer
from ..actors.events import Delta, TokenRow, Usage
from . import sse
from .schemas import (
    CompletionResponse,
    LogProbs,
    NewLogProbs,
    NewLogProbsContent,
    PromptTokensDetails,
    RawOutput,
    TopLogProb,
    UsageInfo,
    WireChoice,
    WireError,
)

Piece = Callable[[int], tuple[str, bytes]]  # a token shown alone: its text and its exact bytes

encode = msgspec.json.Encoder().encode
_HOST = socket.gethostname()


class ChoiceWriter:
    """One choice on the wire, delta by delta."""

    def __init__(self, answer: Answer, piece: Piece, index: int) -> None:
        request = answer.request
        options = request.stream_options
        self._piece = piece
        self._answer = answer
        self._prompt = answer.prompts[index // answer.n]
        self._legacy = request.logprobs is not None and not isinstance(request.logprobs, bool)
        self._rows_wanted = self._legacy or request.logprobs is True
        self._mask = request.sampling_mask if request.logprobs is True else None
        self._ids = bool(request.return_token_ids or (request.stream and options and options.include_internal_content))
        self._first = True
        self._raw: _Raw | None = _Raw() if request.raw_output else None

    def write(self, delta: Delta) -> WireChoice:
        """The wire form of a delta; the last one of a choice also brings its raw output."""
        first, self._first = self._first, False
        if self._raw is not None:
            self._raw.add(delta)
        return WireChoice(
            index=delta.index,
            text=delta.text,
            logprobs=self._logprobs(delta) if self._rows_wanted else None,
            finish_reason=delta.finish_reason,
            raw_output=self._raw_output() if self._raw is not None and delta.finish_reason else UNSET,
            prompt_token_ids=self._prompt.token_ids if first and self._ids else UNSET,
            token_ids=delta.token_ids if self._ids else UNSET,
        )

    def _logprobs(self, delta: Delta) -> LogProbs | NewLogProbs | None:
        if not self._legacy:
            return self._new(delta.rows)
        # Nothing predicts the first token of a full echo: it has no alternatives, not even itself.
        unconditional = 1 if delta.echoed_ids and len(delta.echoed_ids) == len(self._prompt.token_ids) else 0
        rows = delta.rows
        return LogProbs(
            tokens=[self._piece(row.token_id)[0] for row in rows],
            token_logprobs=[row.logprob for row in rows],
            top_logprobs=[{} if i < unconditional else self._alternatives(row) for i, row in enumerate(rows)],
            text_offset=[row.text_offset for row in rows],
            token_ids=[row.token_id for row in rows],
        )

    def _alternatives(self, row: TokenRow) -> dict[str, float]:
        """Text -> logprob of the best tokens and of the token itself; of two with the same text the likelier stays."""
        found: dict[str, float] = {}
        for token_id, logprob in (*row.top, (row.token_id, row.logprob)):
            text = self._piece(token_id)[0]
            found[text] = max(found.get(text, logprob), logprob)
        return found

    def _new(self, rows: Iterable[TokenRow]) -> NewLogProbs:
        return NewLogProbs(content=[self._row(row) for row in rows])

    def _row(self, row: TokenRow) -> NewLogProbsContent:
        text, data = self._piece(row.token_id)
        counted = self._mask is not None and row.kept is not None
        return NewLogProbsContent(
            token=text,
            logprob=row.logprob,
            sampling_logprob=row.sampling_logprob,
            bytes=tuple(data),
            top_logprobs=tuple(self._top(token_id, logprob) for token_id, logprob in row.top),
            token_id=row.token_id,
            text_offset=row.text_offset,
            sampling_mask_count=row.kept if counted and row.kept is not None else UNSET,
            sampling_mask=self._mask_ids(row) if counted else UNSET,
        )

    def _top(self, token_id: int, logprob: float) -> TopLogProb:
        text, data = self._piece(token_id)
        return TopLogProb(token=text, logprob=logprob, token_id=token_id, bytes=tuple(data))

    def _mask_ids(self, row: TokenRow) -> tuple[int, ...] | str | UnsetType:
        ids = row.kept_ids
        if ids is None or self._mask == "count":
            return UNSET
        if self._mask == "non_zero_list":
            return ids
        return base64.b64encode(struct.pack(f"<{len(ids)}I", *ids)).decode()

    def _raw_output(self) -> RawOutput:
        raw = self._raw
        assert raw is not None
        return RawOutput(
            prompt_fragments=self._prompt.fragments,
            prompt_token_ids=self._prompt.token_ids,
            completion="".join(raw.text),
            completion_token_ids=raw.ids,
            completion_logprobs=self._new(raw.rows) if self._rows_wanted else None,
            grammar=self._answer.grammar,
        )


class _Raw:
    """What a choice's raw output is made of, gathered over its deltas."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.ids: list[int] = []
        self.rows: list[TokenRow] = []

    def add(self, delta: Delta) -> None:
        self.text.append(delta.raw_text)
        self.ids += (*delta.echoed_ids, *delta.token_ids)
        self.rows += delta.rows


class StreamWriter:
    """The events of one stream. Every chunk shares a prefix that is encoded once."""

    def __init__(self, answer: Answer, piece: Piece) -> None:
        self._answer = answer
        self._piece = piece
        self._choices: dict[int, ChoiceWriter] = {}
        self._unfinished = len(answer.prompts) * answer.n
        head = {"id": answer.id, "object": "text_completion", "created": answer.created, "model": answer.model}
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        options = answer.request.stream_options
        self._usage = options is None or options.include_usage is not False

    def chunk(self, delta: Delta) -> bytes:
        """One delta as an event; the last finish of the stream brings the performance metrics, if asked for."""
        writer = self._choices.get(delta.index)
        if writer is None:
            writer = self._choices[delta.index] = ChoiceWriter(self._answer, self._piece, delta.index)
        tail = b'],"usage":null}\n\n'
        if delta.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished and self._answer.request.perf_metrics_in_response:
                tail = b'],"usage":null,"perf_metrics":' + encode(perf_metrics(self._answer)) + b"}\n\n"
        return self._head + encode(writer.write(delta)) + tail

    def end(self) -> bytes:
        """What follows the last delta: usage, unless it was declined, and the end mark."""
        if not self._usage:
            return sse.DONE
        return self._head + b'],"usage":' + encode(usage_info(self._answer.usage)) + b"}\n\n" + sse.DONE

    def error(self, error: WireError) -> bytes:
        """A failure in mid-stream: an event with no choices that every client notices, and the end mark."""
        return self._head + b'],"error":' + encode(error) + b"}\n\n" + sse.DONE


def completion(answer: Answer, piece: Piece, deltas: Iterable[Delta]) -> CompletionResponse:
    """The whole body of an answer that is not streamed, from one joined delta per choice."""
    request = answer.request
    return CompletionResponse(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=[ChoiceWriter(answer, piece, delta.index).write(delta) for delta in deltas],
        usage=usage_info(answer.usage),
        perf_metrics=perf_metrics(answer) if request.perf_metrics_in_response else UNSET,
    )


def usage_info(usage: Usage) -> UsageInfo:
    return UsageInfo(
        prompt_tokens=usage.prompt_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        completion_tokens=usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def perf_metrics(answer: Answer) -> dict[str, int | float | str]:
    """The measurements of a finished answer, by their names in the body; times in seconds."""
    t, usage = answer.timings, answer.usage
    metrics: dict[str, int | float | str] = {
        "prompt-tokens": usage.prompt_tokens,
        "cached-prompt-tokens": usage.cached_tokens,
        "server-time-to-first-token": _seconds(t.first_token_s),
        "server-processing-time": _seconds(t.processing_s),
    }
    if (s := answer.speculation) is not None:
        rates = ",".join(f"{place}:{hits}/{tried}" for place, (hits, tried) in enumerate(s.accepted))
        metrics |= {
            "speculation-prompt-tokens": s.prompt_tokens,
            "speculation-prompt-matched-tokens": s.matched_tokens,
            "speculation-generated-tokens": s.drafted_tokens,
            "speculation-acceptance": rates,
        }
    return metrics | {
        "backend-host": _HOST,
        "num-concurrent-requests": answer.concurrent_requests,
        "deployment": answer.model,
        "tokenizer-queue-duration": _seconds(t.tokenizer_queue_s),
        "tokenizer-duration": _seconds(t.tokenizer_s),
        "prefill-queue-duration": _seconds(t.prefill_queue_s),
        "prefill-duration": _seconds(t.prefill_s),
        "generation-queue-duration": _seconds(t.generation_queue_s),
        "generation-duration": _seconds(t.generation_s),
    }


def _seconds(value: float) -> float:
    return round(value, 6)


def opening_headers(answer: Answer) -> dict[str, str]:
    """What is known when generation starts: enough to replay the request."""
    headers = {
        "fireworks-prompt-tokens": str(answer.usage.prompt_tokens),
        "fireworks-sampling-options": json.dumps(answer.sampling_options),
        "fireworks-seed": str(answer.seed),
    }
    if answer.warnings:
        headers["fireworks-warnings"] = _header_text("; ".join(answer.warnings))
    return headers


def closing_headers(answer: Answer) -> dict[str, str]:
    """All measurements of a finished answer."""
    return {f"fireworks-{name}": _header_text(value) for name, value in perf_metrics(answer).items()}


def _header_text(value: float | int | str) -> str:
    """A number without exponent; text that a header can carry."""
    if isinstance(value, float):
        return f"{value:.6f}"
    return str(value).encode("unicode_escape").decode()
