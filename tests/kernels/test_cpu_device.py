"""The CPU device against float64, and against itself: a row's bits may depend on nothing but the row."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from offbook.kernels import build
from offbook.kernels.build import cpu_levels
from offbook.kernels.cpu_device import CpuDevice
from offbook.kernels.params import SamplingParams
from offbook.kernels.spec import RopeSpec
from offbook.kernels.step import SAMPLE, SCORE, StepBatch

F32 = npt.NDArray[np.float32]
Dtype = Literal["auto", "bfloat16", "float32"]

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied, one KV head": {"tied_head": False, "n_kv_heads": 1},
    "as many KV heads as heads": {"n_kv_heads": 4},
    "bias": {"qkv_bias": True},
    "norms of q and k": {"qk_norm": True},
    "head of 80": {"head_dim": 80, "n_heads": 5, "n_kv_heads": 1},
    "head of 96": {"head_dim": 96, "n_heads": 2, "n_kv_heads": 1},
    "head of 128, eight to one": {"head_dim": 128, "n_heads": 8, "n_kv_heads": 1},
    "nothing divides by 32": {
        "hidden": 72, "ffn": 100, "vocabulary_size": 77, "head_dim": 16, "n_heads": 3, "n_kv_heads": 3,
    },
    "linear rope": {"rope": RopeSpec(theta=5000.0, scaling="linear", factor=4.0)},
}  # fmt: skip
MIXED = {"": "Q4_1", "token_embd": "Q8_0", "attn_v": "BF16", "ffn_down": "Q5_0", "attn_output": "Q4_0"}


def device(
    model: Any, dtype: Dtype = "float32", threads: int = 2, blocks: int = 64, level: str | None = None
) -> CpuDevice:
    spec = model.spec
    size = blocks * spec.n_layers * spec.n_kv_heads * spec.head_dim * 32 * 4
    return CpuDevice(spec, model.weights, kv_bytes=size, threads=threads, dtype=dtype, slots=4, level=level)


def logits(cpu: CpuDevice, batch: StepBatch) -> F32:
    cpu.forward(batch)
    return cpu.logits(0, len(batch.logit_rows)).copy()


def ids_of(model: Any, count: int, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, model.spec.vocabulary_size, count).tolist()
    return ids


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_match_float64(lab: Any, shape: str) -> None:
    model = lab.model(seed=3, **SHAPES[shape])
    ids = ids_of(model, 70)
    cpu = device(model)
    got = logits(cpu, lab.batch((ids, 0, range(5))))
    want = model.truth(ids)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max(), shape
    cpu.close()


NATIVE_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16", "F32")
KINDS: dict[str, dict[str, str]] = {
    **{kind: {"": kind} for kind in NATIVE_KINDS},
    "without a kernel": {"": "Q3_K"},
    "gate and up differ": {"": "Q4_1", "ffn_gate": "Q8_0"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_matches_its_dense_values(lab: Any, kind: str) -> None:
    """Weights are never rounded: float32 activations give float64's logits; 33 rows at once, then one by one."""
    model = lab.model(seed=4, kind=KINDS[kind], n_layers=1, hidden=256, ffn=256, head_dim=64)
    ids = ids_of(model, 35)
    cpu = device(model)
    want = model.truth(ids)
    got = logits(cpu, lab.batch((ids[:33], 0, range(3))))
    steps = [logits(cpu, lab.batch(([ids[i]], i, range(3)))) for i in (33, 34)]
    assert np.abs(np.concatenate([got, *steps]) - want).max() < 3e-5 * np.abs(want).max()
    cpu.close()


def test_bfloat16_stays_near_float64(lab: Any) -> None:
    model = lab.model(seed=5, kind=MIXED)
    ids = ids_of(model, 60)
    cpu = device(model, "bfloat16")
    got, want = logits(cpu, lab.batch((ids, 0, range(4)))), model.truth(ids)
    error = (got - want).std() / want.std()
    assert 1e-4 < error < 0.03  # rounded to 8 bits, and no worse
    cpu.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [MIXED, "BF16", "Q6_K"], ids=["mixed", "bf16", "q6k"])
