"""torch tensors. They are viewed where they lie; those of a GPU that this process cannot work on are copied to the host.

*Never run on a GPU so far*: what is about devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from hvdlite.buffer import SMALL_ELEMENTS, Buffer
from hvdlite.dataplane.device import Device, DeviceArray
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
    # Most tensors, in 2.4 us; what follows takes 3.9, which a small synchronous allreduce would feel.
    if name is not None and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous():
        array = _view(tensor.detach() if tensor.requires_grad else tensor, name)
        if array.ndim != 1:
            array = array.reshape(-1)
        return Buffer(array, name, tuple(tensor.shape), "cpu", tensor, None, tensor.data_ptr())
    source, device = _checked(tensor, name, writable), tensor.device.type
    assert name is not None
    if device == "cuda":
        _note_staging(device)
    host = (source.cpu() if device != "cpu" else source).contiguous()
    array = _view(host.view(-1) if host.dim() != 1 else host, name)
    made = Buffer(array, name, tuple(tensor.shape), device, tensor, None, host.data_ptr())
    if writable and host is not source and host.data_ptr() != source.data_ptr():
        made.write_back = _writer(source, host, name)
    return made


def small_copy(tensor: Any) -> Buffer | None:
    """A new tensor of the same values, contiguous, if it is a small one in host memory: to combine it in place takes one
    view instead of two, and so less than to combine it into another."""
    name = _NAMES.get(tensor.dtype)
    if name is None or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.numel() > SMALL_ELEMENTS:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    copied = tensor.clone(memory_format=torch.contiguous_format)
    array = _view(copied, name)
    flat = array if array.ndim == 1 else array.reshape(-1)
    return Buffer(flat, name, tuple(tensor.shape), "cpu", copied, None, copied.data_ptr())


def _checked(tensor: Any, name: str | None, writable: bool) -> Any:
    """The tensor without its history. Raises: InvalidRequestError."""
    if name is None:
        raise InvalidRequestError(f"dtype {tensor.dtype} is not exchanged: convert it to one of {', '.join(_DTYPES)}")
    if tensor.layout is not torch.strided:
        raise InvalidRequestError(f"layout {tensor.layout} is not exchanged here: use to_dense() or a sparse call")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidRequestError(f"device {tensor.device} is not exchanged: move the tensor to the CPU or a GPU")
    source = tensor.detach()
    if writable and 0 in source.stride() and any(
        stride == 0 and length > 1 for stride, length in zip(source.stride(), source.shape, strict=True)
    ):
        raise InvalidRequestError("the tensor's elements overlap in memory (it was expanded): use clone() first")
    return source


def gpu_of(tensor: Any) -> int | None:
    """The GPU that a tensor is on; None for the host."""
    return tensor.get_device() if tensor.is_cuda else None


def device_buffer(tensor: Any, writable: bool, device: Device) -> Buffer:
    """View a tensor on ``device``; a strided one is copied there, and written back when ``writable``.

    Raises: InvalidRequestError for a dtype or layout that is not exchanged.
    """
    name = _NAMES.get(tensor.dtype)
    source = _checked(tensor, name, writable)
    assert name is not None
    flat = source.contiguous()
    array = DeviceArray(flat.data_ptr(), flat.numel(), name, flat)
    made = Buffer(array, name, tuple(tensor.shape), "cuda", tensor, None, flat.data_ptr(), device,
                  lambda: int(torch.cuda.current_stream(device.index).cuda_stream))
    if writable and flat.data_ptr() != source.data_ptr():

        def copy_back(stream: int) -> None:
            with torch.no_grad(), _on_stream(stream, device.index):
                source.copy_(flat)

        made.write_back = copy_back
    return made


def device_empty(shape: tuple[int, ...], dtype: str, like: Buffer, stream: int | None = None) -> Buffer:
    """A new tensor on ``like``'s GPU, uninitialised, of the memory of ``stream``: the calling thread's own by default."""
    with nullcontext() if stream is None else _on_stream(stream, like.on.index):
        made = torch.empty(shape, dtype=_DTYPES[dtype], device=like.tensor.device)
    return device_buffer(made, True, like.on)


def _on_stream(stream: int, index: int) -> AbstractContextManager[Any]:
    known = torch.cuda.ExternalStream(stream, device=index) if stream else torch.cuda.default_stream(index)
    return torch.cuda.stream(known)


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
        _log.warning("torch tensors on %s are copied to the host and back by torch: for NCCL and pinned memory "
                     "pip install hvdlite[gpu]", device)


def cast(tensor: Any, dtype: Any) -> Any:
    """A floating-point tensor in another dtype, given by name or as the framework's own; others as they are."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.to(_DTYPES[dtype] if isinstance(dtype, str) else dtype)
