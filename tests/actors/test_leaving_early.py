"""Callers who leave, or whose time is up, while a thread still works on their request: they wait for no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from sim_device import LetterTokenizer, loaded_with
from sim_executor import SimExecutor

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import DeadlineExceeded
from offbook.actors.events import Context
from offbook.actors.request import from_fields


class Stuck(LetterTokenizer):
    """Long texts take until ``go``."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        if len(text) > 20:
            self.began.set()
            assert self.go.wait(60)
        return super().encode(text, bos=bos)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.go.set()


async def ask(engine: Engine, *, deadline_s: float | None = None) -> None:
    request = from_fields({"model": "simulated", "prompt": "a" * 40})
    async with engine.complete(request, context=Context(deadline_s=deadline_s)) as answer:
        await answer.choices()


@pytest.mark.parametrize("how", ["leaves", "deadline"])
async def test_nobody_waits_for_a_long_text(mock_clock: trio.testing.MockClock, stuck: Stuck, how: str) -> None:
    executor = SimExecutor()
    config = EngineConfig(thread_tokenize_bytes=20)
    async with open_engine(config, loaded=loaded_with(executor, executor.device)) as engine:
        vars(engine)["tokenizer"] = stuck

        async def caller() -> None:
            if how == "leaves":
                await ask(engine)
            else:
                with pytest.raises(DeadlineExceeded):
                    await ask(engine, deadline_s=3)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            await trio.to_thread.run_sync(stuck.began.wait)
            assert engine.active == 1
            if how == "leaves":
                nursery.cancel_scope.cancel()
            else:
                mock_clock.jump(3)
        assert not stuck.go.is_set()
        assert engine.active == 0
