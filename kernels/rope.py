"""Rotary embedding's frequencies, one rule for every device.

Rules of this file: float64 throughout; a device rounds the angles' sines and cosines once, at the end.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .spec import RopeSpec

F64 = npt.NDArray[np.float64]


def frequency_divisors(rope: RopeSpec, head_dim: int) -> F64:
    """By what scaling divides each of the head_dim / 2 plain frequencies.

    ``llama3`` as in the reference code of Llama 3.1: wavelengths under original_context / high_freq_factor stay, those
    over original_context / low_freq_factor are stretched by ``factor``, those between are blended.
    """
    if rope.scaling == "none":
        return np.ones(head_dim // 2)
    if rope.scaling == "linear":
        return np.full(head_dim // 2, rope.factor)
    wavelengths = 2 * math.pi / _plain(rope, head_dim)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((rope.original_context / wavelengths - rope.low_freq_factor) / span, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / rope.factor + smooth), np.float64)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> F64:
    """Radians per position of each pair of a head's halves, [head_dim / 2]."""
    return _plain(rope, head_dim) / frequency_divisors(rope, head_dim)


def _plain(rope: RopeSpec, head_dim: int) -> F64:
    return np.asarray(rope.theta ** (-np.arange(0, head_dim, 2) / head_dim), np.float64)
