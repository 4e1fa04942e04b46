"""Prescale, postscale and average, exact where the dtype allows it."""

from __future__ import annotations

from functools import cache

import numpy as np

from hvdlite import kernels
from hvdlite.message import ReduceOp


@cache
def unscaled_op(op: int, num_ranks: int) -> tuple[ReduceOp, int]:
    """Split an op into what the data plane combines and what divides the result."""
    return (ReduceOp.Sum, num_ranks) if op == ReduceOp.Average else (ReduceOp(op), 1)


def scale(source: np.ndarray, target: np.ndarray, factor: float, divisor: int) -> None:
    """Write ``source * factor / divisor`` to ``target``, which may be ``source``.

    Integers: the factor is applied in float64 and the division truncates toward zero, exactly for every int64.
    """
    if factor == 1.0 and divisor == 1 and source is target:
        return
    if target.dtype.kind in "iu":
        if factor != 1.0:
            np.copyto(target, np.trunc(source * np.float64(factor)), casting="unsafe")
            source = target
        if divisor != 1:
            # source - fmod is a multiple of divisor, so the floor division is exact and truncates.
            np.floor_divide(source - np.fmod(source, divisor), divisor, out=target, casting="unsafe")
        return
    if factor != 1.0:
        np.multiply(source, factor, out=target)
        source = target
    if divisor != 1:
        _divide(source, target, divisor)


def _divide(source: np.ndarray, target: np.ndarray, divisor: int) -> None:
    if divisor & (divisor - 1):
        np.divide(source, divisor, out=target)
        return
    # Exact, and faster than a division; the kernels start sooner than NumPy does, which counts for one element.
    if source is target and target.dtype == np.float32:
        kernels.multiply_float32(target, 1.0 / divisor)
    elif source is target and target.dtype == np.float64:
        kernels.multiply_float64(target, 1.0 / divisor)
    else:
        np.multiply(source, 1.0 / divisor, out=target)
