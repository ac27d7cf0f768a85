"""Needs a CUDA device, torch with CUDA, and CuPy: proves the CUDA device on a GPU and times it, within ten minutes.

    PYTHONPATH=.typing:tests/support python tests/gpu/check_step.py [--model PATH]

Checks: attention's bits are those of the same kernel on the host (where a C++ compiler is found); a float32 step is the
CPU device's within rounding; a row's bits are the same alone and in crowds of every bucket, decoded and prefilled; a
step launched kernel by kernel has the bits of its captured graph; compute-sanitizer's memcheck and racecheck if it is
installed. Times: steps of 1, 16, 64 and 256 decoded rows, and prefill, beside the bytes that they move at the bandwidth
measured here. ``tests/kernels/test_cuda_device.py`` runs these functions on fibers, so that the script can be trusted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_case import MIXED, Attention, spec_of
from gpu_check import sanitize, say
from host_cuda import HostCuda

from offbook.kernels.build import NoCompilerError
from offbook.kernels.cpu_device import CpuDevice
from offbook.kernels.cuda import Cuda
from offbook.kernels.cuda_device import CudaDevice
from offbook.kernels.default_model import fetch_default_model
from offbook.kernels.model_files import ModelFiles, open_model
from offbook.kernels.params import SamplingParams
from offbook.kernels.step import BLOCK_TOKENS, F32, SAMPLE, StepBatch, StepLimits

SHAPES = ((64, 9, 3), (128, 8, 2), (64, 14, 2))
CONTEXT = 192  # positions of the rows that are timed
Rows = Iterable[tuple[int, int, int]]  # sequence, first position, end


def step(rows: Rows, ids: Any, width: int) -> StepBatch:
    """Rows of the sequences ``ids``, in blocks of their own; each sequence's last row draws its best token."""
    rows = list(rows)
    lengths = np.array([end - begin for _, begin, end in rows])
    runs, last = len(rows), (np.cumsum(lengths) - 1).astype(np.int32)
    batch = StepBatch(
        step_id=0,
        token_ids=np.concatenate([ids[s][begin:end] for s, begin, end in rows]).astype(np.int32),
        positions=np.concatenate([np.arange(begin, end) for _, begin, end in rows]).astype(np.int32),
        row_sequence=np.repeat(np.arange(runs), lengths).astype(np.int32),
        block_tables=np.array([np.arange(s * width, (s + 1) * width) for s, _, _ in rows], np.int32),
        copies=np.empty((0, 2), np.int32),
        logit_rows=last,
    )
    batch.row_forced = batch.row_draft = batch.row_mask = np.full(runs, -1, np.int32)
    batch.run_start, batch.run_kind = np.arange(runs + 1, dtype=np.int32), np.full(runs, SAMPLE, np.int32)
    batch.run_params = [SamplingParams(temperature=0.0, logprobs=False)] * runs
    batch.run_slot, batch.run_draw = np.full(runs, -1, np.int32), np.zeros(runs, np.int32)
    batch.run_mu = np.zeros(runs, np.float32)
    return batch


def random_ids(vocabulary: int, sequences: int, length: int) -> Any:
    return np.random.default_rng(0).integers(0, vocabulary, (sequences, length))


def open_cuda(files: ModelFiles, make_cuda: Callable[[], Cuda], dtype: Any, sequences: int, width: int) -> CudaDevice:
    """A device with room for so many sequences of ``width`` blocks."""
    spec = files.spec
    block = 2 * spec.n_layers * spec.n_kv_heads * BLOCK_TOKENS * spec.head_dim * (4 if dtype == "float32" else 2)
    return CudaDevice(spec, files.weights, kv_bytes=sequences * width * block, dtype=dtype, slots=sequences,
                      limits=StepLimits(rows=2048), cuda=make_cuda())  # fmt: skip


def check_attention(make_cuda: Callable[[], Cuda]) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            case, cuda = Attention(spec_of(*shape), MIXED, dtype), make_cuda()
            with cuda.active():
                out = case.run(cuda)
            error = np.abs(out.double().numpy() - case.truth()).max()
            assert error < (2e-6 if dtype is torch.float32 else 1e-2), (shape, dtype, error)
            try:
                assert torch.equal(out, case.run(HostCuda())), f"{shape}, {dtype}: not the bits of the host"
            except NoCompilerError as missing:
                say(f"attention is not compared with the host's: {missing}")
    say("attention: float64's values, and the host's bits")


