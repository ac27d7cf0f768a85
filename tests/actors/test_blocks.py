"""The block pool against a model of it, under any order of calls; and what a failed step leaves in the cache.

The model keeps a plain dictionary of prefixes: whatever the pool says is cached must have been entered with exactly
those tokens after exactly that prefix, and no block is ever lost, handed out twice or evicted before its descendants.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sim_device import EOS, SimDevice, expected, run_on

from offbook.actors.blocks import Block, BlockPool, Namespace
from offbook.actors.schedule import Plan, Scheduler, StepBudget
from offbook.actors.sequence import Sequence
from offbook.actors.steps import assemble, harvest
from offbook.kernels.params import SamplingParams
from offbook.kernels.step import BLOCK_TOKENS

FULL = st.sampled_from([(i,) * BLOCK_TOKENS for i in range(3)])
OPEN = st.builds(lambda t, n: (t,) * n, st.integers(0, 2), st.integers(1, BLOCK_TOKENS - 1))
NAMESPACES = st.sampled_from((None, "", "a"))
Prefix = tuple[Namespace, tuple[tuple[int, ...], ...]]


class PoolMachine(RuleBasedStateMachine):
    """Chains of blocks as sequences hold them: each a path from a root, the last block perhaps an open tail."""

    @initialize(total=st.integers(1, 7), caching=st.booleans())
    def start(self, total: int, caching: bool) -> None:
        self.pool = BlockPool(total, caching=caching)
        self.caching = caching
        self.chains: list[tuple[list[Block], Prefix]] = []
        self.written: dict[int, Prefix] = {}  # block id -> the prefix up to its end that is in it
        self.step = 0

    def _walk(self, namespace: Namespace, contents: list[tuple[int, ...]]) -> list[Block]:
        node, found = self.pool.root(namespace), list[Block]()
        for tokens in contents:
            child = self.pool.child(node, tokens)
            if child is None or len(tokens) < BLOCK_TOKENS:
                break
            found.append(child)
            node = child
        return found

    @rule(namespace=NAMESPACES, full=st.lists(FULL, max_size=4), tail=st.none() | OPEN)
    def begin(self, namespace: Namespace, full: list[tuple[int, ...]], tail: tuple[int, ...] | None) -> None:
        """A sequence: hold what is cached, allocate and enter the rest."""
        contents = [*full, *([tail] if tail else [])]
        blocks = self._walk(namespace, contents)
        for i, block in enumerate(blocks):
            assert self.written[block.id] == (namespace, tuple(contents[: i + 1])), "a hit is the very same prefix"
            self.pool.hold(block)
        for i in range(len(blocks), len(contents)):
            block_or_none = self.pool.allocate()
            if block_or_none is None:
                assert self.pool.available == 0
                break
            assert block_or_none.refs == 1
            assert not block_or_none.cached
            assert all(block_or_none is not b for chain, _ in self.chains for b in chain), "handed out twice"
            blocks.append(block_or_none)
            self.written[block_or_none.id] = (namespace, tuple(contents[: i + 1]))
            parent = blocks[i - 1] if i else self.pool.root(namespace)
            self.pool.enter(parent, contents[i], block_or_none, self.step)
        self.step += 1
        self.chains.append((blocks, (namespace, tuple(contents[: len(blocks)]))))

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        blocks, _ = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.pool.release(reversed(blocks), keep=keep)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def grow_tail(self, data: st.DataObject) -> None:
        """One more token in an open tail that nobody else reads."""
        i = data.draw(st.integers(0, len(self.chains) - 1))
        blocks, (namespace, contents) = self.chains[i]
        if not blocks or len(contents[-1]) == BLOCK_TOKENS or blocks[-1].refs > 1:
            return
        contents = (*contents[:-1], (*contents[-1], contents[-1][0]))
        self.written[blocks[-1].id] = (namespace, contents)
        parent = blocks[-2] if len(blocks) > 1 else self.pool.root(namespace)
        self.pool.enter(parent, contents[-1], blocks[-1], self.step)
        self.chains[i] = (blocks, (namespace, contents))

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A block of a failed step: neither it nor what continues it is found again."""
        blocks, (namespace, contents) = self.chains[data.draw(st.integers(0, len(self.chains) - 1))]
        if not blocks:
            return
        at = data.draw(st.integers(0, len(blocks) - 1))
        block, was_cached = blocks[at], blocks[at].cached
        self.pool.forget(block)
        assert not block.cached
        assert not block.children
        if was_cached:
            assert block not in self._walk(namespace, list(contents))

    @precondition(lambda self: self.caching)
    @rule(namespace=NAMESPACES, tokens=FULL | OPEN)
    def look_for_a_start(self, namespace: Namespace, tokens: tuple[int, ...]) -> None:
        """The longest shared start is really there, and not of a block that this step fills."""
        found = self.pool.longest_start(self.pool.root(namespace), tokens, self.step)
        if found is not None:
            block, n = found
            assert self.written[block.id][0] == namespace
            assert self.written[block.id][1][-1][:n] == tokens[:n]
            assert block.filled_by < self.step

    @invariant()
    def conserved(self) -> None:
        pool = getattr(self, "pool", None)
        if pool is None:
            return
        pool.check()
        held = {b.id for blocks, _ in self.chains for b in blocks}
        assert pool.held == len(held)
        assert pool.held + pool.idle + pool.free == pool.total
        for blocks, _ in self.chains:
            for block in blocks:
                assert block.refs == sum(block in other for other, _ in self.chains)
                if block.parent is not None and block.parent.id >= 0:
                    assert block.parent.cached, "what continues a block is not cached without it"

    def teardown(self) -> None:
        for blocks, _ in getattr(self, "chains", []):
            self.pool.release(reversed(blocks))
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.held == 0
            while self.pool.available:
                assert self.pool.allocate() is not None
            assert self.pool.allocate() is None
            assert not self.pool._roots, "an empty cache keeps no namespace"


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_the_pool_keeps_its_books = PoolMachine.TestCase


