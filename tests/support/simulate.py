"""One seed, one world: the whole engine on a simulated device, under a seeded scheduler and a virtual clock.

The seed decides the pool's size, the requests (sim_requests.py), who arrives when, who leaves when, and what breaks
(sim_faults.py). Every answer that is read to its end is held against an oracle that knows no blocks and no neighbours.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio
import trio.testing
from sim_device import SimDevice, loaded_with
from sim_executor import SimExecutor
from sim_faults import Faults, check_idle, check_step, outcomes
from sim_oracle import compiled_already
from sim_requests import DEFAULT_MAX_TOKENS, check_answer, check_start, fits, random_completion
from sim_seeded import CancelAt, seeded_run

from offbook.actors import admission
from offbook.actors.answer import Answer
from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import CompletionError, EngineUnavailable, InvalidRequest, StepFailed
from offbook.actors.events import Context, Delta
from offbook.actors.request import CompletionRequest, from_fields

IDLE_WITHIN_S = 5.0  # virtual time after which nothing of a caller who left may be left: the longest step and some


@dataclass
class World:
    """What a scenario did, for its checks."""

    rng: random.Random
    trace: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    ended: bool = False  # it came to its end by itself
    preemptions: int = 0
    evictions: int = 0

    def note(self, *words: object) -> None:
        self.trace.append(f"{trio.current_time():.6f} {' '.join(map(str, words))}")

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


Scenario = Callable[[World, list[trio.CancelScope], list[admission._Desk]], Awaitable[None]]


def simulate(seed: int, *, cancel_at: int | None = None, victim: int | None = None, clients_max: int = 12) -> World:
    """Run the seed's scenario to its end. Raises AssertionError where an invariant breaks.

    ``cancel_at``: at this step of any task, cancel client number ``victim``, or everything if that is None.
    """
    world = World(random.Random(seed))
    run_world(world, seed, _scenario, cancel_at, victim, clients_max)
    if victim is not None or world.ended:
        assert sum(world.endings.values()) == world.asked, "each request ends exactly once"
    return world


def run_world(
    world: World, seed: int, scenario: Scenario, cancel_at: int | None, victim: int | None, clients_max: int
) -> None:
    """The scenario under the seed's scheduler, with a cancellation at that step if one is wanted."""
    scopes = [trio.CancelScope() for _ in range(clients_max + 1)]  # the last one is around everything
    chosen = scopes[clients_max if victim is None else victim]
    cancel = None if cancel_at is None else CancelAt(cancel_at, chosen)
    with recorded_desk() as desks:

        async def main() -> None:
            with scopes[clients_max]:
                await scenario(world, scopes[:clients_max], desks)

        seeded_run(seed, main, cancel)
    world.ended = cancel is None or not cancel.reached


def cancelled_at_every_step(simulation: Callable[..., World], seed: int, victim: int | None) -> None:
    """The world once for each step of any task, until it ends before the cancellation comes."""
    for at in range(1, 20_000):
        with failing_as(f"seed {seed}, client {victim} cancelled at step {at}"):
            world = simulation(seed, cancel_at=at, victim=victim, clients_max=3)
        if world.ended:
            assert at > 50
            return
    raise AssertionError(f"seed {seed} never came to its end")


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Whatever fails inside is told under this name; a person's Ctrl-C is no failure of a world, in a group either."""
    try:
        yield
    except (Exception, BaseExceptionGroup) as error:
        if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise AssertionError(what) from error


@contextmanager
def recorded_desk() -> Iterator[list[admission._Desk]]:
    """The books of every engine that is opened meanwhile."""
    desks: list[admission._Desk] = []
    original = admission._Desk

    class Recorded(original):  # type: ignore[misc,valid-type]
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            desks.append(self)

    vars(admission)["_Desk"] = Recorded
    try:
        yield desks
    finally:
        vars(admission)["_Desk"] = original


async def _scenario(world: World, scopes: list[trio.CancelScope], desks: list[admission._Desk]) -> None:
    rng = world.rng
    device = SimDevice(rng.choice((5, 6, 8, 12, 40)), slots=rng.choice((2, 4, 16, 16)))
    executor = SimExecutor(device)
    config = EngineConfig(
        running_max=rng.choice((1, 3, 16, 16)), step_tokens_max=rng.choice((5, 16, 100)),
        step_busy_ms=rng.choice((5.0, 80.0)), queue_max=rng.choice((1, 4, 100, 100)), choices_max=9,
        queue_tokens_max=rng.choice((20, *[4_000_000] * 4)), applies_max=rng.choice((2, *[4096] * 5)),
        prefix_cache=rng.random() < 0.8, prompt_lookup=rng.random() < 0.3,
        client_share_max=rng.choice((None, None, None, 1)), grammar_compile_s=math.inf,
        priority_ageing_s=rng.choice((0.1, 30.0)), default_max_tokens=DEFAULT_MAX_TOKENS,
        draft_tokens_max=rng.choice((1, 3, 64, 64)),
    )  # fmt: skip
    faults = Faults(random.Random(rng.random()), executor)
    world.faults = faults.counts
    try:
        async with open_engine(config, loaded=loaded_with(executor, device)) as engine:
            await trio.lowlevel.checkpoint()  # the actors have begun
            compiled_already(engine._constraints)
            faults.install(engine, lambda step: check_step(engine, desks[0], step))
            await _clients(world, engine, faults, scopes)
            await settled(world, engine, desks[0])
            told = outcomes(engine)
            assert told.total() + world.endings["EngineUnavailable"] == world.asked, (told, world.endings)
            world.note("end", sorted(world.endings.items()), sorted(told.items()))
            faults.stop()
            await _canary(engine)
    except BaseExceptionGroup as group:
        _, others = group.split(trio.Cancelled)
        wanted = OSError, ValueError, trio.ClosedResourceError, trio.BrokenResourceError
        if faults.fatal is None or others is None or others.split(wanted)[1] is not None:
            raise
        world.note("died", faults.fatal)


