"""Prescale, postscale and average, exact where the dtype allows it."""

from __future__ import annotations

import numpy as np

from hvdlite.message import ReduceOp


def unscaled_op(op: ReduceOp, num_ranks: int) -> tuple[ReduceOp, int]:
    """Split an op into what the data plane combines and what divides the result."""
    return (ReduceOp.Sum, num_ranks) if op == ReduceOp.Average else (op, 1)


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
        np.multiply(source, target.dtype.type(factor), out=target)
        source = target
    if divisor & (divisor - 1) == 0 and divisor != 1:
        np.multiply(source, target.dtype.type(1.0 / divisor), out=target)  # exact, and faster than a division
    elif divisor != 1:
        np.divide(source, target.dtype.type(divisor), out=target)
