"""Encoded weight rows -> integer codes, scales and mins, exactly; and their packing into the CPU device's blocks.

Rules of this file: a format is one function from raw bytes to ``Codes``; nothing is rounded (scales are f16 where the
file's are, else the f32 product that the format defines). A format without a function here is served from
``Tensor.dense()`` in float32. Formats: the reference of GGUF (``gguf.quants``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import cpu_layout as c
from .step import U8
from .weights import Tensor

Any2D = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of one or several tensors: ``values`` [out, in] codes or numbers, ``scales``/``mins`` [out, in / group]."""

    values: Any2D
    scales: Any2D | None = None
    mins: Any2D | None = None

    def rows(self, order: Callable[[Any2D], Any2D]) -> Codes:
        """The same with ``order`` applied to the rows of each array."""
        scales, mins = (None if a is None else order(a) for a in (self.scales, self.mins))
        return Codes(order(self.values), scales, mins)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a block of 32 x 32 weights is stored (``csrc/matmul_format.h``)."""

    kind: int
    group: int = 0
    scale_bytes: int = 0
    minimum: int = c.NONE

    @property
    def block_bytes(self) -> int:
        codes = {c.CODES4: 512, c.CODES8: 1024, c.BF16: 2048, c.F16: 2048, c.F32: 4096}[self.kind]
        scales = 32 * self.scale_bytes * (32 // self.group) if self.group else 0
        return codes + scales * (2 if self.minimum == c.STORED else 1)

    def matrix(self, rows: int, columns: int) -> c.Matrix:
        """An unplaced matrix of at least this size."""
        return c.Matrix(
            kind=self.kind, group=self.group, scale_bytes=self.scale_bytes, minimum=self.minimum,
            panels=-(-rows // 32), blocks=-(-columns // 32), block_bytes=self.block_bytes,
        )  # fmt: skip


def matrix_bytes(matrix: c.Matrix) -> int:
    return int(matrix.panels) * int(matrix.blocks) * int(matrix.block_bytes)


def layout_of(*tensors: Tensor) -> Layout:
    """The layout that holds all of these exactly: their own where they share a format, else float32."""
    kinds = {t.kind for t in tensors}
    native = NATIVE.get(kinds.pop()) if len(kinds) == 1 else None
    return native[0] if native else Layout(c.F32)


def decode(tensor: Tensor, layout: Layout) -> Codes:
    """The tensor's codes for ``layout`` (its own or float32), padded to whole blocks with zeros."""
    native = NATIVE.get(tensor.kind)
    codes = native[1](tensor) if native and native[0] == layout else Codes(tensor.dense())
    return codes.rows(lambda a: _padded(a, codes.values.shape[1]))


def _padded(a: Any2D, columns: int) -> Any2D:
    rows, width = a.shape
    more_columns = -width % 32 if width == columns else 0  # only unscaled rows can need it
    if rows % 32 == 0 and more_columns == 0:
        return a
    return np.pad(a, ((0, -rows % 32), (0, more_columns)))


def interleave(gate: Codes, up: Codes) -> Codes:
    """Panels of 16 rows of ``gate`` and the same 16 rows of ``up``."""

    def both(a: Any2D, b: Any2D) -> Any2D:
        width = a.shape[1]
        return np.stack([a.reshape(-1, 16, width), b.reshape(-1, 16, width)], 1).reshape(-1, width)

    pairs = ((gate.values, up.values), (gate.scales, up.scales), (gate.mins, up.mins))
    values, scales, mins = (None if a is None or b is None else both(a, b) for a, b in pairs)
    assert values is not None
    return Codes(values, scales, mins)


def pack(library: ctypes.CDLL, matrix: c.Matrix, codes: Codes, to: U8) -> None:
    """Places ``matrix`` at ``to`` and fills it; ``codes`` must have its padded shape."""
    arrays = [None if a is None else np.ascontiguousarray(a) for a in (codes.values, codes.scales, codes.mins)]
    assert codes.values.shape == (32 * matrix.panels, 32 * matrix.blocks) and to.size >= matrix_bytes(matrix)
    matrix.data = to.ctypes.data
    library.offbook_pack(
        ctypes.byref(matrix), 0, matrix.panels, *(None if a is None else ctypes.c_void_p(a.ctypes.data) for a in arrays)
    )


def _blocks(tensor: Tensor, size: int) -> U8:
    """[out, blocks of the row, bytes of a block]"""
    return tensor.raw.reshape(tensor.shape[0], -1, size)


