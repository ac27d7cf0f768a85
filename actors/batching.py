"""The actor that owns the sequences: it plans a step, has it run, and applies what came out.

Rules of this file: at most one step is out; a sequence that is in it is not touched until it is back. Between two steps
the device idles, so nothing happens there that the next step does not need: figures, text and delivery come when it is
on its way. Nothing here waits for a caller: callers who left are found at the next step and their blocks freed then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, assert_never

import trio

from .choice import Choice
from .errors import CompletionError, Failure, InvalidRequest, StepFailed
from .messages import (
    AdmissionMail,
    Admitted,
    BatchingMail,
    ExecutionMail,
    Failed,
    FanoutMail,
    Gained,
    Released,
    RunStep,
    StepBroken,
    StepDone,
    Stopped,
)
from .metrics import EngineMetrics
from .schedule import Plan, Scheduler
from .sequence import Sequence, State
from .steps import Gain, assemble, harvest
from .ticket import Ticket


async def batching(
    inbox: trio.MemoryReceiveChannel[BatchingMail],
    admission: trio.MemorySendChannel[AdmissionMail],
    execution: trio.MemorySendChannel[ExecutionMail],
    fanout: trio.MemorySendChannel[FanoutMail],
    scheduler: Scheduler,
    metrics: EngineMetrics,
) -> None:
    """Serve the mailbox until it is closed."""
    batcher = _Batcher(admission, execution, fanout, scheduler, metrics)
    async with inbox, admission, execution, fanout:
        async for message in inbox:
            match message:
                case Admitted(ticket=ticket):
                    batcher.admit(ticket)
                case StepDone():
                    batcher.apply(message)
                case StepBroken():
                    batcher.fail(message)
                case Stopped(sequence=sequence):
                    batcher.stop(sequence)
                case _:
                    assert_never(message)
            sent = batcher.advance()
            if sent is not None:
                await trio.lowlevel.checkpoint()  # let execution take it
            batcher.tell(sent)


class _News(NamedTuple):
    """What a step gave; ``at``: when it was done."""

    done: StepDone
    gains: list[Gain]
    at: float


class _Batcher:
    """Batching's own state; every method is synchronous, so each message is one atomic change."""

    def __init__(
        self,
        admission: trio.MemorySendChannel[AdmissionMail],
        execution: trio.MemorySendChannel[ExecutionMail],
        fanout: trio.MemorySendChannel[FanoutMail],
        scheduler: Scheduler,
        metrics: EngineMetrics,
    ) -> None:
        self._admission = admission
        self._execution = execution
        self._fanout = fanout
        self._scheduler = scheduler
        self._metrics = metrics
        self._tickets: dict[int, Ticket] = {}
        self._out: Plan | None = None
        self._stopped: list[Sequence] = []  # ended by fan-out while their step was out
        self._news: _News | None = None  # of the last step, to be told once the next one is on its way
        self._failed: list[Failed] = []  # to be told after it
        self._next_step = 0

    def admit(self, ticket: Ticket) -> None:
        self._tickets[id(ticket)] = ticket
        ticket.open_sequences = len(ticket.sequences)
        ticket.admitted_at = trio.current_time()
        for sequence in ticket.sequences:
            self._scheduler.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        if self._out is None:
            self._finish(sequence)
        else:
            self._stopped.append(sequence)

    def apply(self, done: StepDone) -> None:
        """A step came back: take its tokens and let go of what is finished."""
        self._out = None
        self._metrics.step_back()
        now = trio.current_time()
        plan, gains = done.step.plan, harvest(done.step, done.result, self._scheduler)
        self._scheduler.budget.observe(plan.rows, done.step_ms)
        if self._scheduler.waiting:
            self._count_stalled(plan, done.step_ms)
        self._news = _News(done, gains, now)
        for work, gain in zip(plan.works, gains, strict=True):
            if gain.error:  # what gave a NaN once is not to be given to others
                self._scheduler.distrust(work, plan.step_id)
            if gain.refusal is not None:
                told = Failure(tuple(gain.refusal.loc), gain.refusal.message, "too_complex")
                self._fail(gain.sequence, InvalidRequest(told, status=400))
            elif gain.error:
                self._fail(gain.sequence, _broken("the model's output is not a number, or no token is allowed"))
            elif gain.finish is not None:
                self._finish(gain.sequence)

    def _count_stalled(self, plan: Plan, step_ms: float) -> None:
        served = {id(_ticket(w.sequence)) for w in plan.works}
        waiting = {id(t): t for t in map(_ticket, self._scheduler.waiting)}
        for key, ticket in waiting.items():
            if key not in served and ticket.first_token_at is not None:
                ticket.stalled_s += step_ms / 1e3

    def fail(self, broken: StepBroken) -> None:
        """A step failed: its requests end with an error, and what it may have written is forgotten."""
        self._out = None
        self._metrics.step_back()
        self._metrics.failed_steps.inc()
        for work in broken.step.plan.works:
            self._scheduler.distrust(work, broken.step.plan.step_id)
            self._fail(work.sequence, _broken(broken.reason))

    def advance(self) -> Plan | None:
        """Plan and send the next step, unless one is out; the plan of what was sent."""
        if self._out is not None:
            return None
        self._sweep()
        plan = self._out = self._scheduler.plan(self._next_step)
        if plan is not None:
            self._next_step += 1
            self._execution.send_nowait(RunStep(assemble(plan)))
            self._metrics.step_sent()
        return plan

    def tell(self, sent: Plan | None) -> None:
        """All that the device need not wait for: figures, and what came of the last step for fan-out."""
        if sent is not None:
            self._stamp(sent)
        if self._news is not None:
            done, gains, at = self._news
            self._news = None
            self._fanout.send_nowait(Gained(gains, done.result, at))
            self._observe(done, gains)
        for failed in self._failed:
            self._fanout.send_nowait(failed)
        self._failed.clear()
        self._metrics.scheduled(self._scheduler)

    def _sweep(self) -> None:
        """Finish what fan-out has ended, and what nobody waits for any more."""
        for sequence in self._stopped:
            self._finish(sequence)
        self._stopped.clear()
        for ticket in [t for t in self._tickets.values() if t.abandoned]:
            if not ticket.ended:  # else it left with its whole answer
                ticket.ended = True
                self._metrics.requests.labels("abandoned").inc()
            self._finish_all(ticket)

    def _stamp(self, sent: Plan) -> None:
        now = trio.current_time()
        for work in sent.works:
            ticket = _ticket(work.sequence)
            if ticket.first_step_at is None:
                ticket.first_step_at = now
                ticket.concurrent = len(self._tickets)
                self._metrics.queue_s.observe(now - ticket.asked_at)

    def _observe(self, done: StepDone, gains: Iterable[Gain]) -> None:
        plan, metrics = done.step.plan, self._metrics
        metrics.step_rows.observe(plan.rows)
        metrics.step_s.labels("forward").observe(done.result.forward_ms / 1e3)
        metrics.step_s.labels("sample").observe(done.result.sample_ms / 1e3)
        metrics.step_s.labels("whole").observe(done.step_ms / 1e3)
        drafted = sum(len(w.drafts) for w in plan.works)
        if drafted:
            metrics.drafted.inc(drafted)
            metrics.accepted.inc(sum(max(len(g.tokens) - 1, 0) for g in gains))

    # -- endings -------------------------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence) -> None:
        """Let a sequence go and give its place back; the ticket with the last of them."""
        if sequence.state is State.FINISHED:
            return
        self._scheduler.finish(sequence)
        ticket = _ticket(sequence)
        ticket.open_sequences -= 1
        last = ticket.open_sequences == 0
        if last:
            del self._tickets[id(ticket)]
        self._admission.send_nowait(Released(ticket, 1, last))

    def _finish_all(self, ticket: Ticket) -> None:
        for sequence in ticket.sequences:
            self._finish(sequence)

    def _fail(self, sequence: Sequence, error: CompletionError) -> None:
        """Let a sequence go; whether its request fails is fan-out's to say, who knows whether its text is complete."""
        self._finish(sequence)
        self._failed.append(Failed(sequence, error))


def _broken(reason: str) -> StepFailed:
    return StepFailed(f"the request failed while it was computed: {reason}")


def _ticket(sequence: Sequence) -> Ticket:
    assert isinstance(sequence.owner, Choice)
    return sequence.owner.ticket
