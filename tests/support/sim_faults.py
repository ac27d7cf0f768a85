"""What breaks in a simulated world, and what is checked at each of its steps.

Rules of this file: everything breaks behind a production seam: the executor's, a mailbox's or the engine's own drain.
Who is hit by a fault is written down (``blamed``), so that nobody else may feel it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable

from sim_executor import SimExecutor

from offbook.actors.admission import _Desk
from offbook.actors.choice import Choice
from offbook.actors.engine import Engine
from offbook.actors.execution import StepError
from offbook.actors.sequence import Sequence, State
from offbook.actors.steps import Step
from offbook.kernels.step import ERROR_NAN, StepResult

FATAL = ("the executor dies", "the result does not fit", "a mailbox is closed")


class Faults:
    """Between batching and the executor of one world."""

    def __init__(self, rng: random.Random, executor: SimExecutor, *, fatal: bool = True) -> None:
        self.counts: Counter[str] = Counter()
        self.blamed: set[str] = set()  # ids of requests that a fault has hit
        self.fatal: str | None = None  # how the engine was made to end, once it was
        self.steps = 0
        self._rng = rng
        self._executor = executor
        self._fail_rate = rng.choice((0, 0, 0.02, 0.2))
        self._poison_rate = rng.choice((0, 0, 0.05))
        self._slow = rng.random() < 0.3
        self._ends_at = rng.randrange(1, 60) if rng.random() < 0.12 and fatal else None
        self._drains_at = rng.randrange(1, 60) if rng.random() < 0.1 else None

    def install(self, engine: Engine, check: Callable[[Step], None]) -> None:
        """Break things from now on; ``check`` sees each step before it runs."""
        run: Callable[[Step], Awaitable[StepResult]] = self._executor.run

        async def faulty(step: Step) -> StepResult:
            check(step)
            self.steps += 1
            rng = self._rng
            self._executor.step_s = rng.choice((0.001, 0.001, 0.02, 0.5 if self._slow else 0.001))
            if self.steps == self._drains_at:
                self.counts["drain"] += 1
                engine.begin_drain()
            if self._drains_at and self.steps == self._drains_at + 3 and self.steps % 2:
                self.counts["the drain is over"] += 1
                engine.end_answers()
            if self.steps == self._ends_at:
                self._end(engine, rng.choice(FATAL))
            if rng.random() < self._fail_rate:
                self.counts["a step fails"] += 1
                self.blamed |= {ticket_id(w.sequence) for w in step.plan.works}
                raise StepError("planted")
            return self._spoil(step, await run(step))

        self._executor.run = faulty  # type: ignore[method-assign]

    def stop(self) -> None:
        """Nothing breaks any more."""
        self._fail_rate = self._poison_rate = 0
        self._ends_at = self._drains_at = None

    def _end(self, engine: Engine, how: str) -> None:
        self.counts[how] += 1
        self.fatal = how
        if how == "the executor dies":
            raise OSError("planted: the device is gone")
        if how == "a mailbox is closed":
            engine._mailboxes[self._rng.choice(("admission", "batching", "fanout"))].close()

    def _spoil(self, step: Step, result: StepResult) -> StepResult:
        rows = len(result.token)
        if self.fatal == "the result does not fit":
            result.token = result.token[:-1] if rows else result.token.repeat(2)
            result.step_id -= not rows
        elif rows and self._rng.random() < self._poison_rate:
            self.counts["a row is poisoned"] += 1
            run = self._rng.randrange(len(step.runs))
            self.blamed.add(ticket_id(step.runs[run].sequence))
            first, end = step.batch.run_start[run], step.batch.run_start[run + 1]
            reached = [k for k in range(first, end) if result.token[k] >= 0] or [first]
            k = self._rng.choice(reached)
            result.token[k:end], result.error[k] = -1, ERROR_NAN
        return result


def ticket_id(sequence: Sequence) -> str:
    assert isinstance(sequence.owner, Choice)
    return sequence.owner.ticket.id


def check_step(engine: Engine, desk: _Desk, step: Step) -> None:
    """What holds whenever a step is out."""
    scheduler, config = engine._scheduler, engine.config
    running, waiting = scheduler.running, scheduler.waiting
    scheduler.pool.check()
    assert len({b.id for s in running for b in s.blocks}) == scheduler.pool.held, "a held block is a running sequence's"
    assert all(s.table.tolist() == [b.id for b in s.blocks] for s in (*running, *waiting)), "the device sees its blocks"
    assert all(not s.blocks and s.slot < 0 and s.state is State.WAITING for s in waiting)
    assert len(running) <= scheduler.running_max
    slots = [s.slot for s in running if s.slot >= 0]
    assert len({*slots, *scheduler._free_slots}) == len(slots) + len(scheduler._free_slots), "slots are conserved"
    arrivals = [s.arrival for s in (*running, *waiting)]
    assert arrivals == sorted(arrivals), "nobody is passed by a younger one"
    assert step.plan.works[0].sequence.arrival == arrivals[0], "the oldest always gets on"
    for view in engine.inspect().mailboxes.values():
        assert view.messages <= view.capacity
        assert view.senders_blocked == 0, "no actor waits for another's mailbox"
    lines = len(desk._queue) + len(desk._tokenizing)
    assert lines <= config.queue_max + config.choices_running_max
    owned = {id(s.owner.ticket): s.owner.ticket for s in (*running, *waiting) if isinstance(s.owner, Choice)}
    assert desk._running_choices >= len(running) + len(waiting)
    assert desk._running_choices <= config.choices_running_max or len(owned) == 1


def check_idle(engine: Engine, desk: _Desk) -> None:
    """What holds when nobody is left: every book is back to nothing, and every gauge says so."""
    scheduler = engine._scheduler
    scheduler.pool.check()
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.held == 0
    assert engine.active == 0
    assert sorted(scheduler._free_slots) == list(range(len(scheduler._free_slots)))
    desk._sweep()
    assert not desk._queue
    assert not desk._tokenizing
    assert desk._running_choices == 0
    assert not desk._in_flight
    assert not desk._running
    for gauge in ("requests_waiting", "sequences_running", "sequences_queued", "kv_blocks_used"):
        assert engine.registry.get_sample_value(f"offbook_{gauge}") == 0, gauge


def outcomes(engine: Engine) -> Counter[str]:
    """How requests ended, as the metrics tell it."""
    out: Counter[str] = Counter()
    for family in engine.registry.collect():
        if family.name in ("offbook_requests", "offbook_requests_refused"):
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    out[next(iter(sample.labels.values()))] += int(sample.value)
    return out
