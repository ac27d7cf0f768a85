"""Every row's positions are walked exactly once, by items that fit, however a step is made up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from offbook.kernels.cuda_items import PARTITION, attention_items

chunks = st.lists(st.tuples(st.integers(0, 3 * PARTITION), st.integers(1, 40)), min_size=1, max_size=6)


def rows_of(parts: list[tuple[int, int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Positions and sequences of a step that has chunk i of sequence i: (first position, rows)."""
    positions = np.concatenate([np.arange(start, start + n) for start, n in parts]).astype(np.int32)
    return positions, np.repeat(np.arange(len(parts)), [n for _, n in parts]).astype(np.int32)


@given(parts=chunks, rows_max=st.integers(1, 16), partials=st.sampled_from([0, 1, 7, 60, 4096]))
def test_each_row_is_walked_once(parts: list[tuple[int, int]], rows_max: int, partials: int) -> None:
    positions, sequences = rows_of(parts)
    items, folds = attention_items(positions, sequences, table_width=50, rows_max=rows_max, partials=partials)
    walked: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(len(positions))}
    for row, rows, length, begin, end, table, partial, _ in items.tolist():
        assert 1 <= rows <= rows_max
        assert begin % PARTITION == 0 and (partial < 0 or end - begin <= PARTITION)
        for r in range(rows):
            assert positions[row + r] + 1 == length + r
            assert table == 50 * sequences[row + r]
            walked[row + r].append((begin, end, partial + r if partial >= 0 else -1))
    entries: list[int] = []
    fold_of = {row: (first, stride, count) for row, first, stride, count in folds.tolist()}
    for row, spans in walked.items():
        assert [begin for begin, _, _ in spans] == [0, *(end for _, end, _ in spans[:-1])]
        assert spans[-1][1] >= positions[row] + 1
        if row in fold_of:
            first, stride, count = fold_of[row]
            assert [entry for _, _, entry in spans] == [first + i * stride for i in range(count)]
            entries += [entry for _, _, entry in spans]
        else:
            assert len(spans) == 1 and spans[0][2] == -1
    assert len(entries) == len(set(entries)) and all(0 <= entry < partials for entry in entries)


def test_the_fewest_rows_are_split_first() -> None:
    positions, sequences = rows_of([(3000, 16), (3000, 1), (10, 1)])
    items, folds = attention_items(positions, sequences, table_width=200, rows_max=16, partials=12)
    assert folds.tolist() == [[16, 0, 1, 12]]
    assert len(items) == 1 + 12 + 1
    _, folds = attention_items(positions, sequences, table_width=200, rows_max=16, partials=4096)
    assert len(folds) == 17
