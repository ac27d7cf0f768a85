"""The actor that turns tokens into text and hands each event to its own reader.

Rules of this file: it never waits for anybody, so it always drains: a reader's channel is as long as the longest answer
it can carry. One wake-up per reader and step. It owns the choices of every ticket from their first token on.
"""

from __future__ import annotations

from typing import assert_never

import trio

from .choice import Choice
from .errors import CompletionError
from .events import Delta, Speculation
from .messages import BatchingMail, Failed, FanoutMail, Gained, Stopped
from .metrics import EngineMetrics
from .sequence import Sequence
from .ticket import Ended, Ticket


async def fanout(
    inbox: trio.MemoryReceiveChannel[FanoutMail],
    batching: trio.MemorySendChannel[BatchingMail],
    metrics: EngineMetrics,
) -> None:
    """Deliver what each step gave; ends when the inbox is closed."""
    async with inbox, batching:
        async for message in inbox:
            match message:
                case Gained():
                    _deliver(message, batching, metrics)
                case Failed(sequence=sequence, error=error):
                    _fail(sequence, error, batching, metrics)
                case _:
                    assert_never(message)


def _deliver(message: Gained, batching: trio.MemorySendChannel[BatchingMail], metrics: EngineMetrics) -> None:
    deltas: dict[Ticket, list[Delta]] = {}
    generated = 0
    for gain in message.gains:
        choice = gain.sequence.owner
        assert isinstance(choice, Choice)
        ticket = choice.ticket
        delta = choice.gain(gain, message.result)
        if delta is None or ticket.ended:
            continue
        generated += len(delta.token_ids)
        _stamp(ticket, delta, message.at, metrics)
        if choice.finish_reason is not None and gain.finish is None:
            batching.send_nowait(Stopped(choice.sequence))
        shown = delta if ticket.stream else choice.hold(delta)
        if shown is not None:
            deltas.setdefault(ticket, []).append(shown)
    metrics.generated_tokens.inc(generated)
    for ticket, gained in deltas.items():
        ticket.tell(tuple(gained))
        goes_on = gained[-1].finish_reason is None  # spares most steps the look at every choice
        if not goes_on and all(c.finish_reason is not None for c in ticket.choices):
            ticket.end(Ended(ticket.usage(), ticket.timings(), _speculation(ticket), ticket.concurrent))
            metrics.answered(ticket)


def _fail(
    sequence: Sequence, error: CompletionError, batching: trio.MemorySendChannel[BatchingMail], metrics: EngineMetrics
) -> None:
    """End the request with an error, unless a stop string had ended this choice before the step that failed."""
    choice = sequence.owner
    assert isinstance(choice, Choice)
    ticket = choice.ticket
    if ticket.ended or choice.finish_reason is not None:
        return
    ticket.end(error)
    metrics.requests.labels("failed").inc()
    for other in ticket.choices:
        if other.finish_reason is None and other is not choice:
            batching.send_nowait(Stopped(other.sequence))


def _stamp(ticket: Ticket, delta: Delta, at: float, metrics: EngineMetrics) -> None:
    if delta.token_ids:
        if ticket.first_token_at is None:
            ticket.first_token_at = at
            metrics.first_token_s.observe(at - ticket.asked_at)
        elif ticket.last_token_at is not None and at > ticket.last_token_at:
            metrics.token_gap_s.observe(at - ticket.last_token_at)
    elif ticket.first_token_at is None:
        ticket.first_token_at = at  # scoring only: the prefill ends here
    ticket.last_token_at = at


def _speculation(ticket: Ticket) -> Speculation | None:
    """Figures over all choices, or None where nothing was drafted or predicted."""
    steps = [step for c in ticket.choices for step in c.sequence.drafted]
    if not steps and not ticket.prediction_tokens:
        return None
    drafters = [c.sequence.drafter for c in ticket.choices if c.sequence.drafter is not None]
    longest = max((drafted for drafted, _ in steps), default=0)
    return Speculation(
        prompt_tokens=ticket.prediction_tokens,
        matched_tokens=sum(d.matched for d in drafters) if ticket.prediction_tokens else 0,
        drafted_tokens=sum(drafted for drafted, _ in steps),
        accepted=tuple(
            (sum(hit > i for _, hit in steps), sum(drafted > i for drafted, _ in steps)) for i in range(longest)
        ),
    )
