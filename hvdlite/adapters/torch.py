"""torch tensors. Host tensors are viewed; device tensors are staged through host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvdlite.buffer import Buffer
from hvdlite.errors import InvalidRequestError

_log = logging.getLogger("hvdlite")

_NAMES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
    torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.bool: "bool",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_staged: set[str] = set()


def buffer(tensor: Any, writable: bool) -> Buffer:
    """View a tensor's memory; a strided or device tensor is copied, and written back when ``writable``.

    Raises: InvalidRequestError for a dtype, layout or device that is not exchanged.
    """
    name = _NAMES.get(tensor.dtype)
    # Most tensors, at a third of the time: a small synchronous allreduce spends most of its own here.
    if name is not None and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous():
        array = _view(tensor.detach() if tensor.requires_grad else tensor, name)
        if array.ndim != 1:
            array = array.reshape(-1)
        return Buffer(array, name, tuple(tensor.shape), "cpu", tensor, None, tensor.data_ptr())
    if name is None:
        raise InvalidRequestError(f"dtype {tensor.dtype} is not exchanged: convert it to one of {', '.join(_DTYPES)}")
    if tensor.layout is not torch.strided:
        raise InvalidRequestError(f"layout {tensor.layout} is not exchanged here: use to_dense() or a sparse call")
    device = tensor.device.type
    if device not in ("cpu", "cuda"):
        raise InvalidRequestError(f"device {tensor.device} is not exchanged: move the tensor to the CPU or a GPU")
    source = tensor.detach()
    if writable and 0 in source.stride() and any(
        stride == 0 and length > 1 for stride, length in zip(source.stride(), source.shape, strict=True)
    ):
        raise InvalidRequestError("the tensor's elements overlap in memory (it was expanded): use clone() first")
    if device == "cuda":
        _note_staging(device)
    host = (source.cpu() if device != "cpu" else source).contiguous()
    array = _view(host.view(-1) if host.dim() != 1 else host, name)
    made = Buffer(array, name, tuple(tensor.shape), device, tensor, None, host.data_ptr())
    if writable and host is not source and host.data_ptr() != source.data_ptr():
        made.write_back = _writer(source, host, name)
    return made


def _view(tensor: torch.Tensor, name: str) -> np.ndarray:
    """A host tensor's memory, bfloat16 as its bits."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if name == "bfloat16" else tensor.numpy()


def _writer(target: torch.Tensor, host: torch.Tensor, name: str) -> Callable[[], None]:
    """How the result gets from ``host`` to where the user sees it."""
    if target.device.type != "cpu":
        def copy_to_device() -> None:
            target.copy_(host)

        return copy_to_device
    # Through memory, as results that need no copy arrive: autograd takes no notice, and inference tensors allow it.
    seen, result = _view(target, name), _view(host, name)
    return lambda: np.copyto(seen, result)


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Buffer:
    """A new tensor on ``like``'s device, uninitialised."""
    return buffer(torch.empty(shape, dtype=_DTYPES[dtype], device=like.device), True)


def _note_staging(device: str) -> None:
    if device not in _staged:
        _staged.add(device)
        _log.warning("torch tensors on %s are exchanged through host memory: no device data plane is loaded", device)


def cast(tensor: Any, dtype: Any) -> Any:
    """A floating-point tensor in another dtype, given by name or as the framework's own; others as they are."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.to(_DTYPES[dtype] if isinstance(dtype, str) else dtype)
