"""What an operator can see: counters, gauges and histograms of one engine, in a registry of its own.

Rules of this file: numbers only, no labels that a client chooses. Actors report facts; nothing reads them back.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from .schedule import Scheduler
    from .ticket import Ticket

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Tally(Collector):
    """A histogram for what every stream reports in every step: the library's own takes a lock for each of its parts."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text = name, text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        limits = map(floatToGoString, (*self._bounds, math.inf))
        buckets = list(zip(limits, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class EngineMetrics:
    """One engine's metrics; names begin with ``offbook_``."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"offbook_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"offbook_{name}", text, registry=registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...] = SECONDS, labels: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(f"offbook_{name}", text, labels, buckets=buckets, registry=registry)

        self.waiting = gauge("requests_waiting", "Requests accepted and not yet running")
        self.running = gauge("sequences_running", "Sequences that have a place in steps")
        self.queued = gauge("sequences_queued", "Sequences admitted or preempted, without a place in steps")
        self.blocks_free = gauge("kv_blocks_free", "KV blocks that hold nothing")
        self.blocks_cached = gauge("kv_blocks_cached", "KV blocks that only the prefix cache holds")
        self.blocks_used = gauge("kv_blocks_used", "KV blocks that sequences hold")
        self.requests = counter("requests_total", "Requests by how they ended", ("outcome",))
        self.refused = counter("requests_refused_total", "Requests refused at the door", ("why",))
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of answered requests")
        self.cached_tokens = counter("cached_prompt_tokens_total", "Of these, found in the prefix cache")
        self.generated_tokens = counter("generated_tokens_total", "Generated tokens")
        self.preemptions = counter("preemptions_total", "Sequences that lost their blocks to an older one")
        self.evictions = counter("cache_evictions_total", "Cached blocks given up for new ones")
        self.drafted = counter("draft_tokens_total", "Draft tokens fed to the model")
        self.accepted = counter("draft_tokens_accepted_total", "Of these, accepted")
        self.failed_steps = counter("failed_steps_total", "Steps in which the device failed")
        self.queue_s = histogram("queue_seconds", "From asking to the first step, of requests that got one")
        self.request_s = histogram("request_seconds", "From asking to the last token, of answered requests")
        self.first_token_s = histogram("time_to_first_token_seconds", "From asking to the first token")
        self.token_gap_s = Tally("offbook_inter_token_seconds", "Between a request's tokens, step by step", SECONDS)
        registry.register(self.token_gap_s)
        self.step_s = histogram("step_seconds", "Step time by phase", labels=("phase",))
        self.step_rows = histogram("step_tokens", "Tokens fed in a step", TOKENS)
        gauge(
            "step_age_seconds", "How long the device has been at its present step; 0 between steps, large when it hangs"
        ).set_function(self._step_age_s)
        self._step_began: float | None = None
        self._last_evictions = 0
        self._last_preemptions = 0

    def step_sent(self) -> None:
        """The device has begun a step."""
        self._step_began = time.monotonic()

    def step_back(self) -> None:
        """It has ended it, well or badly."""
        self._step_began = None

    def _step_age_s(self) -> float:
        return 0.0 if self._step_began is None else time.monotonic() - self._step_began

    def scheduled(self, scheduler: Scheduler) -> None:
        """Gauges after a plan."""
        pool = scheduler.pool
        self.running.set(len(scheduler.running))
        self.queued.set(len(scheduler.waiting))
        self.blocks_free.set(pool.free)
        self.blocks_cached.set(pool.idle)
        self.blocks_used.set(pool.held)
        self.evictions.inc(pool.evictions - self._last_evictions)
        self.preemptions.inc(scheduler.preemptions - self._last_preemptions)
        self._last_evictions, self._last_preemptions = pool.evictions, scheduler.preemptions

    def answered(self, ticket: Ticket) -> None:
        """A request's whole answer has been sent."""
        usage = ticket.usage()
        self.requests.labels("answered").inc()
        self.request_s.observe(ticket.timings().processing_s)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
