"""What the sampler means, in plain NumPy and float64: the oracle of its tests, and the way to live without a compiler.

Rules of this file: written from the definitions, one full sort a filter, nothing shared with the C++. Logits are
float32 by nature, so adjusting them (bias, penalties) is done in float32, step by step; probabilities are float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .params import SamplingParams
from .sampler_layout import LOWEST_LOGPROB, REPETITION_EPSILON, slot_entries
from .step import ERROR_EMPTY, ERROR_NAN, F32, I32, SCORE, U32, SlotOpen, StepBatch, StepResult

F64 = npt.NDArray[np.float64]
BOOL = npt.NDArray[np.bool_]

_ROUND = 1e-12  # shares of a mass are compared with this relative grace


@dataclass(slots=True)
class SlotState:
    """Tokens whose logits change: token id -> value."""

    prompt: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)


def raw_logprobs(logits: F32) -> F64:
    """[V] log-softmax of finite or -inf logits."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs: F64 = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def process(logits: F32, allowed: BOOL | None, state: SlotState, params: SamplingParams) -> F32:
    """Bias, repetition, frequency, presence, then the allow mask: float32 [V], -inf where a token is forbidden."""
    y = logits.copy()
    f32 = np.float32
    largest = np.finfo(np.float32).max
    repetition = f32(params.repetition_penalty or REPETITION_EPSILON)
    with np.errstate(over="ignore"):
        for token in state.prompt | state.counts.keys() | state.bias.keys():
            v = f32(y[token] + f32(state.bias.get(token, 0.0)))
            count = state.counts.get(token, 0)
            if count or token in state.prompt:
                v = f32(v / repetition) if v > 0 else f32(v * repetition)
            v = f32(v - f32(f32(params.frequency_penalty) * f32(count)))
            v = f32(v - f32(params.presence_penalty if count else 0.0))
            if logits[token] != -np.inf:
                y[token] = min(max(v, -largest), largest)
    if allowed is not None:
        y[~allowed] = -np.inf
    return y


def is_greedy(params: SamplingParams) -> bool:
    """Whether the parameters leave one token whatever the logits."""
    filters = params.mirostat_target is None
    return params.temperature == 0 or (filters and (params.top_p == 0 or params.top_k == 1))


def survivors(y: F32, params: SamplingParams, mu: float) -> tuple[BOOL, F64]:
    """(which tokens may be drawn, every token's weight relative to the best one), [V] each."""
    keep = y > -np.inf
    order = np.lexsort((np.arange(len(y)), -y.astype(np.float64)))
    if is_greedy(params):
        return _only(order[:1], len(y)), keep.astype(np.float64)
    with np.errstate(over="ignore"):
        gaps = (float(y.max()) - y.astype(np.float64)) / params.temperature
    weights = np.exp(-gaps)
    if params.mirostat_target is not None:
        kept = keep & (gaps + np.log(weights.sum()) <= mu)
        return (kept if kept.any() else _only(order[:1], len(y))), weights
    if params.top_k:
        keep &= _only(order[: params.top_k], len(y))
    if params.top_p < 1:
        keep = _smallest_prefix(order[keep[order]], weights, params.top_p)
    if params.min_p > 0:
        keep &= weights >= params.min_p
    if params.typical_p < 1:
        left = np.flatnonzero(keep)
        share = weights[left] / weights[left].sum()
        finite = np.where(share > 0, gaps[left], 0.0)
        distance = np.abs(gaps[left] - float((share * finite).sum()))
        keep = _smallest_prefix(left[np.argsort(distance, kind="stable")], weights, params.typical_p)
    return keep, weights


def _only(ids: npt.NDArray[np.intp], size: int) -> BOOL:
    keep = np.zeros(size, np.bool_)
    keep[ids] = True
    return keep


def _smallest_prefix(order: npt.NDArray[np.intp], weights: F64, share: float) -> BOOL:
    """The first tokens of ``order`` whose weight reaches the share of the whole order's; the first always."""
    running = np.cumsum(weights[order])
    need = share * running[-1] * (1 - _ROUND)
    return _only(order[: int(np.searchsorted(running, need)) + 1], len(weights))


