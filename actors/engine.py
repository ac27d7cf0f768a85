"""The embedded API, and the wiring plan: the only file that knows all four actors.

``async with open_engine(config) as engine`` starts the actors in a nursery of its own inside the caller's task; if one
crashes, all end and the exception comes out of the ``async with``.

Why no mailbox can deadlock: admission, fan-out and execution never wait on anybody; batching never waits on a mailbox
either (its own sends are ``send_nowait`` into channels sized for all it can owe, see ``config.py``). Only callers wait,
for room in admission's mailbox, which always drains.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Literal

import msgspec
import trio
from prometheus_client import CollectorRegistry

from .admission import admission
from .answer import Answer, Buffering
from .batching import batching
from .blocks import BlockPool
from .choice import Choice
from .config import EngineConfig
from .constraints import Constraints
from .drafts import Prediction, PromptLookup
from .errors import CompletionError, EngineUnavailable, ModelNotFound
from .events import Context
from .execution import execution
from .fanout import fanout
from .grammar import Constraint
from .grammar_meter import Meter
from .inspection import EngineView, engine_view
from .loading import Loaded, Progress, load_model
from .messages import AdmissionMail, Apply, BatchingMail, Enqueue, ExecutionMail, FanoutMail
from .metrics import EngineMetrics
from .request import CompletionRequest, from_fields
from .resolve import (
    RequestPlan,
    check_request,
    effective_options,
    estimate_tokens,
    namespace_of,
    plan_request,
    sampling_params,
    stop_strings,
    text_bytes,
    wants_of,
)
from .schedule import Scheduler, StepBudget
from .sequence import Sequence
from .text import Surfaces
from .thinking import ThinkingState, find_markers
from .ticket import Event, Ticket

_CLOSED = "the engine is closed"


@asynccontextmanager
async def open_engine(
    config: EngineConfig | None = None, *, loaded: Loaded | None = None, progress: Progress | None = None
) -> AsyncIterator[Engine]:
    """Load the model and run the actors for the length of the block.

    Leaving the block normally waits for the requests that are in progress; leaving it by an exception or a cancellation
    abandons them. ``loaded`` takes the place of loading (simulations bring their own executor). Raises ModelFileError,
    DeviceError, DefaultModelError.
    """
    config = config or EngineConfig()
    if loaded is not None:
        async with _run(config, loaded) as engine:
            yield engine
        return
    async with load_model(config, progress) as loaded, _run(config, loaded) as engine:
        yield engine


@asynccontextmanager
async def _run(config: EngineConfig, loaded: Loaded) -> AsyncIterator[Engine]:
    metrics = EngineMetrics()
    scheduler = Scheduler(
        BlockPool(loaded.blocks_total, caching=config.prefix_cache),
        StepBudget(alone=config.step_tokens_max, busy_ms=config.step_busy_ms),
        running_max=min(config.running_max, loaded.slots_total), slots=loaded.slots_total,
        drafts_max=config.draft_tokens_max,
    )  # fmt: skip
    to_admission, at_admission = trio.open_memory_channel[AdmissionMail](config.admission_mailbox)
    to_batching, at_batching = trio.open_memory_channel[BatchingMail](config.batching_mailbox)
    to_execution, at_execution = trio.open_memory_channel[ExecutionMail](config.execution_mailbox)
    to_fanout, at_fanout = trio.open_memory_channel[FanoutMail](config.fanout_mailbox)
    mailboxes = {
        "admission": at_admission, "batching": at_batching, "execution": at_execution, "fanout": at_fanout,
    }  # fmt: skip
    engine = Engine(config, loaded, metrics, scheduler, to_admission, mailboxes)
    block_error: BaseException | None = None
    try:
        async with trio.open_nursery() as company:
            company.start_soon(admission, at_admission, to_batching.clone(), config, metrics)
            company.start_soon(batching, at_batching, to_admission.clone(), to_execution, to_fanout, scheduler, metrics)
            company.start_soon(execution, at_execution, to_batching.clone(), loaded.executor)
            company.start_soon(fanout, at_fanout, to_batching, metrics)
            try:
                yield engine
            except BaseException as error:
                block_error = error
                raise
            engine.begin_drain()
            await engine.idle()
            company.cancel_scope.cancel(reason="the engine is closed and idle")
    except BaseExceptionGroup as group:
        if block_error is not None and group.exceptions == (block_error,):
            raise block_error from None  # the caller's own error: the nursery is ours, so its wrapping stays ours too
        raise


class Engine:
    """A running engine. ``complete`` is the whole API; the rest is for doors and for people."""

    def __init__(
        self, config: EngineConfig, loaded: Loaded, metrics: EngineMetrics, scheduler: Scheduler,
        to_admission: trio.MemorySendChannel[AdmissionMail], mailboxes: Mapping[str, trio.MemoryReceiveChannel[Any]],
    ) -> None:  # fmt: skip
        self.config = config
        self.card = loaded.card
        self.tokenizer = loaded.tokenizer
        self.surfaces = Surfaces(loaded.tokenizer.token_bytes, loaded.tokenizer.is_special)
        self.state: Literal["ready", "draining"] = "ready"
        self._limits = loaded.limits
        self._metrics = metrics
        self._scheduler = scheduler
        self._to_admission = to_admission
        self._constraints = Constraints(config, loaded.tokenizer, loaded.tokenizer.eos_ids, loaded.card.vocabulary_size)
        self._markers = find_markers(loaded.tokenizer, config.think_start, config.think_end)
        self._mailboxes = mailboxes  # looked at, never read
        self._tickets: dict[int, Ticket] = {}  # of the answers that callers hold open
        self._idle = trio.Event()
        self._idle.set()

    @property
    def registry(self) -> CollectorRegistry:
        """Prometheus metrics of this engine."""
        return self._metrics.registry

    @property
    def active(self) -> int:
        """Answers that callers hold open."""
        return len(self._tickets)

    def snapshot(self) -> dict[str, object]:
        """Figures for tests and for a debug page: blocks and sequences, as they are now."""
        pool = self._scheduler.pool
        return {
            "active": self.active, "running": len(self._scheduler.running), "waiting": len(self._scheduler.waiting),
            "blocks_total": pool.total, "blocks_held": pool.held, "blocks_cached": pool.idle, "blocks_free": pool.free,
        }  # fmt: skip

    def inspect(self) -> EngineView:
        """Every mailbox, request and sequence of this instant, for a person who wants to know what it is doing."""
        return engine_view(self.state, self.snapshot(), self._mailboxes, self._tickets.values(), trio.current_time())

    def begin_drain(self) -> None:
        """Refuse new requests from now on; what is in progress goes on."""
        self.state = "draining"

    def end_answers(self) -> None:
        """End every open answer with EngineUnavailable, after what has been made of it: no more time is given."""
        for ticket in self._tickets.values():
            if not ticket.ended and not ticket.abandoned:
                ticket.end(EngineUnavailable("the server stops: send this elsewhere, or again", 5.0))
                self._metrics.requests.labels("failed").inc()

    async def idle(self) -> None:
        """Wait until no answer is open."""
        await self._idle.wait()

    def complete(
        self, request: CompletionRequest | None = None, /, *, context: Context | None = None, **fields: object
    ) -> AbstractAsyncContextManager[Answer]:
        """Ask for a completion: ``async with engine.complete(prompt="Hi") as answer: async for delta in answer: ...``.

        Takes a ready request, or its fields by name (then ``model`` defaults to the loaded one, and ``stream`` to true:
        deltas come as they are made). Leaving the block abandons what has not been generated. Raises CompletionError
        children on entering: InvalidRequest, ModelNotFound, EngineOverloaded, ...
        """
        if request is None:
            request = from_fields({"model": self.card.id, "stream": True, **fields})
        elif fields:
            raise TypeError("give a request or its fields, not both")
        elif not isinstance(request, CompletionRequest):
            raise TypeError(f"give a CompletionRequest, or fields by name (prompt=...), not {type(request).__name__!r}")
        return self._complete(request, context or Context())

    @asynccontextmanager
    async def _complete(self, request: CompletionRequest, context: Context) -> AsyncIterator[Answer]:
        if not self._to_admission.statistics().open_receive_channels:
            raise EngineUnavailable(_CLOSED, 5.0)
        if self.state != "ready":
            raise EngineUnavailable("the server is draining: send this elsewhere, or again later", 5.0)
        self.check_model(request.model)
        check_request(request, self.config, self._limits)
        ticket, answer = self._open(request, context)
        self._idle = self._idle if self._tickets else trio.Event()
        self._tickets[id(ticket)] = ticket
        try:
            self._send(Apply(ticket))
            await answer.accepted()
            with answer.in_time():
                try:
                    plan = await self._plan(request)
                    constraint = await self._constraints.get(request.response_format)
                except CompletionError:
                    if not ticket.ended:  # it is not abandoned either: its caller did not leave by itself
                        ticket.ended = True
                        self._metrics.requests.labels("refused").inc()
                    raise
            self._fill(ticket, answer, plan, context, constraint)
            self._send(Enqueue(ticket))
            yield answer
        finally:
            answer.close()
            del self._tickets[id(ticket)]
            if not self._tickets:
                self._idle.set()

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound unless ``name`` is the served id, an alias, or ``accounts/*/models/<either>``."""
        known = (self.card.id, *self.config.model_aliases)
        parts = name.split("/")
        short = parts[3] if len(parts) == 4 and parts[0] == "accounts" and parts[2] == "models" else name
        if short not in known and name not in known:
            raise ModelNotFound(f"Model {name[:200]!r} not found; this server has {', '.join(map(repr, known))}")

    def _open(self, request: CompletionRequest, context: Context) -> tuple[Ticket, Answer]:
        now = trio.current_time()
        events, receive = trio.open_memory_channel[Event](self._capacity(request))
        seconds = context.deadline_s if context.deadline_s is not None else self.config.deadline_s
        options = request.stream_options
        buffering = Buffering()
        if options is not None and request.stream:
            buffering = Buffering(options.buffer_tokens or 0, options.buffer_ms or 0.0, options.buffer_mode or "any")
        answer_id = f"cmpl-{secrets.token_hex(16)}"
        ticket = Ticket(
            id=context.request_id or answer_id, reply=events, client=context.client or request.user,
            priority=request.service_tier == "priority", estimate=estimate_tokens(request),
            stream=bool(request.stream), asked_at=now, n_per_prompt=request.n or 1,
        )  # fmt: skip
        answer = Answer(
            id=answer_id, created=int(time.time()), model=request.model, request=request, events=receive, ticket=ticket,
            deadline=now + seconds if seconds is not None else math.inf, buffering=buffering,
        )  # fmt: skip
        return ticket, answer

    def _capacity(self, request: CompletionRequest) -> int:
        """The longest answer the caller's channel must carry: the verdict, an event a token and choice, the end."""
        asked = request.max_tokens if request.max_tokens is not None else request.max_completion_tokens
        tokens = min(self.config.default_max_tokens if asked is None else asked, self.card.context_length)
        prompts = len(request.prompt) if isinstance(request.prompt, list) and request.prompt else 1
        return 4 + prompts * (request.n or 1) * (tokens + 2)

    async def _plan(self, request: CompletionRequest) -> RequestPlan:
        """Short texts are tokenized here and now, long ones beside the event loop."""
        plan = partial(plan_request, request, self.tokenizer, self.config, self._limits, self._markers)
        long = text_bytes(request) > self.config.thread_tokenize_bytes
        return await trio.to_thread.run_sync(plan, abandon_on_cancel=True) if long else plan()

    def _fill(
        self, ticket: Ticket, answer: Answer, plan: RequestPlan, context: Context, constraint: Constraint | None
    ) -> None:
        """The ticket's sequences and choices, prompt by prompt, sample by sample."""
        request = answer.request
        seed = secrets.randbits(63) if request.seed is None else request.seed
        answer.seed = seed
        answer.sampling_options = effective_options(request, self._limits)
        answer.prompts = tuple(prompt.info for prompt in plan.prompts)
        if constraint is not None:
            answer.grammar, answer.warnings = constraint.source, constraint.warnings
        ticket.prediction_tokens = len(plan.prediction)
        params = sampling_params(request, answer.sampling_options, seed % 2**64, wants_of(request, plan.prompts[0]))
        predicted = Prediction(plan.prediction) if plan.prediction else None
        keep = request.prompt_cache_key is not None or context.session is not None
        for one in plan.prompts:
            wants, prompt = wants_of(request, one), one.info.token_ids
            thinking = ThinkingState(plan.thinking, prompt) if plan.thinking is not None else None
            drafter = PromptLookup(prompt) if predicted is None and self.config.prompt_lookup else predicted
            for sample in range(answer.n):
                sequence = Sequence(
                    prompt, msgspec.structs.replace(params, choice=sample) if sample else params,
                    max_tokens=one.max_tokens, min_tokens=min(request.min_tokens or 0, one.max_tokens),
                    eos_ids=frozenset() if request.ignore_eos else frozenset(self.tokenizer.eos_ids),
                    score_from=len(prompt) - wants.echo if wants.rows and wants.echo else None,
                    namespace=namespace_of(request, context), cache_limit=request.prompt_cache_max_len, keep=keep,
                    matcher=constraint.matcher(Meter(self.config.grammar_token_ms)) if constraint is not None else None,
                    drafter=drafter.fresh() if drafter is not None else None,
                    thinking=thinking.fresh() if thinking is not None else None,
                )  # fmt: skip
                choice = Choice(ticket, len(ticket.choices), sequence, self.surfaces, stop_strings(request), wants)
                sequence.owner = choice
                ticket.sequences.append(sequence)
                ticket.choices.append(choice)
        ticket.queued_at = trio.current_time()
        answer.usage = ticket.usage()

    def _send(self, message: AdmissionMail) -> None:
        """Into admission's mailbox: applications fill it so far and no further, so that who is inside finds room."""
        used = self._to_admission.statistics().current_buffer_used
        if isinstance(message, Apply) and used >= self.config.applies_max:
            raise EngineUnavailable("too many requests at the same instant: send this again", 1.0)
        try:
            self._to_admission.send_nowait(message)
        except trio.BrokenResourceError:
            raise EngineUnavailable(_CLOSED, 5.0) from None