def test_bits_do_not_depend_on_chunks_blocks_or_threads(lab: Any, kind: Any, dtype: Dtype) -> None:
    shape = {"hidden": 256, "ffn": 256, "head_dim": 64} if kind == "Q6_K" else {"n_heads": 6}
    model = lab.model(seed=6, kind=kind, **shape)
    ids = ids_of(model, 90)
    whole = None
    for threads, chunk, table in (
        (1, 90, range(6)),
        (2, 64, range(9, 3, -1)),
        (3, 16, (7, 60, 2, 9, 33, 1)),
        (2, 7, range(6)),
        (1, 1, range(50, 56)),
    ):
        cpu = device(model, dtype, threads)
        parts = [logits(cpu, lab.batch((ids[i : i + chunk], i, table))) for i in range(0, len(ids), chunk)]
        cpu.close()
        got = np.concatenate(parts).view(np.uint32)
        whole = got if whole is None else whole
        assert np.array_equal(got, whole), (threads, chunk, list(table))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_the_crowd(lab: Any, dtype: Dtype) -> None:
    model = lab.model(seed=7, kind=MIXED, n_heads=6)
    cpu = device(model, dtype, blocks=200)
    rng = np.random.default_rng(7)
    lengths = [1, 2, 15, 16, 17, 31, 33, 40, 64, 65, 5, 80] * 2
    prompts = [ids_of(model, n + 1, seed) for seed, n in enumerate(lengths)]
    blocks = rng.permutation(190)[: 6 * len(lengths)].reshape(-1, 6)
    alone = []
    for ids, table in zip(prompts, blocks, strict=True):
        cpu.forward(lab.batch((ids[:-1], 0, table)))
        alone.append(logits(cpu, lab.batch((ids[-1:], len(ids) - 1, table)))[0])
    chunk = (ids_of(model, 50, 99), 0, [199, 198, 197, 196])
    for size in (2, 3, 4, 7, 13, 24):
        some = rng.permutation(len(prompts))[:size]
        rows = [(prompts[i][-1:], len(prompts[i]) - 1, blocks[i]) for i in some]
        for crowd in (rows, [chunk, *rows]):
            got = logits(cpu, lab.batch(*crowd, last_only=True))[-size:]
            assert all(np.array_equal(a, alone[i]) for a, i in zip(got, some, strict=True)), (size, len(crowd))
    cpu.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [MIXED, "Q4_K", "Q6_K", "F16"], ids=["mixed", "q4k", "q6k", "f16"])
