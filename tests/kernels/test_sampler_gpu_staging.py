"""What the GPU sampler sends, launches and collects, without a GPU: its device memory is host memory and its kernel is
the same kernel on fibers. Only CuPy's and torch's CUDA calls themselves are not met here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_cuda import HostCuda
from sampler_cases import ROW_KINDS, bits, make_batch, make_row, pack_masks, params_grid, run_step

from offbook.kernels.cuda import Cuda
from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import Sampler, new_result
from offbook.kernels.sampler_gpu import GpuSampler
from offbook.kernels.step import SCORE, SlotOpen

V = 800


@pytest.fixture
def make_sampler() -> Callable[..., GpuSampler]:
    return partial(GpuSampler, HostCuda())


def sample(sampler: Any, logits: Any, batch: Any, masks: Any = None, cuts: tuple[int, ...] = ()) -> Any:
    result = new_result(batch)
    edges = [0, *cuts, len(logits)]
    for begin, end in pairwise(edges):
        sampler.sample(torch.from_numpy(logits[begin:end].copy()), batch, begin, end, masks, result)
    return result


def test_a_step_is_staged_and_collected(make_sampler: Callable[..., Any]) -> None:
    rng = np.random.default_rng(4)
    params = [*params_grid(4), SamplingParams(top_logprobs=5)]
    runs = len(params)
    kinds, lengths = [0] * (runs - 1) + [SCORE], [1] * (runs - 1) + [4]
    logits = np.stack([make_row(ROW_KINDS[i % len(ROW_KINDS)], V, rng) for i in range(runs + 3)])
    masks = pack_masks(rng.random((2, V)) < 0.5)
    batch = make_batch(
        params, kinds=kinds, lengths=lengths, forced=[-1] * (runs - 2) + [7, 1, 2, 3, 4],
        mask_rows=[i % 2 if i % 3 == 0 and i < runs - 1 else -1 for i in range(runs + 3)],
    )  # fmt: skip
    sampler = make_sampler(V, 0, rows=runs + 3, runs=runs, mask_rows=2)
    result = sample(sampler, logits, batch, masks, cuts=(10, runs + 1))
    right = run_step(Sampler(V, 0), logits, batch, masks)
    assert bits(result) == bits(right)
    assert result.run_mu.tobytes() == right.run_mu.tobytes()
    sampler.close()


def test_slots_live_on_the_device(make_sampler: Callable[..., Any]) -> None:
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((3, 4.0),), seed=2)
    logits = np.stack([make_row("normal", V, np.random.default_rng(i)) for i in range(4)])
    opening = SlotOpen(1, np.array([5, 6], np.int32), np.array([7, 7], np.int32), params)
    outcomes = []
    step: Any
    for sampler in (make_sampler(V, 2, rows=4, runs=1), Sampler(V, 2)):
        step = sample if isinstance(sampler, GpuSampler) else run_step
        sampler.open_slot(opening)
        first = step(sampler, logits, make_batch([params], lengths=[4], slots=[1]))
        second = step(sampler, logits[:1], make_batch([params], slots=[1], draws=[1]))
        outcomes.append(bits(first) + bits(second))
    assert outcomes[0] == outcomes[1]


def test_a_step_that_is_too_large_is_refused(make_sampler: Callable[..., Any]) -> None:
    sampler = make_sampler(V, 0, rows=2, runs=2, top_width=1, kept_width=3)
    row = make_row("flat", V, np.random.default_rng(0))[None]
    for message, params in (
        ("top_width: 2", [SamplingParams(top_logprobs=2)]),
        ("kept_width: 4", [SamplingParams(kept_ids_max=4)]),
        ("rows: 3", [SamplingParams()] * 3),
    ):
        with pytest.raises(ValueError, match=message):
            sample(sampler, row.repeat(len(params), 0), make_batch(params))


def test_cupy_is_imported_only_when_it_is_needed() -> None:
    importlib.import_module("offbook.kernels.cuda_device")
    if importlib.util.find_spec("cupy") is None:
        with pytest.raises((ImportError, RuntimeError)):
            Cuda()


def test_the_check_for_a_gpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prepared script's own checks, on fibers: when a GPU comes, the script is not what fails."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "gpu"))
    check = importlib.import_module("check_sampler")
    cuda = HostCuda()
    with cuda.active():
        check.check_bits(cuda, V, (1, 30))
        check.check_graph(cuda, V, 30)
