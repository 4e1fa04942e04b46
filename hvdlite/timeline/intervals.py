"""Sets of time as arrays of disjoint intervals, exact to the nanosecond. Pure functions.

*Shapes*: a Set is (starts, ends), int64, ascending, disjoint and not touching.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Set = tuple[np.ndarray, np.ndarray]

EMPTY: Set = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(starts: np.ndarray, ends: np.ndarray) -> Set:
    """The union of any intervals."""
    keep = ends > starts
    starts, ends = np.asarray(starts, np.int64)[keep], np.asarray(ends, np.int64)[keep]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], ends[last]


def combine(one: Set, two: Set, rule: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Set:
    """The times at which ``rule(in one, in two)`` holds."""
    points = np.unique(np.concatenate([*one, *two]))
    if len(points) < 2:
        return EMPTY
    at = points[:-1]
    inside = rule(contains(one, at), contains(two, at))
    return union(at[inside], points[1:][inside])


def intersect(one: Set, two: Set) -> Set:
    """What is in both."""
    return combine(one, two, np.logical_and)


def subtract(one: Set, two: Set) -> Set:
    """What is in the first only."""
    return combine(one, two, lambda a, b: a & ~b)


def contains(one: Set, times: np.ndarray) -> np.ndarray:
    """Whether each time is inside; ends are not."""
    place = np.searchsorted(one[0], times, "right") - 1
    if not len(one[0]):
        return np.zeros(len(times), bool)
    return (place >= 0) & (times < one[1][np.maximum(place, 0)])


def length_until(one: Set, times: np.ndarray) -> np.ndarray:
    """How much of the set lies before each time, in ns."""
    times = np.asarray(times, np.int64)
    if not len(one[0]):
        return np.zeros(times.shape, np.int64)
    total = np.concatenate([[0], np.cumsum(one[1] - one[0])])
    place = np.searchsorted(one[0], times, "right")
    over = np.where(place > 0, np.maximum(0, one[1][np.maximum(place - 1, 0)] - times), 0)
    return total[place] - over


def lengths_in(one: Set, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How much of the set lies in each window."""
    return length_until(one, ends) - length_until(one, starts)
