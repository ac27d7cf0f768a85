"""The actor that owns the device, and the seam behind which a device runs somewhere else than on the event loop.

Rules of this file: one step at a time, in the order they come. A device that fails in a step fails that step; an
executor that is gone ends the engine (crash together). The thread is never cancelled: it ends when its inbox says so.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import trio

from ..kernels.step import Device, StepResult
from .messages import BatchingMail, ExecutionMail, StepBroken, StepDone
from .steps import Step, fill_masks

T = TypeVar("T")
log = logging.getLogger(__name__)

HAND_OVER_S = 0.001  # the event loop stands still for so long at most: where no core is free for the device's thread

_Job = tuple[Future[Any], Callable[[], Any], threading.Event]  # a call, its result, and whether it has been taken


class Executor(Protocol):
    """Where steps run. ``run`` raises StepError when the device failed in this step, anything else is fatal."""

    async def run(self, step: Step) -> StepResult: ...


class StepError(Exception):
    """The device could not do this step; it can do others."""


async def execution(
    inbox: trio.MemoryReceiveChannel[ExecutionMail], batching: trio.MemorySendChannel[BatchingMail], executor: Executor
) -> None:
    """Run each step that comes in and tell batching how it went; ends when the inbox is closed."""
    async with inbox, batching:
        async for message in inbox:
            began = trio.current_time()
            try:
                result = await executor.run(message.step)
            except StepError as error:
                log.error("step %d failed: %s", message.step.batch.step_id, error)
                batching.send_nowait(StepBroken(message.step, str(error)))
            else:
                step_ms = 1e3 * (trio.current_time() - began)
                batching.send_nowait(StepDone(message.step, result, step_ms))


class ThreadExecutor:
    """A device in a thread of its own. Grammar masks are filled by a second thread while the device computes."""

    def __init__(self, open_device: Callable[[], Device]) -> None:
        self._open_device = open_device
        self._worker = _Worker("offbook-device")
        self._masks = _Worker("offbook-masks")
        self._device: Device | None = None

    async def open(self) -> Device:
        """Load the device in its thread. Raises what the loading raises."""
        self._device = await _finished(self._worker.submit(self._open_device))
        return self._device

    async def run(self, step: Step) -> StepResult:
        return await _finished(self._worker.submit(lambda: self._step(step), hand_over=True))

    def _step(self, step: Step) -> StepResult:
        device = self._device
        assert device is not None
        try:
            masks = self._masks.submit(lambda: fill_masks(step, device.vocabulary_size)) if step.mask_rows else None
            began = time.perf_counter()
            device.forward(step.batch)
            middle = time.perf_counter()
            result = device.sample(step.batch, masks.result() if masks else None)
        except Exception as error:
            raise StepError(f"{type(error).__name__}: {error}") from error
        result.forward_ms = 1e3 * (middle - began)
        result.sample_ms = 1e3 * (time.perf_counter() - middle)
        return result

    async def aclose(self, timeout_s: float = 10.0) -> None:
        """Free the device and end the threads, after the call that is running; a call that hangs is left behind."""
        device, self._device = self._device, None
        closing = self._worker.submit(device.close if device is not None else lambda: None)
        del device  # its last reference goes in its own thread
        workers = (self._masks, self._worker)
        for worker in workers:
            worker.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + timeout_s):
            await _finished(closing)
            # A thread that still frees tensors when the interpreter goes away would abort the process.
            for worker in workers:
                await trio.to_thread.run_sync(worker.join, timeout_s)


class _Worker:
    """A daemon thread that runs one call after another: unlike a pool's, it never keeps a process from exiting."""

    def __init__(self, name: str) -> None:
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T], *, hand_over: bool = False) -> Future[T]:
        """With ``hand_over``, the GIL goes to the worker too: else its call would begin when this thread next waits for
        something, which after a step of 64 streams is a millisecond later."""
        future: Future[T] = Future()
        taken = threading.Event()
        self._inbox.put((future, call, taken))
        if hand_over:
            taken.wait(HAND_OVER_S)
        return future

    def close(self) -> None:
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Blocks until the thread has ended, if it does so in time."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while (job := self._inbox.get()) is not None:
            future, call, taken = job
            taken.set()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001, ASYNC103  (a thread: handed to whoever waits)
                future.set_exception(error)
            del job, future, call, taken


async def _finished(future: Future[T]) -> T:
    """Wait for a worker's result without a hop through trio's thread pool: one wake-up of the event loop."""
    token, done = trio.lowlevel.current_trio_token(), trio.Event()

    def wake(_: Future[T]) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # nobody waits any more
            token.run_sync_soon(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()
