"""NumPy arrays, numbers, and anything that NumPy can look at (array interface, DLPack on the host)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite import kernels
from hvdlite.buffer import NUMPY_DTYPES, SMALL_ELEMENTS, Buffer
from hvdlite.errors import InvalidRequestError

#: No array of these is on a GPU.
gpu_of = None

_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != "bfloat16"}


def buffer(tensor: Any, writable: bool) -> Buffer:
    """View an array's memory; a strided array is copied, and written back when ``writable``.

    Raises: InvalidRequestError for a dtype that is not exchanged, and for memory that cannot be written.
    """
    array = _as_array(tensor, writable)
    name = _NAMES.get(array.dtype)
    if name is None:
        raise InvalidRequestError(
            f"dtype {array.dtype} is not exchanged: convert it to one of {', '.join(sorted(_NAMES.values()))}")
    if writable:
        _check_writable(array)
    if array.flags.c_contiguous:
        return Buffer(array if array.ndim == 1 else array.reshape(-1), name, array.shape, "cpu", tensor)
    flat = array.flatten()
    made = Buffer(flat, name, array.shape, "cpu", tensor)
    if writable:
        made.write_back = lambda: np.copyto(array, flat.reshape(array.shape))
    return made


def small_copy(tensor: Any) -> Buffer | None:
    """A new array of the same values, contiguous, if it is a small one: to combine it in place takes one view instead of two."""
    if type(tensor) is np.ndarray:
        if tensor.size > SMALL_ELEMENTS:
            return None
    elif not isinstance(tensor, (int, float, np.generic)):
        return None
    array = np.array(tensor, order="C")
    name = _NAMES.get(array.dtype)
    if name is None:
        return None
    return Buffer(array if array.ndim == 1 else array.reshape(-1), name, array.shape, "cpu", array)


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Buffer:
    """A new array, uninitialised."""
    array = np.empty(shape, NUMPY_DTYPES[dtype])
    return Buffer(array if len(shape) == 1 else array.reshape(-1), dtype, shape, "cpu", array)


def cast(tensor: Any, dtype: Any) -> Any:
    """A floating-point array in another dtype, given by name or as the framework's own; others as they are.

    Raises: InvalidRequestError for bfloat16, which NumPy does not have.
    """
    array = np.asarray(tensor)
    if array.dtype.kind != "f":
        return tensor
    if dtype == "bfloat16":
        raise InvalidRequestError("NumPy has no bfloat16: use Compression.fp16 for its arrays")
    made = np.empty(array.shape, dtype)
    if array.flags.c_contiguous and (array.dtype, made.dtype) == (np.float32, np.float16):
        # Vector code: half the time of NumPy's own casts.
        kernels.float_to_halves(array.reshape(-1), made.reshape(-1).view(np.uint16), False)
    elif array.flags.c_contiguous and (array.dtype, made.dtype) == (np.float16, np.float32):
        kernels.halves_to_float(array.reshape(-1).view(np.uint16), made.reshape(-1), False)
    else:
        with np.errstate(over="ignore"):
            made[...] = array
    return made


def _as_array(tensor: Any, writable: bool) -> np.ndarray:
    if isinstance(tensor, np.ndarray):
        return tensor
    if hasattr(tensor, "__dlpack__") and not hasattr(tensor, "__array_interface__") and not hasattr(tensor, "__array__"):
        try:
            return np.from_dlpack(tensor)
        except (BufferError, RuntimeError, TypeError) as reason:
            raise InvalidRequestError(
                f"{type(tensor).__name__} cannot be viewed through DLPack: {reason}: copy it to a NumPy array") from reason
    array = np.asarray(tensor)
    if writable and not np.shares_memory(array, np.asarray(tensor)):
        raise InvalidRequestError(
            f"{type(tensor).__name__} cannot be changed in place: use the variant that returns a new array")
    return array


def _check_writable(array: np.ndarray) -> None:
    if not array.flags.writeable:
        raise InvalidRequestError("the array is read-only: use the variant that returns a new array")
    if 0 in array.strides and any(
        stride == 0 and length > 1 for stride, length in zip(array.strides, array.shape, strict=True)
    ):
        raise InvalidRequestError("the array's elements overlap in memory (it was broadcast or expanded): copy it first")
