"""The actor at the entrance: who may wait, who runs next, and who is told to come back later.

Rules of this file: the verdict comes before tokenizing costs anything, and it is given at once. The queue's order is
decided afresh at each admission: priority first (waiting long enough counts as priority), then the client with the
least running, then first come first served. It waits for nobody, so its mailbox always drains.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import assert_never

import trio

from .config import EngineConfig
from .errors import ClientOverShare, CompletionError, EngineOverloaded
from .messages import AdmissionMail, Admitted, Apply, BatchingMail, Enqueue, Released
from .metrics import EngineMetrics
from .ticket import Accepted, Ticket


async def admission(
    inbox: trio.MemoryReceiveChannel[AdmissionMail],
    batching: trio.MemorySendChannel[BatchingMail],
    config: EngineConfig,
    metrics: EngineMetrics,
) -> None:
    """Serve the mailbox until it is closed."""
    desk = _Desk(batching, config, metrics)
    async with inbox, batching:
        async for message in inbox:
            match message:
                case Apply(ticket=ticket):
                    desk.judge(ticket)
                case Enqueue(ticket=ticket):
                    desk.enqueue(ticket)
                case Released(ticket=ticket, choices=choices, last=last):
                    desk.release(ticket, choices, last)
                case _:
                    assert_never(message)
            desk.pump()


class _Desk:
    """Admission's own state."""

    def __init__(
        self, batching: trio.MemorySendChannel[BatchingMail], config: EngineConfig, metrics: EngineMetrics
    ) -> None:
        self._batching = batching
        self._config = config
        self._metrics = metrics
        self._tokenizing: dict[int, Ticket] = {}  # accepted, not enqueued yet
        self._queue: dict[int, Ticket] = {}
        self._running_choices = 0
        self._in_flight: Counter[str] = Counter()  # requests of each client, from acceptance to release
        self._running: Counter[str | None] = Counter()  # requests of each client that batching has
        self._release_s: float | None = None  # smoothed seconds between two requests' ends, while busy
        self._last_release = -math.inf
        metrics.waiting.set_function(self._waiting)

    def judge(self, ticket: Ticket) -> None:
        """Accept or refuse, at once."""
        self._sweep()
        refusal = self._refusal(ticket)
        if refusal is not None:
            ticket.end(refusal)
            return
        ticket.accepted_at = trio.current_time()
        self._tokenizing[id(ticket)] = ticket
        if ticket.client is not None:
            self._in_flight[ticket.client] += 1
        ticket.tell(Accepted())

    def enqueue(self, ticket: Ticket) -> None:
        if self._tokenizing.pop(id(ticket), None) is not None:  # else it left, and a sweep found it first
            self._queue[id(ticket)] = ticket

    def release(self, ticket: Ticket, choices: int, last: bool) -> None:
        self._running_choices -= choices
        if last:
            self._running[ticket.client] -= 1
            if not self._running[ticket.client]:
                del self._running[ticket.client]
            self._leave(ticket)
            now = trio.current_time()
            gap = now - self._last_release
            if math.isfinite(gap):
                self._release_s = gap if self._release_s is None else 0.8 * self._release_s + 0.2 * gap
            self._last_release = now

    def pump(self) -> None:
        """Admit while batching has places: up to its bound, and always one request when it has none."""
        while self._queue:
            ticket = min(self._queue.values(), key=self._rank)
            if ticket.abandoned:
                del self._queue[id(ticket)]
                self._abandon(ticket)
                continue
            n = len(ticket.sequences)
            if self._running_choices and self._running_choices + n > self._config.choices_running_max:
                break
            del self._queue[id(ticket)]
            self._running_choices += n
            self._running[ticket.client] += 1
            self._batching.send_nowait(Admitted(ticket))
        if not self._queue:
            self._last_release = -math.inf  # only places that somebody waits for tell how fast they come free

    def _waiting(self) -> int:
        return sum(not t.abandoned for lane in (self._queue, self._tokenizing) for t in lane.values())

    # -- verdicts ------------------------------------------------------------------------------------------------

    def _refusal(self, ticket: Ticket) -> CompletionError | None:
        config, client = self._config, ticket.client
        if client is not None and config.client_share_max is not None:
            if self._in_flight[client] >= config.client_share_max:
                self._metrics.refused.labels("client_share").inc()
                return ClientOverShare(
                    f"this client has {self._in_flight[client]} requests in flight, its share is "
                    f"{config.client_share_max}: wait for one to end", self._retry_after_s(1),
                )  # fmt: skip
        waiting = len(self._queue) + len(self._tokenizing)
        tokens = sum(t.estimate for lane in (self._queue, self._tokenizing) for t in lane.values())
        tokens += ticket.estimate
        if not self._full(waiting, tokens) or (ticket.priority and self._make_room(waiting, tokens)):
            return None
        self._metrics.refused.labels("queue_full").inc()
        return EngineOverloaded(
            f"the queue is full ({waiting} requests wait): send this elsewhere, or again later",
            self._retry_after_s(waiting),
        )

    def _full(self, waiting: int, tokens: int) -> bool:
        """Whether one more is too many where so many wait; ``tokens``: of all, that one included."""
        places = max(self._config.choices_running_max - self._running_choices, 0)  # these will not wait
        too_long = waiting > 0 and tokens > self._config.queue_tokens_max
        return too_long or waiting >= self._config.queue_max + places

    def _make_room(self, waiting: int, tokens: int) -> bool:
        """Send the worst waiting requests of the default tier away, if that makes room for one with priority."""
        lower = sorted((t for t in self._queue.values() if not self._urgent(t)), key=self._rank)
        evicted: list[Ticket] = []
        while self._full(waiting - len(evicted), tokens):
            if not lower:
                return False
            evicted.append(lower.pop())
            tokens -= evicted[-1].estimate
        for worst in evicted:
            del self._queue[id(worst)]
            self._metrics.refused.labels("evicted").inc()
            worst.end(EngineOverloaded("a request with priority took this one's place in the full queue",
                                       self._retry_after_s(len(self._queue))))  # fmt: skip
            self._leave(worst)
        return True

    def _urgent(self, ticket: Ticket) -> bool:
        return ticket.priority or trio.current_time() - ticket.accepted_at >= self._config.priority_ageing_s

    def _rank(self, ticket: Ticket) -> tuple[bool, int, float]:
        return not self._urgent(ticket), self._running[ticket.client], ticket.accepted_at

    def _retry_after_s(self, ahead: int) -> float:
        """When a place is likely, at the rate at which requests have been ending; between a second and a minute."""
        return min(max(ahead * (self._release_s or 0.0), 1.0), 60.0)

    # -- leaving -------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Let go of those whose caller has left while they waited."""
        for lane in (self._queue, self._tokenizing):
            for ticket in [t for t in lane.values() if t.abandoned]:
                del lane[id(ticket)]
                self._abandon(ticket)

    def _abandon(self, ticket: Ticket) -> None:
        if not ticket.ended:  # else it was refused while it was prepared, and left with that
            self._metrics.requests.labels("abandoned").inc()
        self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        if ticket.client is not None:
            self._in_flight[ticket.client] -= 1
            if not self._in_flight[ticket.client]:
                del self._in_flight[ticket.client]
