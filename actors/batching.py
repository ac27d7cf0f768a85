"""The actor that owns the sequences: it plans a step, has it run, and applies what came out.

Rules of this file: at most one step is out; a sequence that is in it is not touched until it is back. The next step is
sent before the last one's tokens are fanned out, so that detokenizing and delivery overlap the device's work. Nothing
here waits for a caller: callers who left are found at the next step and their blocks freed then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import trio

from .choice import Choice
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
            batcher.advance()


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
        self._news: list[FanoutMail] = []  # of the last step, to be fanned out once the next step is on its way
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
        gains = harvest(done.step, done.result, self._scheduler)
        self._observe(done, gains)
        self._news.append(Gained(gains, done.result, now))
        for work, gain in zip(done.step.plan.works, gains, strict=True):
            if gain.error:  # what gave a NaN once is not to be given to others
                self._scheduler.distrust(work, done.step.plan.step_id)
                self._fail(gain.sequence, "the model's output is not a number, or no token is allowed")
            elif gain.finish is not None:
                self._finish(gain.sequence)

    def fail(self, broken: StepBroken) -> None:
        """A step failed: its requests end with an error, and what it may have written is forgotten."""
        self._out = None
        self._metrics.step_back()
        self._metrics.failed_steps.inc()
        for work in broken.step.plan.works:
            self._scheduler.distrust(work, broken.step.plan.step_id)
            self._fail(work.sequence, broken.reason)

    def advance(self) -> None:
        """Plan and send the next step unless one is out; then tell fan-out what came of the last one."""
        if self._out is None:
            self._sweep()
            self._send_step()
            self._metrics.scheduled(self._scheduler)
        for news in self._news:
            self._fanout.send_nowait(news)
        self._news.clear()

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

    def _send_step(self) -> None:
        plan = self._scheduler.plan(self._next_step)
        if plan is None:
            return
        self._next_step += 1
        now = trio.current_time()
        for work in plan.works:
            ticket = _ticket(work.sequence)
            if ticket.first_step_at is None:
                ticket.first_step_at = now
                ticket.concurrent = len(self._tickets)
                self._metrics.queue_s.observe(now - ticket.asked_at)
        self._out = plan
        self._execution.send_nowait(RunStep(assemble(plan)))
        self._metrics.step_sent()

    def _observe(self, done: StepDone, gains: Iterable[Gain]) -> None:
        plan, metrics = done.step.plan, self._metrics
        self._scheduler.budget.observe(plan.rows, done.step_ms)
        metrics.step_rows.observe(plan.rows)
        metrics.step_s.labels("forward").observe(done.result.forward_ms / 1e3)
        metrics.step_s.labels("sample").observe(done.result.sample_ms / 1e3)
        metrics.step_s.labels("whole").observe(done.step_ms / 1e3)
        drafted = sum(len(w.drafts) for w in plan.works)
        if drafted:
            metrics.drafted.inc(drafted)
            metrics.accepted.inc(sum(max(len(g.tokens) - 1, 0) for g in gains))
        if self._scheduler.waiting:
            served = {id(_ticket(w.sequence)) for w in plan.works}
            waiting = {id(t): t for t in map(_ticket, self._scheduler.waiting)}
            for key, ticket in waiting.items():
                if key not in served and ticket.first_token_at is not None:
                    ticket.stalled_s += done.step_ms / 1e3

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

    def _fail(self, sequence: Sequence, reason: str) -> None:
        """Let a sequence go; whether its request fails is fan-out's to say, who knows whether its text is complete."""
        self._finish(sequence)
        self._news.append(Failed(sequence, reason))


def _ticket(sequence: Sequence) -> Ticket:
    assert isinstance(sequence.owner, Choice)
    return sequence.owner.ticket
