"""hvdtrace top: a job that runs, from its rings. Files are only read, so the job is not held up."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

import numpy as np

from hvdlite.timeline import blame
from hvdlite.timeline.doctor import open_calls
from hvdlite.timeline.job import Job, load_job
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.ring import TimelineError
from hvdlite.timeline.steps import PARTS, find_steps

#: Records of each ring's end, and the seconds before the end, that a picture is of. Chosen.
_NEWEST, _WINDOW_NS = 20_000, 3_000_000_000


def watch(directory: Path | str, *, interval_s: float = 1.0, once: bool = False, out: TextIO | None = None) -> int:
    """Print a picture every ``interval_s`` until the job has ended; 0 then. Raises: TimelineError without rings."""
    out = out or sys.stdout
    is_terminal = out.isatty()
    while True:
        job = load_job(directory, allow_missing=True, allow_unsynced=True, newest=_NEWEST)
        if is_terminal and not once:
            out.write("\x1b[H\x1b[2J")
        out.write(picture(job) + "\n")
        out.flush()
        if once or all(len(rank.of(Phase.END)) for rank in job.ranks):
            return 0
        time.sleep(max(0.1, interval_s))


def picture(job: Job) -> str:
    """The last seconds in words."""
    end = max(int(rank.records["end_ns"].max(initial=0)) for rank in job.ranks)
    lines = []
    try:
        steps = find_steps(job)
    except TimelineError as error:
        return f"{job.size} ranks: {error}"
    recent = steps.ends[0] >= end - _WINDOW_NS
    if not recent.any():
        recent[-1:] = True
    arrivals = blame.find_arrivals(job)
    found = blame.find_blame(job, steps, arrivals)
    length = steps.length[:, recent].mean(axis=1) / 1e6
    lines.append(f"{job.size} ranks, step {int(steps.numbers[-1])}, {1e3 / max(1e-9, float(length.mean())):.1f} steps/s")
    lines.append("rank   step ms   " + "   ".join(f"{name:>10}" for name in PARTS) + "   caused ms   pending")
    caused = found.cost[recent].mean(axis=0) / 1e6
    for row, rank in enumerate(job.ranks):
        parts = "   ".join(f"{float(steps.parts[name][row, recent].mean()) / 1e6:10.2f}" for name in PARTS)
        waiting = list(open_calls(job, rank))
        first = f"{len(waiting)} {' '.join(waiting[:1])[:40]}"
        lines.append(f"{rank.rank:4}  {length[row]:8.2f}   {parts}   {caused[row]:9.2f}   {first}")
    worst = int(np.argmax(caused))
    if len(job.ranks) > 1 and caused[worst] > blame.LEAST_COST * float(length.mean()):
        lines.append(f"rank {job.ranks[worst].rank} is the one that others wait for: {caused[worst]:.1f} ms a step")
    for rank in job.ranks:
        last = int(rank.records["end_ns"].max(initial=0))
        if end - last > _WINDOW_NS:
            lines.append(f"rank {rank.rank} has recorded nothing for {(end - last) / 1e9:.1f} s")
    if job.missing:
        lines.append(f"no ring of rank(s) {list(job.missing)}")
    return "\n".join(lines)
