"""Public fault reports about other servers' samplers, as tests of ours. Each test names the reports it answers (B...).

The entries of the same kinds that only a whole server can show (indices of streams, limits of fields, status codes)
are tested there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampler_cases import bits, make_batch, make_row, pack_masks, run_step

from offbook.kernels.params import SamplingParams
from offbook.kernels.sampler import Sampler
from offbook.kernels.step import F32, SlotOpen, StepResult

V = 1200
NOTHING = np.empty(0, np.int32)


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def rows(count: int, seed: int = 0, kind: str = "normal") -> F32:
    rng = np.random.default_rng(seed)
    return np.stack([make_row(kind, V, rng) for _ in range(count)])


def together(params: list[SamplingParams], logits: F32, **where: Any) -> StepResult:
    return run_step(Sampler(V, 0), logits, make_batch(params, **where))


def generate(params: SamplingParams, steps: int, *, seed: int = 0, opening: SlotOpen | None = None) -> list[StepResult]:
    """A sequence of single steps over fixed rows."""
    sampler, logits, out = Sampler(V, 1), rows(steps, seed), []
    if opening is not None:
        sampler.open_slot(opening)
    mu = 2 * (params.mirostat_target or 0.0)
    for i in range(steps):
        slots = [-1 if opening is None else 0]
        out.append(run_step(sampler, logits[i : i + 1], make_batch([params], draws=[i], slots=slots, mu=[mu])))
        mu = float(out[-1].run_mu[0])
    return out


def tokens(results: list[StepResult]) -> list[int]:
    return [int(r.token[0]) for r in results]


def test_choices_of_one_seed_differ_and_repeat() -> None:
    """B049: n samples of one request came back identical."""
    choices = [tokens(generate(SamplingParams(seed=11, choice=c, temperature=1.5), 24)) for c in range(8)]
    assert len({tuple(c) for c in choices}) == 8
    assert choices == [tokens(generate(SamplingParams(seed=11, choice=c, temperature=1.5), 24)) for c in range(8)]


def test_a_seed_does_not_depend_on_the_place_in_the_batch() -> None:
    """B054: the seed was mixed with the batch slot. B057: the second request with a seed went on from the first."""
    row = rows(1)[0]
    result = together([SamplingParams(seed=123)] * 16, np.stack([row] * 16), draws=[5] * 16)
    alone = together([SamplingParams(seed=123)], row[None], draws=[5])
    assert (result.token == alone.token[0]).all()
    first, again, other = (tokens(generate(SamplingParams(seed=s), 16)) for s in (42, 42, 43))
    assert first == again != other


def test_different_seeds_differ() -> None:
    """B055: different seeds sent together gave the same text. B082: temperature had no effect without top_k."""
    texts = {tuple(tokens(generate(SamplingParams(seed=s, temperature=1.5), 16))) for s in range(1, 9)}
    assert len(texts) == 8


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_64_bit_seed_works(seed: int) -> None:
    """B058: seeds from 2**63 up overflowed in the worker."""
    drawn = tokens(generate(SamplingParams(seed=seed), 8))
    assert all(0 <= t < V for t in drawn)
    assert drawn != tokens(generate(SamplingParams(seed=seed ^ 1), 8))
    assert drawn != tokens(generate(SamplingParams(seed=seed ^ (1 << 63)), 8))


def test_choices_are_equal_at_temperature_0() -> None:
    """B062: n > 1 at temperature 0."""
    params = [SamplingParams(temperature=0.0, choice=c, seed=9) for c in range(3)]
    result = together(params, np.stack([rows(1)[0]] * 3))
    assert bits(result, slice(0, 1)) == bits(result, slice(1, 2)) == bits(result, slice(2, 3))


@pytest.mark.parametrize("kind", ["normal", "peaked", "huge", "holes"])
def test_tiny_top_p_and_temperature_are_greedy(kind: str) -> None:
    """B064: top_p or temperature of 0.0001 raised 'probability holds inf/nan'."""
    logits = np.repeat(rows(1, 3, kind), 5, 0)
    params = [
        SamplingParams(temperature=0.0), SamplingParams(top_p=0.0001), SamplingParams(temperature=0.0001),
        SamplingParams(temperature=1e-40), SamplingParams(temperature=0.0001, top_p=0.0001, min_p=0.5),
    ]  # fmt: skip
    result = together(params, logits)
    assert (result.token == result.token[0]).all() and not result.error.any()
    assert (result.kept[[0, 1, 4]] == 1).all()  # temperature alone leaves every token in
    assert (result.sampling_logprob == 0).all() and np.isfinite(result.logprob).all()


def test_masked_greedy_rows_beside_sampled_ones() -> None:
    """B065: greedy rows of a mixed batch were divided by -1, so that a masked logit won or gave NaN."""
    logits = rows(3, 4)
    allowed = np.random.default_rng(1).random((1, V)) < 0.05
    masks = pack_masks(allowed)
    banned = int(logits[1].argmax())
    params = [
        SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias=((banned, -100.0),)),
        SamplingParams(top_p=0.9, seed=4),
    ]  # fmt: skip
    sampler = Sampler(V, 1)
    sampler.open_slot(SlotOpen(0, NOTHING, NOTHING, params[1]))
    result = run_step(sampler, logits, make_batch(params, mask_rows=[0, -1, -1], slots=[-1, 0, -1]), masks)
    assert result.token[0] == np.where(allowed[0], logits[0], -np.inf).argmax()
    assert result.token[1] == np.delete(logits[1], banned).argmax() + (np.delete(logits[1], banned).argmax() >= banned)
    for k in range(3):
        alone = make_batch([params[k]], mask_rows=[0 if k == 0 else -1], slots=[0 if k == 1 else -1])
        assert bits(run_step(sampler, logits[k : k + 1], alone, masks)) == bits(result, slice(k, k + 1))


def test_ties_at_temperature_0_go_to_the_lowest_id() -> None:
    """B066: greedy was done as a tiny temperature, so that tied logits were drawn at random."""
    logits = np.zeros((12, V), np.float32)
    logits[:, [900, 17, 600]] = 5.0
    params = [SamplingParams(temperature=0.0, top_p=0.9, seed=i) for i in range(6)]
    params += [SamplingParams(temperature=1.5, seed=i) for i in range(6)]
    assert together(params, logits).token[:6].tolist() == [17] * 6
    one = together([SamplingParams(top_k=1, temperature=2.0, seed=s) for s in range(12)], logits)
    assert one.token.tolist() == [17] * 12


def test_three_ways_to_be_greedy_agree() -> None:
    """B067: top_k = 1, top_p = 0 and temperature 0 gave different text."""
    logits = rows(30, 5)
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0, "temperature": 2.0}]
    results = [together([SamplingParams(seed=i, **way) for i in range(30)], logits) for way in ways]
    assert bits(results[0]) == bits(results[1]) == bits(results[2])


def test_top_k_of_one_row_leaves_the_others_alone() -> None:
    """B068: rows without top_k were cut when a batchmate set it. B069: top_k beyond the vocabulary."""
    logits = rows(4, 6)
    params = [SamplingParams(seed=1, top_k=1), SamplingParams(seed=2), SamplingParams(seed=3, top_k=50)]
    params.append(SamplingParams(seed=4, top_k=4_000_000))
    result = together(params, logits)
    assert result.kept.tolist() == [1, V, 50, V]
    for k in range(4):
        assert bits(together([params[k]], logits[k : k + 1])) == bits(result, slice(k, k + 1))


def test_no_garbage_outside_the_nucleus() -> None:
    """B074: one completion in nine held a token of logprob -29 although top_p was 0.8."""
    logits = rows(300, 7)
    params = [SamplingParams(temperature=0.7, top_p=0.8, seed=s, kept_ids_max=V) for s in range(300)]
    result = together(params, logits)
    for k in range(300):
        kept = result.kept_ids[k]
        assert result.token[k] in kept and len(kept) == result.kept[k] and (np.diff(kept) > 0).all()
        share = np.exp((logits[k].astype(np.float64) - logits[k].max()) / 0.7)
        share /= share.sum()
        assert share[kept].sum() >= 0.8 - 1e-6
        assert share[kept].sum() - share[kept].min() < 0.8 + 1e-6


def test_temperature_comes_before_top_p_everywhere() -> None:
    """B076: the order of temperature and top_p differed between two code paths."""
    logits = rows(2, 8)
    params = SamplingParams(temperature=0.3, top_p=0.7, seed=3)
    batched = together([params] * 2, logits)
    for k in range(2):
        share = np.sort(np.exp(logits[k].astype(np.float64) / 0.3))[::-1]
        assert batched.kept[k] == int((np.cumsum(share / share.sum()) < 0.7).sum()) + 1
        assert together([params], logits[k : k + 1]).kept[0] == batched.kept[k]


def test_mirostat_uses_temperature_and_goes_on_after_a_restart() -> None:
    """B078: mirostat ignored temperature, and lost its state when a sequence was recomputed."""
    params = SamplingParams(mirostat_target=4.0, mirostat_lr=0.1, temperature=0.7, seed=1)
    whole = generate(params, 12)
    logits = rows(12)
    later = [together([params], logits[i : i + 1], draws=[i], mu=[float(whole[i - 1].run_mu[0])]) for i in range(6, 12)]
    assert [bits(r) for r in later] == [bits(r) for r in whole[6:]]
    assert tokens(generate(SamplingParams(mirostat_target=4.0, temperature=1.9, seed=1), 12)) != tokens(whole)


def test_temperature_changes_the_answer() -> None:
    """B079: a large temperature made no difference."""
    assert tokens(generate(SamplingParams(temperature=2.0, seed=1), 32)) != tokens(
        generate(SamplingParams(temperature=0.0), 32)
    )


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "one"])
def test_typical_p_at_its_ends(kind: str) -> None:
    """B080: typical_p of 1 or 0.99 indexed one past the end."""
    logits = np.repeat(rows(1, 9, kind), 5, 0)
    result = together([SamplingParams(typical_p=p, seed=1) for p in (0.0, 1e-9, 0.5, 0.99, 1.0)], logits)
    assert (result.kept >= 1).all() and (result.token >= 0).all()
    assert result.kept[4] == (logits[0] > -np.inf).sum()
    assert result.kept[0] == result.kept[1] == 1


def test_penalties_do_not_depend_on_the_order_of_the_batch() -> None:
    """B088, B092, B097: batchmates with and without penalties, in either order; no padding is counted."""
    logits = rows(3, 10)
    logits[1, 0] = logits[1].max() + 0.5  # id 0 wins unless somebody's padding is penalised
    penalised = [SamplingParams(temperature=0.0, repetition_penalty=2.0), SamplingParams(top_k=1, seed=99)]
    penalised.append(SamplingParams(temperature=0.0, frequency_penalty=1.05))
    short, long = ids(5), np.arange(300, 600, dtype=np.int32)
    outcomes = []
    for order in ([0, 1, 2], [1, 2, 0], [2, 1, 0]):
        sampler = Sampler(V, 3)
        sampler.open_slot(SlotOpen(0, long, long, penalised[0]))
        sampler.open_slot(SlotOpen(2, short, short, penalised[2]))
        slots = [i if i != 1 else -1 for i in order]
        result = run_step(sampler, logits[order], make_batch([penalised[i] for i in order], slots=slots))
        outcomes.append([bits(result, slice(order.index(i), order.index(i) + 1)) for i in range(3)])
        assert result.token[order.index(1)] == 0
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_repetition_sees_the_prompt_and_the_others_do_not() -> None:
    """B089, B090: repetition missed the prompt; presence and frequency punished prompt tokens."""
    x = np.zeros((1, V), np.float32)
    x[0, [7, 9, 11]] = [3.0, -2.0, 2.5]
    prompt = ids(7, 7, 7, 7, 9)

    def kept_weights(params: SamplingParams) -> dict[int, float]:
        """Sampling logprob of each of three tokens, by allowing one of them and a fixed other."""
        out = {}
        for token in (7, 9, 11):
            sampler = Sampler(V, 1)
            sampler.open_slot(SlotOpen(0, prompt, NOTHING, params))
            allowed = np.zeros((1, V), np.bool_)
            allowed[0, [token, 500]] = True
            result = run_step(sampler, x, make_batch([params], slots=[0], mask_rows=[0]), pack_masks(allowed))
            share = float(np.exp(result.sampling_logprob[0]))
            share = share if result.token[0] == token else 1 - share
            out[token] = float(np.log(share / (1 - share)))  # the token's logit minus that of 500, which is 0
        return out

    scaled = kept_weights(SamplingParams(repetition_penalty=1.5))
    assert scaled == pytest.approx({7: 2.0, 9: -3.0, 11: 2.5}, abs=1e-5)
    plain = kept_weights(SamplingParams(frequency_penalty=2.0, presence_penalty=2.0))
    assert plain == pytest.approx({7: 3.0, 9: -2.0, 11: 2.5}, abs=1e-5)


def test_frequency_grows_with_the_count() -> None:
    """B091: frequency_penalty did not grow with the count: A and B must alternate as the plain formula says."""
    params = SamplingParams(temperature=0.0, logit_bias=((70, 30.0), (80, 29.0)), frequency_penalty=0.5)
    sampler, row = Sampler(V, 1), np.zeros((1, V), np.float32)
    sampler.open_slot(SlotOpen(0, ids(1), NOTHING, params))
    taken = [int(run_step(sampler, row, make_batch([params], slots=[0], draws=[i])).token[0]) for i in range(12)]
    logit, expected = {70: 30.0, 80: 29.0}, []
    for _ in range(12):
        best = max(sorted(logit), key=logit.__getitem__)
        expected.append(best)
        logit[best] -= 0.5
    assert taken == expected and {70, 80} <= set(taken[:4])


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    """B099: an id beyond the vocabulary wrote into the next row. B101: the largest valid id was refused."""
    sampler = Sampler(V, 1)
    for token in (V, V + 5, -1):
        with pytest.raises(ValueError, match=f"logit_bias: token id {token}"):
            sampler.open_slot(SlotOpen(0, NOTHING, NOTHING, SamplingParams(logit_bias=((token, 100.0),))))
    params = SamplingParams(temperature=0.0, logit_bias=((V - 1, 100.0),))
    sampler.open_slot(SlotOpen(0, NOTHING, NOTHING, params))
    logits = rows(2, 11)
    result = run_step(sampler, logits, make_batch([params, SamplingParams(temperature=0.0)], slots=[0, -1]))
    assert result.token.tolist() == [V - 1, int(logits[1].argmax())]


def test_banned_tokens_never_come_and_a_bias_of_0_changes_nothing() -> None:
    """B101, B102: a bias of -100 had no effect."""
    base = tokens(generate(SamplingParams(temperature=0.0), 20))
    bans = SamplingParams(temperature=0.0, logit_bias=tuple((t, -100.0) for t in sorted(set(base))))
    assert not set(base) & set(tokens(generate(bans, 20, opening=SlotOpen(0, NOTHING, NOTHING, bans))))
    zeros = SamplingParams(seed=3, logit_bias=tuple((t, 0.0) for t in range(50)))
    biased = generate(zeros, 20, opening=SlotOpen(0, NOTHING, NOTHING, zeros))
    assert [bits(r) for r in biased] == [bits(r) for r in generate(SamplingParams(seed=3), 20)]
