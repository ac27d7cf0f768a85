"""The CUDA kernel without a GPU: on fibers it gives the bits of the CPU build under every schedule, and the harness
notices barriers that are missing or that some threads do not reach."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np
import pytest
from in_a_child import in_a_child
from sampler_cases import ROW_KINDS, FiberSampler, bits, make_batch, make_row, pack_masks, params_grid, run_step

from offbook.kernels.build import CSRC, load_library
from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import Sampler
from offbook.kernels.step import F32, SCORE, U32, SlotOpen, StepBatch

V = 1531


def grid_step(seed: int, v: int) -> tuple[F32, StepBatch, U32]:
    """Every parameter set on some kind of row, a third of the rows masked, one SCORE run."""
    rng = np.random.default_rng(seed)
    params = [*params_grid(seed), SamplingParams(top_logprobs=3)]
    kinds = [0] * (len(params) - 1) + [SCORE]
    rows = [make_row(ROW_KINDS[(i + seed) % len(ROW_KINDS)], v, rng) for i in range(len(params))]
    rows[3][5 % v] = np.nan
    allowed = rng.random((4, v)) < 0.5
    allowed[1] = False
    masks = pack_masks(allowed)
    mask_rows = [i % 4 if i % 3 == 0 and i < 27 else -1 for i in range(len(params))]
    forced = [-1] * (len(params) - 1) + [v - 1]
    batch = make_batch(params, kinds=kinds, mask_rows=mask_rows, forced=forced)
    return np.stack(rows), batch, masks


@pytest.mark.parametrize("schedule", [0, 1, 2, 3])
def test_fibers_give_the_bits_of_the_lockstep_build(schedule: int) -> None:
    fibers, host = FiberSampler(V, 0, schedule=schedule), Sampler(V, 0)
    logits, batch, masks = grid_step(schedule, V)
    on_fibers, on_host = run_step(fibers, logits, batch, masks), run_step(host, logits, batch, masks)
    assert fibers.complaint == ""
    assert bits(on_fibers) == bits(on_host)
    assert on_fibers.run_mu.tobytes() == on_host.run_mu.tobytes()
    assert (on_host.error != 0).sum() >= 2 and (on_host.token >= 0).sum() > 20


@pytest.mark.parametrize("v", [3, 31, 512, 513, 5003])
def test_fibers_agree_at_odd_vocabularies(v: int) -> None:
    fibers = FiberSampler(v, 0, schedule=2, grid=5)
    logits, batch, masks = grid_step(v, v)
    result = run_step(fibers, logits, batch, masks)
    assert fibers.complaint == ""
    assert bits(result) == bits(run_step(Sampler(v, 0), logits, batch, masks))


PENALISED = SamplingParams(
    temperature=0.9, top_p=0.97, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, seed=9,
    logit_bias=((4, 2.5), (1000, -100.0)), mirostat_target=2.0,
)  # fmt: skip


def penalised_steps(sampler: Sampler) -> bytes:
    """Two runs of a sequence with a slot, the second a draft that is accepted for a while, both masked."""
    logits = np.stack([make_row("normal", V, np.random.default_rng(5))] * 6)
    masks = pack_masks(np.random.default_rng(6).random((1, V)) < 0.9)
    where: dict[str, Any] = {"lengths": [6], "slots": [0], "mask_rows": [0] * 6}
    sampler.open_slot(SlotOpen(0, np.array([1, 2, 2, 7], np.int32), np.array([7, 9], np.int32), PENALISED))
    first = run_step(sampler, logits, make_batch([PENALISED], draft=[-2] * 6, **where), masks)
    drafts = [int(first.token[0])] * 6
    second = run_step(sampler, logits, make_batch([PENALISED], draft=drafts, draws=[1], **where), masks)
    return bits(first) + bits(second) + second.run_mu.tobytes()


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_fibers_carry_slots_drafts_and_mu(schedule: int) -> None:
    assert penalised_steps(FiberSampler(V, 1, schedule=schedule)) == penalised_steps(Sampler(V, 1))


def probe(schedule: int, skip_line: int) -> tuple[list[int], str]:
    """What the threads were told by primitives called one after another; the harness's complaint."""
    told = np.zeros((512, 5), np.uint64)
    x = np.random.default_rng(3).standard_normal(1024).astype(np.float32)
    call = load_library("sampler_fibers", ("sampler_fibers.cpp",)).offbook_probe_on_fibers
    call.restype = ctypes.c_char_p
    pointers = (ctypes.c_void_p(x.ctypes.data), 1024, ctypes.c_void_p(told.ctypes.data))
    complaint = call(*pointers, schedule, skip_line).decode()
    return [int(v) for v in np.unique(told, axis=0).ravel()], complaint


def test_primitives_one_after_another_tell_all_threads_the_same() -> None:
    x = np.random.default_rng(3).standard_normal(1024).astype(np.float32)
    lanes = np.sort(x.reshape(2, 512).max(0))
    values = [int(lanes[-3].view(np.uint32)), int(lanes[1].view(np.uint32)), 9 << 32 | 36, 1023 << 32 | 2046, 1024]
    for schedule in range(4):
        assert probe(schedule, 0) == (values, "")


def barrier_lines() -> list[int]:
    source = (CSRC / "block_cuda.cuh").read_text().splitlines()
    return [number for number, line in enumerate(source, 1) if "__syncthreads()" in line]


def test_a_barrier_left_out_is_noticed() -> None:
    """Each barrier is needed: without it some schedule gives other bits, the harness complains, or memory is hurt."""
    host = Sampler(V, 1)
    steps = [grid_step(seed, V) for seed in (0, 1)]
    truth = [bits(run_step(host, *step)) for step in steps]
    penalised = penalised_steps(host)
    probed = probe(0, 0)

    def noticed(line: int, schedule: int) -> bool:
        fibers = FiberSampler(V, 1, schedule=schedule)
        fibers.skip_line = line
        outcomes = (bits(run_step(fibers, *step)) for step in steps)
        wrong = any(outcome != right or fibers.complaint for outcome, right in zip(outcomes, truth, strict=True))
        return wrong or penalised_steps(fibers) != penalised or probe(schedule, line) != probed

    assert not in_a_child(partial(noticed, 0, 1))  # nothing is noticed where nothing is left out
    schedules = (1, 0, 2, 3, 4)
    unnoticed = [n for n in barrier_lines() if not any(in_a_child(partial(noticed, n, s)) for s in schedules)]
    assert unnoticed == []


def test_a_barrier_that_some_threads_miss_is_reported() -> None:
    logits, batch, masks = grid_step(0, V)
    for line in barrier_lines()[:4]:
        fibers = FiberSampler(V, 0)
        fibers.diverge_line = line
        run_step(fibers, logits, batch, masks)
        assert "thread" in fibers.complaint, line