def check_parity(files: ModelFiles, make_cuda: Callable[[], Cuda], length: int) -> None:
    """A float32 prefill beside the CPU's."""
    width = -(-length // BLOCK_TOKENS)
    ids = random_ids(files.spec.vocabulary_size, 1, length)
    batch = step([(0, 0, length)], ids, width)
    batch.logit_rows = np.arange(length, dtype=np.int32)
    device = open_cuda(files, make_cuda, "float32", 1, width)
    device.forward(batch)
    found = device.logits(batch.logit_rows)
    device.close()
    cpu = CpuDevice(files.spec, files.weights, kv_bytes=1 << 30, threads=4, dtype="float32", slots=1)
    cpu.forward(batch)
    error = np.abs(found - np.concatenate([cpu.logits(k, k + 1).copy() for k in range(length)])).max()
    cpu.close()
    say(f"float32: {length} rows of logits differ from the CPU's by {error:.2g} at most")
    assert error < 5e-3


def logits_after(device: CudaDevice, steps: Iterable[StepBatch]) -> F32:
    """Those of the last step's first logits row."""
    for batch in steps:
        device.forward(batch)
    first: F32 = device.logits(batch.logit_rows[:1])[0]
    return first


def check_crowds(files: ModelFiles, make_cuda: Callable[[], Cuda], dtype: str, crowds: tuple[int, ...]) -> None:
    """The bits of one sequence's row at a position: prefilled alone, decoded alone, and decoded in crowds."""
    length, width, most = CONTEXT, CONTEXT // BLOCK_TOKENS + 1, max(crowds)
    ids = random_ids(files.spec.vocabulary_size, most, length + 1)
    device = open_cuda(files, make_cuda, dtype, most, width)
    say(f"{dtype}: {device.name}")
    whole = logits_after(device, [step([(0, 0, length)], ids, width)])
    chunks = [step([(0, begin, min(begin + 50, length - 1))], ids, width) for begin in range(0, length - 1, 50)]
    last = step([(0, length - 1, length)], ids, width)
    assert logits_after(device, [*chunks, last]).tobytes() == whole.tobytes(), "chunks and a decoded row differ"
    for others in range(1, most):
        device.forward(step([(others, 0, length - 1)], ids, width))
    for crowd in crowds:
        batch = step([(s, length - 1, length) for s in range(crowd)], ids, width)
        assert logits_after(device, [batch]).tobytes() == whole.tobytes(), f"a crowd of {crowd} shows"
        captured, device._bodies = device._bodies, {}
        assert logits_after(device, [batch]).tobytes() == whole.tobytes(), f"{crowd} rows differ without a graph"
        device._bodies = captured
    device.close()
    say(f"{dtype}: the same bits alone, in chunks, in crowds of {crowds}, through graphs and without")


def bandwidth() -> float:
    """Bytes a second of a copy, read and written."""
    source, target = torch.ones(1 << 28, device="cuda"), torch.empty(1 << 28, device="cuda")
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * source.nbytes / min(times)


def time_steps(
    files: ModelFiles, make_cuda: Callable[[], Cuda], dtype: str, speed: float, decodes: tuple[int, ...],
    prefills: tuple[int, ...], repeats: int,
) -> None:  # fmt: skip
    """``speed``: bytes a second that a step is held against."""
    spec, width, most = files.spec, CONTEXT // BLOCK_TOKENS + 1, max(decodes)
    ids = random_ids(spec.vocabulary_size, most, max(*prefills, CONTEXT + 1))
    device = open_cuda(files, make_cuda, dtype, most, width)
    say(f"{dtype}, context {CONTEXT}: {speed / 1e12:.2f} TB/s by copying")
    say(f"{'rows':>6} {'ms':>8} {'tokens/s':>10} {'MB moved':>9} {'floor ms':>9}")
    steps = [(f"{n}", step([(s, CONTEXT, CONTEXT + 1) for s in range(n)], ids, width)) for n in decodes]
    steps += [(f"0-{n}", step([(0, 0, n)], ids, -(-n // BLOCK_TOKENS))) for n in prefills]
    for name, batch in steps:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            device.forward(batch)
            device.sample(batch, None)
            times.append(time.perf_counter() - begin)
        seen, element = int(batch.positions.max() + 1) * len(batch.run_kind), 4 if dtype == "float32" else 2
        moved = device.weight_bytes + 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * element * seen
        s = sorted(times)[len(times) // 2]
        rate = len(batch.token_ids) / s
        say(f"{name:>6} {1e3 * s:>8.3f} {rate:>10.0f} {moved / 1e6:>9.1f} {1e3 * moved / speed:>9.3f}")
    device.close()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", type=Path, help="a GGUF file or a Hugging Face directory; else the default model")
    arguments.add_argument("--short", action="store_true", help="attention alone: what compute-sanitizer watches")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this check needs a CUDA device: nothing was run")
    start = time.monotonic()
    say(torch.cuda.get_device_name())
    check_attention(Cuda)
    if options.short:
        return
    files = open_model(options.model or fetch_default_model())
    check_parity(files, Cuda, length=300)
    speed = bandwidth()
    for dtype in ("float32", "bfloat16"):
        check_crowds(files, Cuda, dtype, (1, 2, 16, 63, 64, 65, 130, 256))
        time_steps(files, Cuda, dtype, speed, (1, 16, 64, 256), (512, 2048), repeats=30)
    sanitize(__file__)
    say(f"done in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
