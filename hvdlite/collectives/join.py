"""Join: a rank without data takes part in the allreduces of the others, with values that change no result."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from hvdlite.buffer import HALVES, NUMPY_DTYPES, Buffer
from hvdlite.handle import Handle
from hvdlite.message import ReduceOp, Request
from hvdlite.tensor_queue import TensorEntry


def neutral_entry(request: Request) -> TensorEntry:
    """An entry of tensors that an allreduce as in ``request`` leaves as they are."""
    buffers = []
    for dtype, shape in zip(request.dtypes, request.shapes, strict=True):
        array = np.full(prod(shape), neutral_element(dtype, request), NUMPY_DTYPES[dtype])
        buffers.append(Buffer(array, dtype, shape, "cpu", array))
    made = tuple(buffers)
    return TensorEntry(request, made, made, Handle(request.key), lambda entry: None, is_stand_in=True)


def neutral_element(dtype: str, request: Request) -> Any:
    """What leaves every other value alone under the request's op; for 16-bit floats, which their owner prescales as it
    does everyone's, so that it does afterwards; for bfloat16 its bits."""
    op = request.op
    if op in (ReduceOp.Sum, ReduceOp.Average, ReduceOp.Adasum):
        return 0
    if NUMPY_DTYPES[dtype].kind in "iu" and dtype != "bfloat16":
        limits = np.iinfo(NUMPY_DTYPES[dtype])
        return {ReduceOp.Min: limits.max, ReduceOp.Max: limits.min, ReduceOp.Product: 1}[ReduceOp(op)]
    value = np.float32({ReduceOp.Min: np.inf, ReduceOp.Max: -np.inf, ReduceOp.Product: 1.0}[ReduceOp(op)])
    if dtype in HALVES and request.prescale:
        value /= np.float32(request.prescale)
    return value.view(np.uint32) >> 16 if dtype == "bfloat16" else value
