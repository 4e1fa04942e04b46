"""Chrome JSON from rings: one process per rank, one lane per kind of phase.

Ranks of one host share CLOCK_MONOTONIC. Rings of several hosts are placed by each host's wall clock, read when
the ring was made; the file says so in ``otherData.clock``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdlite.timeline.phase import LANES, Phase, lane
from hvdlite.timeline.ring import Ring, TimelineError, missing_ranks, read_directory


def write_chrome_json(directory: Path | str, output: Path | str, *, allow_missing: bool = False) -> int:
    """Merge the rings in ``directory`` into ``output``; return the number of recorded phases in it.

    Raises: TimelineError without rings, and for missing ranks unless ``allow_missing``.
    """
    rings = read_directory(directory)
    missing = missing_ranks(rings)
    if missing and not allow_missing:
        raise TimelineError(f"{directory}: no ring of rank(s) {missing}: copy them here, or use --allow-missing")
    other = {
        "clock": "monotonic" if len({ring.header["host"] for ring in rings}) == 1 else "wall clocks of the hosts",
        "missing_ranks": missing, "lost_records": sum(ring.lost for ring in rings),
        "torn_records": sum(ring.torn for ring in rings)}
    count = 0
    # Written beside and renamed: readers see the whole file or none.
    partial = f"{output}.partial"
    with open(partial, "w", encoding="ascii") as file:
        file.write('{"traceEvents": [\n')
        for number, event in enumerate(_events(rings)):
            file.write((",\n" if number else "") + json.dumps(event))
            count += event["ph"] == "X"
        file.write(f'\n], "displayTimeUnit": "ms", "otherData": {json.dumps(other)}}}\n')
    os.replace(partial, output)
    return count


def _events(rings: list[Ring]) -> Iterator[dict[str, Any]]:
    shifts = _shifts(rings)
    zero = min((int(ring.records["start_ns"].min()) + shift
                for ring, shift in zip(rings, shifts, strict=True) if len(ring.records)), default=0)
    for ring, shift in zip(rings, shifts, strict=True):
        rank = ring.header["rank"]
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name",
               "args": {"name": f"rank {rank} ({ring.header['host']})"}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        for number, name in enumerate(LANES):
            yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": name}}
        for record in ring.records:
            phase = Phase(int(record["phase"]))
            start_ns = int(record["start_ns"]) + shift - zero
            yield {"ph": "X", "pid": rank, "tid": lane(phase), "name": phase.name, "ts": start_ns / 1e3,
                   "dur": (int(record["end_ns"]) - int(record["start_ns"])) / 1e3,
                   "args": {"tensor": ring.names[record["name"]], "bytes": int(record["num_bytes"])}}


def _shifts(rings: list[Ring]) -> list[int]:
    """What to add to each ring's times, in ns."""
    if len({ring.header["host"] for ring in rings}) == 1:
        return [0] * len(rings)
    return [ring.header["realtime_ns"] - ring.header["monotonic_ns"] for ring in rings]
