"""Every message between actors, grouped by receiver.

Rules of this file: messages are facts, sent without waiting for an answer; each has one receiver and one sender kind.
There is no message for ending (a channel closes, or the nursery does) and none for abandoning (the caller closes its
end of ``Ticket.reply``): state cannot get lost in the mail.
"""

from __future__ import annotations

import msgspec

from ..kernels.step import StepResult
from .errors import CompletionError
from .sequence import Sequence
from .steps import Gain, Step
from .ticket import Ticket

# -- to admission ----------------------------------------------------------------------------------------------------


class Apply(msgspec.Struct, frozen=True):
    """A caller asks for a place; answered at once on its channel with Accepted or an error."""

    ticket: Ticket


class Enqueue(msgspec.Struct, frozen=True):
    """An accepted request is tokenized and ready to run."""

    ticket: Ticket


class Released(msgspec.Struct, frozen=True):
    """Batching is done with ``choices`` sequences of a request; ``last``: with the request itself."""

    ticket: Ticket
    choices: int
    last: bool


AdmissionMail = Apply | Enqueue | Released

# -- to batching -----------------------------------------------------------------------------------------------------


class Admitted(msgspec.Struct, frozen=True):
    """Run this request's sequences."""

    ticket: Ticket


class StepDone(msgspec.Struct, frozen=True):
    """``step_ms``: wall time of the step in the executor."""

    step: Step
    result: StepResult
    step_ms: float


class StepBroken(msgspec.Struct, frozen=True):
    """The device failed in this step: what its rows wrote is not to be trusted."""

    step: Step
    reason: str


class Stopped(msgspec.Struct, frozen=True):
    """Nothing more is wanted of this sequence: a stop string completed in its text, or its request failed."""

    sequence: Sequence


BatchingMail = Admitted | StepDone | StepBroken | Stopped

# -- to execution ----------------------------------------------------------------------------------------------------


class RunStep(msgspec.Struct, frozen=True):
    step: Step


ExecutionMail = RunStep

# -- to fan-out ------------------------------------------------------------------------------------------------------


class Gained(msgspec.Struct, frozen=True):
    """What each sequence of a step got; ``at``: when the step was done."""

    gains: list[Gain]
    result: StepResult
    at: float


class Failed(msgspec.Struct, frozen=True):
    """Nothing more can be computed for this sequence: its request ends with an error, unless the text that it has is
    complete."""

    sequence: Sequence
    error: CompletionError


FanoutMail = Gained | Failed
