"""How a step's attention is divided among the blocks of a GPU: items of consecutive rows, long walks split.

Rules of this file: NumPy only; the layouts are those of ``csrc/paged_attention.cuh``. Nothing decided here changes a
bit of the result: partitions are counted from position 0 and folded in order wherever they are walked.
"""

from __future__ import annotations

import numpy as np

from .step import I32

PARTITION = 256  # positions: one stream at position 8000 then gives each KV head work for 32 blocks


def attention_items(
    positions: I32, row_sequence: I32, *, table_width: int, rows_max: int, partials: int
) -> tuple[I32, I32]:
    """The arrays ``AttentionItem`` [n, 8] and ``FoldItem`` [m, 4] of a step's rows.

    An item has at most ``rows_max`` rows. Walks longer than a partition are split, those of the fewest rows first, as
    long as their results fit into ``partials`` entries.
    """
    first, rows = _groups(positions, row_sequence, rows_max)
    length = positions[first] + 1
    last = length + rows - 1
    parts = -(-last // PARTITION)

    partial = _entries(rows, parts, partials)
    times = np.where(partial < 0, 1, parts)
    group = np.repeat(np.arange(len(first)), times)
    part = np.arange(len(group)) - np.repeat(np.cumsum(times) - times, times)
    whole = partial[group] < 0
    items = np.zeros((len(group), 8), np.int32)
    items[:, 0], items[:, 1], items[:, 2] = first[group], rows[group], length[group]
    items[:, 3] = part * PARTITION
    items[:, 4] = np.where(whole, last[group], np.minimum(last[group], (part + 1) * PARTITION))
    items[:, 5] = row_sequence[first[group]] * table_width
    items[:, 6] = np.where(whole, -1, partial[group] + part * rows[group])
    return items, _folds(first, rows, parts, partial)


def _groups(positions: I32, row_sequence: I32, rows_max: int) -> tuple[I32, I32]:
    """First row and number of rows of each stretch of one sequence's consecutive positions, cut at ``rows_max``."""
    n = len(positions)
    starts = np.ones(n, bool)
    starts[1:] = (np.diff(row_sequence) != 0) | (np.diff(positions) != 1)
    stretch = np.flatnonzero(starts)
    inside = np.arange(n) - np.repeat(stretch, np.diff(stretch, append=n))
    first = np.flatnonzero(inside % rows_max == 0).astype(np.int32)
    return first, np.diff(first, append=np.int32(n))


def _entries(rows: I32, parts: I32, partials: int) -> I32:
    """Each group's first entry for split walks, or -1 where the walk stays whole."""
    order = np.argsort(rows, kind="stable")
    wanted = np.where(parts > 1, rows * parts, 0)[order]
    ends = np.cumsum(wanted)
    found = np.full(len(rows), -1, np.int32)
    found[order] = np.where((wanted > 0) & (ends <= partials), ends - wanted, -1)
    return found


def _folds(first: I32, rows: I32, parts: I32, partial: I32) -> I32:
    split = np.flatnonzero(partial >= 0)
    group = np.repeat(split, rows[split])
    inside = np.arange(len(group)) - np.repeat(np.cumsum(rows[split]) - rows[split], rows[split])
    folds = np.empty((len(group), 4), np.int32)
    folds[:, 0], folds[:, 1] = first[group] + inside, partial[group] + inside
    folds[:, 2], folds[:, 3] = rows[group], parts[group]
    return folds
