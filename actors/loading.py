"""A model file onto a device: what has to happen before the actors can start.

Rules of this file: everything slow happens in threads, so that the caller's event loop goes on (a door can say
"starting"); whatever fails is one exception that says what to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from ..kernels.default_model import fetch_default_model
from ..kernels.devices import DeviceError, open_device
from ..kernels.model_files import ModelFiles, open_model
from ..kernels.step import BLOCK_TOKENS, Device, StepLimits
from .config import EngineConfig
from .events import ModelCard
from .execution import Executor, ThreadExecutor
from .resolve import KEPT_IDS_MAX, Limits
from .tokens import Tokenizer

Progress = Callable[[str, int, int], None]  # what is going on, how much is done, how much there is


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a device: what the actors need to know of both."""

    card: ModelCard
    tokenizer: Tokenizer
    limits: Limits
    executor: Executor
    blocks_total: int
    slots_total: int


@asynccontextmanager
async def load_model(config: EngineConfig, progress: Progress | None) -> AsyncIterator[Loaded]:
    began = time.perf_counter()
    report = progress or (lambda what, done, total: None)
    path = Path(config.model) if config.model else await _default_model(report)
    files = await trio.to_thread.run_sync(open_model, path)
    executor = ThreadExecutor(lambda: _open_device(config, files, report))
    try:
        device = await executor.open()
        tokenizer = await trio.to_thread.run_sync(Tokenizer, files.tokenizer_json, files.spec)
        yield _loaded(config, files, device, tokenizer, executor, time.perf_counter() - began)
    finally:
        await executor.aclose()


async def _default_model(report: Progress) -> Path:
    """The default model's file. A cancellation ends the download at its next sign of life."""

    def alive(what: str, done: int, total: int) -> None:
        trio.from_thread.check_cancelled()
        report(what, done, total)

    return await trio.to_thread.run_sync(fetch_default_model, alive)


def _open_device(config: EngineConfig, files: ModelFiles, report: Progress) -> Device:
    threads = config.threads or len(os.sched_getaffinity(0))
    try:
        return open_device(
            files, kind=config.device, dtype=config.dtype, kv_bytes=config.kv_bytes, threads=threads,
            slots=config.running_max, limits=_limits(config),
            progress=lambda done, total: report("loading weights", done, total),
        )  # fmt: skip
    except OSError as error:  # the cache directory cannot be made, filled or run from
        reason = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
        hint = "compiled kernels are kept in $OFFBOOK_CACHE_DIR, by default ~/.cache/offbook"
        raise DeviceError(f"the device cannot be made ready: {reason}; {hint}") from error


def _limits(config: EngineConfig) -> StepLimits:
    drafted = 1 + config.draft_tokens_max  # rows of a sequence that decodes
    return StepLimits(config.step_tokens_max + config.running_max * drafted, drafted, config.logprobs_max, KEPT_IDS_MAX)


def _loaded(
    config: EngineConfig, files: ModelFiles, device: Device, tokenizer: Tokenizer, executor: Executor, load_s: float
) -> Loaded:
    kv_tokens = device.blocks_total * BLOCK_TOKENS
    context = min(device.context_length, config.context_length or device.context_length, kv_tokens)
    name = config.model_id or files.spec.name
    card = ModelCard(
        id=name, aliases=config.model_aliases, context_length=context, vocabulary_size=tokenizer.vocabulary_size,
        created=int(time.time()), device=device.name, weight_bytes=device.weight_bytes, kv_bytes=device.kv_bytes,
        kv_tokens=kv_tokens, load_s=load_s,
    )  # fmt: skip
    limits = Limits(context, tokenizer.vocabulary_size, files.spec.generation_defaults)
    return Loaded(card=card, tokenizer=tokenizer, limits=limits, executor=executor, blocks_total=device.blocks_total,
                  slots_total=device.slots_total)  # fmt: skip
