"""Microseconds a row of the CPU sampler, one thread, beside torch doing the same with sort, topk and multinomial.

    PYTHONPATH=.typing:tests/support python tests/benchmarks/bench_sampler.py [rows]

Minimum of several runs of ``rows`` different rows (16), normal logits of standard deviation 3 (a hard case: a nucleus
of thousands of tokens) and the same made peaked, as a language model's are. The prototype's figures on AVX-512, for
the row "everything": 98 us at V = 49152 and 294 at 151936 with top_k 50.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sampler_cases import make_batch

from offbook.kernels.build import cpu_level
from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import Sampler, new_result

REPEATS = 7
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature only": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_k 50, 5 logprobs": {"top_k": 50, "top_logprobs": 5},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9},
    "mirostat 3": {"mirostat_target": 3.0},
    "everything": {
        "temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "top_logprobs": 5,
        "kept_ids_max": 1000,
    },
    "no short list": {"temperature": 0.8, "top_p": 0.999, "min_p": 1e-4, "typical_p": 0.99, "kept_ids_max": 1000},
}  # fmt: skip


def best_us(work: Callable[[], Any], rows: int) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times) / rows * 1e6


def ours(logits: np.ndarray[Any, np.dtype[np.float32]], features: dict[str, Any]) -> float:
    rows, v = logits.shape
    sampler, batch = Sampler(v, 0), make_batch([SamplingParams(seed=i, **features) for i in range(rows)])
    result = new_result(batch)
    return best_us(lambda: sampler.sample(logits, batch, 0, rows, None, result), rows)


def by_torch(logits: torch.Tensor, features: dict[str, Any]) -> Callable[[], Any] | None:
    """What one would write with torch: raw logprobs, filters by topk or sort, softmax, multinomial."""
    temperature = features.get("temperature", 1.0)

    def draw(scores: torch.Tensor) -> Any:
        return torch.multinomial(torch.softmax(scores / temperature, -1), 1), torch.log_softmax(logits, -1)

    if temperature == 0:
        return lambda: (logits.argmax(-1), torch.log_softmax(logits, -1))
    if set(features) <= {"temperature"}:
        return lambda: draw(logits)
    if "top_k" in features and len(features) <= 2:
        return lambda: draw(logits.topk(features["top_k"]).values)
    if set(features) == {"top_p"}:

        def nucleus() -> Any:
            ordered = logits.sort(-1, descending=True).values
            share = torch.softmax(ordered, -1)
            return draw(ordered.masked_fill(share.cumsum(-1) - share >= features["top_p"], -torch.inf))

        return nucleus
    return None


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    torch.set_num_threads(1)
    sys.stdout.write(f"us a row, {cpu_level()}, one thread, {rows} rows\n")
    sys.stdout.write(f"{'':24}{'V':>8}{'normal':>9}{'peaked':>9}{'torch':>9}{'ratio':>7}\n")
    for v in (49152, 151936):
        rng = np.random.default_rng(0)
        normal = (rng.standard_normal((rows, v)) * 3).astype(np.float32)
        peaked = normal + np.float32(12) * (rng.random((rows, v)) < 30 / v).astype(np.float32)
        for name, features in CASES.items():
            us, us_peaked = ours(normal, features), ours(peaked, features)
            theirs = by_torch(torch.from_numpy(normal), features)
            beside = best_us(theirs, rows) if theirs else float("nan")
            sys.stdout.write(f"{name:24}{v:8}{us:9.0f}{us_peaked:9.0f}{beside:9.0f}{beside / us:7.1f}\n")


if __name__ == "__main__":
    main()
