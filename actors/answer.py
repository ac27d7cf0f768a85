"""The caller's side of one request: typed events as they come, joined where they pile up.

Rules of this file: it runs in the caller's task and owns the receive end; closing it is how a request is abandoned.
Deltas of one choice are never reordered; a held delta leaves at the latest with the choice's finish reason.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, Self

import trio

from .choice import join
from .errors import CompletionError, DeadlineExceeded, StepFailed
from .events import Delta, PromptInfo, Speculation, Timings, Usage
from .request import CompletionRequest
from .ticket import Accepted, Ended, Event, Ticket

TOO_LATE = "the request's deadline passed before its answer was complete"


class Buffering:
    """When held deltas are let go: by number of tokens, by time, by either or by both. Off when both are 0."""

    def __init__(self, tokens: int = 0, ms: float = 0.0, mode: Literal["any", "all"] = "any") -> None:
        self.tokens = tokens
        self.s = ms / 1e3
        self.every = mode == "all"
        self.off = not tokens and not ms

    def due(self, tokens: int, held_since: float, now: float) -> bool:
        """Whether deltas with so many tokens, the first of them held since then, leave now."""
        tests = []
        if self.tokens:
            tests.append(tokens >= self.tokens)
        if self.s:
            tests.append(now >= held_since + self.s)
        return (all(tests) if self.every else any(tests)) if tests else True

    def wake_at(self, tokens: int, held_since: float) -> float:
        """When time alone will make them due; infinity when it will not."""
        waits_for_tokens = self.every and self.tokens and tokens < self.tokens
        return held_since + self.s if self.s and not waits_for_tokens else math.inf


class _Held:
    __slots__ = ("deltas", "since", "tokens")

    def __init__(self, since: float) -> None:
        self.deltas: list[Delta] = []
        self.since = since
        self.tokens = 0


class Answer:
    """An async iterable of ``Delta``; see the attributes. ``usage`` and ``timings`` are final after the last delta;
    of an answer that was left early they are what had been computed.

    Iterating raises CompletionError children, after the deltas that came before: StepFailed when the device failed,
    InvalidRequest when its grammar cannot be followed any further, DeadlineExceeded, EngineOverloaded when a request
    with priority took its place in the queue.
    """

    def __init__(
        self, *, id: str, created: int, model: str, request: CompletionRequest,
        events: trio.MemoryReceiveChannel[Event], ticket: Ticket, deadline: float, buffering: Buffering,
    ) -> None:  # fmt: skip
        self.id = id
        self.created = created  # unix seconds
        self.model = model  # the name that was asked for
        self.request = request
        self.n = request.n or 1
        self.seed = 0
        self.sampling_options: dict[str, float | int] = {}
        self.prompts: tuple[PromptInfo, ...] = ()
        self.grammar: str | None = None  # the effective grammar of a constrained answer
        self.warnings: tuple[str, ...] = ()  # parts of a schema that are not enforced (lenient mode)
        self.usage = Usage(0, 0, 0)
        self.timings = Timings()
        self.speculation: Speculation | None = None
        self.concurrent_requests = 0
        self._events = events
        self._ticket = ticket  # to be marked when this is closed, and asked for figures; no more
        self._deadline = deadline
        self._buffering = buffering
        self._held: dict[int, _Held] = {}
        self._ready: deque[Delta] = deque()
        self._ended = False
        self._whole = False  # ended well: its figures are final
        self._error: CompletionError | None = None  # what it ended with, until it has been raised

    async def accepted(self) -> None:
        """Wait for admission's verdict. Raises CompletionError."""
        event = await self._receive()
        if isinstance(event, CompletionError):
            raise event
        assert isinstance(event, Accepted)

    def close(self) -> None:
        """Abandon what has not been received; the engine frees it within one step. Synchronous, never fails."""
        self._events.close()
        self._ticket.abandoned = True
        if not self._whole:
            self.usage = self._ticket.usage()
            if self._ticket.first_token_at is not None:
                self.timings = self._ticket.timings()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._ready:
            await self._fill()
            if not self._ready:
                raise StopAsyncIteration
        return self._ready.popleft()

    async def next_all(self) -> list[Delta]:
        """All deltas that are due, as soon as one is: a door writes them in one go. Empty after the last."""
        if not self._ready:
            await self._fill()
        out = list(self._ready)
        self._ready.clear()
        return out

    async def choices(self) -> list[Delta]:
        """The whole answer: one joined delta per choice, by index."""
        deltas: dict[int, list[Delta]] = {}
        async for delta in self:
            deltas.setdefault(delta.index, []).append(delta)
        return [join(deltas[i]) for i in sorted(deltas)]

    async def _fill(self) -> None:
        """Wait until a delta is ready, or the answer at its end. Raises what ended it, after its last delta."""
        while not self._ready and not self._ended:
            try:
                event = await self._receive()
            except CompletionError as error:
                self._take_all_nowait()  # what came before the deadline counts, even if nobody had read it
                event = None if self._ended else error
            if event is not None:
                self._take(event)
                self._take_all_nowait()
            self._release()
        if not self._ready and self._error is not None:
            failure, self._error = self._error, None
            raise failure

    async def _receive(self) -> Event | None:
        """The next event, or None when held deltas may be due before one has come."""
        wake_at = math.inf
        if self._held:
            wake_at = min(self._buffering.wake_at(h.tokens, h.since) for h in self._held.values())
        until = min(wake_at, self._deadline)
        try:
            if until == math.inf:
                return await self._events.receive()
            with trio.move_on_at(until):
                return await self._events.receive()
        except trio.EndOfChannel:
            raise StepFailed("the engine ended before the answer did") from None
        if wake_at <= self._deadline:
            return None
        raise DeadlineExceeded(TOO_LATE)

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """Until the deadline, and no longer. Raises DeadlineExceeded."""
        with trio.move_on_at(self._deadline) as scope:
            yield
        if scope.cancelled_caught:
            raise DeadlineExceeded(TOO_LATE)

    def _take_all_nowait(self) -> None:
        while not self._ended:
            try:
                self._take(self._events.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                return

    def _take(self, event: Event) -> None:
        match event:
            case Ended():
                self._ended = self._whole = True
                self.usage, self.timings = event.usage, event.timings
                self.speculation, self.concurrent_requests = event.speculation, event.concurrent_requests
            case CompletionError():
                self._ended = True
                self._error = event
            case Accepted():
                raise AssertionError("the verdict comes once")
            case deltas:
                now = 0.0 if self._buffering.off else trio.current_time()
                for delta in deltas:
                    held = self._held.get(delta.index)
                    if held is None:
                        held = self._held[delta.index] = _Held(now)
                    held.deltas.append(delta)
                    held.tokens += len(delta.token_ids) + len(delta.echoed_ids)

    def _release(self) -> None:
        if self._buffering.off or self._ended:
            self._ready += [join(held.deltas) for held in self._held.values()]
            self._held.clear()
            return
        now = trio.current_time()
        for index, held in list(self._held.items()):
            finished = held.deltas[-1].finish_reason is not None
            if finished or self._buffering.due(held.tokens, held.since, now):
                self._ready.append(join(held.deltas))
                del self._held[index]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