def test_all_cpu_levels_give_the_same_bits(lab: Any, kind: Any, dtype: Dtype) -> None:
    wide = {"hidden": 256, "ffn": 256, "head_dim": 64}
    shape = wide if kind in ("Q4_K", "Q6_K") else {"qkv_bias": True, "n_heads": 6}
    model = lab.model(seed=8, kind=kind, n_layers=1, **shape)
    ids = ids_of(model, 40)
    answers = []
    for level in cpu_levels():
        cpu = device(model, dtype, level=level)
        first = logits(cpu, lab.batch((ids[:-1], 0, range(3))))
        answers.append(np.concatenate([first, logits(cpu, lab.batch((ids[-1:], 39, range(3))))]))
        cpu.close()
    assert all(np.array_equal(a, answers[0]) for a in answers), cpu_levels()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_contexts_give_the_same_bits_however_they_are_cut(lab: Any, dtype: Dtype) -> None:
    """Several partitions of attention: by tiles and by single rows, cut among threads, in a crowd, at any level."""
    model = lab.model(seed=12, kind=MIXED, n_heads=6, context_length=1024)
    ids, table = ids_of(model, 600), range(38)
    others = [(ids_of(model, 300, seed), 0, range(seed, seed + 19)) for seed in range(40, 140, 20)]
    best, *rest = cpu_levels()
    whole = None
    for level, ways in ((best, ((2, 600), (1, 250), (3, 37))), *((other, ((2, 300),)) for other in rest)):
        for threads, chunk in ways:
            cpu = device(model, dtype, threads, 140, level)
            got = [logits(cpu, lab.batch((ids[i : i + chunk], i, table))) for i in range(0, 600, chunk)]
            got += [logits(cpu, lab.batch((ids[i : i + 1], i, table))) for i in range(596, 600)]
            got.append(logits(cpu, lab.batch((ids[-7:], 593, table), *others))[:7])
            cpu.close()
            rows = np.concatenate(got).view(np.uint32)
            whole = rows[:600] if whole is None else whole
            expected = np.concatenate([whole, whole[596:], whole[593:]])
            assert np.array_equal(rows, expected), (level, threads, chunk)
    assert whole is not None
    error = (whole.view(np.float32) - model.truth(ids)).std() / whole.view(np.float32).std()
    assert error < (1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_recycled_block_leaks_nothing(lab: Any, dtype: Dtype) -> None:
    """A sequence whose KV is NaN leaves its blocks to another: same bits as in fresh blocks."""
    model = lab.model(seed=9)
    poison = model.weights["token_embd.weight"].raw
    poison[7] = np.full(model.spec.hidden, np.nan, np.float32).view(np.uint8)
    cpu = device(model, dtype)
    clean = [i if i != 7 else 8 for i in ids_of(model, 37)]
    want = logits(cpu, lab.batch((clean, 0, [10, 11, 12])))
    assert np.isnan(logits(cpu, lab.batch(([7] * 48, 0, [0, 1, 2])))).all()
    for chunk in (37, 8, 1):
        parts = [logits(cpu, lab.batch((clean[i : i + chunk], i, [0, 1, 2]))) for i in range(0, 37, chunk)]
        assert np.array_equal(np.concatenate(parts)[:, :7], want[:, :7]), chunk
        cpu.forward(lab.batch(([7] * 48, 0, [0, 1, 2])))
    both = logits(cpu, lab.batch((clean, 0, [3, 4, 5]), ([7] * 5, 0, [6])))
    assert np.array_equal(both[:37, :7], want[:, :7])
    cpu.close()


def test_copied_blocks_continue_as_the_original(lab: Any) -> None:
    model = lab.model(seed=10)
    cpu = device(model, "bfloat16")
    ids = ids_of(model, 30)
    cpu.forward(lab.batch((ids[:25], 0, [0, 1])))
    want = logits(cpu, lab.batch((ids[25:], 25, [0, 1])))
    got = logits(cpu, lab.batch((ids[25:], 25, [8, 9]), copies=[(1, 9), (0, 8)]))
    assert np.array_equal(got, want)
    cpu.close()


@pytest.mark.parametrize(
    ("vendor", "flags", "levels"),
    [
        ("AuthenticAMD", "avx512_vnni avx512_bf16", ("avx512bf16", "avx512vnni", "avx512", "avx2", "generic")),
        ("GenuineIntel", "avx512_vnni avx512_bf16", ("avx512vnni", "avx512bf16", "avx512", "avx2", "generic")),
        ("GenuineIntel", "", ("avx512", "avx2", "generic")),
    ],
)
def test_the_pair_product_comes_second_on_intel(
    monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, levels: tuple[str, ...]
) -> None:
    has = {"vendor_id": vendor, "flags": f"avx2 fma f16c bmi2 {' '.join(build.AVX512)} {flags}"}
    monkeypatch.setattr(build, "_cpuinfo", has.__getitem__)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert cpu_levels.__wrapped__() == levels


def sampling(batch: StepBatch, kinds: list[int], starts: list[int], forced: list[int]) -> StepBatch:
    rows = len(batch.logit_rows)
    batch.run_start, batch.run_kind = np.array(starts, np.int32), np.array(kinds, np.int32)
    batch.row_forced = np.array(forced, np.int32)
    batch.row_draft = np.full(rows, -1, np.int32)
    batch.row_mask = np.full(rows, -1, np.int32)
    batch.run_params = [SamplingParams(temperature=0.0)] * len(kinds)
    batch.run_slot, batch.run_draw = np.full(len(kinds), -1, np.int32), np.zeros(len(kinds), np.int32)
    batch.run_mu = np.zeros(len(kinds), np.float32)
    return batch


def test_sample_scores_a_long_prompt_and_draws(lab: Any) -> None:
    model = lab.model(seed=11, kind="Q8_0")
    cpu = device(model)
    ids = ids_of(model, 151)
    batch = sampling(lab.batch((ids, 0, range(10))), [SCORE, SAMPLE], [0, 150, 151], [*ids[1:], -1])
    cpu.forward(batch)
    result = cpu.sample(batch, None)
    truth = model.truth(ids)
    log_softmax = truth - np.log(np.exp(truth).sum(-1, keepdims=True))
    assert np.abs(result.logprob[:150] - log_softmax[np.arange(150), ids[1:]]).max() < 1e-3
    assert result.token[150] == truth[150].argmax() and not result.error.any()
    assert result.forward_ms > 0 and result.sample_ms > 0
    cpu.close()


def test_dtype_auto_follows_the_weights(lab: Any) -> None:
    for kind, name in (("F32", "float32"), ("F16", "float32"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")):
        cpu = device(lab.model(kind=kind), "auto")
        assert name in cpu.name
        cpu.close()


def test_bad_batches_are_refused_by_name(lab: Any) -> None:
    model = lab.model()
    cpu = device(model, blocks=4)
    good = lab.batch(([1, 2], 0, [0]))
    for field, value in (
        ("token_ids", [1, 150]), ("token_ids", [-1, 0]), ("positions", [0, 16]), ("row_sequence", [0, 1]),
        ("block_tables", [[9]]), ("block_tables", [[-1]]), ("copies", [[0, 9]]), ("logit_rows", [2]),
    ):  # fmt: skip
        batch = lab.batch(([1, 2], 0, [0]))
        setattr(batch, field, np.array(value, np.int32))
        with pytest.raises(ValueError, match=field):
            cpu.forward(batch)
    before = logits(cpu, good)
    assert np.array_equal(logits(cpu, good), before)
    cpu.close()
    cpu.close()
    with pytest.raises(ValueError, match="closed"):
        cpu.forward(good)


def test_bad_sizes_are_refused_by_name(lab: Any) -> None:
    model = lab.model()
    with pytest.raises(ValueError, match="kv_bytes"):
        CpuDevice(model.spec, model.weights, kv_bytes=100, threads=1, slots=1)
    with pytest.raises(ValueError, match="threads"):
        CpuDevice(model.spec, model.weights, kv_bytes=1 << 20, threads=0, slots=1)
    odd = lab.model(head_dim=24)
    with pytest.raises(ValueError, match="head_dim"):
        CpuDevice(odd.spec, odd.weights, kv_bytes=1 << 20, threads=1, slots=1)


def test_progress_counts_to_the_packed_size(lab: Any) -> None:
    model = lab.model(kind="Q4_1")
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    cpu = CpuDevice(model.spec, model.weights, kv_bytes=1 << 20, threads=1, slots=1, progress=progress)
    assert seen == sorted(seen) and seen[-1] == (cpu.weight_bytes, cpu.weight_bytes)
    cpu.close()
