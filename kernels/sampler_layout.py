"""The sampler's structs as NumPy sees them, and the packing of sampling parameters.

Rules of this file: dtypes mirror ``csrc/sampler_types.h`` field by field. Parameters never change while a sequence
lives, so each ``SamplingParams`` object is packed once; what is left to do in a step is one dictionary look-up a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .params import SamplingParams
from .step import F32, I32, SCORE, U32, SlotOpen, StepBatch, StepResult

GREEDY, MIROSTAT, ADJUSTS, COUNTS, SCORED = 1, 2, 4, 8, 16
REPETITION_EPSILON = 1e-5  # stands for repetition_penalty 0, so that dividing a logit stays finite
LARGEST_VOCABULARY = 1 << 20
LOWEST_LOGPROB = -9999.0
_FLOAT_MAX = float(np.finfo(np.float32).max)
_CACHED_PARAMS = 4096

CONSTANTS = np.dtype(
    [
        ("seed", "u8"), ("top_p", "f8"), ("typical_p", "f8"),
        ("inverse_temperature", "f4"), ("min_p", "f4"), ("min_p_reach", "f4"), ("repetition", "f4"),
        ("frequency", "f4"), ("presence", "f4"), ("mirostat_target", "f4"), ("mirostat_lr", "f4"),
        ("top_k", "i4"), ("choice", "u4"), ("top_logprobs", "i4"), ("kept_ids_max", "i4"), ("flags", "u4"), ("_", "u4"),
    ]
)  # fmt: skip
SLOT = np.dtype([("ids", "u8"), ("marks", "u8"), ("bias", "u8"), ("n", "i4"), ("_", "i4")])
_POINTERS = (
    "logits", "masks", "params", "row_forced", "row_draft", "row_mask", "run_start", "run_kind", "run_slot",
    "run_draw", "run_mu", "slots", "kept_at", "token", "error", "logprob", "sampling_logprob", "kept",
    "run_mu_after", "top_ids", "top_logprobs", "kept_ids",
)  # fmt: skip
_NUMBERS = ("vocabulary", "row_begin", "row_end", "runs", "mask_words", "top_width", "kept_width", "bf16")
STEP_ARGS = np.dtype([(name, "u8") for name in _POINTERS] + [(name, "i4") for name in _NUMBERS])


def flags_of(params: SamplingParams) -> int:
    """The flag bits of SamplingConstants: what the parameters amount to."""
    mirostat = params.mirostat_target is not None
    greedy = params.temperature == 0 or (not mirostat and (params.top_p == 0 or params.top_k == 1))
    counts = params.repetition_penalty != 1.0 or params.frequency_penalty != 0 or params.presence_penalty != 0
    draws = GREEDY * greedy | MIROSTAT * mirostat
    return draws | ADJUSTS * params.uses_slot | COUNTS * counts | SCORED * params.scored


def pack(params: SamplingParams) -> bytes:
    """One SamplingConstants record."""
    out = np.zeros(1, CONSTANTS)
    row = out[0]
    temperature = params.temperature
    row["seed"] = params.seed & 0xFFFFFFFFFFFFFFFF
    row["choice"] = params.choice & 0xFFFFFFFF
    row["top_p"], row["typical_p"], row["min_p"] = params.top_p, params.typical_p, params.min_p
    row["inverse_temperature"] = min(1 / temperature, _FLOAT_MAX) if temperature > 0 else 1.0
    reach = math.log(params.min_p) * temperature if params.min_p > 0 else -math.inf
    row["min_p_reach"] = max(reach * 1.001, -_FLOAT_MAX)
    row["repetition"] = params.repetition_penalty or REPETITION_EPSILON
    row["frequency"], row["presence"] = params.frequency_penalty, params.presence_penalty
    row["mirostat_target"], row["mirostat_lr"] = params.mirostat_target or 0.0, params.mirostat_lr
    row["top_k"] = min(params.top_k, LARGEST_VOCABULARY)
    row["top_logprobs"], row["kept_ids_max"] = params.top_logprobs, params.kept_ids_max
    row["flags"] = flags_of(params)
    return out.tobytes()


class PackedParams:
    """Packs each SamplingParams object once, by identity: hashing one would cost more than packing it."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[SamplingParams, bytes]] = {}

    def of(self, run_params: Sequence[SamplingParams]) -> bytes:
        """The records of a step's runs, one after another."""
        packed = self._packed
        try:
            return b"".join([packed[id(p)][1] for p in run_params])
        except KeyError:
            if len(packed) + len(run_params) > _CACHED_PARAMS:
                packed.clear()
            for p in run_params:
                if id(p) not in packed:
                    packed[id(p)] = (p, pack(p))
            return b"".join([packed[id(p)][1] for p in run_params])


