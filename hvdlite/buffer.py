"""Buffer: a tensor as the core sees it, flat bytes with a dtype name and a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

#: How each dtype lies in host memory; bfloat16 as its bits, which NumPy has no name for.
NUMPY_DTYPES = {
    name: np.dtype({"bfloat16": "uint16"}.get(name, name))
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
}
#: Up to this many elements a tensor is copied at the call. Chosen: a copy of 16 KB takes less than what it saves.
SMALL_ELEMENTS = 4096
HALVES = frozenset(("float16", "bfloat16"))


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of one tensor, on the host or, where ``on`` is its Device, on a GPU.

    *Shapes*: ``array`` (num_elements,), contiguous: a NumPy array, or a DeviceArray. ``device``: where the tensor itself lives.
    ``write_back`` copies ``array`` to where the user sees it, when it is a copy; on a GPU it takes the stream to do so in.
    ``tensor``: what the user sees, kept alive with the memory. ``current_stream``: that of the calling thread, of GPU tensors.
    """

    array: Any
    dtype: str
    shape: tuple[int, ...]
    device: str
    tensor: Any
    write_back: Callable[..., None] | None = None
    known_address: int = 0
    on: Any = None
    current_stream: Callable[[], int] | None = None

    @property
    def address(self) -> int:
        """Of the first byte; asked for only when tensors are packed."""
        if self.known_address or self.on is not None:
            return self.known_address
        address: int = self.array.__array_interface__["data"][0]
        return address


class Memory(NamedTuple):
    """Where tensors lie that are exchanged in place, again and again.

    *Shapes*: ``addresses`` one for each of ``buffers``, uint64. ``flats``: memory in which some lie side by side, flat, of the
    tensors' dtype.
    """

    buffers: tuple[Buffer, ...]
    addresses: np.ndarray
    flats: tuple[np.ndarray, ...]
