"""The transformer's CUDA kernels without a GPU: on fibers, against float64, under several schedules.

What a block of a GPU would do out of order, fibers do in orders of our choice; barriers are taken away one by one, and
each must be missed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attention_case import MIXED, Attention, pointer, spec_of
from host_cuda import HostCuda
from in_a_child import in_a_child

from offbook.kernels import nvrtc
from offbook.kernels.build import CSRC
from offbook.kernels.cuda_model import ROTATION, SHARED_BYTES, THREADS, kernel_defines
from offbook.kernels.spec import ModelSpec

SHAPES = [(64, 3, 1), (32, 4, 4), (20, 6, 2)]
F32, BF16 = torch.float32, torch.bfloat16
TYPED = [*((s, F32) for s in SHAPES), (SHAPES[0], BF16), ((128, 8, 2), BF16), ((80, 4, 1), BF16), ((96, 2, 1), BF16),
         ((256, 2, 2), F32)]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), TYPED, ids=str)
def test_attention_equals_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    attention = Attention(spec_of(*shape), MIXED, dtype)
    cuda = HostCuda()
    error = np.abs(attention.run(cuda).double().numpy() - attention.truth())
    assert cuda.complaint == ""
    assert error.max() < (2e-6 if dtype is torch.float32 else 1e-2)  # bfloat16 keeps 8 bits of the output


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neither_grouping_nor_splitting_nor_schedules_show(shape: tuple[int, int, int]) -> None:
    attention = Attention(spec_of(*shape), MIXED)
    bits = attention.run(HostCuda())
    assert torch.equal(bits, attention.run(HostCuda(schedule=0), rows_max=1))
    assert torch.equal(bits, attention.run(HostCuda(schedule=1), partials=0))
    assert torch.equal(bits, attention.run(HostCuda(schedule=3), rows_max=2, partials=9))


def test_a_nan_or_infinite_score_shows_in_its_own_row_alone() -> None:
    attention = Attention(spec_of(32, 4, 2), [(40, 1), (300, 3), (7, 1)])
    clean = attention.run(HostCuda())
    attention.queries[0, 5] = torch.inf
    attention.keys[:, attention.places(1, 303)[302]] = torch.nan  # what only the last row of the second sequence reads
    attention.values[:, attention.places(1, 303)[302]] = torch.nan
    out = attention.run(HostCuda())
    assert out[0, :32].isnan().all() and out[3].isnan().all()
    assert torch.equal(out[[1, 2, 4]], clean[[1, 2, 4]])


def kernel_of(cuda: HostCuda, spec: ModelSpec, dtype: torch.dtype, name: str) -> Callable[..., None]:
    return cuda.kernels("transformer.cu", THREADS, kernel_defines(spec, dtype))(f"offbook_{name}")


def norm(cuda: HostCuda, x: torch.Tensor, added: torch.Tensor | None, picks: list[int] | None) -> torch.Tensor:
    """RMSNorm by the kernel; x is changed where no rows are picked."""
    n = x.shape[1]
    weight = torch.linspace(0.5, 1.5, n)
    chosen = None if picks is None else torch.tensor(picks, dtype=torch.int32)
    out = torch.zeros(len(x) if picks is None else len(picks), n)
    run = kernel_of(cuda, spec_of(32, 4, 2), torch.float32, "norm")
    run(len(out), pointer(chosen), pointer(x), pointer(added), pointer(weight), pointer(out), np.int32(n),
        np.float32(1e-5))  # fmt: skip
    return out


def test_norm_adds_picks_and_scales() -> None:
    x, added = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)), torch.full((5, 100), 0.25)

    def truth(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.double()
        return rows / (rows.square().mean(1, keepdim=True) + 1e-5).sqrt() * torch.linspace(0.5, 1.5, 100)

    plain = x.clone()
    assert (norm(HostCuda(), plain, None, None) - truth(x)).abs().max() < 1e-6
    assert torch.equal(plain, x)
    assert (norm(HostCuda(), plain, added, None) - truth(x + added)).abs().max() < 1e-6
    assert torch.equal(plain, x + added)
    picked = norm(HostCuda(), plain, added, [3, 3, 0])
    assert (picked - truth(x + 2 * added)[[3, 3, 0]]).abs().max() < 1e-6
    assert torch.equal(plain, x + added)


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_places_keys_and_values(normed: bool) -> None:
    spec, rows = spec_of(20, 6, 2), 3
    random = torch.Generator().manual_seed(2)
    qkv, bias = torch.randn(rows, 10 * 20, generator=random), torch.randn(10 * 20, generator=random)
    q_norm, k_norm = torch.rand(20, generator=random) + 0.5, torch.rand(20, generator=random) + 0.5
    angles = torch.rand(8, 10, generator=random)
    cosines, sines = angles.cos(), angles.sin()
    positions, places = torch.tensor([7, 0, 3], dtype=torch.int32), torch.tensor([40, 0, 17], dtype=torch.int32)
    keys, values, queries = torch.zeros(2, 48, 20), torch.zeros(2, 48, 20), torch.zeros(rows, 120)
    record = np.zeros(1, ROTATION)
    record["cosines"], record["sines"], record["bias"] = pointer(cosines), pointer(sines), pointer(bias)
    record["q_norm"], record["k_norm"] = (pointer(q_norm), pointer(k_norm)) if normed else (0, 0)
    record["cache_places"], record["heads"], record["kv_heads"], record["eps"] = 48, 6, 2, 1e-5
    run = kernel_of(HostCuda(), spec, torch.float32, "rotate")
    run(rows, np.uint64(record.ctypes.data), pointer(positions), pointer(places), pointer(qkv), pointer(queries),
        pointer(keys), pointer(values))  # fmt: skip

    heads = (qkv + bias).double().view(rows, 10, 20)

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if normed:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        low, high = x.chunk(2, -1)
        cos, sin = (table[positions.long()].unsqueeze(1).double() for table in (cosines, sines))
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    assert (queries.view(rows, 6, 20) - rotated(heads[:, :6], q_norm)).abs().max() < 1e-5
    assert (keys[:, places.long()].transpose(0, 1) - rotated(heads[:, 6:8], k_norm)).abs().max() < 1e-5
    assert (values[:, places.long()].transpose(0, 1) - heads[:, 8:]).abs().max() < 1e-6
    untouched = [p for p in range(48) if p not in places.tolist()]
    assert not keys[:, untouched].any() and not values[:, untouched].any()


def test_gate_and_embedding() -> None:
    cuda, spec = HostCuda(), spec_of(32, 4, 2)
    gate_up = torch.randn(4, 2 * 200, generator=torch.Generator().manual_seed(3)) * 6
    gate_up[0, :6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 100.0, -100.0, 0.0])
    out = torch.zeros(4, 200)
    kernel_of(cuda, spec, torch.float32, "gate")(4, pointer(gate_up), pointer(out), np.int32(200))
    gate, up = gate_up.double().chunk(2, 1)
    truth = torch.nn.functional.silu(gate) * up
    truth[0, 1] = torch.nan  # minus infinity times a sigmoid of zero
    assert torch.allclose(out.double(), truth, rtol=1e-6, atol=1e-6, equal_nan=True)
    table = torch.randn(9, 30).bfloat16()
    ids, x = torch.tensor([8, 0, 8], dtype=torch.int32), torch.zeros(3, 30)
    kernel_of(cuda, spec, torch.bfloat16, "embed")(3, pointer(ids), pointer(table), pointer(x), np.int32(30))
    assert torch.equal(x, table[ids.long()].float())


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    bits = np.random.default_rng(4).integers(0, 1 << 32, 40_000, dtype=np.uint32)
    bits[:6] = [0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0x80000000, 0x3F808000, 0x3F818000]
    values = torch.from_numpy(bits.view(np.float32)).view(8, 5000)
    gate = torch.full((8, 5000), 200.0)  # whose sigmoid is 1, so that a power of two is all that is multiplied
    scaled = torch.cat((gate, values), 1).bfloat16()
    out = torch.zeros(8, 5000, dtype=torch.bfloat16)
    run = kernel_of(HostCuda(), spec_of(32, 4, 2), torch.bfloat16, "gate")
    run(8, pointer(scaled), pointer(out), np.int32(5000))
    truth = (scaled[:, :5000].float() * scaled[:, 5000:].float()).bfloat16()
    assert torch.equal(out.isnan(), truth.isnan())
    assert torch.equal(out[~out.isnan()].view(torch.int16), truth[~truth.isnan()].view(torch.int16))


@pytest.mark.parametrize("file", ["paged_attention.cuh", "transformer_rows.cuh"])
def test_a_barrier_left_out_is_noticed(file: str) -> None:
    attention = Attention(spec_of(20, 6, 2), [(300, 3), *[(20, 1)] * 6])  # a warp loads parts of others' queries
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    truths = attention.run(HostCuda()), norm(HostCuda(), x, None, None)

    def noticed(line: int, schedule: int) -> bool:
        torch.set_num_threads(1)  # a forked process has lost the others
        cuda = HostCuda(schedule)
        cuda.skip_line, cuda.forgiving = line, True
        outcomes = attention.run(cuda, blocks=1), norm(cuda, x, None, None)
        same = all(torch.equal(a, b) for a, b in zip(outcomes, truths, strict=True))
        return cuda.complaint != "" or not same

    lines = [
        n for n, line in enumerate((CSRC / file).read_text().splitlines(), 1) if re.search("__sync[a-z]+\\(", line)
    ]
    assert lines
    assert not in_a_child(partial(noticed, 0, 1))
    unnoticed = [n for n in lines if not any(in_a_child(partial(noticed, n, schedule)) for schedule in range(6))]
    assert unnoticed == []


ARCHITECTURES = (80, 90, 100, 120)
MODELS = {
    "SmolLM2": (64, 9, 3),
    "Llama-3.1": (128, 32, 8),
    "Qwen2.5": (64, 14, 2),
    "Phi-3": (96, 32, 32),
    "wide": (256, 8, 1),
}


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], nvrtc.Compiled]:
    cases: list[Any] = [(model, 90) for model in MODELS] + [("SmolLM2", a) for a in ARCHITECTURES if a != 90]

    def compile_one(case: tuple[str, int]) -> nvrtc.Compiled:
        dtype = torch.float32 if case[0] == "wide" else torch.bfloat16
        return nvrtc.compile_cubin("transformer.cu", case[1], kernel_defines(spec_of(*MODELS[case[0]]), dtype))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(compile_one, cases), strict=True))


@pytest.mark.slow
def test_the_kernels_compile_within_their_budgets(compiled: dict[tuple[str, int], nvrtc.Compiled]) -> None:
    """Three blocks of 128 threads a multiprocessor at the least, a thread's arrays in registers, next to no spills."""
    for case, result in compiled.items():
        assert result.cubin.startswith(b"\x7fELF") and b"offbook_attend" in result.cubin, case
        numbers = {word: [int(n) for n in re.findall(rf"(\d+) {word}", result.log)]
                   for word in ("registers", "bytes smem", "bytes spill stores", "bytes stack frame")}  # fmt: skip
        assert max(numbers["registers"]) <= 168, case
        assert max(numbers["bytes smem"]) <= SHARED_BYTES, case
        assert max(numbers["bytes spill stores"] + numbers["bytes stack frame"]) <= 32, case
