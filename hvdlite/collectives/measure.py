"""Timing several ways to exchange the same values, for all ranks of a plane alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvdlite.dataplane.base import DataPlane
from hvdlite.message import ReduceOp

#: Sizes that are timed, in bytes of float32. Chosen: latency shows in the first, and in the last what overlaps.
PROBE_BYTES = (64 << 10, 1 << 20, 8 << 20, 32 << 20)
#: Rounds for each, of which the median counts; and the seconds after which no larger size is tried.
ROUNDS, ENOUGH_S = 5, 0.25

Measured = dict[str, list[tuple[int, float]]]


def time_ways(
    plane: DataPlane, prepare: Callable[[np.ndarray], Mapping[str, Callable[[], object]]], sizes: Sequence[int] = PROBE_BYTES,
) -> Measured:
    """Time every way on values of each size: pairs of bytes and seconds, equal on all ranks. Collective over the plane.

    ``prepare``: the ways by name, given the values they exchange in place. The slowest rank's time of each round counts. At
    least two sizes are timed, the others only while all this takes less than ``ENOUGH_S`` for a size.
    """
    found: Measured = {}
    for num_bytes in sizes:
        values = np.empty(num_bytes // 4, np.float32)
        ways = prepare(values)
        times = np.empty((ROUNDS + 1, len(ways)))
        for number in range(ROUNDS + 1):
            for index, call in enumerate(ways.values()):
                # Like a gradient, none of whose sums is exact or infinite.
                values[:] = np.random.default_rng(plane.rank).standard_normal(256, np.float32).repeat(len(values) // 256)
                plane.barrier()
                started = time.perf_counter()
                call()
                times[number, index] = time.perf_counter() - started
        slowest = times[1:].reshape(-1).copy()
        plane.allreduce(slowest, slowest, ReduceOp.Max)
        medians = np.median(slowest.reshape(ROUNDS, -1), axis=0)
        for way, seconds in zip(ways, medians, strict=True):
            found.setdefault(way, []).append((num_bytes, float(seconds)))
        if slowest.sum() > ENOUGH_S and all(len(points) > 1 for points in found.values()):
            break
    return found
