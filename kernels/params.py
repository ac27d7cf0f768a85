"""What decides a token, apart from the logits: the sampling parameters of one sequence.

Rules of this file: values are already validated (the request's schema bounds them); ``None`` never appears, a
feature that is off has its neutral value. The meaning and order of the filters is that of ``sampler.cuh``.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one sequence; the defaults are neutral (the model's own distribution).

    Order: logit_bias, repetition, frequency, presence on raw logits; allow mask; temperature; top_k; top_p; min_p;
    typical_p; draw. Mirostat (v2) replaces top_k/top_p/min_p/typical_p.
    """

    temperature: float = 1.0  # 0 = argmax, ties to the lowest id
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off, 0 = argmax
    min_p: float = 0.0  # relative to the largest probability; 0 = off
    typical_p: float = 1.0  # 1 = off
    repetition_penalty: float = 1.0  # over prompt and output; 1 = off
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    mirostat_target: float | None = None  # tau, in nats; None = off
    mirostat_lr: float = 0.1  # eta
    seed: int = 0  # 64 bits, unsigned
    choice: int = 0  # sample index within its prompt: part of the draw's key
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), ids unique
    logprobs: bool = True  # whether raw log-probabilities are wanted; they cost a pass over the row, and are 0 if not
    top_logprobs: int = 0  # alternatives wanted per token, from the raw distribution
    kept_ids_max: int = 0  # ids of surviving tokens wanted when there are at most this many (0 = only the count)

    @property
    def scored(self) -> bool:
        """Whether any raw log-probability is wanted."""
        return self.logprobs or self.top_logprobs > 0

    @property
    def uses_slot(self) -> bool:
        """Whether the device must keep state for this sequence (token counts, bias) between steps."""
        return bool(
            self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty or self.logit_bias
        )