def slot_entries(opening: SlotOpen, vocabulary_size: int) -> tuple[I32, U32, F32]:
    """A slot's starting entries: unique ids, marks (bit 0 = in the prompt, the rest = count in the output), bias.

    Holds only what the parameters need. Raises ValueError naming the field for a token id outside the vocabulary.
    """
    params = opening.params
    flags = flags_of(params)
    bias_ids = np.array([token for token, _ in params.logit_bias], np.int32)
    for name, ids in (("prompt_ids", opening.prompt_ids), ("output_ids", opening.output_ids), ("logit_bias", bias_ids)):
        check_ids(name, ids, 0, vocabulary_size)
    nothing = np.empty(0, np.int32)
    prompt = np.unique(opening.prompt_ids) if params.repetition_penalty != 1.0 else nothing
    output, counts = np.unique(opening.output_ids if flags & COUNTS else nothing, return_counts=True)
    ids = np.unique(np.concatenate([prompt, output, bias_ids])).astype(np.int32)
    marks = np.zeros(len(ids), np.uint32)
    marks[np.searchsorted(ids, prompt)] |= np.uint32(1)
    marks[np.searchsorted(ids, output)] += (2 * counts).astype(np.uint32)
    bias = np.zeros(len(ids), np.float32)
    bias[np.searchsorted(ids, bias_ids)] = [value for _, value in params.logit_bias]
    return ids, marks, bias


def check_ids(name: str, ids: npt.NDArray[np.int32], lowest: int, vocabulary_size: int) -> None:
    """Raises ValueError when an id is not in lowest..vocabulary_size - 1."""
    if len(ids) and (int(ids.min()) < lowest or int(ids.max()) >= vocabulary_size):
        wrong = int(ids.max()) if int(ids.max()) >= vocabulary_size else int(ids.min())
        raise ValueError(f"{name}: token id {wrong} is outside {lowest}..{vocabulary_size - 1}")


_INT32_FIELDS = ("row_forced", "row_draft", "row_mask", "run_start", "run_kind", "run_slot", "run_draw")


def check_batch(batch: StepBatch, packed: bytes, slots: int, vocabulary_size: int) -> None:
    """Raises ValueError naming the field for a batch that would make the sampler read outside its memory.

    ``packed``: the records of the batch's parameters.
    """
    for name in _INT32_FIELDS:
        array = getattr(batch, name)
        if array.dtype != np.int32 or not array.flags.c_contiguous:
            raise ValueError(f"{name}: need a C-contiguous int32 array, got {array.dtype}")
    check_ids("row_forced", batch.row_forced, -1, vocabulary_size)
    check_ids("run_slot", batch.run_slot, -1, slots)
    adjusts = np.frombuffer(packed, CONSTANTS)["flags"] & ADJUSTS != 0
    if (adjusts & (batch.run_slot < 0) & (batch.run_kind != SCORE)).any():
        raise ValueError("run_slot: penalties and logit_bias need a slot, got -1")
    if (batch.run_kind == SCORE).any():
        scored = np.repeat(batch.run_kind, np.diff(batch.run_start)) == SCORE
        if (batch.row_forced[scored] < 0).any():
            raise ValueError("row_forced: every row of a SCORE run needs its token")


def check_masks(batch: StepBatch, masks: U32 | None, vocabulary_size: int) -> None:
    """Raises ValueError unless the masks have the batch's shape and hold every row that it names."""
    named = int(batch.row_mask.max(initial=-1)) + 1
    if named and (masks is None or masks.shape[0] < named):
        raise ValueError(f"masks: row_mask names row {named - 1}, got {0 if masks is None else masks.shape[0]} rows")
    if masks is not None and (masks.dtype != np.uint32 or masks.shape[1:] != (-(-vocabulary_size // 32),)):
        raise ValueError(f"masks: need uint32 [n, {-(-vocabulary_size // 32)}], got {masks.dtype} {masks.shape}")


def new_result(batch: StepBatch) -> StepResult:
    """A StepResult of the batch's shape in which nothing has been sampled yet."""
    rows = len(batch.logit_rows)
    width = max((p.top_logprobs for p in batch.run_params), default=0)
    return StepResult(
        step_id=batch.step_id,
        token=np.full(rows, -1, np.int32),
        error=np.zeros(rows, np.uint8),
        logprob=np.zeros(rows, np.float32),
        sampling_logprob=np.zeros(rows, np.float32),
        kept=np.zeros(rows, np.int32),
        run_mu=np.array(batch.run_mu, np.float32),
        top_ids=np.full((rows, width), -1, np.int32),
        top_logprobs=np.full((rows, width), LOWEST_LOGPROB, np.float32),
    )


def kept_limits(batch: StepBatch, row_begin: int, row_end: int) -> I32:
    """[K] how many ids of survivors a row wants at most; 0 outside the rows, in SCORE runs, where none are wanted."""
    limits = np.zeros(len(batch.row_forced), np.int32)
    if any(p.kept_ids_max for p in batch.run_params):
        wanted = np.array([p.kept_ids_max for p in batch.run_params], np.int32) * (batch.run_kind != SCORE)
        limits[row_begin:row_end] = np.repeat(wanted, np.diff(batch.run_start))[row_begin:row_end]
    return limits
