"""Compiles the C++ in ``csrc/`` into shared libraries at first use, and keeps them.

Rules of this file: a library's name in the cache is a hash of everything that decides its bits (sources, flags,
compiler), so a stale one can never be loaded. ``-ffast-math`` is never used and contraction is always off: the same
source must give the same bits at every CPU level.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

from .cache_dir import cache_directory, whole_file

_log = logging.getLogger(__name__)

CSRC = Path(__file__).parent / "csrc"
BASE_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-pthread",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden",
)  # fmt: skip
LEVEL_FLAGS = {
    "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    "avx512vnni": ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx2": ("-march=x86-64-v3",),
    "generic": (),
}
AVX512 = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"))
LEVEL_NEEDS = {  # flags of /proc/cpuinfo
    "avx512bf16": AVX512 | {"avx512_vnni", "avx512_bf16"},
    "avx512vnni": AVX512 | {"avx512_vnni"},
    "avx512": AVX512,
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
}


class NoCompilerError(Exception):
    """No C++ compiler was found, or it refused our sources; the message says which and what it printed."""


@functools.cache
def cpu_level() -> str:
    """The fastest of LEVEL_FLAGS that this machine runs; ``$OFFBOOK_CPU_LEVEL`` may ask for another one."""
    asked = os.environ.get("OFFBOOK_CPU_LEVEL")
    if asked:
        if asked not in LEVEL_FLAGS:
            raise ValueError(f"OFFBOOK_CPU_LEVEL={asked!r}: choose one of {', '.join(LEVEL_FLAGS)}")
        return asked
    return cpu_levels()[0]


@functools.cache
def cpu_levels() -> tuple[str, ...]:
    """Those of LEVEL_FLAGS that this machine runs, the fastest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("generic",)
    vendor, flags = _cpuinfo("vendor_id"), set(_cpuinfo("flags").split())
    levels = [level for level, needs in LEVEL_NEEDS.items() if needs <= flags]
    if vendor == "GenuineIntel" and "avx512bf16" in levels:
        # There a bf16 pair product takes four times a multiply-add, for twice the work; on AMD's cores it takes one.
        levels[:2] = ["avx512vnni", "avx512bf16"]
    return (*levels, "generic")


def _cpuinfo(field: str) -> str:
    """The first value of this field of /proc/cpuinfo, or nothing."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    except OSError:
        pass
    return ""


@functools.cache
def compiler() -> str:
    """Path of the C++ compiler: ``$CXX``, g++, clang++, c++. Raises NoCompilerError."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        found = name and shutil.which(name)
        if found:
            return found
    raise NoCompilerError("no C++ compiler found (looked for $CXX, g++, clang++, c++)")


def load_library(
    name: str, sources: tuple[str, ...], *, level: str | None = None, extra: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """The shared library made of ``sources`` (file names in csrc/), built now if the cache lacks it.

    Raises NoCompilerError. Calls through the result release the GIL.
    """
    return ctypes.CDLL(str(build_library(name, sources, level=level, extra=extra)))


def build_library(
    name: str, sources: tuple[str, ...], *, level: str | None = None, extra: tuple[str, ...] = ()
) -> Path:
    """As load_library, but only makes the file and returns its path."""
    cxx = compiler()
    flags = (*BASE_FLAGS, *LEVEL_FLAGS[level or cpu_level()], *extra)
    target = cache_directory() / "lib" / f"{name}-{_fingerprint(cxx, flags, sources)}.so"
    if not target.exists():
        _log.info("compiling the CPU kernels (%s), at the first start only: up to half a minute", name)
        with whole_file(target) as draft:
            objects = [draft.with_name(f"{draft.name}.{source}.o") for source in sources]
            compile_ = [cxx, *flags, "-c", "-o"]
            try:
                _run(name, [[*compile_, str(o), str(CSRC / s)] for s, o in zip(sources, objects, strict=True)])
                _run(name, [[cxx, *flags, "-shared", "-o", str(draft), *map(str, objects)]])
            finally:
                for made in objects:
                    made.unlink(missing_ok=True)
    return target


def _run(name: str, commands: list[list[str]]) -> None:
    """All of the compiler's calls side by side. Raises NoCompilerError with the first error of one that fails."""
    calls = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        printed = [call.communicate()[1] for call in calls]
    finally:
        for call in calls:
            call.kill()  # of those that have ended nothing is left to kill
    for call, command, text in zip(calls, commands, printed, strict=True):
        if call.returncode:
            _log.debug("%s\n%s", " ".join(command), text)
            lines = text.strip().splitlines() or [f"exit status {call.returncode}"]
            first = next((line for line in lines if "error" in line), lines[-1])
            raise NoCompilerError(f"{command[0]} could not build {name}: {first.strip()[:400]}")


def _fingerprint(cxx: str, flags: tuple[str, ...], sources: tuple[str, ...]) -> str:
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(repr((version, flags, sources, platform.machine())).encode())
    headers = sorted(p for p in CSRC.iterdir() if p.suffix in (".h", ".cuh", ".cu") or p.name in sources)
    for path in headers:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]
