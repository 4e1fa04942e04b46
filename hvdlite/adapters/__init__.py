"""Adapters: how arrays of a framework become Buffers and back. Adding a framework is one file and one row.

An adapter module has ``buffer(tensor, writable)`` -> Buffer; ``small_copy(tensor)`` -> Buffer, a new tensor of the same values
if it is a small one in host memory, else None; ``empty(shape, dtype, like)`` -> Buffer, a new tensor of the same framework and
device as ``like``; ``cast(tensor, dtype)`` -> tensor; and ``gpu_of``, None where no tensor can be on a GPU. Else that is a
function ``gpu_of(tensor)`` -> its GPU's index or None, and there are ``device_buffer(tensor, writable, device)`` -> Buffer, where
it lies, and ``device_empty(shape, dtype, like, stream)`` -> Buffer, on ``like``'s GPU, in memory that belongs to ``stream``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hvdlite.errors import InvalidRequestError

#: First package of the tensor's class (or of a base class) -> adapter.
_TABLE = {
    "torch": "hvdlite.adapters.torch",
    "cupy": "hvdlite.adapters.cupy",
    "numpy": "hvdlite.adapters.numpy",
}
_PROTOCOLS = ("__array_interface__", "__array__", "__dlpack__")
_known: dict[type, Any] = {}


def adapter_for(tensor: Any) -> Any:
    """The adapter of a tensor's type.

    Raises: InvalidRequestError for what is no tensor in any known way.
    """
    kind = type(tensor)
    adapter = _known.get(kind)
    if adapter is None:
        adapter = _known[kind] = _find(tensor)
    return adapter


def _find(tensor: Any) -> Any:
    for base in type(tensor).__mro__:
        module = _TABLE.get(base.__module__.partition(".")[0])
        if module:
            return import_module(module)
    if isinstance(tensor, (int, float, list, tuple)) or any(hasattr(tensor, name) for name in _PROTOCOLS):
        return import_module("hvdlite.adapters.numpy")
    raise InvalidRequestError(
        f"{type(tensor).__module__}.{type(tensor).__name__} is no tensor: it has none of {', '.join(_PROTOCOLS)}: "
        "pass a NumPy array, a torch tensor, a CuPy array, or anything with DLPack or the array interface")
