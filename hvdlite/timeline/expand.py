"""Taking composite records apart, many at once. What they hold: ``composite``, whose ``singles`` does the same with one."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.timeline.composite import AWAITED, EXCHANGE_MASK, EXCHANGE_SHIFT, NEGOTIATING, PACKED, REASON_MASK
from hvdlite.timeline.phase import Phase

#: Single records that a composite one can hold.
MOST_PARTS = 4


def num_parts(records: np.ndarray) -> np.ndarray:
    """How many single records each one stands for. *Shapes*: (n,)."""
    phase, flagged = records["phase"], records["detail"] >= AWAITED
    return np.where(phase == Phase.WHOLE_OPERATION, 3 + flagged, np.where(phase == Phase.WHOLE_BUCKET, 2 + 2 * flagged, 1))


def expand(records: np.ndarray) -> np.ndarray:
    """Single records, those of a composite one in its place and under its sequence word."""
    counts = num_parts(records)
    if len(records) == counts.sum():
        return records
    made = np.repeat(records, counts)
    first = np.cumsum(counts) - counts
    for phase, take_apart in ((Phase.WHOLE_OPERATION, _operations), (Phase.WHOLE_BUCKET, _buckets)):
        of_phase = records["phase"] == phase
        if of_phase.any():
            take_apart(records[of_phase], made, first[of_phase])
    return made


def _operations(records: np.ndarray, made: np.ndarray, at: np.ndarray) -> None:
    """*Shapes*: at: (n,), the place of each one's first part."""
    seen, agreed = _halves(records["num_bytes"])
    waited, later = _halves(records["value"])
    start, end, detail = records["start_ns"], records["end_ns"], records["detail"]
    whole, own = (detail & ~np.uint16(AWAITED)).astype(np.int64), records["operation"] - later.astype(np.uint32)
    _fill(made, at, Phase.QUEUE, start, start + seen, operation=own)
    _fill(made, at + 1, whole + NEGOTIATING, start + seen, start + agreed, operation=own)
    _fill(made, at + 2, whole, start, end, count=records["count"])
    awaited = detail >= AWAITED
    _fill(made, at[awaited] + 3, Phase.WAIT, (end - waited)[awaited], end[awaited])


def _buckets(records: np.ndarray, made: np.ndarray, at: np.ndarray) -> None:
    num_bytes, first = _halves(records["num_bytes"])
    packed, combined = _halves(records["value"])
    start, end, detail = records["start_ns"], records["end_ns"], records["detail"]
    exchange, is_packed = detail >> EXCHANGE_SHIFT & EXCHANGE_MASK, detail >= PACKED
    for which, phases in (
        (~is_packed, [(exchange, start + first, end)]),
        (is_packed, [(np.full_like(exchange, Phase.MEMCPY_IN_FUSION_BUFFER), start + first, start + packed),
                     (exchange, start + packed, start + combined),
                     (np.full_like(exchange, Phase.MEMCPY_OUT_FUSION_BUFFER), start + combined, end)]),
    ):
        for number, (phase, began, ended) in enumerate(phases):
            _fill(made, at[which] + number, phase[which], began[which], ended[which], num_bytes=num_bytes[which])
        _fill(made, at[which] + len(phases), Phase.BUCKET, start[which], end[which], num_bytes=num_bytes[which],
              detail=(detail & REASON_MASK)[which], count=records["count"][which])


def _fill(made: np.ndarray, at: np.ndarray, phase: Any, start: np.ndarray, end: np.ndarray, **rest: np.ndarray) -> None:
    """Make single records of what lies there; fields that are not named are zero, or those of the composite record."""
    values = dict(phase=phase, start_ns=start, end_ns=end, num_bytes=0, detail=0, count=0, value=0.0) | rest
    for name, value in values.items():
        made[name][at] = value


def _halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high 32 bits of 64. *Shapes*: (n,) each, int64."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    return (bits & np.uint64(0xffffffff)).astype(np.int64), (bits >> np.uint64(32)).astype(np.int64)
