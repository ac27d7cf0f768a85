"""The CUDA device without a GPU: its kernels on fibers, torch's products on the CPU, its graphs as lists of calls.

Right against a float64 transformer, blind to a row's company, drawing what the CPU's sampler draws. What only a GPU can
show (torch's and CuPy's CUDA calls, cuBLAS, times) is in tests/gpu.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from host_cuda import HostCuda, use_small_tiles
from sampler_cases import bits, make_batch, pack_masks, run_step

from offbook.kernels import cuda_device, devices, torch_device
from offbook.kernels.cuda_device import CudaDevice
from offbook.kernels.cuda_model import buckets
from offbook.kernels.cuda_products import TiledProducts
from offbook.kernels.model_files import open_model
from offbook.kernels.nvrtc import NvrtcError
from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import Sampler
from offbook.kernels.step import SAMPLE, SCORE, SlotOpen, StepBatch, StepLimits

Dtype = Literal["float32", "bfloat16"]
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {"n_heads": 6, "n_kv_heads": 2, "head_dim": 20},
    "qwen2": {"qkv_bias": True, "tied_head": False},
    "qwen3": {"qk_norm": True},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)


def open_cuda(model: Any, dtype: Dtype = "float32", rows: int = 400, **limits: int) -> CudaDevice:
    spec = model.spec
    block = 2 * spec.n_layers * spec.n_kv_heads * 16 * spec.head_dim * (2 if dtype == "bfloat16" else 4)
    sizes: dict[str, Any] = {"kv_bytes": 100 * block, "slots": 6, "limits": StepLimits(rows, **limits)}
    return CudaDevice(spec, model.weights, dtype=dtype, cuda=HostCuda(), **sizes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_float64(variant: str, lab: Any) -> None:
    model = lab.model(seed=3, vocabulary_size=90, **VARIANTS[variant])
    ids = np.random.default_rng(0).integers(0, 90, 301).tolist()
    device = open_cuda(model)
    batch = lab.batch((ids[:300], 0, range(5, 24)))
    device.forward(batch)
    assert np.abs(device.logits(batch.logit_rows) - model.truth(ids)[:300]).max() < 2e-5
    device.close()
    device.close()


Bits = dict[tuple[int, int], bytes]
Chunk = tuple[int, int, int]  # sequence, first position, end


def bits_of(device: CudaDevice, lab: Any, steps: list[list[Chunk]], ids: list[list[int]], tables: Any) -> Bits:
    """(sequence, position) -> everything the device says of that row."""
    found: Bits = {}
    for chunks in steps:
        rows = [(ids[s][begin:end], begin, tables[s].tolist()) for s, begin, end in chunks]
        batch = lab.batch(*rows)
        device.forward(batch)
        places = ((s, p) for s, begin, end in chunks for p in range(begin, end))
        found |= dict(zip(places, (row.tobytes() for row in device.logits(batch.logit_rows)), strict=True))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_company_chunks_and_placement_do_not_show(dtype: Any, variant: str, lab: Any) -> None:
    """Alone and token by token, or in crowds and chunks, through graphs or without, within a partition and beyond."""
    model = lab.model(seed=4, vocabulary_size=90, **VARIANTS[variant])
    device = open_cuda(model, dtype)
    random = np.random.default_rng(1)
    ids = [random.integers(0, 90, n + 1).tolist() for n in (270, 17, 40, 5, 64)]
    lone: Bits = {}
    for s, tokens in enumerate(ids):
        n = len(tokens) - 1
        alone = [[(s, 0, max(n - 9, 1))], *([(s, p, p + 1)] for p in range(max(n - 9, 1), n))]
        lone |= bits_of(device, lab, alone, ids, random.permutation(100)[:90].reshape(5, 18))
    mixed = [[(0, 0, 16), (1, 0, 1), (2, 0, 33)], [(0, 16, 17), (1, 1, 17), (4, 0, 60), (2, 33, 34)],
             [(2, 34, 40), (0, 17, 265), (3, 0, 5), (4, 60, 64)], [(0, 265, 266)], [(0, 266, 270)]]  # fmt: skip
    assert bits_of(device, lab, mixed, ids, random.permutation(100)[:90].reshape(5, 18)) == lone


def test_copies_come_first(lab: Any) -> None:
    model = lab.model(seed=5)
    device, ids = open_cuda(model), np.random.default_rng(2).integers(0, 150, 41).tolist()
    plain = bits_of(device, lab, [[(0, 0, 40)]], [ids], np.array([[1, 2, 3]]))
    moved = lab.batch((ids[16:40], 16, [9, 8, 7]), copies=[[1, 9]])
    device.forward(moved)
    assert [row.tobytes() for row in device.logits(moved.logit_rows)] == [plain[0, p] for p in range(16, 40)]


def test_it_draws_what_the_cpu_draws_from_the_same_logits(lab: Any) -> None:
    """Masks, slots, drafts, alternatives and survivors, more logits rows than fit at once, twice through the graphs."""
    model = lab.model(seed=6)
    device, reference = open_cuda(model, alternatives=4, run_rows=8), Sampler(150, 6)
    penalised = SamplingParams(seed=1, frequency_penalty=0.6, repetition_penalty=1.2, logit_bias=((3, 2.0),))
    params = [
        penalised, SamplingParams(temperature=0.0, top_logprobs=4),
        SamplingParams(top_p=0.8, kept_ids_max=50, seed=2), SamplingParams(min_p=0.1, seed=3), SamplingParams(),
    ]  # fmt: skip
    lengths, kinds = [1, 6, 1, 1, 30], [SAMPLE] * 4 + [SCORE]
    opening = SlotOpen(0, np.array([5, 6], np.int32), np.array([7], np.int32), penalised)
    reference.open_slot(opening)
    for turn in range(2):
        random = np.random.default_rng(turn)
        rows = [(random.integers(0, 150, n).tolist(), 0, [3 * i, 3 * i + 1]) for i, n in enumerate(lengths)]
        placed = lab.batch(*rows)
        batch = make_batch(
            params, lengths=lengths, kinds=kinds, slots=[0, -1, -1, -1, -1], draws=[turn] * 5,
            forced=[-1] * 9 + random.integers(0, 150, 30).tolist(),
            draft=[-1, *random.integers(0, 150, 5), *[-1] * 33], mask_rows=[-1] * 7 + [1, 0] + [-1] * 30,
        )  # fmt: skip
        for name in ("token_ids", "positions", "row_sequence", "block_tables", "copies", "logit_rows"):
            setattr(batch, name, getattr(placed, name))
        batch.slot_opens = [opening] * (turn == 0)
        masks = pack_masks(random.random((2, 150)) < 0.4)
        device.forward(batch)
        logits = device.logits(batch.logit_rows)
        assert bits(device.sample(batch, masks)) == bits(run_step(reference, logits, batch, masks))


def test_a_step_without_logits_rows(lab: Any) -> None:
    device = open_cuda(lab.model())
    batch = lab.batch(([1, 2, 3], 0, [0]))
    batch.logit_rows = np.empty(0, np.int32)
    device.forward(batch)
    assert len(device.sample(batch, None).token) == 0


def test_what_does_not_fit_is_refused_before_anything_is_sent(lab: Any) -> None:
    device = open_cuda(lab.model(), rows=30)
    ids = [7] * 41
    good = lab.batch((ids[:20], 0, [0, 1]))
    device.forward(good)
    before = device.logits(good.logit_rows).tobytes()
    refused: list[tuple[str, StepBatch]] = [
        ("token_ids: 31 rows are more than the 30", lab.batch(([1] * 31, 0, [2, 3]))),
        ("block_tables: 7 are more than the 6", lab.batch(*(([1], 0, [i]) for i in range(7)))),
        ("token_ids: .* outside 0..149", lab.batch(([150], 0, [2]))),
        ("block_tables: .* outside 0..99", lab.batch(([1], 0, [100]))),
    ]
    for message, batch in refused:
        with pytest.raises(ValueError, match=message):
            device.forward(batch)
    long_run = make_batch([SamplingParams()], lengths=[25])
    long_run.logit_rows = np.arange(25, dtype=np.int32)
    device.forward(lab.batch((ids[:25], 0, [0, 1])))
    with pytest.raises(ValueError, match="a SAMPLE run of 25 rows is longer than 24"):
        device.sample(long_run, None)
    device.forward(good)
    assert device.logits(good.logit_rows).tobytes() == before


def test_heads_without_room_and_too_little_memory_are_refused(lab: Any) -> None:
    with pytest.raises(ValueError, match="head_dim: 32 query heads of 256 for a KV head are too many"):
        open_cuda(lab.model(n_heads=32, n_kv_heads=1, head_dim=256, n_layers=1))
    model = lab.model()
    with pytest.raises(ValueError, match="kv_bytes: 100 bytes of KV memory are less than one block"):
        CudaDevice(model.spec, model.weights, kv_bytes=100, slots=1, limits=StepLimits(8), cuda=HostCuda())


def test_buckets_grow_by_thirds_and_halves() -> None:
    assert buckets(64, 1000) == [64, 128, 192, 256, 384, 512, 768, 1024]
    assert buckets(1, 7) == [1, 2, 3, 4, 6, 8]
    assert buckets(64, 3) == [64]


class Fickle(HostCuda):
    """Products whose rows know how many they are, or which place they have."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def product(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        super().product(x, weight, out)
        if self.fault == "place" and len(x) == 16:
            out[3] += 1e-3
        if self.fault == "size" and len(x) == 64:
            out += 1e-3


