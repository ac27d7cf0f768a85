"""Thousands of small worlds (tests/support/simulate.py), each decided by a seed; the seed of a failing one is printed.

``OFFBOOK_SIMULATIONS=50000 pytest tests/simulation -s`` runs longer. Seeds that once found something stay in KEPT.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from simulate import simulate

COUNT = int(os.environ.get("OFFBOOK_SIMULATIONS", "1500"))
KEPT = (51,)  # 51: a failed step left its unfinished tail in the cache


def test_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    endings: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in [*KEPT, *range(COUNT)]:
        try:
            world = simulate(seed)
        except (Exception, BaseExceptionGroup) as error:
            raise AssertionError(f"seed {seed}") from error
        endings += world.endings
        faults += world.faults
    with capsys.disabled():
        print(f"\n{COUNT} worlds: endings {dict(endings)}, planted faults {dict(faults)}")  # noqa: T201
    assert {"done", "left", "StepFailed", "EngineOverloaded", "DeadlineExceeded", "ClientOverShare"} <= endings.keys()


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_the_same_seed_is_the_same_world(seed: int) -> None:
    assert simulate(seed).digest == simulate(seed).digest


@pytest.mark.parametrize("seed", range(6))
def test_cancelled_at_every_step_nothing_is_left(seed: int) -> None:
    step = 1
    while step < 4000:
        try:
            world = simulate(seed, cancel_at_step=step)
        except (Exception, BaseExceptionGroup) as error:
            raise AssertionError(f"seed {seed}, cancelled at step {step}") from error
        if any(line.split(" ", 1)[1].startswith("end") for line in world.trace[-1:]):
            break  # it ended before the cancellation came
        step += 1 if step < 60 else 7
