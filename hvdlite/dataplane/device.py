"""Device: what the runtime asks of a GPU, and DeviceArray, flat memory on it. ``cuda`` keeps the contract with CuPy.

*Order*: everything the runtime does on a GPU is enqueued on one stream of its own, ``stream``, in plan order. Before it reads a
tensor that stream waits for an event of the producer's (``wait_for``); the consumer's waits for the event after the last access.
The host waits for neither. What a stream still works on is kept alive until it has passed (``keep``, ``poll``).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from hvdlite.buffer import NUMPY_DTYPES


class Event(Protocol):
    """A place in a stream."""

    def is_done(self) -> bool:
        """Whether the stream has come there; never blocks."""

    def synchronize(self) -> None:
        """Block the host until it has, without using a core."""


class Device(Protocol):
    """One GPU, as this process uses it. Streams are handles, None is the device's own; addresses and sizes are in bytes.

    *Threads*: ``record``, ``wait_for`` and ``download`` from any, everything else from the background thread only.
    *Raises*: TransportError where CUDA reports a failure.
    """

    index: int
    #: What tells this GPU from all others of the job, in 63 bits.
    identity: int
    #: The runtime's own stream, and one for copies to the host that shall overlap with it. Neither waits for the default stream.
    stream: int
    wire: int

    def allocate(self, num_bytes: int) -> DeviceArray:
        """Memory of bytes, at a multiple of 256, for use on ``stream``."""

    def pinned(self, num_bytes: int) -> np.ndarray:
        """Host memory that is copied from and to without a detour. *Shapes*: (num_bytes,), uint8."""

    def upload(self, array: np.ndarray) -> int:
        """Copy a small array to the device, in the order of ``stream``, and return its address: good for all that is enqueued
        there before the next ``poll``."""

    def launch(self, kernel: Any, num_warps: int, *arguments: Any) -> None:
        """Enqueue a kernel of ``compression.cuda_kernels`` on ``stream``, with at most so many warps."""

    def copy(self, target: int, source: int, num_bytes: int, stream: int | None = None) -> None:
        """Enqueue a copy between any two addresses of this device and pinned memory."""

    def download(self, address: int, num_bytes: int) -> np.ndarray:
        """Copy from the device and wait for it, in the order of ``stream``; from any thread. *Shapes*: (num_bytes,), uint8."""

    def record(self, stream: int | None = None) -> Event:
        """An event after all that is in the stream now."""

    def wait_for(self, event: Event, stream: int | None = None) -> None:
        """Let what comes into the stream from now on wait for ``event``."""

    def keep(self, *what: Any) -> None:
        """Hold references until ``stream`` has passed what is in it now."""

    def poll(self) -> None:
        """Let go of what has been passed. Between operations only."""

    def synchronize(self) -> None:
        """Block until both streams are empty."""


class DeviceArray:
    """Flat memory of a GPU, by address; ``owner`` keeps it. Slices share the memory."""

    __slots__ = ("address", "dtype", "num_elements", "owner")

    def __init__(self, address: int, num_elements: int, dtype: str, owner: Any = None) -> None:
        self.address = address
        self.num_elements = num_elements
        self.dtype = dtype
        self.owner = owner

    def __len__(self) -> int:
        return self.num_elements

    def __getitem__(self, place: slice) -> DeviceArray:
        start, stop, _ = place.indices(self.num_elements)
        return DeviceArray(self.address + start * self.itemsize, max(0, stop - start), self.dtype, self)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return NUMPY_DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.num_elements * self.itemsize

    def as_dtype(self, dtype: str) -> DeviceArray:
        """The same bytes as elements of another dtype."""
        return DeviceArray(self.address, self.nbytes // NUMPY_DTYPES[dtype].itemsize, dtype, self)
