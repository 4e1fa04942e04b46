"""The Device of real GPUs: CuPy's runtime calls for memory, streams and events, numba-cuda for kernels.

The one place where streams and events are shared with CuPy and torch: by handle. Both use the device's primary context, as CUDA's
runtime does, so addresses and handles are common to all.

*Never run on a GPU so far*: tests run everything above on a stand-in (tests/simulated/fake_cuda.py).
"""

from __future__ import annotations

import hashlib
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdlite.backoff import LONGEST_TRANSFER_SLEEP_S, complete
from hvdlite.dataplane.device import DeviceArray
from hvdlite.errors import TransportError, UnavailableError

#: Blocks of a persistent grid for each multiprocessor: of 256 threads eight fill it. *Source*: CUDA C++ Programming Guide.
_BLOCKS_PER_MULTIPROCESSOR = 8


def why_unavailable() -> str:
    """Why there can be no device here; empty where there can. Imports CuPy and numba-cuda."""
    try:
        import cupy
        from numba import cuda

        num_devices = cupy.cuda.runtime.getDeviceCount()
        if not num_devices:
            return "there is no GPU"
        return "" if cuda.is_available() else "numba-cuda finds no GPU"
    except ImportError as error:
        return f"{error.name or error} is not installed"
    except Exception as error:  # CuPy's own kinds, one for each way in which a driver can be missing
        return f"CUDA cannot be used: {error}"


def num_gpus() -> int:
    """How many this process sees; 0 where it cannot use them."""
    if why_unavailable():
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def load_nccl() -> tuple[Any, Callable[[], str]]:
    """The module ``cupy.cuda.nccl``, and what tells of NCCL's last failure.

    Raises: UnavailableError.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise UnavailableError(f"NCCL: {error}: pip install hvdlite[gpu]") from error
    if not nccl.available:
        raise UnavailableError("NCCL: this CuPy was built without it, or finds no libnccl.so.2: pip install hvdlite[gpu]")
    return nccl, _last_error


def _last_error() -> str:
    """NCCL's own words, which CuPy's error has not; empty before NCCL 2.13."""
    import ctypes

    try:
        function = ctypes.CDLL("libnccl.so.2").ncclGetLastError
    except (OSError, AttributeError):
        return ""
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    return (function(None) or b"").decode(errors="replace")


def _identity(properties: dict[str, Any]) -> int:
    """Of a GPU, in 63 bits. CuPy cuts its UUID at the first zero byte: then the host's name stands for the rest."""
    uuid = bytes(properties["uuid"])
    place = tuple(properties[name] for name in ("pciDomainID", "pciBusID", "pciDeviceID"))
    text = repr((uuid, place, "" if len(uuid) == 16 else socket.gethostname()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class CudaEvent:
    """A CuPy event; times are not taken."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.done)

    def synchronize(self) -> None:
        complete(_Awaited(self.event), longest_s=LONGEST_TRANSFER_SLEEP_S)


class _Awaited:
    """An event as what ``backoff.complete`` waits for."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def Test(self) -> bool:
        return bool(self._event.done)


class CudaDevice:
    """A Device. *Threads*: as there; each method makes its GPU the calling thread's current one while it runs."""

    def __init__(self, index: int) -> None:
        """Raises: UnavailableError."""
        reason = why_unavailable()
        if reason:
            raise UnavailableError(f"GPU {index}: {reason}: pip install hvdlite[gpu], on a machine with a GPU")
        import cupy
        from numba import cuda

        self.index = index
        self._cupy, self._numba = cupy, cuda
        self._runtime = cupy.cuda.runtime
        self._kept: deque[tuple[CudaEvent, tuple[Any, ...]]] = deque()
        #: What the operation that is being enqueued has uploaded: its kernels come after that, and before the next ``poll``.
        self._uploads: list[Any] = []
        with self._current("opening it"):
            properties = self._runtime.getDeviceProperties(index)
            self.identity = _identity(properties)
            self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            self._num_blocks = _BLOCKS_PER_MULTIPROCESSOR * properties["multiProcessorCount"]
        self.stream, self.wire = (int(one.ptr) for one in self._streams)
        self._launched_on: Any = None

    def allocate(self, num_bytes: int) -> DeviceArray:
        with self._current("an allocation"), self._streams[0]:
            memory = self._cupy.cuda.alloc(max(1, num_bytes))
        return DeviceArray(int(memory.ptr), num_bytes, "uint8", memory)

    def pinned(self, num_bytes: int) -> np.ndarray:
        with self._current("an allocation of pinned memory"):
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, num_bytes))
        return np.frombuffer(memory, np.uint8, num_bytes)

    def upload(self, array: np.ndarray) -> int:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host, there = self.pinned(len(flat)), self.allocate(len(flat))
        host[:] = flat
        self.copy(there.address, host.ctypes.data, len(flat))
        self._uploads.append((host, there))
        return there.address

    def launch(self, kernel: Any, num_warps: int, *arguments: Any) -> None:
        from hvdlite.compression.cuda_kernels import THREADS, WARPS_PER_BLOCK

        blocks = min(self._num_blocks, -(-num_warps // WARPS_PER_BLOCK))
        with self._current("a launch"), self._numba.gpus[self.index]:
            if self._launched_on is None:  # made here, because it belongs to Numba's context of this GPU
                self._launched_on = self._numba.external_stream(self.stream)
            kernel[blocks, THREADS, self._launched_on](*arguments)

    def copy(self, target: int, source: int, num_bytes: int, stream: int | None = None) -> None:
        if num_bytes:
            with self._current("a copy"):
                self._runtime.memcpyAsync(
                    target, source, num_bytes, self._runtime.memcpyDefault, self.stream if stream is None else stream)

    def download(self, address: int, num_bytes: int) -> np.ndarray:
        host = self.pinned(num_bytes)
        self.copy(host.ctypes.data, address, num_bytes)
        self.record().synchronize()
        return host.copy()

    def record(self, stream: int | None = None) -> CudaEvent:
        with self._current("recording an event"):
            event = self._cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, self.stream if stream is None else stream)
        return CudaEvent(event)

    def wait_for(self, event: Any, stream: int | None = None) -> None:
        with self._current("waiting for an event"):
            self._runtime.streamWaitEvent(self.stream if stream is None else stream, event.event.ptr)

    def keep(self, *what: Any) -> None:
        self._kept.append((self.record(), what))

    def poll(self) -> None:
        if self._uploads:
            uploads, self._uploads = self._uploads, []
            self.keep(uploads)
        with self._current("a call that was under way"):
            while self._kept and self._kept[0][0].is_done():
                self._kept.popleft()

    def synchronize(self) -> None:
        for stream in (self.wire, self.stream):
            self.record(stream).synchronize()
        self.poll()

    @contextmanager
    def _current(self, doing: str) -> Iterator[None]:
        try:
            with self._cupy.cuda.Device(self.index):
                yield
        except (self._runtime.CUDARuntimeError, self._cupy.cuda.memory.OutOfMemoryError) as error:
            raise TransportError(f"CUDA failed in {doing} on GPU {self.index}: {error}: look at what ran there before") from error
