"""Timing several ways to exchange the same values, for all ranks of a plane alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvdlite.dataplane.base import DataPlane
from hvdlite.message import ReduceOp

#: Sizes that are timed, in bytes of float32. Chosen: latency shows in the first, and in the last what overlaps.
PROBE_BYTES = (64 << 10, 1 << 20, 8 << 20, 32 << 20)
#: Rounds for each size, of which the median counts: at least, and at most, where they are expected to take ``SECONDS`` together;
#: short ones jitter. And the seconds after which no larger size is tried. Chosen.
ROUNDS, MOST_ROUNDS, SECONDS, ENOUGH_S = 5, 25, 0.15, 0.25

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
        before = sum(points[-1][1] * num_bytes / points[-1][0] for points in found.values())  # the same on all ranks
        rounds = rounds_for(before)

        def refill(values: np.ndarray = values) -> None:
            # Like a gradient, none of whose sums is exact or infinite.
            values[:] = np.random.default_rng(plane.rank).standard_normal(256, np.float32).repeat(len(values) // 256)

        seconds = time_calls(plane, ways, refill, rounds)
        for way, one in seconds.items():
            found.setdefault(way, []).append((num_bytes, one))
        if sum(seconds.values()) * ROUNDS > ENOUGH_S and all(len(points) > 1 for points in found.values()):
            break
    return found


def rounds_for(seconds: float) -> int:
    """How often to call what takes so long, all ways together; 0: not known."""
    return int(min(MOST_ROUNDS, max(ROUNDS, SECONDS / seconds))) if seconds else MOST_ROUNDS


def time_calls(
    plane: DataPlane, ways: Mapping[str, Callable[[], object]], refill: Callable[[], None], rounds: int
) -> dict[str, float]:
    """Call every way ``rounds`` times, in turn, each after ``refill``; the median of the slowest rank's seconds, equal on all."""
    times = np.empty((rounds + 1, len(ways)))
    for number in range(rounds + 1):
        for index, call in enumerate(ways.values()):
            refill()
            plane.barrier()
            started = time.perf_counter()
            call()
            times[number, index] = time.perf_counter() - started
    slowest = times[1:].reshape(-1).copy()
    plane.allreduce(slowest, slowest, ReduceOp.Max)
    return dict(zip(ways, np.median(slowest.reshape(rounds, -1), axis=0).tolist(), strict=True))
