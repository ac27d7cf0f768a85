"""What the GPU sampler sends, launches and collects, without a GPU: its device memory is host memory and its kernel is
the same kernel on fibers. Only CuPy's and torch's CUDA calls themselves are not met here."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sampler_cases import ROW_KINDS, bits, make_batch, make_row, pack_masks, params_grid, run_step

from offbook.kernels import sampler_gpu
from offbook.kernels.build import load_library
from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import Sampler, new_result
from offbook.kernels.step import SCORE, SlotOpen
from offbook.kernels.torch_device import TorchDevice, open_sampler

V = 800


class HostTorch:
    """torch whose "cuda" device is the host."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, dtype: Any = torch.float32, **_: Any) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    empty = zeros

    def from_numpy(self, array: Any) -> Any:
        return torch.from_numpy(array).clone()

    @property
    def cuda(self) -> Any:
        return SimpleNamespace(
            current_device=lambda: 0,
            get_device_properties=lambda _: SimpleNamespace(major=9, minor=0, multi_processor_count=2),
            current_stream=lambda: SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
        )


def fiber_kernel(grid: tuple[int], block: tuple[int], pointers: tuple[int, int], *_: Any) -> None:
    assert block == (512,)
    call = load_library("sampler_fibers", ("sampler_fibers.cpp",)).offbook_sample_on_fibers
    call.restype = ctypes.c_char_p
    assert call(*(ctypes.c_void_p(int(p)) for p in pointers), grid[0], 2, 0, 0) == b""


@pytest.fixture
def make_sampler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., sampler_gpu.GpuSampler]:
    module = SimpleNamespace(load=lambda _: None, get_function=lambda _: fiber_kernel)
    stream = SimpleNamespace(from_external=lambda s: s.__cuda_stream__())
    cupy = SimpleNamespace(cuda=SimpleNamespace(function=SimpleNamespace(Module=lambda: module), Stream=stream))
    fakes = {"cupy": cupy, "torch": HostTorch()}
    monkeypatch.setattr(sampler_gpu, "importlib", SimpleNamespace(import_module=fakes.__getitem__))
    monkeypatch.setattr(sampler_gpu, "cached_cubin", lambda *_: Path(__file__))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    return sampler_gpu.GpuSampler


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
        step = sample if isinstance(sampler, sampler_gpu.GpuSampler) else run_step
        sampler.open_slot(opening)
        first = step(sampler, logits, make_batch([params], lengths=[4], slots=[1]))
        second = step(sampler, logits[:1], make_batch([params], slots=[1], draws=[1]))
        outcomes.append(bits(first) + bits(second))
    assert outcomes[0] == outcomes[1]


def test_the_torch_device_draws_with_it(make_sampler: Callable[..., Any], lab: Any) -> None:
    """Logits go to the sampler as tensors, and what comes back is what the CPU's sampler draws from the same ones."""
    model = lab.model(seed=12)
    params = [SamplingParams(seed=3), SamplingParams(temperature=0.0, top_logprobs=3), SamplingParams(top_p=0.8)]
    answers = []
    for gpu in (True, False):
        device = TorchDevice(model.spec, model.weights, kv_bytes=1 << 20, threads=1, dtype="float32", slots=2)
        if gpu:
            device._sampler = make_sampler(model.spec.vocabulary_size, 2, rows=8, runs=4, mask_rows=2)
        batch = make_batch(params, mask_rows=[0, -1, -1])
        placed = lab.batch(([5, 6, 7], 0, [0]), ([9, 8], 0, [1]), ([4], 0, [2]), last_only=True)
        for name in ("token_ids", "positions", "row_sequence", "block_tables", "copies", "logit_rows"):
            setattr(batch, name, getattr(placed, name))
        device.forward(batch)
        answers.append(bits(device.sample(batch, pack_masks(np.arange(model.spec.vocabulary_size)[None] % 3 == 0))))
        device.close()
    assert answers[0] == answers[1]


def test_without_cupy_tokens_are_drawn_on_the_cpu_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    if importlib.util.find_spec("cupy") is None:
        assert isinstance(open_sampler(V, 1, "cuda"), Sampler)
        assert "offbook[gpu]" in caplog.text


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


def test_cupy_is_imported_only_when_a_sampler_is_made() -> None:
    importlib.import_module("offbook.kernels.sampler_gpu")
    if importlib.util.find_spec("cupy") is None:
        with pytest.raises(ImportError):
            sampler_gpu.GpuSampler(V, 0, rows=1, runs=1)
