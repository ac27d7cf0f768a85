"""Compiles CUDA C++ to cubins through NVRTC, with flags that are ours, and keeps them.

Rules of this file: no GPU and no CuPy needed (the ``nvidia-cuda-nvrtc`` wheel is enough). CuPy's own compile path turns
flush-to-zero on and cannot be told not to; the bits of a token would then depend on the device. A cubin's name in the
cache is a hash of sources, flags, architecture and compiler version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

from .build import CSRC
from .cache_dir import cache_directory, whole_file

_log = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-default-device")


class NvrtcError(Exception):
    """NVRTC is missing or refused the source; the message holds what it printed."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what ptxas said about it (registers, shared memory, spills)."""

    cubin: bytes
    log: str


@functools.cache
def library() -> ctypes.CDLL:
    """NVRTC from its wheel, else from the system. Raises NvrtcError."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    wheels = sorted((p for root in roots for p in root.glob("*/lib/libnvrtc.so.*")), reverse=True)
    for name in (*map(str, wheels), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NvrtcError("NVRTC was not found: install nvidia-cuda-nvrtc or the CUDA toolkit")


def version() -> tuple[int, int]:
    """NVRTC's (major, minor)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def compile_cubin(source: str, architecture: int, defines: tuple[str, ...] = ()) -> Compiled:
    """The file ``csrc/source`` compiled for sm_<architecture> with ``defines`` ("NAME=1"). Raises NvrtcError with the
    compiler's log."""
    nvrtc, program = library(), ctypes.c_void_p()
    text = (CSRC / source).read_bytes()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None), "nvrtcCreateProgram")
    try:
        options = [*FLAGS, *(f"-D{d}" for d in defines), f"-arch=sm_{architecture}", f"-I{CSRC}", "--ptxas-options=-v"]
        argv = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), argv)
        log = _fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if failed:
            raise NvrtcError(f"NVRTC could not compile {source} for sm_{architecture}:\n{log}")
        return Compiled(_fetch(program, "CUBIN"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def cached_cubin(source: str, architecture: int, defines: tuple[str, ...] = ()) -> Path:
    """The cubin's file, compiled now if the cache lacks it. Raises NvrtcError, OSError."""
    digest = hashlib.sha256(repr((version(), FLAGS, defines, architecture, source)).encode())
    for path in sorted(p for p in CSRC.iterdir() if p.suffix in (".h", ".cuh") or p.name == source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    target = cache_directory() / "cubin" / f"{Path(source).stem}-sm{architecture}-{digest.hexdigest()[:20]}.cubin"
    if not target.exists():
        _log.info("compiling the CUDA kernels (%s), at the first start only", source)
        with whole_file(target) as draft:
            draft.write_bytes(compile_cubin(source, architecture, defines).cubin)
    return target


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    """The bytes behind nvrtcGet<what>Size and nvrtcGet<what>."""
    size = ctypes.c_size_t()
    _check(getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return buffer.raw


def _check(status: int, call: str) -> None:
    if status:
        describe = library().nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        raise NvrtcError(f"{call}: {describe(status).decode()}")
