"""Clocks: from readings of two clocks at one moment to a map between them, with its error. Pure functions of values.

A reading comes from an exchange of messages: rank 0 notes when it asked and when the answer came, the other rank its own
time in between; the truth lies within half of the round trip. Between two readings the map is a straight line, which takes a
constant drift out; beyond the first and last one it goes on with the drift seen, or with none where there is one reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: How far two clocks may drift apart that nobody has compared, and how far the drift itself changes. Chosen: crystals are
#: good to 50 millionths, NTP slews CLOCK_MONOTONIC by up to 500, but seldom.
UNKNOWN_DRIFT, CHANGE_OF_DRIFT = 50e-6, 1e-6


class Reading(NamedTuple):
    """One moment on this rank's clock and on rank 0's; the truth is within ``error_ns`` of it."""

    own_ns: int
    zero_ns: int
    error_ns: float


def best_reading(pings: Sequence[tuple[int, int, int, int]]) -> Reading:
    """Of some pings the one with the shortest round trip. Each: asked, received there, answered there, received (ns)."""
    asked, there, answered, back = min(pings, key=lambda one: one[3] - one[0] - (one[2] - one[1]))
    return Reading((there + answered) // 2, (asked + back) // 2, max(1.0, (back - asked - (answered - there)) / 2))


class ClockMap:
    """Maps one clock to rank 0's. Without readings it is the same clock."""

    def __init__(self, readings: Sequence[Reading] = ()) -> None:
        ordered = sorted(readings)
        self._own = np.array([one.own_ns for one in ordered], np.int64)
        self._offset = np.array([one.zero_ns - one.own_ns for one in ordered], np.int64)
        self._error = np.array([one.error_ns for one in ordered])
        self.num_readings = len(ordered)
        #: Seconds that rank 0's clock gains in a second of this one.
        self.drift = 0.0
        if len(ordered) > 1 and self._own[-1] > self._own[0]:
            self.drift = float(self._offset[-1] - self._offset[0]) / float(self._own[-1] - self._own[0])

    def to_zero(self, own_ns: np.ndarray) -> np.ndarray:
        """Times of rank 0's clock. *Shapes*: any; int64."""
        own_ns = np.asarray(own_ns, np.int64)
        if not self.num_readings:
            return own_ns
        # Times count from the first reading, so that floats hold them to the nanosecond.
        since, ends = own_ns - self._own[0], self._own - self._own[0]
        offset = np.interp(since, ends, self._offset - self._offset[0])
        offset += self.drift * (np.minimum(since, 0) + np.maximum(since - ends[-1], 0))
        return own_ns + self._offset[0] + np.rint(offset).astype(np.int64)

    def error_ns(self, own_ns: np.ndarray) -> np.ndarray:
        """The bound of ``to_zero``'s error. *Shapes*: as given; float64."""
        own_ns = np.asarray(own_ns, np.int64)
        if not self.num_readings:
            return np.zeros(own_ns.shape)
        since, ends = own_ns - self._own[0], self._own - self._own[0]
        nearest = np.abs(since[..., None] - ends).min(axis=-1)
        outside = np.maximum(-since, 0) + np.maximum(since - ends[-1], 0)
        if self.num_readings == 1:
            return self._error[0] + UNKNOWN_DRIFT * outside
        span = max(1.0, float(ends[-1]))
        # The drift itself is known to within the errors of the readings it comes from.
        slope = (self._error[0] + self._error[-1]) / span + CHANGE_OF_DRIFT
        return np.interp(since, ends, self._error) + CHANGE_OF_DRIFT * nearest + slope * outside
