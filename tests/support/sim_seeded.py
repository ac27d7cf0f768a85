"""A trio run that a seed decides: the order of tasks, and the clock.

trio's scheduler shuffles its batches with a private random source behind a private switch: both are used here and
nowhere else, and their presence is asserted at import.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
import trio.testing
from trio._core import _run as trio_run

assert hasattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING"), "trio changed its private switch"
assert hasattr(trio_run, "_r"), "trio changed its private random source"


def seeded_run(seed: int, main: Callable[[], Awaitable[None]], instrument: trio.abc.Instrument | None = None) -> None:
    """Run ``main`` in virtual time, tasks in the seed's order. Raises what it raises."""
    vars(trio_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
    trio_run._r.seed(seed)
    try:
        trio.run(
            main, clock=trio.testing.MockClock(autojump_threshold=0), restrict_keyboard_interrupt_to_checkpoints=True,
            instruments=[] if instrument is None else [instrument],
        )  # fmt: skip
    finally:
        vars(trio_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = False


class CancelAt(trio.abc.Instrument):
    """Cancels a scope at the n-th step of any task. ``reached``: whether the run was that long."""

    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self._left = step
        self._scope = scope

    @property
    def reached(self) -> bool:
        return self._left <= 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self._scope.cancel()
