"""One request on its way through the company: what the actors hand to one another.

Rules of this file: a ticket has one owner at a time (caller -> admission -> batching), except for ``choices``, which
belong to fan-out, and ``reply``, whose other end belongs to the caller. The caller leaves by closing that end, which
marks the ticket ``abandoned``; whoever owns it finds it so and lets go. Stamps are trio clock seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .errors import CompletionError
from .events import Delta, FinishReason, Speculation, Timings, Usage
from .sequence import Sequence

if TYPE_CHECKING:
    import trio


class Written(Protocol):
    """What a ticket knows of its choices (choice.py)."""

    completion_tokens: int
    finish_reason: FinishReason | None
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Accepted:
    """The queue has room for the request; it may be tokenized."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The whole answer has been sent; nothing follows."""

    usage: Usage
    timings: Timings
    speculation: Speculation | None
    concurrent_requests: int


Event = Accepted | tuple[Delta, ...] | CompletionError | Ended  # what a caller's channel carries


@dataclass(eq=False, slots=True)
class Ticket:
    """``estimate``: prompt tokens expected, from the size of the text, until it is tokenized."""

    id: str
    reply: trio.MemorySendChannel[Event]
    client: str | None
    priority: bool
    estimate: int
    stream: bool
    asked_at: float
    sequences: list[Sequence] = field(default_factory=list)
    choices: list[Written] = field(default_factory=list)
    n_per_prompt: int = 1
    accepted_at: float = 0.0
    queued_at: float = 0.0  # tokenized, in the queue
    admitted_at: float | None = None
    first_step_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    stalled_s: float = 0.0  # after the first token: steps that had no place for any of its choices
    open_sequences: int = 0  # sequences that batching has not finished yet
    prediction_tokens: int = 0  # length of the predicted output
    concurrent: int = 0  # requests in progress when its first step was sent
    abandoned: bool = False  # the caller has closed its end (a mark, since every step asks every ticket)
    ended: bool = False  # answered, failed, refused or abandoned: it is counted as that, and nothing more is sent

    def tell(self, event: Event) -> None:
        """Send an event, unless the caller has left or was told the end: he is batching's or admission's to let go. A
        full channel would be a bug in its capacity."""
        if not self.abandoned and not self.ended:
            self.reply.send_nowait(event)

    def end(self, last: Event) -> None:
        """Tell how it ended; nothing is sent after that."""
        self.tell(last)
        self.reply.close()
        self.ended = True

    def timings(self) -> Timings:
        """The stages, each from the end of the one before; what never happened takes no time."""
        first_step = self.queued_at if self.first_step_at is None else self.first_step_at
        first_token = first_step if self.first_token_at is None else self.first_token_at
        last = first_token if self.last_token_at is None else self.last_token_at
        return Timings(
            tokenizer_queue_s=self.accepted_at - self.asked_at,
            tokenizer_s=self.queued_at - self.accepted_at,
            prefill_queue_s=first_step - self.queued_at,
            prefill_s=first_token - first_step,
            generation_queue_s=min(self.stalled_s, last - first_token),
            generation_s=max(last - first_token - self.stalled_s, 0.0),
            first_token_s=first_token - self.asked_at,
            processing_s=last - self.asked_at,
        )

    def usage(self) -> Usage:
        """Prompts once each; ``cached_tokens`` is what the first sample of each prompt found in the cache."""
        firsts = self.sequences[:: self.n_per_prompt]
        return Usage(
            prompt_tokens=sum(s.n_prompt for s in firsts),
            completion_tokens=sum(c.completion_tokens for c in self.choices),
            cached_tokens=sum(s.cached_tokens or 0 for s in firsts),
        )
