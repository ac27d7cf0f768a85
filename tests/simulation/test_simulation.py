"""Thousands of small worlds (tests/support/simulate.py), each decided by a seed; the seed of a failing one is printed.

``OFFBOOK_SIMULATIONS=50000 pytest tests/simulation -s`` runs longer. Seeds that once found something stay in KEPT.
Small worlds run once more for each step of any of their tasks, with a cancellation there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from simulate import cancelled_at_every_step, failing_as, simulate

COUNT = int(os.environ.get("OFFBOOK_SIMULATIONS", "1200"))
KEPT = {
    13: "a grammar did not wait for the end of a thinking block without a budget",
    322: "below its minimum length an answer could not end at a draft's row that had reached it",
}
SMALL = (2009, 2037, 2051, 2072)  # worlds of two clients, for what is tried at every step


def test_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    endings: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    preemptions = evictions = 0
    for seed in [*KEPT, *range(COUNT)]:
        with failing_as(f"seed {seed}"):
            world = simulate(seed)
        endings += world.endings
        faults += world.faults
        preemptions += world.preemptions
        evictions += world.evictions
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{COUNT} worlds: endings {dict(endings)}, planted faults {dict(faults)}, "
            f"{preemptions} preemptions, {evictions} evictions"
        )
    assert {
        "done", "left", "left at once", "gone", "never read", "StepFailed", "EngineOverloaded", "EngineUnavailable",
        "DeadlineExceeded", "ClientOverShare", "InvalidRequest", "stopped",
    } <= endings.keys()  # fmt: skip
    assert len(faults) == 7
    assert preemptions
    assert evictions


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_the_same_seed_is_the_same_world(seed: int) -> None:
    assert simulate(seed).digest == simulate(seed).digest


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError(), AssertionError), (BaseExceptionGroup("", [ValueError()]), AssertionError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (BaseExceptionGroup("", [BaseExceptionGroup("", [KeyboardInterrupt()]), ValueError()]), KeyboardInterrupt),
    ],
)  # fmt: skip
def test_a_ctrl_c_is_no_failed_world(raised: BaseException, seen: type[BaseException]) -> None:
    with pytest.raises(seen) as caught, failing_as("seed 1"):
        raise raised
    assert type(caught.value) is seen


def test_the_order_of_hashes_does_not_show() -> None:
    program = "from simulate import simulate\nprint([simulate(seed).digest for seed in range(12)])"
    told = []
    for hash_seed in ("0", "7"):
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": _path()},
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        told.append(done.stdout)
    assert told[0] == told[1]


def _path() -> str:
    import offbook

    package = Path(str(offbook.__file__)).absolute().parent
    return os.pathsep.join((str(Path(__file__).parent.parent / "support"), str(package.parent)))


@pytest.mark.parametrize("seed", SMALL)
def test_everything_cancelled_at_every_step(seed: int) -> None:
    cancelled_at_every_step(simulate, seed, None)


@pytest.mark.parametrize("victim", range(2))
@pytest.mark.parametrize("seed", SMALL)
def test_one_client_cancelled_at_every_step(seed: int, victim: int) -> None:
    """The others' answers are what they would be alone, and the engine's books are even afterwards."""
    cancelled_at_every_step(simulate, seed, victim)
