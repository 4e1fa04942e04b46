"""CuPy arrays, staged through host memory."""

from __future__ import annotations

import logging
from typing import Any

import cupy
import numpy as np

from hvdlite.adapters import numpy as host_adapter
from hvdlite.buffer import NUMPY_DTYPES, Buffer
from hvdlite.errors import InvalidRequestError

_log = logging.getLogger("hvdlite")
_noted: list[bool] = []


def buffer(tensor: Any, writable: bool) -> Buffer:
    """Copy an array to the host, and back when ``writable``.

    Raises: InvalidRequestError for a dtype that is not exchanged.
    """
    if not _noted:
        _noted.append(True)
        _log.warning("CuPy arrays are exchanged through host memory: no device data plane is loaded")
    host = np.ascontiguousarray(cupy.asnumpy(tensor))
    made = host_adapter.buffer(host, True)
    made.device, made.tensor = "cuda", tensor
    if writable:
        made.write_back = lambda: tensor.set(host.reshape(tensor.shape))
    return made


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
