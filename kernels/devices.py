"""Chooses the device a model runs on, and opens it.

Rules of this file: torch is imported only where it is used, since importing it takes longer than loading a small model;
whatever runs out of memory while a device opens is one exception that says what to lower.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .build import NoCompilerError
from .model_files import ModelFiles
from .step import Device

DeviceKind = Literal["auto", "cpu", "torch-cpu", "cuda"]
DeviceDtype = Literal["auto", "bfloat16", "float32"]
Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)


class DeviceError(Exception):
    """The device cannot be opened as asked; the message says what to change."""


def open_device(
    files: ModelFiles,
    *,
    kind: DeviceKind = "auto",
    dtype: DeviceDtype = "auto",
    kv_bytes: int,
    threads: int,
    slots: int,
    progress: Progress | None = None,
) -> Device:
    """Loads the model onto a device: "auto" is CUDA where torch sees it, else the CPU.

    "cpu" falls back to "torch-cpu", with one warning, where its C++ library cannot be built. Raises DeviceError,
    ModelFileError.
    """
    if kind == "auto":
        kind = "cuda" if cuda_available() else "cpu"
    elif kind == "cuda" and not cuda_available():
        raise DeviceError("no CUDA device is available to torch; choose the device 'cpu'")

    def with_torch(where: Literal["cpu", "cuda"]) -> Device:
        from .torch_device import TorchDevice

        return TorchDevice(files.spec, files.weights, kv_bytes=kv_bytes, threads=threads, dtype=dtype, slots=slots,
                           kind=where, progress=progress)  # fmt: skip

    def with_library() -> Device:
        from .cpu_device import CpuDevice

        device: Device = CpuDevice(files.spec, files.weights, kv_bytes=kv_bytes, threads=threads, dtype=dtype,
                                   slots=slots, progress=progress)  # fmt: skip
        return device

    try:
        if kind == "cuda":
            return with_torch("cuda")
        if kind == "cpu":
            try:
                return with_library()
            except NoCompilerError as error:
                _log.warning("the CPU library cannot be built, so torch is used, which is slower: %s", error)
        return with_torch("cpu")
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        raise DeviceError(
            f"not enough memory for the model and {kv_bytes / 2**20:.0f} MiB of KV cache on {kind!r}; "
            f"lower the KV memory or choose a smaller model"
        ) from error
    except ValueError as error:
        raise DeviceError(str(error)) from error


def cuda_available() -> bool:
    """Whether torch sees a CUDA device; without importing torch where there is no NVIDIA driver."""
    if not any(Path("/dev").glob("nvidia*")) or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _is_memory(error: Exception) -> bool:
    """torch says that memory ran out with its own RuntimeErrors (one class for CUDA, a plain one for the CPU)."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "allocate memory" in str(error)
