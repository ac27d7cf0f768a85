"""One seed, one world: the whole engine on a simulated device, under a seeded scheduler and a virtual clock.

The seed decides the pool's size, the requests, who arrives when, who leaves when, and what breaks. Every answer is held
against ``sim_device.expected``, which knows no blocks and no neighbours. trio's scheduler is seeded through a private
switch, isolated here and asserted at import.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import trio
import trio.testing
from sim_device import EOS, VOCABULARY, LetterTokenizer, SimDevice, expected, loaded_with, logprob_of
from sim_executor import SimExecutor
from trio._core import _run as trio_run

from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.errors import CompletionError, StepFailed
from offbook.actors.events import Context, Delta
from offbook.actors.execution import StepError
from offbook.actors.request import CompletionRequest, from_fields
from offbook.actors.steps import Step
from offbook.kernels.params import SamplingParams

assert hasattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING"), "trio changed its private switch"
assert hasattr(trio_run, "_r"), "trio changed its private random source"

LETTERS = LetterTokenizer()


@dataclass
class World:
    """What a scenario did, for its checks."""

    rng: random.Random
    trace: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    asked: int = 0

    def note(self, *words: object) -> None:
        self.trace.append(f"{trio.current_time():.6f} {' '.join(map(str, words))}")

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def simulate(seed: int, *, cancel_at_step: int | None = None) -> World:
    """Run the seed's scenario to its end. Raises AssertionError where an invariant breaks. ``cancel_at_step``: cancel
    everything at the n-th task step instead of letting it end."""
    vars(trio_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
    trio_run._r.seed(seed)
    world = World(random.Random(seed))
    try:
        trio.run(
            _scenario,
            world,
            cancel_at_step,
            clock=trio.testing.MockClock(autojump_threshold=0),
            restrict_keyboard_interrupt_to_checkpoints=True,
        )
    finally:
        vars(trio_run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = False
    return world


class CancelAt(trio.abc.Instrument):
    """Cancels a scope at the n-th step of any task."""

    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self.left = step
        self.scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()


async def _scenario(world: World, cancel_at_step: int | None) -> None:
    rng = world.rng
    blocks = rng.choice((6, 12, 40, 200))
    device = SimDevice(blocks, slots=rng.choice((2, 4, 16)))
    executor = SimExecutor(device, step_s=rng.choice((0.001, 0.02)))
    config = EngineConfig(
        running_max=rng.choice((1, 3, 16)), step_tokens_max=rng.choice((5, 16, 100)),
        step_busy_ms=rng.choice((5.0, 80.0)), queue_max=rng.choice((1, 4, 100)),
        prefix_cache=rng.random() < 0.8, prompt_lookup=rng.random() < 0.2,
        client_share_max=rng.choice((None, None, 2)), grammar_compile_s=math.inf,
        priority_ageing_s=rng.choice((0.1, 30.0)), default_max_tokens=30,
    )  # fmt: skip
    executor.before = _faults(world, executor)
    with trio.CancelScope() as scope:
        if cancel_at_step is not None:
            trio.lowlevel.add_instrument(CancelAt(cancel_at_step, scope))
        async with open_engine(config, loaded=loaded_with(executor, device)) as engine:
            _check_every_step(executor, engine)
            async with trio.open_nursery() as nursery:
                for i in range(rng.randrange(1, 12)):
                    nursery.start_soon(_client, world, engine, i, _request(rng, engine), rng.random(), rng.randrange(8))
                    if rng.random() < 0.6:
                        await trio.sleep(rng.choice((0, 0.003, 0.05)))
            for _ in range(100_000):
                if not engine.snapshot()["blocks_held"]:
                    break
                await trio.sleep(0.005)
            _check_idle(engine)
            world.note("end", sorted(world.endings.items()))
    pool = engine._scheduler.pool
    pool.check()
    if cancel_at_step is None:
        assert sum(world.endings.values()) == world.asked, "each request ends exactly once"
        assert pool.held == 0


def _faults(world: World, executor: SimExecutor) -> Callable[[Step], None]:
    rng = random.Random(world.rng.random())
    rate = rng.choice((0, 0, 0.02, 0.2))

    def before(step: Step) -> None:
        executor.step_s = rng.choice((0.001, 0.001, 0.02, 0.5 if rate else 0.001))
        if rng.random() < rate:
            world.faults["step"] += 1
            raise StepError("planted")

    return before


def _check_every_step(executor: SimExecutor, engine: Engine) -> None:
    scheduler, run = engine._scheduler, executor.run

    async def checked(step: Step) -> object:
        scheduler.pool.check()
        held = {b.id for s in scheduler.running for b in s.blocks}
        assert len(held) == scheduler.pool.held, "every held block is some running sequence's"
        assert all(not s.blocks for s in scheduler.waiting)
        assert len(scheduler.running) <= scheduler.running_max
        return await run(step)

    executor.run = checked  # type: ignore[method-assign,assignment]


def _check_idle(engine: Engine) -> None:
    scheduler = engine._scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert engine.active == 0
    assert len(scheduler._free_slots) == len(set(scheduler._free_slots))


def _request(rng: random.Random, engine: Engine) -> CompletionRequest:
    context = engine.card.context_length
    stem = "".join(chr(97 + (i * 7) % 26) for i in range(rng.choice((3, 20, 50))))[: context // 2]
    prompt: object = stem + "".join(rng.choice("xyz") for _ in range(rng.randrange(6)))
    if rng.random() < 0.2:
        prompt = [stem + "a", stem + "b"]
    body: dict[str, object] = {
        "model": "simulated", "prompt": prompt, "stream": rng.random() < 0.7, "seed": rng.randrange(3),
        "max_tokens": rng.choice((0, 1, 5, 30)), "n": rng.choice((1, 1, 1, 3)), "ignore_eos": rng.random() < 0.5,
        "temperature": rng.choice((0, 1.0)), "service_tier": rng.choice(("default", "priority")),
    }  # fmt: skip
    options: list[dict[str, object]] = [
        {"echo": True, "logprobs": 2}, {"frequency_penalty": 0.5}, {"logprobs": True}, {"user": "u"},
        {"prompt_cache_isolation_key": rng.choice("pq")}, {"speculation": "abcxyz"}, {"prompt_cache_key": "k"},
        {"stream_options": {"buffer_tokens": 3}}, {"stream_options": {"buffer_ms": 7}}, {"prompt_cache_max_len": 5},
    ]  # fmt: skip
    for option in rng.sample(options, rng.randrange(4)):
        body |= option
    return from_fields(body)


async def _client(
    world: World, engine: Engine, name: int, request: CompletionRequest, temper: float, patience: int
) -> None:
    """Ask, and read to the end, or slowly, or leave: before the first event, between events, or by a deadline."""
    world.asked += 1
    context = Context(request_id="same" if temper < 0.1 else None, deadline_s=0.05 if 0.8 < temper < 0.9 else None)
    ending, deltas = "gone", list[Delta]()
    with trio.CancelScope() as scope:
        if temper > 0.9:
            scope.deadline = trio.current_time() + 0.01 * patience
        try:
            async with engine.complete(request, context=context) as answer:
                ending = "left"
                async for delta in answer:
                    deltas.append(delta)
                    world.note(name, delta.index, delta.text, delta.finish_reason)
                    if 0.3 < temper < 0.5 and len(deltas) > patience:
                        break
                    if 0.5 < temper < 0.6:
                        await trio.sleep(0.1)
                else:
                    ending = "done"
                    check_answer(request, deltas)
                    assert answer.usage.completion_tokens == sum(len(d.token_ids) for d in deltas)
        except CompletionError as error:
            ending = type(error).__name__
            assert not isinstance(error, StepFailed) or world.faults, "nothing fails unless something broke"
    world.endings[ending] += 1
    world.note(name, ending)


def check_answer(request: CompletionRequest, deltas: list[Delta]) -> None:
    """Every choice equals its lone cold run; text, ids, scores and finish reasons."""
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    n = request.n or 1
    for index in range(len(prompts) * n):
        mine = [d for d in deltas if d.index == index]
        ids = LETTERS.encode(str(prompts[index // n]))
        params = SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature, seed=request.seed or 0,
            choice=index % n, frequency_penalty=request.frequency_penalty or 0.0,
        )  # fmt: skip
        eos = frozenset() if request.ignore_eos else frozenset({EOS})
        tokens, reason = expected(ids, params, request.max_tokens or 0, eos)
        assert [t for d in mine for t in d.token_ids] == tokens
        assert [d.finish_reason for d in mine if d.finish_reason] == [reason]
        text = b"".join(LETTERS.token_bytes(t) for t in tokens if not LETTERS.is_special(t)).decode()
        echoed = str(prompts[index // n]) if request.echo else ""
        assert "".join(d.text for d in mine) == echoed + text
        rows = [r for d in mine for r in d.rows]
        if request.logprobs:
            whole = [*ids, *tokens]
            shown = whole if request.echo else tokens
            assert [r.token_id for r in rows] == shown
            start = len(whole) - len(shown)
            for q, row in enumerate(rows, start):
                assert row.logprob == (logprob_of(whole[:q], whole[q]) if q else 0.0)
        assert all(t < VOCABULARY for t in tokens)
