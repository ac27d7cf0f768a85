"""A simulated executor behind the production seam, with named points at which it can be slow, fail, lie or die."""

from __future__ import annotations

from collections.abc import Callable

import trio
from sim_device import SimDevice, run_on

from offbook.actors.execution import StepError
from offbook.actors.steps import Step
from offbook.kernels.step import StepResult


class SimExecutor:
    """Runs steps on a SimDevice in virtual time. ``before`` is called with each step and may raise: a StepError fails
    the step, anything else is the executor's death. ``after`` may change the result."""

    def __init__(self, device: SimDevice | None = None, *, step_s: float = 0.01) -> None:
        self.device = device or SimDevice()
        self.step_s = step_s
        self.before: Callable[[Step], None] | None = None
        self.after: Callable[[StepResult], None] | None = None
        self.busy = False

    async def run(self, step: Step) -> StepResult:
        assert not self.busy, "one step at a time"
        self.busy = True
        try:
            await trio.sleep(self.step_s)
            if self.before is not None:
                self.before(step)
            try:
                result = run_on(self.device, step)
            except MemoryError as error:
                raise StepError(f"MemoryError: {error}") from error
            if self.after is not None:
                self.after(result)
        finally:
            self.busy = False
        return result
