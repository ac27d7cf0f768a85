"""Steps of the CPU device beside the machine's own limits, measured in the same minute.

    python tests/benchmarks/bench_cpu_step.py [--model PATH] [--threads N] [--dtype bfloat16] [--context 192] [--json]

A step's floor is the larger of its bytes (weights once, KV of every row) at the measured read bandwidth and its
products at the measured peak of 16-bit words, as codes are multiplied (the peak of floats is half of it). Best and
median of several steps; other work on the machine shows at once, so compare ratios within one run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from offbook.kernels.blocks_memory import huge_array
from offbook.kernels.build import LEVEL_FLAGS, compiler, cpu_level
from offbook.kernels.cpu_device import CpuDevice
from offbook.kernels.default_model import fetch_default_model
from offbook.kernels.model_files import open_model
from offbook.kernels.spec import ModelSpec
from offbook.kernels.step import BLOCK_TOKENS, StepBatch

READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Limits:
    gops: float
    read_gb: float


@dataclass(frozen=True)
class Row:
    case: str
    rows: int
    best_ms: float
    median_ms: float
    tokens_per_s: float
    floor_ms: float
    share: float  # floor / best


def measure_limits(threads: int) -> Limits:
    """The best of several tries."""
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "limits.so")
        flags = ["-std=c++20", "-O3", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread", *LEVEL_FLAGS[cpu_level()]]
        source = str(Path(__file__).with_name("cpu_limits.cpp"))
        subprocess.run([compiler(), *flags, "-o", target, source], check=True)
        library = ctypes.CDLL(target)
    library.limit_gops.restype = library.limit_read_gb.restype = ctypes.c_double
    memory = huge_array(READ_BYTES + 4096)
    memory[:] = 1
    address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(READ_BYTES)
    gops = max(library.limit_gops(threads) for _ in range(5))
    return Limits(gops, max(library.limit_read_gb(threads, address, size) for _ in range(9)))


def decode_batch(spec: ModelSpec, rows: int, context: int) -> StepBatch:
    width = context // BLOCK_TOKENS + 1
    return StepBatch(
        step_id=0,
        token_ids=np.random.default_rng(rows).integers(0, spec.vocabulary_size, rows).astype(np.int32),
        positions=np.full(rows, context, np.int32),
        row_sequence=np.arange(rows, dtype=np.int32),
        block_tables=np.arange(rows * width, dtype=np.int32).reshape(rows, width),
        copies=np.empty((0, 2), np.int32),
        logit_rows=np.arange(rows, dtype=np.int32),
    )


def prefill_batch(spec: ModelSpec, rows: int) -> StepBatch:
    return StepBatch(
        step_id=0,
        token_ids=np.random.default_rng(rows).integers(0, spec.vocabulary_size, rows).astype(np.int32),
        positions=np.arange(rows, dtype=np.int32),
        row_sequence=np.zeros(rows, np.int32),
        block_tables=np.arange(rows // BLOCK_TOKENS + 1, dtype=np.int32)[None],
        copies=np.empty((0, 2), np.int32),
        logit_rows=np.array([rows - 1], np.int32),
    )


def floor_ms(device: CpuDevice, spec: ModelSpec, batch: StepBatch, limits: Limits, element_bytes: int) -> float:
    """Milliseconds that no program can beat: bytes and arithmetic, whichever takes longer."""
    attention = spec.n_heads * spec.head_dim
    kv = spec.n_kv_heads * spec.head_dim
    layer = spec.hidden * (2 * attention + 2 * kv + 3 * spec.ffn)
    head = spec.hidden * spec.vocabulary_size * len(batch.logit_rows)
    seen = int(batch.positions.sum()) + len(batch.positions)
    flops = 2 * (spec.n_layers * (layer * len(batch.positions) + 2 * attention * seen) + head)
    sequences = int(batch.row_sequence.max()) + 1
    kv_seen = sum(int(batch.positions[batch.row_sequence == s].max()) + 1 for s in range(sequences))
    moved = device.weight_bytes + spec.n_layers * 2 * kv * kv_seen * element_bytes
    return 1e3 * max(flops / limits.gops / 1e9, moved / limits.read_gb / 1e9)


def time_step(device: CpuDevice, batch: StepBatch, budget_s: float) -> list[float]:
    times: list[float] = []
    until = time.perf_counter() + budget_s
    while len(times) < 4 or time.perf_counter() < until:
        start = time.perf_counter()
        device.forward(batch)
        for begin in range(0, len(batch.logit_rows), 64):
            device.logits(begin, min(begin + 64, len(batch.logit_rows)))
        times.append(time.perf_counter() - start)
    return times[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=1.5, help="per case")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    files = open_model(args.model or fetch_default_model())
    spec = files.spec
    started = time.perf_counter()
    device = CpuDevice(spec, files.weights, kv_bytes=1 << 30, threads=args.threads, dtype=args.dtype, slots=1)
    load_s = time.perf_counter() - started
    limits = measure_limits(args.threads)
    element = 2 if "bfloat16" in device.name else 4
    cases = [(f"decode {n}", decode_batch(spec, n, args.context)) for n in (1, 2, 4, 8, 16, 32, 64)]
    cases += [(f"prefill {n}", prefill_batch(spec, n)) for n in (32, 128, 512)]
    rows = []
    for case, batch in cases:
        times = time_step(device, batch, args.seconds)
        best, count = min(times), len(batch.token_ids)
        floor = floor_ms(device, spec, batch, limits, element)
        rows.append(
            Row(case, count, 1e3 * best, 1e3 * float(np.median(times)), count / best, floor, floor / 1e3 / best)
        )
    device.close()
    if args.json:
        report = {"device": device.name, "load_s": load_s, **asdict(limits), "cases": [asdict(r) for r in rows]}
        sys.stdout.write(json.dumps(report) + "\n")
        return 0
    megabytes = device.weight_bytes / 1e6
    sys.stdout.write(f"{device.name}; loaded in {load_s:.2f} s, weights {megabytes:.1f} MB; context {args.context}\n")
    sys.stdout.write(f"limits: {limits.gops:.0f} G operations/s, {limits.read_gb:.1f} GB/s\n")
    sys.stdout.write(f"{'case':12} {'best ms':>9} {'median':>9} {'tok/s':>7} {'floor ms':>9} {'share':>6}\n")
    for r in rows:
        times_text = f"{r.best_ms:9.2f} {r.median_ms:9.2f}"
        sys.stdout.write(f"{r.case:12} {times_text} {r.tokens_per_s:7.0f} {r.floor_ms:9.2f} {r.share:6.0%}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
