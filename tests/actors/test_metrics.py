"""A histogram of our own says what the library's says."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from offbook.actors.metrics import SECONDS, Tally


def test_a_tally_is_written_like_a_histogram() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally, histogram = Tally("gaps", "Text", SECONDS), Histogram("gaps", "Text", buckets=SECONDS, registry=theirs)
    ours.register(tally)
    chance = random.Random(1)
    for value in (*SECONDS, 0.0, 1e3, *(chance.expovariate(20) for _ in range(200))):
        tally.observe(value)
        histogram.observe(value)
    created = b"# HELP gaps_created"  # when the histogram was made: no figure of ours
    assert generate_latest(ours) == generate_latest(theirs).partition(created)[0]
