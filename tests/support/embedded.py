"""An engine in a thread of its own, for tests that are not async: the embedded API beside a server.

Rules of this file: the thread runs one Trio loop for as long as the block lasts; whatever it raises, the block raises.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import trio

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import CompletionError
from offbook.actors.events import Delta
from offbook.server import translate


class Embedded:
    """``complete`` asks the engine and waits."""

    engine: Engine

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ready = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        async with open_engine(self._config) as self.engine:
            self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Self:
        self._ended = self._thread.submit(self._run)
        self._ready.wait(60)
        if self._ended.done():
            self._ended.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended.done():
            self._token.run_sync_soon(self._stop.set)
        self._ended.result(60)
        self._thread.shutdown()

    def complete(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[Delta]]:
        """The wire form of the answer, and its choices as the embedded API gives them. Raises CompletionError."""

        async def ask() -> tuple[dict[str, Any], list[Delta]]:
            async with self.engine.complete(**body) as answer:
                deltas = await answer.choices()
                encoded = translate.encode(translate.completion(answer, self.engine.surfaces.piece, deltas))
                return json.loads(encoded), deltas

        return trio.from_thread.run(ask, trio_token=self._token)

    def refusal(self, body: dict[str, Any]) -> CompletionError | None:
        """What the engine says against a request, None when it takes it."""

        async def ask() -> CompletionError | None:
            try:
                async with self.engine.complete(**body):
                    return None
            except CompletionError as error:
                return error

        return trio.from_thread.run(ask, trio_token=self._token)
