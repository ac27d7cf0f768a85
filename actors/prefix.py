"""How a sequence shares blocks: what it finds cached, and what it leaves for others.

Rules of this file: pure; the block pool knows blocks, the scheduler knows room and turns, this knows which tokens and
which prompt scores a block can stand for. Echo scoring keeps its cache: a block stands for its positions only if their
wanted scores lie beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.step import BLOCK_TOKENS
from .blocks import Block, BlockPool
from .sequence import Sequence


@dataclass(slots=True)
class Match:
    """What of a sequence's start is cached: whole blocks, then the start of one to copy (``source``)."""

    blocks: list[Block]
    source: Block | None
    length: int
    pending: bool  # it would be longer in the next step


class PrefixCache:
    """The sequences' side of a block pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def store_scores(self, sequence: Sequence, start: int, stop: int) -> None:
        """Keep the known scores of prompt positions up to ``stop`` beside the cached blocks that hold those tokens.
        Positions before ``start`` in its block count too: their scores came with a copy."""
        start -= start % BLOCK_TOKENS
        node: Block | None = self._pool.root(sequence.namespace)
        for i in range(min(stop, sequence.n_prompt - 1) // BLOCK_TOKENS + 1):
            at = i * BLOCK_TOKENS
            assert node is not None
            node = self._pool.child(node, tuple(sequence.tokens[at : at + BLOCK_TOKENS]))
            if node is None and i < len(sequence.blocks) and sequence.blocks[i].cached:
                node = sequence.blocks[i]  # the open tail
            if node is None:
                return
            for q in range(max(at, start), min(at + len(node.tokens), stop + 1)):
                known, new = node.scores.get(q - at), sequence.scores.get(q)
                if new is not None and (known is None or len(known[1]) < len(new[1])):
                    node.scores[q - at] = new
            if len(node.tokens) < BLOCK_TOKENS:
                return

    def match(self, sequence: Sequence, step_id: int) -> Match:
        """What step ``step_id`` may take over for a sequence that starts in it; its known scores are taken at once."""
        tokens = sequence.tokens
        limit = sequence.cache_limit if sequence.n_output == 0 else len(tokens) - 1
        node, blocks, length = self._pool.root(sequence.namespace), list[Block](), 0
        while length + BLOCK_TOKENS <= limit:
            block = self._pool.child(node, tuple(tokens[length : length + BLOCK_TOKENS]))
            if block is None:
                break
            if sequence.reusable(block, length, length + BLOCK_TOKENS) < length + BLOCK_TOKENS:
                if block.filled_by == step_id:
                    return Match([], None, 0, pending=True)
                break
            sequence.adopt_scores(block, length, length + BLOCK_TOKENS)
            blocks.append(block)
            node, length = block, length + BLOCK_TOKENS
        source, length = self._match_tail(sequence, node, length, limit, step_id)
        if sequence.score_from is not None and max(sequence.score_from, 1) <= length < sequence.n_prompt:
            if length not in sequence.scores:
                length -= 1  # the score of the first position not found comes from the row before it
                if source is None:
                    source = blocks.pop()
                    if source.filled_by == step_id:  # not there to be copied before this step has run
                        return Match([], None, 0, pending=True)
                elif length % BLOCK_TOKENS == 0:
                    source = None
        return Match(blocks, source, length, pending=False)

    def _match_tail(
        self, sequence: Sequence, node: Block, length: int, limit: int, step_id: int
    ) -> tuple[Block | None, int]:
        """A cached block whose start, though not its whole, continues ``node`` as the sequence does."""
        rest = sequence.tokens[length : min(limit, length + BLOCK_TOKENS)]
        found = self._pool.longest_start(node, rest, step_id) if rest else None
        if found is None:
            return None, length
        block, n = found
        stop = sequence.reusable(block, length, length + n)
        if stop == length:
            return None, length
        sequence.adopt_scores(block, length, stop)
        return block, stop

    def enter(self, sequence: Sequence, start: int, stop: int, step_id: int) -> None:
        """Offer the blocks that are full now to the cache, and the tail when the prompt is complete."""
        for i in range(start // BLOCK_TOKENS, stop // BLOCK_TOKENS):
            self._enter_block(sequence, i, (i + 1) * BLOCK_TOKENS, step_id)
        if start < sequence.n_prompt <= stop and stop % BLOCK_TOKENS:
            self._enter_block(sequence, stop // BLOCK_TOKENS, stop, step_id)

    def _enter_block(self, sequence: Sequence, i: int, stop: int, step_id: int) -> None:
        parent = sequence.blocks[i - 1] if i else self._pool.root(sequence.namespace)
        block = sequence.blocks[i]
        if block.refs == 1:
            self._pool.enter(parent, tuple(sequence.tokens[i * BLOCK_TOKENS : stop]), block, step_id)

    def enter_tail(self, sequence: Sequence, step_id: int) -> None:
        """Keep the last, partly filled block findable: a conversation goes on from exactly there."""
        full, rest = divmod(sequence.computed, BLOCK_TOKENS)
        if rest and full < len(sequence.blocks):
            self._enter_block(sequence, full, sequence.computed, step_id)
