"""Chrome JSON from rings: one process per rank, one lane per kind of phase, arrows from rank to rank, counters.

*Format*: what both ui.perfetto.dev and chrome://tracing load. Times in us from the job's first record; spans of one thread
never overlap: where a lane's do, as those of calls in flight together, they take turns with lanes of their own. An operation's
ranks are joined by one flow: "s" at the rank that began first, "t" at others, "f" at the last, each inside its span.
*Guarantees*: the output is strict JSON, ASCII, and whole or not there. Memory holds the records that are written.
"""

from __future__ import annotations

import gzip
import heapq
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from hvdlite.timeline.job import FINISHED, Job, Rank, load_job
from hvdlite.timeline.phase import INSTANTS, LANES, Phase, lane
from hvdlite.timeline.ring import TimelineError, num_ranks_in

#: Threads of a lane are numbered from this much times the lane's number plus one.
_LANE = 100
#: Bytes that a record takes in the file, about, with its share of counters and arrows. Measured with names of 20 characters.
_RECORD_BYTES = 285
#: Phases whose spans are joined by arrows.
_JOINED = (Phase.BUCKET,)
_HIDDEN = frozenset((Phase.CLOCK,))


def write_chrome_json(
    directory: Path | str, output: Path | str, *, allow_missing: bool = False, allow_unsynced: bool = False,
    steps: tuple[int, int] | None = None, ranks: Sequence[int] | None = None, max_bytes: int = 0,
    more: Sequence[dict[str, Any]] = (),
) -> int:
    """Merge the rings in ``directory`` into ``output``; return the number of recorded spans in it. A name that ends in .gz
    is compressed.

    ``steps``: the first and the first not to write; ``max_bytes``: about the largest file, by leaving out what is oldest.
    Raises: TimelineError without rings or records, for what is missing unless allowed, and where nothing is left.
    """
    job = load_job(directory, allow_missing=allow_missing, allow_unsynced=allow_unsynced, steps=steps,
                   newest=newest_of(directory, max_bytes) if steps is None else None)
    return write_job(job, output, steps=steps, ranks=ranks, max_bytes=max_bytes, more=more)


def newest_of(directory: Path | str, max_bytes: int) -> int | None:
    """How many records of each ring can be needed for a file so large: an equal share of each rank, and some more."""
    if not max_bytes:
        return None
    return max(1000, int(1.3 * max_bytes / _RECORD_BYTES / max(1, num_ranks_in(directory))))


