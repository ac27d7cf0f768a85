"""Needs a CUDA device, torch with CUDA, and CuPy: proves the sampler on a GPU and times it, within ten minutes.

    PYTHONPATH=.typing:tests/support python tests/gpu/check_sampler.py

Checks: the CPU build's bits for B in 1..256 and V of 49152, 128256, 151936, over every parameter set and kind of row;
rows alone, permuted and replayed from a captured graph; compute-sanitizer's racecheck if it is installed. Times: each
parameter set against the time that one read of the logits takes.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gpu_check import sanitize, say
from sampler_cases import ROW_KINDS, bits, make_batch, make_row, pack_masks, params_grid, run_step

from offbook.kernels.cuda import Cuda
from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import Sampler, new_result
from offbook.kernels.sampler_gpu import GpuSampler

VOCABULARIES = (49152, 128256, 151936)
BATCHES = (1, 2, 7, 32, 64, 256)
NEWEST_BANDWIDTH = 4.3e12  # bytes a second, for the "one read" column
TIMED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "everything": {"top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "temperature": 0.8, "top_logprobs": 5},
}


def step(v: int, rows: int, seed: int) -> tuple[Any, Any, Any]:
    """Rows of all kinds, all parameter sets in turn, a third masked."""
    rng = np.random.default_rng(seed)
    grid = params_grid(seed)
    params = [grid[i % len(grid)] for i in range(rows)]
    kinds = [make_row(kind, v, rng) for kind in ROW_KINDS]
    logits = np.stack([np.roll(kinds[i % len(kinds)], i) for i in range(rows)])
    allowed = rng.random((3, v)) < 0.6
    allowed[2] = False
    return logits, make_batch(params, mask_rows=[i % 3 if i % 3 == 0 else -1 for i in range(rows)]), pack_masks(allowed)


def sample(cuda: Cuda, sampler: GpuSampler, logits: Any, batch: Any, masks: Any) -> Any:
    result = new_result(batch)
    sampler.sample(cuda.put(logits), batch, 0, len(logits), masks, result)
    return result


def check_bits(cuda: Cuda, v: int, batches: tuple[int, ...]) -> None:
    most = max(batches)
    sampler = GpuSampler(cuda, v, 1, rows=most, runs=most, mask_rows=3)
    for rows in batches:
        logits, batch, masks = step(v, rows, seed=rows)
        right = run_step(Sampler(v, 0), logits, batch, masks)
        result = sample(cuda, sampler, logits, batch, masks)
        assert bits(result) == bits(right), (v, rows, np.flatnonzero(result.token != right.token))
        assert result.run_mu.tobytes() == right.run_mu.tobytes(), (v, rows)
        say(f"V={v} B={rows}: the CPU's bits")
    order = np.random.default_rng(0).permutation(rows)
    mixed = make_batch([batch.run_params[i] for i in order], mask_rows=batch.row_mask[order].tolist())
    shuffled = sample(cuda, sampler, logits[order], mixed, masks)
    for name in ("token", "kept", "logprob", "sampling_logprob"):
        assert getattr(shuffled, name).tobytes() == getattr(result, name)[order].tobytes(), name
    say(f"V={v}: a row's result does not depend on its place")


def check_graph(cuda: Cuda, v: int, rows: int) -> None:
    sampler = GpuSampler(cuda, v, 1, rows=rows, runs=rows, mask_rows=3)
    logits, batch, masks = step(v, rows, seed=1)
    on_device = cuda.put(logits)
    sampler.stage(on_device, batch, 0, rows, masks)
    replay = cuda.capture(sampler.launch)
    for seed in (2, 3):
        logits, batch, masks = step(v, rows, seed)
        on_device.copy_(torch.from_numpy(logits))
        sampler.stage(on_device, batch, 0, rows, masks)
        replay()
        result = new_result(batch)
        sampler.collect(batch, 0, rows, result)
        assert bits(result) == bits(run_step(Sampler(v, 0), logits, batch, masks)), seed
    say(f"V={v}: a captured graph replays other steps with the CPU's bits")


def time_kernels(cuda: Cuda) -> None:
    event_type: Any = torch.cuda.Event
    say(f"{'V':>7} {'B':>4} " + " ".join(f"{name:>12}" for name in TIMED) + f" {'one read':>9}   (us)")
    for v, rows in ((v, rows) for v in VOCABULARIES for rows in (1, 64, 256)):
        sampler, line = GpuSampler(cuda, v, 1, rows=rows, runs=rows), []
        logits = torch.randn(rows, v, device="cuda") * 3
        for features in TIMED.values():
            batch = make_batch([SamplingParams(seed=i, **features) for i in range(rows)])
            sampler.stage(logits, batch, 0, rows, None)
            events: list[Any] = [event_type(enable_timing=True) for _ in range(21)]
            for event in events:
                event.record()
                sampler.launch()
            torch.cuda.synchronize()
            line.append(min(a.elapsed_time(b) for a, b in pairwise(events)) * 1e3)
        floor = rows * v * 4 / NEWEST_BANDWIDTH * 1e6
        say(f"{v:>7} {rows:>4} " + " ".join(f"{us:>12.1f}" for us in line) + f" {floor:>9.1f}")


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this check needs a CUDA device: nothing was run")
    say(torch.cuda.get_device_name())
    start, cuda = time.monotonic(), Cuda()
    with cuda.active():
        if "--short" in sys.argv:  # what compute-sanitizer watches
            return check_bits(cuda, 5003, (28,))
        for v in VOCABULARIES:
            check_bits(cuda, v, BATCHES)
        check_graph(cuda, VOCABULARIES[0], 64)
        time_kernels(cuda)
    sanitize(__file__)
    say(f"done in {time.monotonic() - start:.0f} s")
    return None


if __name__ == "__main__":
    main()
