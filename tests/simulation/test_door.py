"""Hundreds of small worlds behind the HTTP door (tests/support/sim_door.py), each decided by a seed.

``OFFBOOK_SIMULATIONS=50000 pytest tests/simulation -s`` runs longer. Seeds that once found something stay in KEPT.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest
from sim_door import ENDINGS, simulate_door
from simulate import cancelled_at_every_step, failing_as

COUNT = int(os.environ.get("OFFBOOK_SIMULATIONS", "1200")) // 5
KEPT = {
    7: "a connection whose next request had come already was kept for ever when its client was cut",
    294: "a drain that ended while a refusal was still unread ended the engine",
}
SMALL = (12, 25, 27, 34, 38, 40)  # worlds of one or two clients, for what is tried at every step


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Planted failures are logged by the thousand, and kept by pytest."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    endings: Counter[str] = Counter()
    for seed in [*KEPT, *range(COUNT)]:
        with failing_as(f"seed {seed}"):
            endings += simulate_door(seed).endings
    with capsys.disabled():
        print(f"\n{COUNT} worlds behind the door: {dict(endings)}")  # noqa: T201
    told = {"done", "babbled", "left in its own words", "left waiting", "never read", "left reading", "half-closed"}
    assert told | {"over its share", "failed", "turned away"} <= endings.keys() <= told | {"cut", *ENDINGS.values()}


@pytest.mark.parametrize("seed", range(10))
def test_the_same_seed_is_the_same_world(seed: int) -> None:
    assert simulate_door(seed).digest == simulate_door(seed).digest


@pytest.mark.parametrize("victim", [None, 0])
@pytest.mark.parametrize("seed", SMALL)
def test_cancelled_at_every_step(seed: int, victim: int | None) -> None:
    """Everything, or one client, and whenever: connections, requests and blocks are gone too."""
    cancelled_at_every_step(simulate_door, seed, victim)
