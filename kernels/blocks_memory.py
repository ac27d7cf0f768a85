"""Large arrays for weights and KV, in huge pages where the system grants them.

Rules of this file: memory is taken lazily (a page that is never touched costs nothing) and starts as zeros. Huge pages
matter: reading weights through 4 KiB pages was measured at two thirds of the bandwidth.
"""

from __future__ import annotations

import mmap

import numpy as np

from .step import U8

HUGE_PAGE = 2 << 20


def huge_array(size: int) -> U8:
    """``size`` zero bytes, aligned to a huge page; freed with the last reference. Raises MemoryError."""
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE)
    except OSError as error:
        raise MemoryError(f"cannot reserve {size} bytes: {error.strerror or error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages: only slower
            return _aligned(pages, size)
    return _aligned(pages, size)


def _aligned(pages: mmap.mmap, size: int) -> U8:
    whole = np.frombuffer(pages, np.uint8)
    offset = -whole.ctypes.data % HUGE_PAGE
    return whole[offset : offset + size]
