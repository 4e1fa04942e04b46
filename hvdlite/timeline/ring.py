"""Reading ring files, of live, ended and killed processes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.errors import HvdliteError, format_ranks
from hvdlite.timeline.expand import MOST_PARTS, expand, num_parts
from hvdlite.timeline.recorder import HEADER_BYTES, READABLE, RECORD

DTYPE = np.dtype({
    "names": ["sequence", "start_ns", "end_ns", "num_bytes", "name", "phase", "detail", "operation", "plan", "count",
              "process_set", "value"],
    "formats": ["<u8", "<i8", "<i8", "<u8", "<u4", "<u2", "<u2", "<u4", "<u4", "<u4", "<u4", "<f8"],
    "offsets": [0, 8, 16, 24, 32, 36, 38, 40, 44, 48, 52, 56],
    "itemsize": RECORD.size,
})

#: Rings below this size are read from end to end. Chosen: that takes some 50 ms, and relies on nothing.
_LARGE_BYTES = 64 << 20
#: Records that may have been written together, in any order. Chosen: more than a plan of many tensors makes.
_TOGETHER = 256
#: Records that are read beyond what is enough on average. Chosen: what lies at the end may be of another kind.
_MORE = 4096
#: Slots that are looked at together. Chosen: memory stays small however large the ring is.
_SLOTS_AT_ONCE = 1 << 17


class TimelineError(HvdliteError, ValueError):
    """A timeline cannot be read, or is not what it should be."""


@dataclass(frozen=True)
class Ring:
    """What one thread recorded.

    ``records``: structured array in order of recording, fields as in ``DTYPE``, composite ones taken apart. ``lost``:
    overwritten since; ``torn``: dropped because the writer was in the middle of it; ``cut``: left out by the reader.
    ``since_ns``: from then on nothing of the thread is lost, nor left out for being old.
    ``about``: by number of a name, the last thing said of it.
    """

    path: Path
    header: dict[str, Any]
    records: np.ndarray
    names: list[str]
    lost: int
    torn: int
    cut: int = 0
    since_ns: int = -1 << 62
    about: dict[int, dict[str, Any]] = field(default_factory=dict)


#: Which of some records are wanted.
Wanted = Callable[[np.ndarray], np.ndarray]


def read_ring(path: Path | str, *, newest: int | None = None, wanted: Wanted | None = None) -> Ring:
    """Read one ring file; of a large one only the ``newest`` records, or those that ``wanted`` tells. Memory holds these and
    a few MB.

    Raises: TimelineError for what is no ring.
    """
    path = Path(path)
    header = read_header(path)
    capacity = header["capacity"]
    keeps_all = newest is None or newest >= MOST_PARTS * capacity
    top = written = num_valid = num_singles = 0
    parts = []
    for slots, valid in _chunks(path, capacity, 0, capacity):
        written += int(((slots["sequence"] != 0) | (slots["end_ns"] != 0)).sum())
        num_valid += int(valid.sum())
        num_singles += int(num_parts(slots[valid]).sum())
        top = max(top, int(slots["sequence"][valid].max(initial=0)))
        if keeps_all:
            parts.append(_chosen(expand(slots[valid]), wanted))
    oldest = max(0, top - capacity)
    if newest is not None and not keeps_all:
        # Composite records become several: on average so many of them are enough.
        oldest = max(0, top - min(newest, newest * num_valid // max(1, num_singles) + _MORE))
        for first, end in _ranges(oldest, top, capacity):
            for slots, valid in _chunks(path, capacity, first, end):
                parts.append(_chosen(expand(slots[valid & (slots["sequence"].astype(np.int64) > oldest)]), wanted))
    kept = np.concatenate(parts) if parts else np.zeros(0, DTYPE)
    kept = kept[np.argsort(kept["sequence"], kind="stable")]
    if newest is not None and wanted is None and len(kept) > newest:
        oldest = int(kept["sequence"][-newest]) - 1  # no composite record is cut into two
        kept = kept[kept["sequence"] > oldest]
    names, about = _read_names(path)  # afterwards: what is recorded has its name already
    good = kept["name"] < len(names)
    torn = max(0, written - num_valid) + int((~good).sum())
    since_ns = _whole_since(path, capacity, oldest, top) if oldest else -1 << 62
    return Ring(path, header, kept[good], names, max(0, top - capacity), torn, max(0, num_singles - len(kept)), since_ns, about)


def _whole_since(path: Path, capacity: int, oldest: int, top: int) -> int:
    """When the first records after the one numbered ``oldest`` were written; what is lost had ended by then."""
    together = min(_TOGETHER, 1 + (top - oldest) // 16)
    ends = [slots["end_ns"][valid] for first, end in _ranges(oldest, min(top, oldest + together), capacity)
            for slots, valid in _chunks(path, capacity, first, end)]
    return int(max((one.max() for one in ends if len(one)), default=-1 << 62))


def _chosen(records: np.ndarray, wanted: Wanted | None) -> np.ndarray:
    return records if wanted is None or not len(records) else records[wanted(records)]


def _ranges(oldest: int, top: int, capacity: int) -> list[tuple[int, int]]:
    """The slots of records ``oldest`` to ``top`` - 1, as one or two ranges."""
    if top <= oldest:
        return []
    first, last = oldest % capacity, (top - 1) % capacity
    return [(first, last + 1)] if first <= last else [(0, last + 1), (first, capacity)]


def _chunks(path: Path, capacity: int, first: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces of a ring: the slots, and which of them hold a whole record of this writer. Holes of the file are passed over."""
    with open(path, "rb") as file:
        while first < end:
            first, until = _next_data(file.fileno(), first, end)
            if first >= end:
                return
            count = min(_SLOTS_AT_ONCE, until - first)
            looks = []
            for _ in range(2):
                content = os.pread(file.fileno(), count * RECORD.size, HEADER_BYTES + first * RECORD.size)
                looks.append(np.frombuffer(content, DTYPE, count=len(content) // RECORD.size))
            slots, again = looks
            if not len(again):
                return  # shorter than it was made: closed meanwhile, what was not needed cut off
            slots = slots[: len(again)]
            numbers = slots["sequence"].astype(np.int64) - 1
            # Record k lies at slot k % capacity: anything else there is not from this writer. What a live writer replaces while
            # it is read has another number at the second look.
            valid = (numbers >= 0) & (numbers % capacity == first + np.arange(len(slots)))
            yield slots, valid & (slots["sequence"] == again["sequence"])
            first += len(slots)


def _next_data(file: int, first: int, end: int) -> tuple[int, int]:
    """From slot ``first`` on, where the file holds something other than holes: first slot and the one after the last."""
    if end * RECORD.size < _LARGE_BYTES:
        return first, end
    try:
        at = os.lseek(file, HEADER_BYTES + first * RECORD.size, os.SEEK_DATA)
        hole = os.lseek(file, at, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but holes
            return end, end
        return first, end  # a file system that does not tell
    return max(first, (at - HEADER_BYTES) // RECORD.size), min(end, -(-(hole - HEADER_BYTES) // RECORD.size))


def read_header(path: Path) -> dict[str, Any]:
    """What a ring says about itself. Raises: TimelineError for what is no ring."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(HEADER_BYTES))
        is_ring = header["magic"] in READABLE and header["capacity"] > 0
    except (ValueError, KeyError, TypeError):
        is_ring = False
    if not is_ring:
        raise TimelineError(f"{path}: this is no ring file of hvdlite: name a directory written by --timeline")
    return dict(header)


def read_directory(
    directory: Path | str, *, newest: int | None = None, wanted: Callable[[int], Wanted] | None = None,
) -> list[Ring]:
    """Read every ring of a job, in rank order; see ``read_ring``. ``wanted``: what is wanted of a rank's records.

    Raises: TimelineError when there is none, or of two jobs.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise TimelineError(f"{directory}: no such directory: name what hvdrun --timeline wrote to")
    paths = sorted(directory.glob("ring-*.hvdring"))
    if not paths:
        raise TimelineError(f"{directory}: no ring file in it: record with hvdrun --timeline DIR")
    rings = []
    for path in paths:
        header = read_header(path)
        # The few readings of clocks are about the whole job.
        is_clock = header["thread"] == "clock"
        rings.append(read_ring(path, newest=None if is_clock else newest,
                               wanted=None if is_clock or wanted is None else wanted(header["rank"])))
    jobs = {(ring.header.get("job", ""), ring.header["size"]): ring.header["rank"] for ring in rings}
    if len(jobs) > 1:
        told = ", ".join(f"that of rank {rank} is of job {job!r} of {size} ranks" for (job, size), rank in sorted(jobs.items()))
        raise TimelineError(f"{directory}: rings of two jobs: {told}: leave those of one job here, and move the others away")
    return rings


def num_ranks_in(directory: Path | str) -> int:
    """How many ranks have left rings in a directory."""
    return len({path.name.split("-")[1] for path in Path(directory).glob("ring-*.hvdring")})


def missing_ranks(rings: list[Ring]) -> list[int]:
    """The ranks of the job that left no ring."""
    size = max(ring.header["size"] for ring in rings)
    return sorted(set(range(size)) - {ring.header["rank"] for ring in rings})


def check_complete(directory: Path | str, rings: list[Ring], allow_missing: bool) -> list[int]:
    """The ranks that left no ring. Raises: TimelineError where there are some, unless that is allowed; without any record."""
    missing = missing_ranks(rings)
    if missing and not allow_missing:
        raise TimelineError(
            f"{directory}: no ring of {format_ranks(missing)}: copy what those hosts wrote here, or pass --allow-missing")
    if not any(len(ring.records) for ring in rings if ring.header["thread"] != "clock"):
        raise TimelineError(f"{directory}: the rings hold no record: the job ended before its first operation")
    return missing


def _read_names(path: Path) -> tuple[list[str], dict[int, dict[str, Any]]]:
    names: list[str] = []
    about: dict[int, dict[str, Any]] = {}
    try:
        content = Path(f"{path}.names").read_text(encoding="ascii")
    except OSError as reason:
        raise TimelineError(f"{path}: its names are missing ({reason}): copy the .names files too") from reason
    for line in content.split("\n")[:-1]:  # the last one is empty, or cut in the middle
        value = json.loads(line)
        if isinstance(value, str):
            names.append(value)
        else:
            about[value["name"]] = value
    return names, about