def _f16(blocks: U8, at: int) -> npt.NDArray[np.float16]:
    """The f16 at byte ``at`` of each block, [out, blocks]"""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _flat(codes: npt.NDArray[np.generic]) -> Any2D:
    """[out, blocks, ...] -> [out, in], as bytes."""
    return codes.reshape(codes.shape[0], -1).view(np.uint8)


def _nibbles(packed: U8) -> U8:
    """[..., n] bytes -> [..., 2 n] codes: the low halves, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _with_fifth_bit(nibbles: U8, high: U8) -> U8:
    """Bit i of the 4 bytes ``high`` is bit 4 of code i."""
    fifth = np.unpackbits(high, axis=-1, bitorder="little")
    return nibbles | np.left_shift(fifth, 4, dtype=np.uint8)


def _q4_0(t: Tensor) -> Codes:
    b = _blocks(t, 18)
    return Codes(_flat(_nibbles(b[..., 2:])), _f16(b, 0))


def _q4_1(t: Tensor) -> Codes:
    b = _blocks(t, 20)
    return Codes(_flat(_nibbles(b[..., 4:])), _f16(b, 0), _f16(b, 2))


def _q5_0(t: Tensor) -> Codes:
    b = _blocks(t, 22)
    return Codes(_flat(_with_fifth_bit(_nibbles(b[..., 6:]), b[..., 2:6]) - np.uint8(16)), _f16(b, 0))


def _q5_1(t: Tensor) -> Codes:
    b = _blocks(t, 24)
    return Codes(_flat(_with_fifth_bit(_nibbles(b[..., 8:]), b[..., 4:8])), _f16(b, 0), _f16(b, 2))


def _q8_0(t: Tensor) -> Codes:
    b = _blocks(t, 34)
    return Codes(_flat(np.ascontiguousarray(b[..., 2:])), _f16(b, 0))


def _k_scales(b: U8) -> tuple[Any2D, Any2D]:
    """Scales and mins of the 8 groups of a Q4_K or Q5_K block: 6-bit factors of the block's two f16."""
    low, mid, high = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = np.concatenate([low & 63, high & 15 | low >> 2 & 48], -1).astype(np.float32)
    minimum = np.concatenate([mid & 63, high >> 4 | mid >> 2 & 48], -1).astype(np.float32)
    d, dmin = (_f16(b, at).astype(np.float32)[..., None] for at in (0, 2))
    return (d * scale).reshape(len(b), -1), (-dmin * minimum).reshape(len(b), -1)


def _q4_k(t: Tensor) -> Codes:
    b = _blocks(t, 144)
    codes = _nibbles(b[..., 16:].reshape(*b.shape[:2], 4, 32))
    return Codes(_flat(codes), *_k_scales(b))


def _q5_k(t: Tensor) -> Codes:
    b = _blocks(t, 176)
    nibbles = _nibbles(b[..., 48:].reshape(*b.shape[:2], 4, 32)).reshape(*b.shape[:2], 8, 32)
    fifth = b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Codes(_flat(nibbles | fifth << 4), *_k_scales(b))


def _q6_k(t: Tensor) -> Codes:
    b = _blocks(t, 210)
    low = _nibbles(b[..., :128].reshape(*b.shape[:2], 2, 64))
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = b[..., 128:192].reshape(*b.shape[:2], 2, 1, 32) >> shifts & 3
    codes = low.reshape(high.shape) | high << 4
    scales = b[..., 192:208].view(np.int8).astype(np.float32) * _f16(b, 208).astype(np.float32)[..., None]
    return Codes(_flat(codes - np.uint8(32)), scales.reshape(len(b), -1))


NATIVE: dict[str, tuple[Layout, Callable[[Tensor], Codes]]] = {
    "Q4_0": (Layout(c.CODES4, 32, 2, c.MINUS_EIGHT), _q4_0),
    "Q4_1": (Layout(c.CODES4, 32, 2, c.STORED), _q4_1),
    "Q5_0": (Layout(c.CODES8, 32, 2), _q5_0),
    "Q5_1": (Layout(c.CODES8, 32, 2, c.STORED), _q5_1),
    "Q8_0": (Layout(c.CODES8, 32, 2), _q8_0),
    "Q4_K": (Layout(c.CODES4, 32, 4, c.STORED), _q4_k),
    "Q5_K": (Layout(c.CODES8, 32, 4, c.STORED), _q5_k),
    "Q6_K": (Layout(c.CODES8, 16, 4), _q6_k),
    "BF16": (Layout(c.BF16), lambda t: Codes(t.raw.view(np.uint16))),
    "F16": (Layout(c.F16), lambda t: Codes(t.raw.view(np.uint16))),
    "F32": (Layout(c.F32), lambda t: Codes(t.dense())),
}
