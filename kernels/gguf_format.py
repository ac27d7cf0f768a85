"""Reads the container format GGUF: key-value metadata and tensor extents over a memory map.

Rules of this file: no meaning, only structure. Every length is checked against the file, so that a broken or cut file
gives a ModelFileError, never a crash or a huge allocation. Values are plain Python (ints, floats, strings, lists).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .model_checks import ModelFileError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """Where a tensor lies: ``shape`` is [out, in] or [n] (rows last in the file's own order), ``start`` from byte 0."""

    kind: str
    shape: tuple[int, ...]
    start: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class GgufContainer:
    """A parsed file. ``data`` is its memory map."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorExtent]
    data: npt.NDArray[np.uint8]


class _Cursor:
    """Reads values one after another; running off the file is a ModelFileError."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {problem}; download or convert the file again")

    def scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self.data, self.at)
        except struct.error:
            self.fail("broken or truncated GGUF: it ends inside its header")
        self.at += struct.calcsize("<" + code)
        return value

    def count(self, what: str, least_bytes: int) -> int:
        """A length that the rest of the file could hold at ``least_bytes`` an item."""
        number = int(self.scalar("Q"))
        if number * least_bytes > len(self.data) - self.at:
            self.fail(f"broken or truncated GGUF: {what} of {number} items does not fit the file")
        return number

    def string(self) -> str:
        length = self.count("a string", 1)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return str(raw, "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            self.fail(f"broken GGUF: unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind = self.scalar("I")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            number = self.count("an array", struct.calcsize(code))
            values = struct.unpack_from(f"<{number}{code}", self.data, self.at)
            self.at += number * struct.calcsize(code)
            return list(values)
        if kind != _STRING:
            self.fail(f"broken GGUF: unknown array type {kind}")
        return [self.string() for _ in range(self.count("an array", 8))]


def read_container(path: Path) -> GgufContainer:
    """Parses the header of the GGUF file at ``path``. Raises ModelFileError, OSError."""
    if path.stat().st_size < 24:
        raise ModelFileError(f"{path}: not a GGUF file (only {path.stat().st_size} bytes)")
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    cursor = _Cursor(path, data.data)
    if bytes(data[:4]) != b"GGUF":
        raise ModelFileError(f"{path}: not a GGUF file; give a .gguf file or a Hugging Face directory")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        cursor.fail(f"GGUF version {version} is not supported (2 and 3, little-endian, are)")
    tensor_count = cursor.count("the tensor list", 24)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("the metadata", 12)):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        cursor.fail(f"broken GGUF: alignment {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: _extent(cursor, name, dims, kind, base + offset) for name, dims, kind, offset in infos}
    return GgufContainer(metadata, tensors, data)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    n_dims = cursor.scalar("I")
    if not 1 <= n_dims <= _MAX_DIMENSIONS:
        cursor.fail(f"broken GGUF: tensor {name!r} has {n_dims} dimensions")
    dims = tuple(cursor.scalar("Q") for _ in range(n_dims))
    return name, dims, cursor.scalar("I"), cursor.scalar("Q")


def _extent(cursor: _Cursor, name: str, dims: tuple[int, ...], kind_id: int, start: int) -> TensorExtent:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(kind_id)
    except ValueError:
        raise ModelFileError(f"{cursor.path}: tensor {name!r} has an unknown encoding ({kind_id})") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if dims[0] % block:
        cursor.fail(f"broken GGUF: rows of {name!r} ({dims[0]} values) are not whole {kind.name} blocks")
    row_bytes = dims[0] // block * block_bytes
    end = start + row_bytes * math.prod(dims[1:])
    if end > len(cursor.data):
        cursor.fail(f"truncated GGUF: tensor {name!r} ends at byte {end}, the file has {len(cursor.data)}")
    return TensorExtent(kind.name, tuple(reversed(dims)), start, row_bytes)
