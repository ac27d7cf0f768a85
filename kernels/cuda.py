"""The few CUDA calls that offbook makes, through torch and CuPy: memory, launches, graphs.

Rules of this file: nothing here knows a sampler or a model; torch and CuPy are imported when a ``Cuda`` is made, never
before. Everything happens inside ``active()``, on one stream. Tests put a ``Cuda`` whose memory is the host's in its
place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from .nvrtc import cached_cubin

Array = npt.NDArray[Any]
Fields = Mapping[str, tuple[Any, tuple[int, ...]]]  # name -> dtype, shape
Launch = Callable[..., None]  # (number of blocks, *arguments: NumPy scalars, pointers as uint64)


class Cuda:
    """The current CUDA device. Raises ImportError without CuPy, RuntimeError without a GPU."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._cupy = importlib.import_module("cupy")
        index = self._torch.cuda.current_device()
        properties = self._torch.cuda.get_device_properties(index)
        self.device = self._torch.device("cuda", index)
        self.name: str = properties.name
        self.multiprocessors: int = properties.multi_processor_count
        self._architecture = 10 * properties.major + properties.minor
        self._stream = self._torch.cuda.Stream(self.device)
        self._graphs_memory = self._torch.cuda.graph_pool_handle()

    @contextmanager
    def active(self) -> Iterator[None]:
        """All other methods, and all work on their tensors, belong inside."""
        with self._torch.cuda.stream(self._stream), self._torch.inference_mode():
            yield

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor of zeros on the device; ``dtype``: torch's."""
        return self._torch.zeros(shape, dtype=dtype, device=self.device)

    def put(self, array: Array) -> Any:
        """The array as a tensor on the device."""
        return self._torch.from_numpy(array).to(self.device)

    def pinned(self, size: int) -> Any:
        """``size`` bytes of page-locked host memory, as a torch tensor."""
        return self._torch.zeros(size, dtype=self._torch.uint8, pin_memory=True)

    def kernels(self, source: str, threads: int, defines: tuple[str, ...] = ()) -> Callable[[str], Launch]:
        """The kernels of ``csrc/source`` by name, for blocks of ``threads``. Raises NvrtcError, OSError."""
        module = self._cupy.cuda.function.Module()
        module.load(cached_cubin(source, self._architecture, defines).read_bytes())

        def kernel(name: str) -> Launch:
            function = module.get_function(name)

            def launch(blocks: int, *arguments: Any) -> None:
                stream = _Stream(self._torch.cuda.current_stream().cuda_stream)  # another one while capturing
                function((blocks,), (threads,), arguments, 0, self._cupy.cuda.Stream.from_external(stream))

            return launch

        return kernel

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs ``work`` once, then records it in a CUDA graph; the result replays it.

        The first run is outside of the graph because loading a module and choosing a product's algorithm are not
        allowed inside. ``work`` must find everything that changes in device memory.
        """
        work()
        self.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, pool=self._graphs_memory, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def product(self, x: Any, weight: Any, out: Any) -> None:
        """out[M, N] = x[M, K] weight[N, K]^T, added up in float32; ``out`` may be float32 where the others are not."""
        if x.dtype == out.dtype:
            self._torch.mm(x, weight.t(), out=out)
        else:
            self._torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)

    def synchronize(self) -> None:
        """Waits for everything that was sent. Raises what went wrong there."""
        self._torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        """Gives memory that is no longer used back to the driver."""
        self._torch.cuda.empty_cache()


class Arena:
    """Device memory with a page-locked twin on the host, in which a step's arrays are laid out side by side."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        """Room for ``size`` bytes."""
        self._host = cuda.pinned(size)
        self._device = cuda.put(np.zeros(size, np.uint8))
        self._used = 0
        self.address: dict[str, int] = {}  # on the device
        self.host: dict[str, Array] = {}

    @staticmethod
    def size_of(fields: Fields) -> int:
        """Bytes that the arrays take when they are laid out."""
        return sum(_padded(dtype, shape) for dtype, shape in fields.values())

    def lay(self, fields: Fields) -> None:
        """Lays out arrays of these shapes: from now on ``address`` and ``host`` are theirs. An array's address depends
        on the sizes of those before it alone. The host's contents are whatever was there."""
        self._used, base, flat = 0, self._device.data_ptr(), self._host.numpy()
        self.address, self.host = {}, {}
        for name, (dtype, shape) in fields.items():
            begin, size = self._used, int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._used += _padded(dtype, shape)
            self.address[name] = base + begin
            self.host[name] = flat[begin : begin + size].view(dtype).reshape(shape)

    def upload(self) -> None:
        """What was laid out, without waiting: the host's side must not change before the next synchronisation."""
        self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)

    def download(self) -> None:
        """What was laid out, without waiting."""
        self._host[: self._used].copy_(self._device[: self._used], non_blocking=True)


def _padded(dtype: Any, shape: tuple[int, ...]) -> int:
    """Bytes of an array, up to a multiple that suits any load."""
    size: int = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return -(-size // 256) * 256


class _Stream:
    """A raw stream handle under the ``__cuda_stream__`` protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)
