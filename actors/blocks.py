"""The KV block pool and its prefix cache: who may read which block, and which one goes first.

Rules of this file: pure and synchronous; one owner (batching). A cached block is found by the exact tokens of its
whole prefix inside its namespace (dictionaries of token tuples, no hashes that could collide). A block is *held* while
a sequence refers to it, *idle* while only the cache does, *free* otherwise; held + idle + free is constant.
A block is entered into the cache when the step that fills it is planned: in a step every KV write of a layer comes
before any read, so a sequence planned into the same step may already read it. Copies happen before a step, so a block
filled by the same step cannot be copied from (``filled_by``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..kernels.step import BLOCK_TOKENS

Namespace = str | None  # a prompt_cache_isolation_key; None = the common namespace, which no key can name
Score = tuple[float, tuple[tuple[int, float], ...]]  # logprob of a prompt token, and the best alternatives


@dataclass(eq=False, slots=True)
class Block:
    """One KV block. ``tokens``: what it is cached as (up to 16 ids; fewer = an open tail, never a parent)."""

    id: int
    refs: int = 0
    parent: Block | None = None
    tokens: tuple[int, ...] = ()
    children: dict[tuple[int, ...], Block] = field(default_factory=dict)
    filled_by: int = -1  # the step that completes what it is cached as
    scores: dict[int, Score] = field(default_factory=dict)  # offset in the block -> that prompt token's score
    kept: bool = False  # asked to stay longer: idle blocks of this kind go last
    namespace: Namespace = None  # of a root (id -1)

    @property
    def cached(self) -> bool:
        return self.parent is not None


class BlockPool:
    """All KV blocks of a device."""

    def __init__(self, total: int, *, caching: bool = True) -> None:
        self.total = total
        self._caching = caching
        self._free = [Block(i) for i in range(total - 1, -1, -1)]
        self._idle: tuple[OrderedDict[int, Block], OrderedDict[int, Block]] = (OrderedDict(), OrderedDict())
        self._roots: dict[Namespace, Block] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that can be had now: free and idle."""
        return len(self._free) + self.idle

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        return len(self._idle[0]) + len(self._idle[1])

    @property
    def held(self) -> int:
        return self.total - self.available

    def root(self, namespace: Namespace) -> Block:
        """The parent of first blocks in a namespace; remembered only while something hangs below it."""
        return self._roots.get(namespace) or Block(-1, namespace=namespace)

    def child(self, parent: Block, tokens: tuple[int, ...]) -> Block | None:
        """The cached full block that continues ``parent`` with exactly these tokens."""
        return parent.children.get(tokens)

    def longest_start(self, parent: Block, tokens: Sequence[int], step_id: int) -> tuple[Block, int] | None:
        """The cached continuation of ``parent`` that shares the longest start with ``tokens``, and how many tokens;
        only blocks that an earlier step has filled (they are going to be copied)."""
        best: tuple[Block, int] | None = None
        for key, block in parent.children.items():
            if key[0] != tokens[0] or block.filled_by >= step_id:
                continue
            n = _common(key, tokens)
            if best is None or n > best[1]:
                best = (block, n)
        return best

    def hold(self, block: Block) -> Block:
        """One more reader; an idle block becomes held."""
        if block.refs == 0 and block.cached:
            del self._idle[block.kept][block.id]
        block.refs += 1
        return block

    def allocate(self) -> Block | None:
        """A block to write, held once by the caller; the least recently used idle one goes if none is free."""
        if not self._free and not self._evict():
            return None
        block = self._free.pop()
        block.refs = 1
        return block

    def enter(self, parent: Block, tokens: tuple[int, ...], block: Block, step_id: int) -> None:
        """Cache ``block``, whose ``tokens`` step ``step_id`` completes, after ``parent`` (again, when an open tail has
        grown). If the same content is cached already, the one that others continue stays, else the newer one: this
        chain goes on, and a private block's continuation could not be found."""
        if parent.id < 0:
            parent = self._roots.get(parent.namespace, parent)
        elif len(parent.tokens) < BLOCK_TOKENS:
            return  # a private twin of a cached block: what follows it stays private too
        if not self._caching:
            return
        twin = parent.children.get(tokens)
        if twin is not None:
            if twin is block or twin.children:
                return
            block.scores, block.kept = {**twin.scores, **block.scores}, twin.kept
            self.forget(twin)
        if parent.id < 0:
            self._roots[parent.namespace] = parent
        if block.parent is not None:
            del block.parent.children[block.tokens]
        block.parent, block.tokens, block.filled_by = parent, tokens, step_id
        parent.children[tokens] = block

    def release(self, blocks: Iterable[Block], *, keep: bool = False) -> None:
        """One reader less for each, last block of the chain first, so that tails are evicted before their parents."""
        for block in blocks:
            block.refs -= 1
            if block.refs:
                block.kept |= keep
            elif block.cached:
                block.kept |= keep
                self._idle[block.kept][block.id] = block
            else:
                self._recycle(block)

    def forget(self, block: Block) -> None:
        """Take a block whose content is not to be trusted, and all that continues it, out of the cache."""
        for child in list(block.children.values()):
            self.forget(child)
        if block.cached:
            if block.refs == 0:
                del self._idle[block.kept][block.id]
                self._recycle(block)
            else:
                self._unlink(block)

    def _evict(self) -> bool:
        for lane in self._idle:
            if lane:
                _, block = lane.popitem(last=False)
                assert not block.children, "a parent is never older than what continues it"
                self.evictions += 1
                self._recycle(block)
                return True
        return False

    def _recycle(self, block: Block) -> None:
        self._unlink(block)
        block.kept = False
        self._free.append(block)

    def _unlink(self, block: Block) -> None:
        block.scores.clear()
        block.filled_by = -1
        parent, block.parent = block.parent, None
        if parent is None:
            return
        del parent.children[block.tokens]
        block.tokens = ()
        if parent.id < 0 and not parent.children:
            del self._roots[parent.namespace]

    def check(self) -> None:
        """Assert the pool's invariants (tests and simulation call it after every step)."""
        idle = [b for lane in self._idle for b in lane.values()]
        ids = [b.id for b in self._free] + [b.id for b in idle]
        assert len(set(ids)) == len(ids) <= self.total
        assert all(b.refs == 0 and not b.cached and not b.children for b in self._free)
        assert all(b.refs == 0 and b.cached for b in idle)
        assert all(b.parent is not None and b.parent.children[b.tokens] is b for b in idle)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def blocks_for(tokens: int) -> int:
    """How many blocks hold this many positions."""
    return -(-tokens // BLOCK_TOKENS)
