"""The critical path: backwards from the end, at every wait over to the rank that came last. Pure functions of a Job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdlite.timeline import intervals
from hvdlite.timeline.blame import Arrivals, waits_of
from hvdlite.timeline.job import Job
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.steps import Steps

#: Share of a step from which the path counts as passing through a rank. Chosen.
_PASSES = 0.05


@dataclass(frozen=True)
class Segment:
    """A piece of the path: on which rank (an index into ``Job.ranks``), what, and when, in ns."""

    column: int
    kind: str
    start_ns: int
    end_ns: int
    name: str = ""


@dataclass(frozen=True)
class CriticalPath:
    """``segments`` in order of time, without gaps. ``by_kind``, ``by_rank``: ns of all steps counted. ``passes``: by rank, the
    share of steps in which the path has a part of its own work."""

    segments: tuple[Segment, ...]
    by_kind: dict[str, int]
    by_rank: dict[int, int]
    passes: dict[int, float]


def find_path(job: Job, steps: Steps, arrivals: Arrivals) -> CriticalPath:
    """Walk back from the end of the last step to the beginning of the first one counted."""
    first = steps.counted.start or 0
    begin = int(steps.starts[:, first].min())
    column = int(steps.ends[:, -1].argmax())
    at = int(steps.ends[column, -1])
    waits = [waits_of(job, one, arrivals) for one in range(len(job.ranks))]
    executed = [_executions(job, one) for one in range(len(job.ranks))]
    last, last_rank = arrivals.last, arrivals.last_rank
    by_operation = _last_of_operations(arrivals)
    segments: list[Segment] = []
    while at > begin:
        _, ends, rows = waits[column]
        place = int(np.searchsorted(ends, at, "right")) - 1
        if place < 0 or ends[place] <= begin:
            segments.append(Segment(column, "work", begin, at))
            break
        if ends[place] < at:
            segments.append(Segment(column, "work", int(ends[place]), at))
        row = int(rows[place])
        came, who = int(last[row]), int(last_rank[row])
        # What is executed before it holds it up: go back to what the queue of operations began with.
        operation = int(arrivals.operation[row])
        while (before := executed[column].get(operation - 1)) is not None and before > came and operation - 1 in by_operation:
            operation -= 1
            came, who = by_operation[operation]
        came = min(came, int(ends[place]) - 1)
        segments.append(Segment(who, "communicate", max(came, begin), int(ends[place]), job.names[arrivals.name[row]]))
        column, at = who, came
    segments.reverse()
    return _sum_up(job, steps, tuple(segments), first)


def _executions(job: Job, column: int) -> dict[int, int]:
    records = job.ranks[column].of(Phase.BUCKET)
    return dict(zip(records["operation"].tolist(), records["end_ns"].tolist(), strict=True))


def _last_of_operations(arrivals: Arrivals) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    table = np.stack([arrivals.operation, arrivals.last, arrivals.last_rank], axis=1)
    for operation, came, who in table.tolist():
        if operation not in found or came > found[operation][0]:
            found[operation] = came, who
    return found


def _sum_up(job: Job, steps: Steps, segments: tuple[Segment, ...], first: int) -> CriticalPath:
    by_kind = {"compute": 0, "input": 0, "not running": 0, "communicate": 0}
    by_rank = {rank.rank: 0 for rank in job.ranks}
    edges = np.concatenate([steps.starts[:, first:].min(axis=0), [int(steps.ends[:, -1].max())]])
    passed = np.zeros((len(job.ranks), steps.num - first))
    for one in segments:
        length = one.end_ns - one.start_ns
        if one.kind == "communicate":
            by_kind["communicate"] += length
            continue
        window = np.array([one.start_ns]), np.array([one.end_ns])
        activity = steps.activities[one.column]
        stopped = int(intervals.lengths_in(activity.stopped, *window)[0])
        reading = int(intervals.lengths_in(intervals.subtract(activity.reading, activity.stopped), *window)[0])
        by_kind["not running"] += stopped
        by_kind["input"] += reading
        by_kind["compute"] += length - stopped - reading
        by_rank[job.ranks[one.column].rank] += length
        low, high = np.searchsorted(edges, [one.start_ns, one.end_ns], "right") - 1
        for step in range(max(0, low), min(high, steps.num - first - 1) + 1):
            passed[one.column, step] += max(0, min(one.end_ns, edges[step + 1]) - max(one.start_ns, edges[step]))
    lengths = np.maximum(1, np.diff(edges))
    passes = {rank.rank: float((passed[row] > _PASSES * lengths).mean()) for row, rank in enumerate(job.ranks)}
    return CriticalPath(segments, by_kind, by_rank, passes)
