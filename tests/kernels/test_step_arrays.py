"""What every device asks of a step, and how all divide its logits rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampler_cases import make_batch

from offbook.kernels.params import SamplingParams
from offbook.kernels.step import SAMPLE, SCORE
from offbook.kernels.step_arrays import checked_arrays, logits_tiles


def test_logits_tiles_keep_sample_runs_whole() -> None:
    def ranges(*runs: tuple[int, int]) -> list[tuple[int, int]]:
        kinds, lengths = [kind for kind, _ in runs], [n for _, n in runs]
        forced = [0] * sum(lengths)
        batch = make_batch([SamplingParams()] * len(runs), kinds=kinds, lengths=lengths, forced=forced)
        return list(logits_tiles(batch, 64))

    assert ranges((SCORE, 200)) == [(0, 64), (64, 128), (128, 192), (192, 200)]
    assert ranges((SAMPLE, 40), (SAMPLE, 30), (SCORE, 10), (SAMPLE, 24)) == [(0, 40), (40, 104)]
    assert ranges((SAMPLE, 100), (SAMPLE, 1)) == [(0, 100), (100, 101)]
    assert ranges((SAMPLE, 1), (SCORE, 64), (SAMPLE, 1)) == [(0, 64), (64, 66)]
    assert [end for _, end in ranges((SCORE, 60), (SAMPLE, 10), (SAMPLE, 100), (SCORE, 130))] == [
        60,
        70,
        170,
        234,
        298,
        300,
    ]


GOOD = {"token_ids": [3], "positions": [20], "row_sequence": [0], "block_tables": [[4, 9, -1]], "copies": [[1, 2]]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", [50]), ("token_ids", [-1]), ("positions", [64]), ("positions", [48]), ("positions", [-1]),
        ("row_sequence", [1]), ("block_tables", [[4, 10, -1]]), ("block_tables", [[-1, 9, 0]]), ("copies", [[0, 10]]),
        ("logit_rows", [1]),
    ],
)  # fmt: skip
def test_a_step_that_would_read_elsewhere_is_refused_by_field(lab: Any, field: str, value: Any) -> None:
    batch = lab.batch(([3], 20, [4, 9, -1]), copies=[[1, 2]])
    limits = {"vocabulary_size": 50, "positions": 64, "blocks": 10}
    assert {name: a.tolist() for name, a in checked_arrays(batch, **limits).items()} == GOOD | {"logit_rows": [0]}
    setattr(batch, field, np.array(value, np.int32))
    with pytest.raises(ValueError, match=f"{field}: .* is outside 0"):
        checked_arrays(batch, **limits)
