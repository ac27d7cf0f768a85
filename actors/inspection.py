"""What a live engine is doing, as plain data for people: its mailboxes, requests and sequences.

Rules of this file: figures, ids and states, never a prompt, an answer or a key; it looks on and changes nothing. What
it lists is bounded, so that looking at a server in trouble does not add to the trouble.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .sequence import Sequence
from .ticket import Ticket

if TYPE_CHECKING:
    import trio

TICKETS_TOLD = 200
SEQUENCES_TOLD = 8  # of each request

Stage = Literal["applying", "tokenizing", "queued", "waiting", "prefill", "generating", "delivering"]


class MailboxView(msgspec.Struct, frozen=True):
    """``senders_blocked`` is 0 in a healthy engine: no actor ever waits for another's mailbox."""

    messages: int
    capacity: float
    senders_blocked: int


class SequenceView(msgspec.Struct, frozen=True):
    state: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    computed: int  # tokens whose KV is in its blocks
    blocks: int
    preemptions: int


class TicketView(msgspec.Struct, frozen=True):
    """``undelivered``: events that its reader has not taken yet; many of them mean a slow reader."""

    id: str
    client: str | None
    stage: Stage
    age_s: float
    priority: bool
    stream: bool
    abandoned: bool
    undelivered: int
    sequences_total: int
    sequences: list[SequenceView]


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """``tickets``: the oldest ``TICKETS_TOLD`` of ``tickets_total``."""

    state: str
    figures: dict[str, object]
    mailboxes: dict[str, MailboxView]
    tickets_total: int
    tickets: list[TicketView]


def mailbox_view(channel: trio.MemoryReceiveChannel[Any]) -> MailboxView:
    """How full an actor's mailbox is."""
    now = channel.statistics()
    return MailboxView(now.current_buffer_used, now.max_buffer_size, now.tasks_waiting_send)


def ticket_view(ticket: Ticket, now: float) -> TicketView:
    """One request; ``now`` in trio clock seconds."""
    return TicketView(
        id=ticket.id, client=ticket.client and ticket.client[:64], stage=stage_of(ticket),
        age_s=round(now - ticket.asked_at, 3), priority=ticket.priority, stream=ticket.stream,
        abandoned=ticket.abandoned, undelivered=ticket.reply.statistics().current_buffer_used,
        sequences_total=len(ticket.sequences), sequences=[_sequence(s) for s in ticket.sequences[:SEQUENCES_TOLD]],
    )  # fmt: skip


def stage_of(ticket: Ticket) -> Stage:
    """How far it has come, from its stamps."""
    if ticket.ended:
        return "delivering"
    if ticket.first_token_at is not None:
        return "generating"
    if ticket.first_step_at is not None:
        return "prefill"
    if ticket.admitted_at is not None:
        return "waiting"  # batching has it, and no room for it yet
    if ticket.queued_at:
        return "queued"
    return "tokenizing" if ticket.accepted_at else "applying"


def engine_view(
    state: str, figures: dict[str, object], mailboxes: Mapping[str, trio.MemoryReceiveChannel[Any]],
    tickets: Collection[Ticket], now: float,
) -> EngineView:  # fmt: skip
    """All of it at one instant."""
    oldest: Iterable[Ticket] = sorted(tickets, key=lambda t: t.asked_at)[:TICKETS_TOLD]
    return EngineView(
        state=state, figures=figures, mailboxes={name: mailbox_view(box) for name, box in mailboxes.items()},
        tickets_total=len(tickets), tickets=[ticket_view(t, now) for t in oldest],
    )  # fmt: skip


def _sequence(sequence: Sequence) -> SequenceView:
    return SequenceView(
        sequence.state.value, sequence.n_prompt, sequence.n_output, sequence.max_tokens, sequence.computed,
        len(sequence.blocks), sequence.preemptions,
    )  # fmt: skip
