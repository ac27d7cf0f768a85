"""The scheduler, driven step by step on the simulated device: whatever it shares, evicts, preempts or cuts into chunks,
each sequence's answer equals its lone cold run, and no block is ever lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_device import EOS, SimDevice, expected, logprob_of, run_on

from offbook.actors.blocks import BlockPool, blocks_for
from offbook.actors.schedule import Scheduler, StepBudget
from offbook.actors.sequence import TRANSITIONS, Sequence, State
from offbook.actors.steps import assemble, harvest
from offbook.kernels.params import SamplingParams


class Driver:
    """A scheduler and a simulated device in lockstep."""

    def __init__(self, blocks: int = 64, *, chunk: int = 64, running: int = 16, caching: bool = True) -> None:
        self.device = SimDevice(blocks, slots=running)
        self.pool = BlockPool(blocks, caching=caching)
        budget = StepBudget(alone=chunk, busy_ms=10, floor=min(chunk, 8))
        self.scheduler = Scheduler(self.pool, budget, running_max=running, slots=running)
        self.reasons: dict[int, str] = {}
        self.step_id = 0

    def step(self) -> bool:
        plan = self.scheduler.plan(self.step_id)
        self.pool.check()
        if plan is None:
            return False
        self.step_id += 1
        step = assemble(plan)
        for gain in harvest(step, run_on(self.device, step), self.scheduler):
            assert not gain.error
            if gain.finish:
                self.reasons[id(gain.sequence)] = gain.finish
                self.scheduler.finish(gain.sequence)
        self.pool.check()
        return True

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            pytest.fail("it does not come to an end")
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.pool.held == 0


def make(prompt: list[int], max_tokens: int = 8, **kw: object) -> Sequence:
    params = kw.pop("params", SamplingParams(temperature=0))
    assert isinstance(params, SamplingParams)
    return Sequence(prompt, params, max_tokens=max_tokens, eos_ids=frozenset({EOS}), **kw)  # type: ignore[arg-type]


def assert_lone(driver: Driver, sequence: Sequence) -> None:
    tokens, reason = expected(sequence.tokens[: sequence.n_prompt], sequence.params, sequence.max_tokens)
    assert sequence.output == tokens
    assert driver.reasons[id(sequence)] == reason
    if sequence.score_from is not None:
        prompt = sequence.tokens[: sequence.n_prompt]
        for q in range(max(sequence.score_from, 1), sequence.n_prompt):
            assert sequence.scores[q][0] == logprob_of(prompt[:q], prompt[q])


def test_every_pair_of_state_and_event_is_decided() -> None:
    for state in State:
        for event in ("start", "preempt", "finish"):
            sequence = make([1])
            sequence.state = state
            if (state, event) in TRANSITIONS:
                sequence.move(event)
                assert sequence.state is TRANSITIONS[state, event]
            else:
                with pytest.raises(KeyError):
                    sequence.move(event)


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 64])
def test_chunks_do_not_show(chunk: int) -> None:
    driver = Driver(chunk=chunk)
    sequence = make(list(range(1, 60)))
    driver.scheduler.add(sequence)
    driver.run()
    assert_lone(driver, sequence)


def test_prompts_that_arrive_together_share_one_prefill() -> None:
    driver = Driver(blocks=200, chunk=600)
    stem = [random.Random(1).randrange(1, 64) for _ in range(480)]
    sequences = [make([*stem, i, 7, i]) for i in range(1, 9)]
    for sequence in sequences:
        driver.scheduler.add(sequence)
    driver.run()
    for sequence in sequences:
        assert_lone(driver, sequence)
    prompt_rows = sum(s.n_prompt for s in sequences)
    assert driver.device.rows_run < prompt_rows / 4
    assert [s.cached_tokens for s in sequences] == [0, *[480] * 7]


def test_a_conversation_hits_its_own_answer() -> None:
    driver = Driver(chunk=64)
    first = make(list(range(1, 41)), 30, params=SamplingParams(seed=3))
    driver.scheduler.add(first)
    driver.run()
    second = make([*first.tokens, 5, 6], 4)
    driver.scheduler.add(second)
    driver.run()
    assert_lone(driver, second)
    assert second.cached_tokens == len(first.tokens) - 1  # all but the token that was never fed back


def test_scoring_many_endings_pays_the_stem_once() -> None:
    driver = Driver(blocks=128, chunk=64)
    stem = [random.Random(2).randrange(1, 64) for _ in range(333)]
    sequences = [make([*stem, i % 63 + 1, i // 3 + 1], 0, score_from=0) for i in range(40)]
    for sequence in sequences:
        driver.scheduler.add(sequence)
    driver.run()
    for sequence in sequences:
        prompt = sequence.tokens
        assert [sequence.scores[q][0] for q in range(1, len(prompt))] == [
            logprob_of(prompt[:q], prompt[q]) for q in range(1, len(prompt))
        ]
    assert driver.device.rows_run < 333 + 40 * 20


def test_scores_join_a_stem_that_was_cached_without_them() -> None:
    driver = Driver(chunk=64)
    stem = list(range(1, 50))
    for sequence in (make(stem, 1), make(stem, 0, score_from=0), again := make(stem, 0, score_from=0)):
        driver.scheduler.add(sequence)
        driver.run()
    assert again.cached_tokens is not None
    assert again.cached_tokens >= 32


def test_namespaces_never_meet() -> None:
    driver = Driver()
    prompt = list(range(1, 50))
    for namespace in (None, "", "a", "b", "None"):
        sequence = make(prompt, namespace=namespace)
        driver.scheduler.add(sequence)
        driver.run()
        assert sequence.cached_tokens == 0
    again = make(prompt, namespace="a")
    driver.scheduler.add(again)
    driver.run()
    assert again.cached_tokens == 48


def test_cache_limit_caps_reuse() -> None:
    driver = Driver()
    prompt = list(range(1, 50))
    for limit, hit in ((None, 0), (None, 48), (20, 20), (0, 0), (1000, 48)):
        sequence = make(prompt, cache_limit=limit)
        driver.scheduler.add(sequence)
        driver.run()
        assert sequence.cached_tokens == hit
        assert_lone(driver, sequence)


def test_the_largest_request_that_fits_the_pool_runs() -> None:
    driver = Driver(blocks=4, chunk=16)
    prompt = list(range(1, 41))
    for _ in range(2):  # cold, then on its own cached blocks, with no block to spare for a copy
        sequence = make(prompt, 24)
        driver.scheduler.add(sequence)
        driver.run()
        assert_lone(driver, sequence)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_random_crowds_equal_lone_runs(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.choice([12, 20, 64])
    driver = Driver(
        blocks, chunk=rng.choice([1, 7, 16, 40, 200]), running=rng.choice([1, 2, 5, 16]), caching=rng.random() < 0.8
    )
    stems = [[rng.randrange(1, 64) for _ in range(rng.randrange(1, 90))] for _ in range(3)]
    todo, cancelled = [], []
    for _ in range(rng.randrange(1, 14)):
        prompt = [*rng.choice(stems), *(rng.randrange(1, 64) for _ in range(rng.randrange(0, 20)))]
        room = blocks * 16 - len(prompt)
        params = SamplingParams(
            temperature=rng.choice([0, 1.0]), seed=rng.randrange(5), choice=rng.randrange(3),
            frequency_penalty=rng.choice([0.0, 0.5]), top_logprobs=rng.choice([0, 2]),
        )  # fmt: skip
        todo.append(
            make(prompt, min(rng.randrange(0, 40), room), params=params, namespace=rng.choice([None, "x"]),
                 score_from=rng.choice([None, None, 0, len(prompt) // 2]), keep=rng.random() < 0.3)
        )  # fmt: skip
    pending = list(todo)
    while pending or driver.scheduler.running or driver.scheduler.waiting:
        while pending and rng.random() < 0.4:
            driver.scheduler.add(pending.pop())
        live = [*driver.scheduler.running, *driver.scheduler.waiting]
        if live and rng.random() < 0.03:
            cancelled.append(rng.choice(live))
            driver.scheduler.finish(cancelled[-1])
        driver.step()
        assert driver.step_id < 6000, f"stuck (seed {seed})"
    assert driver.pool.held == 0
    for sequence in todo:
        if sequence not in cancelled:
            if sequence.max_tokens:
                assert_lone(driver, sequence)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


def test_a_block_of_this_very_step_is_not_copied_from() -> None:
    """Scoring the first token after a block that another sequence fills in the same step: the row before it is needed,
    so the block would have to be copied, and it is still empty."""
    driver = Driver(chunk=64)
    prompt = list(range(1, 33))
    first, second = make(prompt, 4), make(prompt, 4, score_from=16)
    driver.scheduler.add(first)
    driver.scheduler.add(second)
    driver.run()
    assert_lone(driver, first)
    assert_lone(driver, second)
