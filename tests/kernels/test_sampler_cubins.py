"""The compile gate: the sampler's kernel builds for every architecture without a GPU, within its budgets."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from offbook.kernels import nvrtc

ARCHITECTURES = (80, 90, 100, 120)
REGISTERS = 64  # two blocks of 512 threads a multiprocessor: 65536 / 1024
SHARED_BYTES = 48 * 1024  # static shared memory ends here
SPILL_STORE_BYTES = 640  # a thread, all functions together: registers saved around calls, none in the loops over a row


@pytest.fixture(scope="module")
def compiled() -> dict[int, nvrtc.Compiled]:
    with ThreadPoolExecutor(2) as pool:
        cubins = pool.map(lambda architecture: nvrtc.compile_cubin("sampler.cu", architecture), ARCHITECTURES)
    return dict(zip(ARCHITECTURES, cubins, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_fits(compiled: dict[int, nvrtc.Compiled], architecture: int) -> None:
    result = compiled[architecture]
    assert result.cubin.startswith(b"\x7fELF") and b"offbook_sample" in result.cubin
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", result.log)]
    shared = [int(n) for n in re.findall(r"(\d+) bytes smem", result.log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", result.log)]
    assert registers and max(registers) <= REGISTERS
    assert shared and max(shared) <= SHARED_BYTES
    assert spills and sum(spills) <= SPILL_STORE_BYTES


def test_contraction_and_flush_to_zero_are_off() -> None:
    assert {"-fmad=false", "-ftz=false", "-prec-div=true"} <= set(nvrtc.FLAGS)
    assert not any("fast" in flag for flag in nvrtc.FLAGS)


def test_a_refused_source_says_why() -> None:
    with pytest.raises(nvrtc.NvrtcError, match="could not compile"):
        nvrtc.compile_cubin("sampler.cpp", 90)
