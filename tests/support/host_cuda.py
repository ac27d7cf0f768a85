"""A ``Cuda`` whose device is the host: kernels run on fibers, products on the CPU, and graphs are lists of calls.

Rules of this file: what differs from a GPU is how a call is carried out, never which calls are made or with what.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from offbook.kernels import cuda_device, cuda_model
from offbook.kernels.build import load_library
from offbook.kernels.cuda import Array, Cuda, Launch

Call = Callable[[], None]


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small steps have several tiles, buckets, and launches without a graph; and no thread of torch's own."""
    monkeypatch.setattr(cuda_model, "TILE_ROWS", (4,))
    monkeypatch.setattr(cuda_model, "LARGER_TILE_ROWS", (16,))
    monkeypatch.setattr(cuda_model, "GRAPH_ROWS_MAX", 24)
    monkeypatch.setattr(cuda_device, "LOGITS_ROWS", 24)
    torch.set_num_threads(1)


class HostCuda(Cuda):
    """``schedule``: the order in which fibers run; ``skip_line``: barriers that are left out; ``forgiving``: what the
    fibers complain of is kept in ``complaint`` and not raised."""

    def __init__(self, schedule: int = 2, multiprocessors: int = 2) -> None:
        self.device, self.name, self.multiprocessors = torch.device("cpu"), "fibers", multiprocessors
        self.schedule, self.skip_line, self.forgiving = schedule, 0, False
        self.complaint = ""
        self._recorded: list[Call] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return torch.zeros(shape, dtype=dtype)

    def put(self, array: Array) -> Any:
        return torch.from_numpy(array).clone()

    def pinned(self, size: int) -> Any:
        return torch.zeros(size, dtype=torch.uint8)

    def _do(self, call: Call) -> None:
        """Now, or when the graph that is being captured is replayed."""
        if self._recorded is None:
            call()
        else:
            self._recorded.append(call)

    def kernels(self, source: str, threads: int, defines: tuple[str, ...] = ()) -> Callable[[str], Launch]:
        name = source.removesuffix(".cu") + "_fibers"
        library = load_library(name, (f"{name}.cpp",), extra=tuple(f"-D{d}" for d in defines))

        def kernel(function: str) -> Launch:
            run = self._sampler(library) if source == "sampler.cu" else self._transformer(library, function)
            return lambda blocks, *arguments: self._do(lambda: run(blocks, *arguments))

        return kernel

    def _sampler(self, library: ctypes.CDLL) -> Launch:
        call = library.offbook_sample_on_fibers
        call.restype = ctypes.c_char_p

        def run(blocks: int, *pointers: Any) -> None:
            addresses = [ctypes.c_void_p(int(p)) for p in pointers]
            self.complaint += call(*addresses, blocks, self.schedule, self.skip_line, 0).decode()

        return run

    def _transformer(self, library: ctypes.CDLL, function: str) -> Launch:
        call = library.offbook_launch_on_fibers
        call.restype = ctypes.c_char_p

        def run(blocks: int, *arguments: Any) -> None:
            boxes = [np.array([a]) for a in arguments]
            values = (ctypes.c_void_p * len(boxes))(*(b.ctypes.data for b in boxes))
            self.complaint += call(function.encode(), values, blocks, self.schedule, self.skip_line).decode()

        return run

    def capture(self, work: Call) -> Call:
        work()
        calls: list[Call] = []
        self._recorded = calls
        work()
        self._recorded = None

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def product(self, x: Any, weight: Any, out: Any) -> None:
        def multiply() -> None:
            if x.dtype == out.dtype:
                torch.mm(x, weight.t(), out=out)
            else:
                torch.mm(x.float(), weight.float().t(), out=out)

        self._do(multiply)

    def synchronize(self) -> None:
        assert self.forgiving or self.complaint == "", self.complaint

    def release(self) -> None:
        pass
