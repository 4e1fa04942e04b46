"""What each step of each rank was spent on. Pure functions of a Job.

A step's parts sum to it: *compute* (nothing of the exchange is felt), *input*, *overlapped* (the exchange runs behind other
work), *exposed* (a thread is blocked while data moves) and *idle* (blocked, and nothing moves: some rank is awaited).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hvdlite.timeline import intervals
from hvdlite.timeline.intervals import Set
from hvdlite.timeline.job import Job, Rank
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.ring import TimelineError

PARTS = ("compute", "input", "overlapped", "exposed", "idle")

#: Steps from which the first one, where everything is set up, is left out of means. Chosen.
_ENOUGH_STEPS = 5


@dataclass(frozen=True)
class Activity:
    """One rank's sets of time."""

    blocked: Set
    moving: Set
    reading: Set
    stopped: Set


@dataclass(frozen=True)
class Steps:
    """Every rank's steps. *Shapes*: ``starts``, ``ends``, each of ``parts``, ``stopped``: (ranks, steps), int64, ns; ranks
    as in ``Job.ranks``. ``source``: how steps were found. ``numbers``: of each step. ``stopped``: the process did not run.
    """

    numbers: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    parts: dict[str, np.ndarray]
    stopped: np.ndarray
    source: str
    activities: tuple[Activity, ...]

    @property
    def length(self) -> np.ndarray:
        """Of every step, in ns. *Shapes*: (ranks, steps)."""
        return self.ends - self.starts

    @property
    def num(self) -> int:
        return len(self.numbers)

    @property
    def counted(self) -> slice:
        """The steps that means are of: without the first one of a recording that has enough of them."""
        return slice(1 if self.num >= _ENOUGH_STEPS else 0, None)


def activity(rank: Rank) -> Activity:
    """What a rank did when."""

    def of(*phases: int) -> Set:
        records = rank.of(*phases)
        return intervals.union(records["start_ns"], records["end_ns"])

    return Activity(of(Phase.WAIT), of(Phase.BUCKET), of(Phase.INPUT), of(Phase.NOT_RUNNING))


def find_steps(job: Job) -> Steps:
    """Find the steps that all ranks have, and take them apart. Raises: TimelineError where nothing tells of any."""
    bounds, source = _bounds(job)
    # A step that began before some ring's oldest record would seem to be free of what that ring has lost.
    since_ns = job.since_ns
    common = [number for number in sorted(set.intersection(*(set(one) for one in bounds)))
              if min(one[number][0] for one in bounds) >= since_ns]
    if not common:
        raise TimelineError(
            "no step is whole on all ranks: their rings cover different times, or less than a step: give --timeline-ring-mb "
            "more, or see hvdtrace doctor")
    starts = np.array([[one[number][0] for number in common] for one in bounds], np.int64)
    ends = np.array([[one[number][1] for number in common] for one in bounds], np.int64)
    activities = tuple(activity(rank) for rank in job.ranks)
    parts: dict[str, np.ndarray] = {name: np.zeros(starts.shape, np.int64) for name in PARTS}
    stopped = np.zeros(starts.shape, np.int64)
    for row, (rank, one) in enumerate(zip(job.ranks, activities, strict=True)):
        split = {
            "exposed": intervals.intersect(one.blocked, one.moving),
            "idle": intervals.subtract(one.blocked, one.moving),
            "overlapped": intervals.subtract(one.moving, one.blocked)}
        busy = intervals.union(np.concatenate([one.blocked[0], one.moving[0]]), np.concatenate([one.blocked[1], one.moving[1]]))
        split["input"] = intervals.subtract(one.reading, busy)
        for name, times in split.items():
            parts[name][row] = intervals.lengths_in(times, starts[row], ends[row])
        parts["compute"][row] = ends[row] - starts[row] - sum(parts[name][row] for name in split)
        stopped[row] = intervals.lengths_in(intervals.subtract(one.stopped, one.blocked), starts[row], ends[row])
        stopped[row] = np.maximum(stopped[row], _delays(rank, common))
    return Steps(np.array(common), starts, ends, parts, stopped, source, activities)


def _bounds(job: Job) -> tuple[list[dict[int, tuple[int, int]]], str]:
    """Of each rank, when each step began and ended."""
    marked = [rank.of(Phase.STEP) for rank in job.ranks]
    if all(len(one) for one in marked):
        found = [{int(record["count"]): (int(record["start_ns"]), int(record["end_ns"])) for record in one} for one in marked]
        return found, "marked"
    name = _recurring(job)
    if name is None:
        ends = [int(rank.records["end_ns"].max(initial=0)) for rank in job.ranks]
        return [{0: (job.since_ns, max(end, job.since_ns))} for end in ends], (
            "none marked: the whole recording is taken for one step: call hvdlite.mark_step()")
    found = []
    for rank in job.ranks:
        # Submissions are numbered from the end: rings may have lost different numbers at the beginning.
        records = rank.of(Phase.QUEUE)
        records = records[records["name"] == name]
        at = dict(zip(records["plan"].tolist(), records["start_ns"].tolist(), strict=True))
        plans = sorted(at)
        found.append({one: (at[one], at[two]) for one, two in pairwise(plans)})
    return found, f"none marked: told by the recurrence of {job.names[name]}: call hvdlite.mark_step()"


def _recurring(job: Job) -> int | None:
    """The name first submitted that comes back the most often on all ranks."""
    counts = None
    for rank in job.ranks:
        own = Counter(rank.of(Phase.QUEUE)["name"].tolist())
        counts = own if counts is None else counts & own
    if not counts or max(counts.values()) < 3:
        return None
    most = max(counts.values())
    order = job.ranks[0].of(Phase.QUEUE)["name"].tolist()
    return next(name for name in order if counts[name] >= 0.9 * most)


def _delays(rank: Rank, numbers: list[int]) -> np.ndarray:
    """How long the user's thread waited for a processor in each step, as the kernel tells."""
    records = rank.of(Phase.STEP)
    known: dict[int, float] = {}
    for number, value, num_steps in records[["count", "value", "detail"]].tolist():
        # What was read after several steps is theirs to equal parts: the kernel is not asked in every short step.
        for one in range(max(1, num_steps)):
            known[number - one] = value / max(1, num_steps)
    return np.array([int(known.get(number, 0)) for number in numbers], np.int64)
