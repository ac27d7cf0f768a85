"""A step's arrays, checked before native code reads memory by them, and its logits rows, divided.

Rules of this file: every device calls these, so that all refuse the same steps and divide them alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .step import BLOCK_TOKENS, I32, SCORE, StepBatch


def checked_arrays(batch: StepBatch, *, vocabulary_size: int, positions: int, blocks: int) -> dict[str, I32]:
    """The arrays that the model's body reads, C-contiguous. Raises ValueError, naming the field, for a row outside the
    model's ``positions``, its table or the KV cache."""
    names = ("token_ids", "positions", "row_sequence", "block_tables", "copies", "logit_rows")
    arrays = {name: np.ascontiguousarray(getattr(batch, name), np.int32) for name in names}
    tables = arrays["block_tables"]
    _check_range("token_ids", arrays["token_ids"], vocabulary_size)
    _check_range("positions", arrays["positions"], min(positions, tables.shape[1] * BLOCK_TOKENS))
    _check_range("row_sequence", arrays["row_sequence"], len(tables))
    _check_range("copies", arrays["copies"], blocks)
    _check_range("logit_rows", arrays["logit_rows"], len(batch.token_ids))
    used = np.zeros(len(tables), np.int32)
    np.maximum.at(used, arrays["row_sequence"], arrays["positions"] // BLOCK_TOKENS + 1)
    in_use = np.arange(tables.shape[1]) < used[:, None]
    _check_range("block_tables", tables[in_use], blocks)
    return arrays


def _check_range(name: str, values: I32, limit: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= limit):
        raise ValueError(f"{name}: {values.min()}..{values.max()} is outside 0..{limit - 1}")


def logits_tiles(batch: StepBatch, rows_max: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most ``rows_max`` logits rows, unless one SAMPLE run has more: those stay whole, SCORE runs are cut
    where a range is full."""
    begin = end = 0
    for run, kind in enumerate(batch.run_kind.tolist()):
        run_end = int(batch.run_start[run + 1])
        full = end - begin >= rows_max or (kind != SCORE and run_end - begin > rows_max)
        if full and end > begin:
            yield begin, end
            begin = end
        while kind == SCORE and run_end - begin > rows_max:
            yield begin, begin + rows_max
            begin += rows_max
        end = run_end
    if end > begin:
        yield begin, end
