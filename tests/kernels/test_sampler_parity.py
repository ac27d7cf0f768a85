"""The CPU sampler against the float64 oracle, and against itself: levels, batches, cuts, drafts, threads.

The oracle rounds elsewhere, so a token at the very edge of a cut may fall on the other side; such rows are allowed
where the masses prove it, and must be few.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from sampler_cases import ROW_KINDS, bits, make_batch, make_row, pack_masks, params_grid, run_step

from offbook.kernels import sampler as sampler_module
from offbook.kernels.build import NoCompilerError, cpu_level, load_library
from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import SOURCES, Sampler
from offbook.kernels.sampler_reference import ReferenceSampler, philox_u64
from offbook.kernels.step import ERROR_EMPTY, ERROR_NAN, F32, SCORE, SlotOpen, StepBatch, StepResult


def assert_close(result: StepResult, oracle: StepResult, what: str) -> int:
    """Equal up to rounding, row by row; returns how many rows fell on another side of an edge."""
    edges = 0
    assert result.error.tolist() == oracle.error.tolist(), what
    assert result.top_ids.tolist() == oracle.top_ids.tolist(), what
    np.testing.assert_allclose(result.top_logprobs, oracle.top_logprobs, rtol=2e-6, atol=4e-6, err_msg=what)
    for k in range(len(result.token)):
        if result.token[k] != oracle.token[k] or result.kept[k] != oracle.kept[k]:
            assert abs(int(result.kept[k]) - int(oracle.kept[k])) <= max(2, oracle.kept[k] // 500), f"{what} row {k}"
            edges += 1
            continue
        assert math.isclose(result.logprob[k], oracle.logprob[k], rel_tol=2e-6, abs_tol=4e-6), f"{what} row {k}"
        a, b = float(result.sampling_logprob[k]), float(oracle.sampling_logprob[k])
        assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5), f"{what} row {k}: {a} {b}"
        assert (k in result.kept_ids) == (k in oracle.kept_ids), f"{what} row {k}"
        if k in result.kept_ids:
            assert result.kept_ids[k].tolist() == oracle.kept_ids[k].tolist(), f"{what} row {k}"
    np.testing.assert_allclose(result.run_mu, oracle.run_mu, rtol=1e-4, atol=1e-4, err_msg=what)
    return edges


def mixed_step(v: int, seed: int, kind: str) -> tuple[F32, StepBatch, Any]:
    """All parameter sets on rows of one kind, every third row masked."""
    rng = np.random.default_rng(seed)
    params = params_grid(seed)
    logits = np.stack([make_row(kind, v, rng) for _ in params])
    allowed = rng.random((3, v)) < 0.6
    allowed[:, rng.integers(v)] = True
    mask_rows = [i % 9 // 3 if i % 3 == 0 else -1 for i in range(len(params))]
    return logits, make_batch(params, mask_rows=mask_rows), pack_masks(allowed)


@pytest.mark.parametrize("v", [3, 33, 1000, 4099, 49152])
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_parity_with_the_oracle(v: int, kind: str) -> None:
    edges = 0
    for seed in range(1 if v > 10000 else 4):
        logits, batch, masks = mixed_step(v, seed, kind)
        result = run_step(Sampler(v, 0), logits, batch, masks)
        oracle = run_step(ReferenceSampler(v, 0), logits, batch, masks)
        edges += assert_close(result, oracle, f"v={v} kind={kind} seed={seed}")
    assert edges <= 4


@pytest.mark.parametrize("seed", range(6))
def test_parity_of_penalties_bias_and_drafts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    v = [5, 77, 1000, 5000, 20000, 2049][seed]
    bias = tuple((int(i), float(rng.normal() * 5)) for i in rng.choice(v, min(v, 40), replace=False))
    grid = [
        SamplingParams(repetition_penalty=1.4, seed=seed, temperature=0.8),
        SamplingParams(repetition_penalty=0.0, seed=seed, top_k=20),
        SamplingParams(frequency_penalty=1.5, presence_penalty=-2.0, seed=seed, temperature=0.0),
        SamplingParams(logit_bias=bias, seed=seed, top_p=0.9),
        SamplingParams(logit_bias=bias, repetition_penalty=0.7, frequency_penalty=0.1, seed=seed, mirostat_target=1.0),
    ]
    samplers: tuple[Any, Any] = Sampler(v, len(grid)), ReferenceSampler(v, len(grid))
    outcomes = []
    for sampler in samplers:
        rng = np.random.default_rng(seed + 100)
        for slot, params in enumerate(grid):
            prompt, output = rng.integers(0, v, 30).astype(np.int32), rng.integers(0, v, 9).astype(np.int32)
            sampler.open_slot(SlotOpen(slot, prompt, output, params))
        logits = np.concatenate([make_row("normal", v, rng)[None].repeat(3, 0) for _ in grid])
        logits[1, 0] = -np.inf
        where: dict[str, Any] = {"lengths": [3] * len(grid), "slots": range(len(grid))}
        first = run_step(sampler, logits, make_batch(grid, **where))
        draft = np.where(first.token < 0, 0, first.token)
        draft[1::3] = draft[0::3]
        outcomes.append((first, run_step(sampler, logits, make_batch(grid, draws=[1] * 5, draft=draft, **where))))
    for a, b in zip(*outcomes, strict=True):
        assert assert_close(a, b, f"seed={seed}") == 0


@pytest.mark.parametrize("level", ["generic", "avx2"])
def test_every_cpu_level_gives_the_same_bits(level: str) -> None:
    if level == "avx2" and cpu_level() == "generic":
        pytest.skip("this CPU has no AVX2")
    for seed, kind in enumerate(ROW_KINDS):
        logits, batch, masks = mixed_step(3001, seed, kind)
        here = run_step(Sampler(3001, 0), logits, batch, masks)
        assert bits(here) == bits(run_step(Sampler(3001, 0, level=level), logits, batch, masks)), kind


def test_a_row_is_the_same_alone_and_anywhere() -> None:
    v = 2500
    logits, batch, masks = mixed_step(v, 1, "tied")
    runs = len(batch.run_params)
    whole = run_step(Sampler(v, 0), logits, batch, masks)
    order = np.random.default_rng(2).permutation(runs)
    shuffled = make_batch([batch.run_params[i] for i in order], mask_rows=batch.row_mask[order])
    mixed = run_step(Sampler(v, 0), logits[order], shuffled, masks)
    for place, i in enumerate(order.tolist()):
        alone = make_batch([batch.run_params[i]], mask_rows=[int(batch.row_mask[i])])
        single = run_step(Sampler(v, 0), logits[i : i + 1], alone, masks)
        width = single.top_ids.shape[1]
        for other, k in ((whole, i), (mixed, place)):
            assert single.token[0] == other.token[k] and single.kept[0] == other.kept[k]
            assert single.logprob[0].tobytes() == other.logprob[k].tobytes()
            assert single.sampling_logprob[0].tobytes() == other.sampling_logprob[k].tobytes()
            assert single.top_ids[0].tolist() == other.top_ids[k, :width].tolist()
            assert (other.top_ids[k, width:] == -1).all()


def test_a_draft_gives_the_bits_of_single_steps() -> None:
    v, steps = 900, 7
    params = SamplingParams(
        seed=2**64 - 1, choice=3, repetition_penalty=1.2, frequency_penalty=0.3, mirostat_target=2.5, top_logprobs=2
    )
    opening = SlotOpen(0, np.array([1, 5, 5], np.int32), np.array([5], np.int32), params)
    rows = np.stack([make_row("normal", v, np.random.default_rng(i)) for i in range(steps)])
    single = Sampler(v, 1)
    single.open_slot(opening)
    mu, singles = 5.0, []
    for i in range(steps):
        result = run_step(single, rows[i : i + 1], make_batch([params], slots=[0], draws=[i + 1], mu=[mu]))
        singles.append(result)
        mu = float(result.run_mu[0])
    taken = [int(r.token[0]) for r in singles]
    for accepted in (0, 3, 6):  # the draft is right for so many tokens
        draft = [t if i < accepted else (t + 1) % v for i, t in enumerate(taken)]
        batched = Sampler(v, 1)
        batched.open_slot(opening)
        batch = make_batch([params], lengths=[steps], slots=[0], draws=[1], mu=[5.0], draft=draft)
        result = run_step(batched, rows, batch)
        assert result.token.tolist() == taken[: accepted + 1] + [-1] * (steps - accepted - 1)
        for i in range(accepted + 1):
            assert bits(result, slice(i, i + 1)) == bits(singles[i])
        assert result.run_mu[0] == singles[accepted].run_mu[0]
        following = make_batch([params], slots=[0], draws=[accepted + 2], mu=[float(result.run_mu[0])])
        if accepted + 1 < steps:  # the slot holds exactly the tokens taken
            assert bits(run_step(batched, rows[accepted + 1 : accepted + 2], following)) == bits(singles[accepted + 1])


def test_score_runs_may_be_cut_and_forced_tokens_are_taken() -> None:
    v = 700
    rng = np.random.default_rng(3)
    rows = np.stack([make_row("normal", v, rng) for _ in range(8)])
    rows[2, 9] = -np.inf
    penalised = SamplingParams(frequency_penalty=2.0, temperature=0.0, kept_ids_max=5)
    batch = make_batch(
        [SamplingParams(top_logprobs=5), penalised], lengths=[5, 3], kinds=[SCORE, 0], slots=[-1, 0],
        forced=[1, 2, 9, 4, v - 1, 8, -1, -1], draft=[-1] * 5 + [8, -2, -2],
    )  # fmt: skip
    opening = SlotOpen(0, np.empty(0, np.int32), np.empty(0, np.int32), penalised)
    whole, cut = Sampler(v, 1), Sampler(v, 1)
    whole.open_slot(opening)
    cut.open_slot(opening)
    rows[6, 8] = rows[6].max() + 1  # token 8 would win, were it not counted
    result = run_step(whole, rows, batch)
    assert bits(result) == bits(run_step(cut, rows, batch, cuts=(1, 4, 5)))
    assert result.token[:6].tolist() == [1, 2, 9, 4, v - 1, 8] and result.logprob[2] == -9999.0
    assert result.sampling_logprob[5] == 0.0 and result.kept[5] == 1 and result.kept_ids[5].tolist() == [8]
    assert result.token[6] != 8 and result.token[7] == -1
    with pytest.raises(ValueError, match="cut the SAMPLE run 1"):
        run_step(cut, rows, batch, cuts=(6,))


def test_bad_rows_hurt_nobody_else() -> None:
    v = 300
    rows = np.stack([make_row("normal", v, np.random.default_rng(i)) for i in range(6)])
    clean = run_step(Sampler(v, 0), rows, make_batch([SamplingParams(seed=i) for i in range(6)]))
    rows[1, 100], rows[2, 7], rows[3] = np.nan, np.inf, -np.inf
    masks = pack_masks(np.zeros((1, v), np.bool_))
    batch = make_batch([SamplingParams(seed=i) for i in range(6)], mask_rows=[-1, -1, -1, -1, 0, -1])
    result = run_step(Sampler(v, 0), rows, batch, masks)
    assert result.error.tolist() == [0, ERROR_NAN, ERROR_NAN, ERROR_EMPTY, ERROR_EMPTY, 0]
    assert result.token[1:5].tolist() == [-1] * 4
    assert bits(result, slice(0, 1)) == bits(clean, slice(0, 1))
    assert bits(result, slice(5, 6)) == bits(clean, slice(5, 6))


def test_bfloat16_rows_equal_the_same_numbers_as_float32() -> None:
    v = 1000
    wide = np.stack([make_row("normal", v, np.random.default_rng(i)) for i in range(5)])
    narrow = (wide.view(np.uint32) >> 16).astype(np.uint16)
    wide = (narrow.astype(np.uint32) << 16).view(np.float32)
    batch = make_batch([SamplingParams(seed=i, top_p=0.9, top_logprobs=4) for i in range(5)])
    assert bits(run_step(Sampler(v, 0), narrow, batch)) == bits(run_step(Sampler(v, 0), wide, batch))


def test_a_thread_pool_gives_the_same_bits() -> None:
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def backwards(n: int, body: int, context: int) -> None:
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)(body)
        for i in reversed(range(n)):
            work(context, i, i + 1)

    callback = kind(backwards)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    logits, batch, masks = mixed_step(999, 4, "normal")
    pooled = run_step(Sampler(999, 0, address), logits, batch, masks)
    assert bits(pooled) == bits(run_step(Sampler(999, 0), logits, batch, masks))


def test_frequencies_are_those_of_the_distribution() -> None:
    """Chi-square of 20000 draws over 40 survivors; forbidden tokens come exactly never."""
    v, draws = 512, 20000
    row = make_row("normal", v, np.random.default_rng(8))
    params = SamplingParams(seed=77, top_k=40, temperature=1.3)
    allowed = np.random.default_rng(9).random((1, v)) < 0.7
    rows, masks = np.broadcast_to(row, (draws, v)).copy(), pack_masks(allowed)
    batch = make_batch([params] * draws, draws=range(draws), mask_rows=[0] * draws)
    tokens = run_step(Sampler(v, 0), rows, batch, masks).token
    order = [i for i in np.argsort(-row, kind="stable") if allowed[0, i]][:40]
    share = np.exp((row[order].astype(np.float64) - row[order].max()) / 1.3)
    expected = draws * share / share.sum()
    counts = np.bincount(tokens, minlength=v)
    assert counts.sum() == counts[order].sum() == draws
    assert ((counts[order] - expected) ** 2 / expected).sum() < 73  # 99.9 % of 39 degrees of freedom


def test_known_answers_of_the_arithmetic() -> None:
    library = load_library("sampler", SOURCES)
    library.offbook_philox.restype = ctypes.c_uint64
    library.offbook_philox.argtypes = [ctypes.c_uint64] + [ctypes.c_uint32] * 4
    # Random123's known answers for philox4x32-10.
    known = [
        (0, (0, 0, 0, 0), 0x6627E8D5E169C58D),
        (2**64 - 1, (2**32 - 1,) * 4, 0x408F276D41C83B0E),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xD16CFE0994FDCCEB),
    ]
    for key, counter, answer in known:
        assert library.offbook_philox(key, *counter) == philox_u64(key, counter) == answer
    x = -np.concatenate([np.logspace(-30, 1.93, 3000), [0.5, 1, 2, 87]]).astype(np.float32)
    exponential, logarithm, masses = np.empty_like(x), np.empty_like(x), np.empty(len(x), np.uint64)
    addresses = [a.ctypes.data for a in (x, exponential, logarithm, masses)]
    library.offbook_math(ctypes.c_void_p(addresses[0]), len(x), *(ctypes.c_void_p(a) for a in addresses[1:]))
    np.testing.assert_allclose(exponential, np.exp(x.astype(np.float64)), rtol=3e-7)
    np.testing.assert_allclose(logarithm, np.log(-x.astype(np.float64)), rtol=3e-7, atol=1e-7)
    assert masses.tolist() == [int(float(e) * 2**40) for e in exponential]


def test_bad_input_is_refused_by_name() -> None:
    sampler = Sampler(100, 2)
    row, bias = np.zeros((1, 100), np.float32), SamplingParams(logit_bias=((105, 100.0),))
    nothing = np.empty(0, np.int32)
    refused: list[tuple[str, Any]] = [
        ("vocabulary_size", lambda: Sampler(2**20 + 1, 0)),
        ("logit_bias: token id 105", lambda: sampler.open_slot(SlotOpen(0, nothing, nothing, bias))),
        ("prompt_ids", lambda: sampler.open_slot(SlotOpen(0, np.array([-1], np.int32), nothing, bias))),
        ("slot: 2", lambda: sampler.open_slot(SlotOpen(2, nothing, nothing, bias))),
        ("run_slot", lambda: run_step(sampler, row, make_batch([SamplingParams(presence_penalty=1.0)]))),
        ("run_slot", lambda: run_step(sampler, row, make_batch([SamplingParams()], slots=[2]))),
        ("row_forced", lambda: run_step(sampler, row, make_batch([SamplingParams()], forced=[100]))),
        ("row_forced", lambda: run_step(sampler, row, make_batch([SamplingParams()], kinds=[SCORE]))),
        ("masks", lambda: run_step(sampler, row, make_batch([SamplingParams()], mask_rows=[0]))),
        ("logits", lambda: run_step(sampler, row[:, :50], make_batch([SamplingParams()]))),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_without_a_compiler_numpy_samples_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: Any, **__: Any) -> None:
        raise NoCompilerError("none here")

    logits, batch, masks = mixed_step(500, 3, "normal")
    right = run_step(Sampler(500, 0), logits, batch, masks)
    monkeypatch.setattr(sampler_module, "load_library", no_compiler)
    fallback = Sampler(500, 0)
    wanted = "the sampler's library cannot be built, so NumPy samples, which is slower: none here"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", wanted)]
    assert assert_close(run_step(fallback, logits, batch, masks), right, "fallback") == 0
    fallback.close()


def test_log_probabilities_nobody_asked_for_cost_no_pass_and_change_no_draw() -> None:
    rng = np.random.default_rng(11)
    logits = rng.normal(size=(6, 4001)).astype(np.float32) * 3
    settings: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.0},
        {"top_k": 20},
        {"top_p": 0.9},
        {"typical_p": 0.8},
        {"mirostat_target": 3.0},
    )
    asked = [SamplingParams(seed=i, **s) for i, s in enumerate(settings)]
    silent = [msgspec.structs.replace(p, logprobs=False) for p in asked]
    told, untold = (run_step(Sampler(4001, 0), logits, make_batch(params)) for params in (asked, silent))
    assert told.token.tolist() == untold.token.tolist()
    assert told.sampling_logprob.tobytes() == untold.sampling_logprob.tobytes()
    assert told.kept.tolist() == untold.kept.tolist()
    assert (untold.logprob == 0).all()
    assert (told.logprob < 0).all()