@pytest.mark.parametrize(("fault", "tiles"), [("none", [16, 64]), ("place", [4, 64]), ("size", [16])])
def test_tiles_in_which_rows_differ_are_not_used(fault: str, tiles: list[int]) -> None:
    weight = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    cuda = Fickle(fault)
    products = TiledProducts(cuda, [(weight, torch.float32)], bases=(16, 4), larger=(64,))
    assert products.tiles == tiles
    x, out = torch.randn(80 + 2 * products.base, 32), torch.zeros(80 + 2 * products.base, 40)
    products.product(x, weight, out)
    for begin in range(0, len(x), products.base):
        part = torch.zeros(products.base, 40)
        cuda.product(x[begin : begin + products.base], weight, part)
        assert torch.equal(out[begin : begin + products.base], part)


def test_without_kernels_torch_steps_in_with_one_warning(
    tiny_model_dir: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a machine with CUDA but without CuPy or NVRTC the plain torch device opens in its place."""
    opened = []
    monkeypatch.setattr(devices, "cuda_available", lambda: True)
    monkeypatch.setattr(torch_device, "TorchDevice", lambda *_, kind, **__: opened.append(kind))
    for error in (ImportError("No module named 'cupy'"), NvrtcError("NVRTC was not found")):

        def refuse(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(cuda_device, "CudaDevice", refuse)
        with caplog.at_level(logging.WARNING):
            devices.open_device(open_model(tiny_model_dir), kv_bytes=1 << 20, threads=1, slots=1, limits=StepLimits(8))
        assert [str(error) in r.getMessage() and "offbook[gpu]" in r.getMessage() for r in caplog.records] == [True]
        caplog.clear()
    assert opened == ["cuda", "cuda"]


def test_the_check_for_a_gpu_runs(tiny_model_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prepared script's own checks, on fibers: when a GPU comes, the script is not what fails."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "gpu"))
    check = importlib.import_module("check_step")
    files = open_model(tiny_model_dir)
    monkeypatch.setattr(check, "CONTEXT", 60)
    monkeypatch.setattr(check, "SHAPES", ((32, 4, 4),))
    check.check_attention(HostCuda)
    check.check_parity(files, HostCuda, length=40)
    check.check_crowds(files, HostCuda, "bfloat16", (1, 2, 5))
    check.time_steps(files, HostCuda, "bfloat16", 1e9, (1, 4), (30,), repeats=2)
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["check_step.py", "--short"])
        with pytest.raises(SystemExit, match="needs a CUDA device: nothing was run"):
            check.main()