def philox_u64(key: int, counter: tuple[int, int, int, int]) -> int:
    """First 64 bits of Philox4x32-10 (Salmon et al., 2011) at a 64-bit key and four 32-bit counter words."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0 << 32 | c1


def draw(keep: BOOL, weights: F64, random: int) -> int:
    """Inverse CDF in order of token id; ``random`` is 64 uniform bits."""
    running = np.cumsum(np.where(keep, weights, 0.0))
    place = int(np.searchsorted(running, random / 2**64 * running[-1], "right"))
    return min(place, int(np.flatnonzero(keep)[-1]))


def best_raw(logits: F32, wanted: int) -> npt.NDArray[np.intp]:
    """Ids of the largest finite logits, best first, ties to the lowest id."""
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))[:wanted]
    return order[logits[order] > -np.inf]


def allowed_tokens(masks: U32 | None, row: int, vocabulary_size: int) -> BOOL | None:
    """One packed row of the masks as booleans [V]; None for row -1."""
    if row < 0 or masks is None:
        return None
    bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")
    return bits[:vocabulary_size].astype(np.bool_)


class ReferenceSampler:
    """The ``Sampler`` interface on the functions above."""

    def __init__(self, vocabulary_size: int, slots: int) -> None:
        self.vocabulary_size = vocabulary_size
        self.slots = [SlotState() for _ in range(slots)]

    def open_slot(self, opening: SlotOpen) -> None:
        """See ``Sampler.open_slot``."""
        state = SlotState()
        for token, mark, bias in zip(*(a.tolist() for a in slot_entries(opening, self.vocabulary_size)), strict=True):
            if mark & 1:
                state.prompt.add(token)
            if mark > 1:
                state.counts[token] = mark >> 1
            if bias:
                state.bias[token] = bias
        self.slots[opening.slot] = state

    def sample(
        self,
        logits: F32 | npt.NDArray[np.uint16],
        batch: StepBatch,
        k_begin: int,
        k_end: int,
        masks: U32 | None,
        result: StepResult,
    ) -> None:
        """See ``Sampler.sample``."""
        if logits.dtype == np.uint16:
            logits = (logits.astype(np.uint32) << 16).view(np.float32)
        rows: F32 = logits.view(np.float32)
        starts = batch.run_start.tolist()
        for r in range(len(batch.run_params)):
            begin, end = max(starts[r], k_begin), min(starts[r + 1], k_end)
            if batch.run_kind[r] == SCORE:
                for k in range(begin, end):
                    self._raw(rows[k - k_begin], batch.run_params[r], int(batch.row_forced[k]), k, result)
            elif begin < end:
                self._run(rows[begin - k_begin : end - k_begin], batch, r, masks, result)

    def _raw(self, logits: F32, params: SamplingParams, token: int, k: int, result: StepResult) -> bool:
        """Raw outputs of row k for the token taken; False when the row is in error."""
        bad = bool((np.isnan(logits) | (logits == np.inf)).any())
        result.error[k] = ERROR_NAN if bad else 0 if logits.max() > -np.inf else ERROR_EMPTY
        if result.error[k]:
            return False
        logprobs = np.maximum(raw_logprobs(logits), LOWEST_LOGPROB)
        best = best_raw(logits, params.top_logprobs)
        result.top_ids[k, : len(best)], result.top_logprobs[k, : len(best)] = best, logprobs[best]
        result.token[k], result.logprob[k], result.sampling_logprob[k] = token, logprobs[token], 0.0
        result.kept[k] = 1
        return True

    def _run(self, logits: F32, batch: StepBatch, r: int, masks: U32 | None, result: StepResult) -> None:
        params, slot = batch.run_params[r], int(batch.run_slot[r])
        state = self.slots[slot] if slot >= 0 else SlotState()
        counts = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
        mu = float(batch.run_mu[r])
        first = int(batch.run_start[r])
        for j, row in enumerate(logits):
            k, token = first + j, int(batch.row_forced[first + j])
            if not self._raw(row, params, token, k, result):
                result.token[k] = -1
                break
            if token < 0:
                allowed = allowed_tokens(masks, int(batch.row_mask[k]), len(row))
                y = process(row, allowed, state, params)
                token = self._draw(y, params, mu, int(batch.run_draw[r]) + j, k, result)
                if token < 0:
                    break
                result.logprob[k] = max(raw_logprobs(row)[token], LOWEST_LOGPROB) if params.scored else 0.0
                if params.mirostat_target is not None and not is_greedy(params):
                    mu -= params.mirostat_lr * (-float(result.sampling_logprob[k]) - params.mirostat_target)
            elif params.kept_ids_max:
                result.kept_ids[k] = np.array([token], np.int32)
            if counts:
                state.counts[token] = state.counts.get(token, 0) + 1
            if token != batch.row_draft[k]:
                break
        result.run_mu[r] = mu

    def _draw(self, y: F32, params: SamplingParams, mu: float, counter: int, k: int, result: StepResult) -> int:
        if y.max() == -np.inf:
            result.token[k], result.error[k], result.kept[k], result.logprob[k] = -1, ERROR_EMPTY, 0, 0.0
            result.top_ids[k], result.top_logprobs[k] = -1, LOWEST_LOGPROB
            return -1
        keep, weights = survivors(y, params, mu)
        ids: I32 = np.flatnonzero(keep).astype(np.int32)
        token = draw(keep, weights, philox_u64(params.seed, (counter, params.choice, 0, 0)))
        share = np.log(weights[token] / weights[keep].sum()) if len(ids) > 1 else 0.0
        result.token[k], result.kept[k] = token, len(ids)
        result.sampling_logprob[k] = max(share, LOWEST_LOGPROB)
        if 0 < len(ids) <= params.kept_ids_max:
            result.kept_ids[k] = ids
        return token
