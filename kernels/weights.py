"""Weights by canonical name, as they lie in the file: quantised rows stay quantised until a device asks otherwise.

Rules of this file: no device, no arithmetic beyond decoding. Canonical names are GGUF's (``token_embd.weight``,
``blk.N.attn_q.weight``, ``output_norm.weight``, ...). Rows of Q and K are always in the half-split RoPE order, whatever
order the file uses, because a row permutation is free here and a trap everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: ``shape`` is [out, in] (or [n]); ``kind`` is GGUF's type name ("F32", "F16", "BF16", "Q4_1", ...).

    ``raw`` is uint8 [out, bytes per row] ([1, bytes] for vectors): the encoded rows, in canonical row order.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]

    def dense(self) -> npt.NDArray[np.float32]:
        """The tensor dequantized to float32, of ``shape``."""
        from gguf import GGMLQuantizationType, quants

        if self.kind == "F32":
            return self.raw.view(np.float32).reshape(self.shape)
        if self.kind == "BF16":
            return (self.raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        out = quants.dequantize(self.raw, GGMLQuantizationType[self.kind])
        return np.ascontiguousarray(out, np.float32).reshape(self.shape)


class Weights(Protocol):
    """A model file opened for reading. Raises ``ModelFileError`` (kernels/model_files.py) for what is missing."""

    def __getitem__(self, name: str) -> Tensor: ...
    def __contains__(self, name: object) -> bool: ...
    def names(self) -> list[str]: ...
    def close(self) -> None: ...