def write_job(
    job: Job, output: Path | str, *, steps: tuple[int, int] | None = None, ranks: Sequence[int] | None = None,
    max_bytes: int = 0, more: Sequence[dict[str, Any]] = (),
) -> int:
    """Write a job; see ``write_chrome_json``."""
    job, dropped = cut(job, steps=steps, ranks=ranks, max_bytes=max_bytes)
    other = {
        "format": "hvdlite", "epoch_unix_ns": job.epoch_ns, "baseTimeNanoseconds": job.epoch_ns,
        "clock_error_us": max((one.error_ns for one in job.ranks), default=0.0) / 1e3, "missing_ranks": list(job.missing),
        "lost_records": sum(one.lost for one in job.ranks), "torn_records": sum(one.torn for one in job.ranks),
        "left_out_records": dropped + sum(one.cut for one in job.ranks), "notes": list(job.notes)}
    count = 0
    # Written beside and renamed: readers see the whole file or none.
    partial = f"{output}.partial"
    try:
        with _open(partial, str(output).endswith(".gz")) as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other, allow_nan=False)}, "traceEvents": [\n')
            for number, event in enumerate(events(job, more)):
                file.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
                count += event["ph"] == "X"
            file.write("\n]}\n")
        os.replace(partial, output)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return count


def _open(path: str, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", encoding="ascii", compresslevel=4)
    return open(path, "w", encoding="ascii")


def cut(
    job: Job, *, steps: tuple[int, int] | None = None, ranks: Sequence[int] | None = None, max_bytes: int = 0,
) -> tuple[Job, int]:
    """The part of a job that was asked for, and how many records that leaves out. Raises: TimelineError where nothing is left."""
    kept = list(job.ranks)
    before = sum(len(one.records) for one in kept)
    if ranks is not None:
        unknown = sorted(set(ranks) - {one.rank for one in kept})
        if unknown:
            raise TimelineError(f"--ranks: there is no ring of {unknown}: the job has ranks 0 to {job.size - 1}")
        kept = [one for one in kept if one.rank in ranks]
    if steps is not None:
        window = [(int(own["start_ns"].min()), int(own["end_ns"].max())) for one in kept
                  if len(own := _steps_within(one, steps))]
        if not window:
            raise TimelineError(f"--steps {steps[0]}:{steps[1]}: no such step was marked, or it is lost: see hvdtrace report")
        first, last = min(one[0] for one in window), max(one[1] for one in window)
        kept = [_between(one, first, last) for one in kept]
    budget = int(max_bytes / _RECORD_BYTES)
    total = sum(len(one.records) for one in kept)
    if budget and total > budget:
        starts = np.sort(np.concatenate([one.records["start_ns"] for one in kept]))
        since = int(starts[max(0, len(starts) - max(1, budget))])
        kept = [_between(one, since, 1 << 62) for one in kept]
    if budget and any(one.cut for one in kept):  # from when on all of them are whole
        kept = [_between(one, max(rank.since_ns for rank in kept), 1 << 62) for one in kept]
    after = sum(len(one.records) for one in kept)
    if not after:
        raise TimelineError("nothing is left: pass other --steps or --ranks, or a larger --max-mb")
    return replace(job, ranks=tuple(kept)), before - after


def _steps_within(rank: Rank, steps: tuple[int, int]) -> np.ndarray:
    records = rank.of(Phase.STEP)
    return records[(records["count"] >= steps[0]) & (records["count"] < steps[1])]


def _between(rank: Rank, first_ns: int, last_ns: int) -> Rank:
    inside = (rank.records["start_ns"] >= first_ns) & (rank.records["end_ns"] <= last_ns)
    return replace(rank, records=rank.records[inside], thread=rank.thread[inside])


def events(job: Job, more: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Every event, process by process; ``more`` at the end."""
    flows = _flows(job)
    for rank in job.ranks:
        yield from _rank_events(job, rank, flows)
    yield from more


def _rank_events(job: Job, rank: Rank, flows: dict[tuple[int, int], tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    # Process 0 means something else to some viewers.
    pid = rank.rank + 1
    yield _metadata(pid, 0, "process_name", name=f"rank {rank.rank}")
    yield _metadata(pid, 0, "process_labels", labels=rank.host)
    yield _metadata(pid, 0, "process_sort_index", sort_index=rank.rank)
    turns: dict[int, list[tuple[int, int]]] = {}
    free: dict[int, list[int]] = {}
    named: set[int] = set()
    records = rank.records
    # A span that holds others comes before them.
    order = np.lexsort((-records["end_ns"], records["start_ns"]))
    for place in order:
        record = records[place]
        phase = Phase(int(record["phase"]))
        if phase in _HIDDEN:
            continue
        number, start, end = lane(phase), int(record["start_ns"]), int(record["end_ns"])
        name = job.names[record["name"]]
        if phase in INSTANTS:
            tid = _LANE * (number + 1)
            if phase != Phase.SUBMIT:
                yield {"ph": "i", "pid": pid, "tid": tid, "s": "t", "name": phase.name, "ts": start / 1e3,
                       "args": {"tensor": name, "bytes": int(record["num_bytes"]), "value": float(record["value"])}}
        else:
            tid = _LANE * (number + 1) + _turn(turns.setdefault(number, []), free.setdefault(number, []), start, end)
            yield {"ph": "X", "pid": pid, "tid": tid, "name": phase.name, "cat": LANES[number], "ts": start / 1e3,
                   "dur": (end - start) / 1e3, "args": _arguments(record, name)}
            if phase in _JOINED:
                step = flows.get((int(record["operation"]), rank.rank))
                if step is not None:
                    kind, at, operation = step
                    flow = {"ph": kind, "pid": pid, "tid": tid, "name": "operation", "cat": "flow", "id": operation}
                    yield {**flow, "ts": at / 1e3, **({"bp": "e"} if kind == "f" else {})}
        if tid not in named:
            named.add(tid)
            label = LANES[number] + (f" ({tid % _LANE + 1})" if tid % _LANE else "")
            yield _metadata(pid, tid, "thread_name", name=label)
            yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
    yield from _counters(job, rank, pid)


def _metadata(pid: int, tid: int, kind: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": arguments}


def _arguments(record: np.void, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"tensor": name, "bytes": int(record["num_bytes"])}
    if record["operation"]:
        found["operation"] = int(record["operation"])
    if record["count"]:
        found["count"] = int(record["count"])
    return found


def _turn(busy: list[tuple[int, int]], free: list[int], start: int, end: int) -> int:
    """Which of a lane's threads is free for a span; of several the first one."""
    while busy and busy[0][0] <= start:
        heapq.heappush(free, heapq.heappop(busy)[1])
    turn = heapq.heappop(free) if free else len(busy)
    heapq.heappush(busy, (end, turn))
    return min(turn, _LANE - 1)


def _flows(job: Job) -> dict[tuple[int, int], tuple[str, int, int]]:
    """By operation and rank: what kind of event it has in the operation's flow, when, and the flow's number."""
    tables = [rank.of(*_JOINED) for rank in job.ranks]
    if len(tables) < 2:
        return {}
    operation = np.concatenate([one["operation"] for one in tables]).astype(np.int64)
    start = np.concatenate([one["start_ns"] for one in tables])
    end = np.concatenate([one["end_ns"] for one in tables])
    rank = np.concatenate([np.full(len(table), one.rank) for one, table in zip(job.ranks, tables, strict=True)])
    order = np.lexsort((start, operation))
    found: dict[tuple[int, int], tuple[str, int, int]] = {}
    edges = np.flatnonzero(np.diff(operation[order])) + 1
    for own in np.split(order, edges):
        if len(own) < 2 or not operation[own[0]]:
            continue
        at = 0
        steps = []
        for one in own.tolist():
            at = max(int(start[one]), at)
            if at <= int(end[one]):  # else the ranks' spans do not meet: it has no part in the flow
                steps.append((int(rank[one]), at))
        if len(steps) < 2:
            continue
        number = int(operation[own[0]])
        for place, (who, when) in enumerate(steps):
            kind = "s" if place == 0 else "f" if place == len(steps) - 1 else "t"
            found[number, who] = kind, when, number
    return found


def _counters(job: Job, rank: Rank, pid: int) -> Iterator[dict[str, Any]]:
    """How much is in flight: calls submitted and not complete, their bytes, and the busbw of each operation."""
    changes: list[tuple[int, int, int]] = []
    open_calls: dict[int, list[int]] = {}
    names = np.isin(rank.records["phase"], (Phase.SUBMIT, *FINISHED))
    moments = []
    for phase, name, start, end, size in rank.records[names][["phase", "name", "start_ns", "end_ns", "num_bytes"]].tolist():
        moments.append((start if phase == Phase.SUBMIT else end, phase == Phase.SUBMIT, name, size))
    for at, is_new, name, size in sorted(moments):
        if is_new:
            size = job.bytes_of(job.names[name], size)
            open_calls.setdefault(name, []).append(size)
            changes.append((at, 1, size))
        elif open_calls.get(name):
            changes.append((at, -1, -open_calls[name].pop(0)))
    depth = flying = 0
    for at, calls, size in changes:
        depth, flying = depth + calls, flying + size
        yield {"ph": "C", "pid": pid, "name": "queue depth", "ts": at / 1e3, "args": {"calls": depth}}
        yield {"ph": "C", "pid": pid, "name": "bytes in flight", "ts": at / 1e3, "args": {"bytes": flying}}
    factor = 2 * (job.size - 1) / job.size
    for start, end, size in rank.of(Phase.MPI_ALLREDUCE, Phase.QUANTIZED_ALLREDUCE)[["start_ns", "end_ns", "num_bytes"]].tolist():
        if end > start and factor:
            for at, rate in ((start, factor * size / (end - start)), (end, 0.0)):
                yield {"ph": "C", "pid": pid, "name": "busbw (GB/s)", "ts": at / 1e3, "args": {"busbw": rate}}


def lint(trace: Iterable[dict[str, Any]]) -> list[str]:
    """What viewers would stumble over in events: types, nesting, flows. Empty where all is well."""
    found: list[str] = []
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    flows: dict[int, list[tuple[float, str, int, int]]] = {}
    for event in trace:
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid", 0), int):
            found.append(f"pid and tid must be whole numbers: {event}")
        elif event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
        elif event["ph"] in "stf":
            flows.setdefault(event["id"], []).append((event["ts"], event["ph"], event["pid"], event["tid"]))
    for thread, own in spans.items():
        stack: list[float] = []
        for ts, minus in sorted(own):
            while stack and stack[-1] <= ts + 5e-4:
                stack.pop()
            if stack and ts - minus > stack[-1] + 5e-4:
                found.append(f"thread {thread}: a span from {ts} us ends after the one that holds it")
            stack.append(ts - minus)
    for number, steps in flows.items():
        kinds = "".join(one[1] for one in sorted(steps, key=lambda one: (one[0], "stf".index(one[1]))))
        if kinds[0] != "s" or kinds[-1] != "f" or set(kinds[1:-1]) - {"t"}:
            found.append(f"flow {number}: its events are {kinds}")
        for ts, _, pid, tid in steps:
            if not any(begin - 5e-4 <= ts <= begin - minus + 5e-4 for begin, minus in spans.get((pid, tid), [])):
                found.append(f"flow {number}: an event at {ts} us is in no span of thread {(pid, tid)}")
    return found
