"""CuPy arrays. They are viewed where they lie; where this process cannot work on the GPU itself they are copied to the host.

*Never run on a GPU so far.*
"""

from __future__ import annotations

import logging
from typing import Any

import cupy
import numpy as np

from hvdlite.adapters import numpy as host_adapter
from hvdlite.buffer import NUMPY_DTYPES, Buffer
from hvdlite.dataplane.device import Device, DeviceArray
from hvdlite.errors import InvalidRequestError

_log = logging.getLogger("hvdlite")
_noted: list[bool] = []


def buffer(tensor: Any, writable: bool) -> Buffer:
    """Copy an array to the host, and back when ``writable``.

    Raises: InvalidRequestError for a dtype that is not exchanged.
    """
    if not _noted:
        _noted.append(True)
        _log.warning("CuPy arrays are copied to the host and back by CuPy: for NCCL and pinned memory pip install hvdlite[gpu]")
    host = np.ascontiguousarray(cupy.asnumpy(tensor))
    made = host_adapter.buffer(host, True)
    made.device, made.tensor = "cuda", tensor
    if writable:
        made.write_back = lambda: tensor.set(host.reshape(tensor.shape))
    return made


def small_copy(tensor: Any) -> None:
    """None of them is in host memory."""


def gpu_of(tensor: Any) -> int:
    """The GPU that an array is on."""
    return int(tensor.device.id)


def device_buffer(tensor: Any, writable: bool, device: Device) -> Buffer:
    """View an array on ``device``; a strided one is copied there, and written back when ``writable``.

    Raises: InvalidRequestError for a dtype that is not exchanged.
    """
    name = str(tensor.dtype)
    if name not in NUMPY_DTYPES:
        raise InvalidRequestError(f"dtype {name} is not exchanged: convert it to one of {', '.join(NUMPY_DTYPES)}")
    flat = cupy.ascontiguousarray(tensor)
    array = DeviceArray(int(flat.data.ptr), int(flat.size), name, flat)
    made = Buffer(array, name, tuple(tensor.shape), "cuda", tensor, None, array.address, device,
                  lambda: int(cupy.cuda.get_current_stream(device.index).ptr))
    if writable and flat.data.ptr != tensor.data.ptr:

        def copy_back(stream: int) -> None:
            with cupy.cuda.Device(device.index), _stream(stream):
                tensor[...] = flat

        made.write_back = copy_back
    return made


def device_empty(shape: tuple[int, ...], dtype: str, like: Buffer, stream: int | None = None) -> Buffer:
    """A new array on ``like``'s GPU, uninitialised, of the memory of ``stream``: the calling thread's own by default."""
    with cupy.cuda.Device(like.on.index), cupy.cuda.get_current_stream() if stream is None else _stream(stream):
        made = cupy.empty(shape, NUMPY_DTYPES[dtype])
    return device_buffer(made, True, like.on)


def _stream(handle: int) -> Any:
    return cupy.cuda.ExternalStream(handle) if handle else cupy.cuda.Stream.null


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Buffer:
    """A new array on the current device, uninitialised."""
    return buffer(cupy.empty(shape, NUMPY_DTYPES[dtype]), True)


def cast(tensor: Any, dtype: Any) -> Any:
    """A floating-point array in another dtype, given by name or as the framework's own; others as they are.

    Raises: InvalidRequestError for bfloat16, which CuPy does not have.
    """
    if tensor.dtype.kind != "f":
        return tensor
    if dtype == "bfloat16":
        raise InvalidRequestError("CuPy has no bfloat16: use Compression.fp16 for its arrays")
    return tensor.astype(dtype, copy=False)