# -- eviction --------------------------------------------------------------------------------------------------------


def filled(pool: BlockPool, token: int, *, keep: bool = False, namespace: Namespace = None) -> Block:
    block = pool.allocate()
    assert block is not None
    pool.enter(pool.root(namespace), (token,) * BLOCK_TOKENS, block, 0)
    pool.release([block], keep=keep)
    return block


def test_the_least_recently_used_goes_first_and_kept_ones_last() -> None:
    pool = BlockPool(4)
    kept, first, second = filled(pool, 1, keep=True), filled(pool, 2), filled(pool, 3)
    pool.release([pool.hold(first)])  # used again
    order = [pool.allocate() for _ in range(4)]
    assert order[1:] == [second, first, kept]
    assert pool.evictions == 3


def test_namespaces_and_their_roots() -> None:
    pool = BlockPool(3)
    for namespace in (None, "", "a"):
        filled(pool, 1, namespace=namespace)
    assert len({id(pool.child(pool.root(n), (1,) * BLOCK_TOKENS)) for n in (None, "", "a")}) == 3
    assert pool.child(pool.root("b"), (1,) * BLOCK_TOKENS) is None
    for _ in range(3):
        pool.allocate()
    assert not pool._roots


# -- failed steps ----------------------------------------------------------------------------------------------------


class Fallible:
    """A scheduler whose steps may fail: what the step was to write is then garbage on the device."""

    def __init__(self, blocks: int, *, chunk: int, running: int = 8) -> None:
        self.device = SimDevice(blocks, slots=running)
        self.pool = BlockPool(blocks)
        budget = StepBudget(alone=chunk, busy_ms=10, floor=chunk)
        self.scheduler = Scheduler(self.pool, budget, running_max=running, slots=running)
        self.step_id = 0

    def step(self, *, fails: bool = False) -> Plan | None:
        plan = self.scheduler.plan(self.step_id)
        if plan is None:
            return None
        self.step_id += 1
        step = assemble(plan)
        if fails:
            for work in plan.works:
                self.scheduler.distrust(work, plan.step_id)
            for work in plan.works:
                self.scheduler.finish(work.sequence)
        else:
            for gain in harvest(step, run_on(self.device, step), self.scheduler):
                if gain.finish:
                    self.scheduler.finish(gain.sequence)
        self.pool.check()
        return plan

    def run(self) -> None:
        while self.step():
            assert self.step_id < 5000

    def add(self, prompt: list[int], max_tokens: int = 4) -> Sequence:
        sequence = Sequence(prompt, SamplingParams(temperature=0), max_tokens=max_tokens, eos_ids=frozenset({EOS}))
        self.scheduler.add(sequence)
        return sequence


def answers(sequence: Sequence) -> bool:
    prompt = sequence.tokens[: sequence.n_prompt]
    return sequence.output == expected(prompt, sequence.params, sequence.max_tokens)[0]


@pytest.mark.parametrize("seed", range(150))
def test_failed_steps_never_show_in_others_answers(seed: int) -> None:
    rng = random.Random(seed)
    driver = Fallible(rng.choice((5, 6, 8, 16)), chunk=rng.choice((8, 16, 24, 48)), running=rng.choice((2, 8)))
    stems = [[rng.randrange(1, 64) for _ in range(rng.choice((16, 32, 48, 60)))] for _ in range(2)]
    alive: list[Sequence] = []
    for _ in range(60):
        if rng.random() < 0.3:
            alive.append(driver.add([*rng.choice(stems), *([rng.randrange(1, 64)] * rng.randrange(1, 4))]))
        fails = rng.random() < 0.15
        plan = driver.step(fails=fails)
        if plan is not None and fails:
            alive = [s for s in alive if all(w.sequence is not s for w in plan.works)]
    driver.run()
    for sequence in alive:
        assert answers(sequence), f"seed {seed}"