async def _clients(world: World, engine: Engine, faults: Faults, scopes: list[trio.CancelScope]) -> None:
    rng = world.rng
    patient = rng.random() < 0.7  # else all come at once
    async with trio.open_nursery() as nursery:
        for i in range(rng.randrange(1, len(scopes))):
            request = random_completion(rng, engine.card.context_length)
            client = _Client(world, engine, faults, i, request, rng.random(), rng.randrange(8))
            nursery.start_soon(client.run, scopes[i])
            if patient and rng.random() < 0.6:
                await trio.sleep(rng.choice((0, 0.003, 0.05)))


async def settled(world: World, engine: Engine, desk: admission._Desk) -> None:
    """Everything of everybody is gone soon, and the books are even."""
    with trio.fail_after(IDLE_WITHIN_S):
        while _busy(engine):  # noqa: ASYNC110  # blocks are freed by the next step: nothing tells
            await trio.sleep(0.005)
        await trio.testing.wait_all_tasks_blocked()
    check_idle(engine, desk)
    pool = engine._scheduler.pool
    world.preemptions, world.evictions = engine._scheduler.preemptions, pool.evictions


def _busy(engine: Engine) -> bool:
    now = engine.snapshot()
    return bool(now["blocks_held"] or now["running"] or now["waiting"])


async def _canary(engine: Engine) -> None:
    """After all that, a small request is answered as ever."""
    if engine.state == "ready":
        request = from_fields({"model": "simulated", "prompt": "canary", "max_tokens": 5, "seed": 1, "stream": True})
        async with engine.complete(request) as answer:
            check_answer(request, [delta async for delta in answer], answer.usage, engine.card.context_length)


@dataclass
class _Client:
    """Asks, and reads to the end, or slowly, or never, or leaves: before the first event, between events, after the
    last, or by a deadline."""

    world: World
    engine: Engine
    faults: Faults
    name: int
    request: CompletionRequest
    temper: float
    patience: int

    async def run(self, scope: trio.CancelScope) -> None:
        world, temper = self.world, self.temper
        world.asked += 1
        id = "same" if temper < 0.1 else f"r{self.name}"
        context = Context(
            request_id=id, deadline_s=0.05 if 0.8 < temper < 0.85 else None, session="s" if temper < 0.2 else None,
            isolation_key="p" if self.patience == 0 else None,
        )  # fmt: skip
        ending = "gone"
        deltas: list[Delta] = []
        try:
            with scope:
                if temper > 0.9:
                    scope.deadline = min(scope.deadline, trio.current_time() + 0.01 * self.patience)
                try:
                    async with self.engine.complete(self.request, context=context) as answer:
                        ending = "left"
                        ending = await self._read(answer, deltas)
                except CompletionError as error:
                    ending = "stopped" if "the server stops" in str(error) else type(error).__name__
                    if isinstance(error, StepFailed):
                        assert id in self.faults.blamed or self.faults.fatal, "nobody else feels a fault"
                    if isinstance(error, InvalidRequest):
                        assert not fits(self.request, self.engine.card.context_length)
                    if isinstance(error, EngineUnavailable):
                        assert (
                            self.faults.fatal or self.engine.state == "draining" or self.engine.config.applies_max < 12
                        )
        finally:
            if ending != "done":
                check_start(self.request, deltas, self.engine.card.context_length)
            world.endings[ending] += 1
            world.note(self.name, ending)

    async def _read(self, answer: Answer, deltas: list[Delta]) -> str:
        if 0.7 < self.temper < 0.75:
            return "left at once"
        if 0.6 < self.temper < 0.7:
            await trio.sleep(0.05 * self.patience)  # reads late, or never
            if self.patience > 5:
                return "never read"
        async for delta in answer:
            deltas.append(delta)
            self.world.note(self.name, delta.index, delta.text, delta.finish_reason)
            if 0.3 < self.temper < 0.5 and len(deltas) > self.patience:
                return "left"
            if 0.5 < self.temper < 0.6:
                await trio.sleep(0.1)
        check_answer(self.request, deltas, answer.usage, self.engine.card.context_length)
        return "done"
