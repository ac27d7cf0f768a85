"""Chooses the device a model runs on, and opens it.

Rules of this file: torch is imported only where it is used, since importing it takes longer than loading a small model;
whatever runs out of memory while a device opens is one exception that says what to lower.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypedDict

from .build import NoCompilerError
from .model_files import ModelFiles
from .nvrtc import NvrtcError
from .step import Device, StepLimits

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
    limits: StepLimits,
    progress: Progress | None = None,
) -> Device:
    """Loads the model onto a device: "auto" is CUDA where torch sees it, else the CPU.

    CUDA makes its memory for steps within ``limits``. Plain torch takes over, with one warning, where the CPU's C++
    library or CUDA's kernels cannot be had. Raises DeviceError, ModelFileError.
    """
    if kind == "auto":
        kind = "cuda" if cuda_available() else "cpu"
    elif kind == "cuda" and not cuda_available():
        raise DeviceError("no CUDA device is available to torch; choose the device 'cpu'")

    options = _Options(kv_bytes=kv_bytes, dtype=dtype, slots=slots, progress=progress)
    try:
        if kind == "cuda":
            return _on_cuda(files, limits, threads, options)
        return _on_cpu(files, threads, options) if kind == "cpu" else _on_torch(files, "cpu", threads, options)
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        raise DeviceError(
            f"not enough memory for the model and {kv_bytes / 2**20:.0f} MiB of KV cache on {kind!r}; "
            f"lower the KV memory or choose a smaller model"
        ) from error
    except ValueError as error:
        raise DeviceError(str(error)) from error


class _Options(TypedDict):
    """What every device is told."""

    kv_bytes: int
    dtype: DeviceDtype
    slots: int
    progress: Progress | None


def _on_torch(files: ModelFiles, where: Literal["cpu", "cuda"], threads: int, options: _Options) -> Device:
    from .torch_device import TorchDevice

    return TorchDevice(files.spec, files.weights, threads=threads, kind=where, **options)


def _on_cpu(files: ModelFiles, threads: int, options: _Options) -> Device:
    from .cpu_device import CpuDevice

    try:
        return CpuDevice(files.spec, files.weights, threads=threads, **options)
    except NoCompilerError as error:
        _log.warning("the CPU library cannot be built, so torch is used, which is slower: %s", error)
    return _on_torch(files, "cpu", threads, options)


def _on_cuda(files: ModelFiles, limits: StepLimits, threads: int, options: _Options) -> Device:
    from .cuda_device import CudaDevice

    try:
        return CudaDevice(files.spec, files.weights, limits=limits, **options)
    except (ImportError, NvrtcError) as error:
        _log.warning("no CUDA kernels, so torch is used, which is slower; pip install 'offbook[gpu]': %s", error)
    return _on_torch(files, "cuda", threads, options)


def cuda_available() -> bool:
    """Whether torch sees a CUDA device; without importing torch where there is no NVIDIA driver."""
    if not any(Path("/dev").glob("nvidia*")) or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _is_memory(error: Exception) -> bool:
    """torch says that memory ran out with its own RuntimeErrors (one class for CUDA, a plain one for the CPU)."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "allocate memory" in str(error)
