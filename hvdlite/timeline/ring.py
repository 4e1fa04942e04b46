"""Reading ring files, of live, ended and killed processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.timeline.recorder import HEADER_BYTES, MAGIC, RECORD

_DTYPE = np.dtype({
    "names": ["sequence", "start_ns", "end_ns", "num_bytes", "name", "phase"],
    "formats": ["<u8", "<i8", "<i8", "<u8", "<u4", "<u2"],
    "offsets": [0, 8, 16, 24, 32, 36],
    "itemsize": RECORD.size,
})


class TimelineError(HvdliteError, ValueError):
    """A timeline cannot be read, or is not what it should be."""


@dataclass(frozen=True)
class Ring:
    """What one thread recorded.

    ``records``: structured array in order of recording, fields sequence, start_ns, end_ns, num_bytes, name,
    phase. ``lost``: overwritten since; ``torn``: dropped because the writer was in the middle of it.
    """

    path: Path
    header: dict[str, Any]
    records: np.ndarray
    names: list[str]
    lost: int
    torn: int


def read_ring(path: Path | str) -> Ring:
    """Read one ring file. Raises: TimelineError for what is none."""
    path = Path(path)
    content = path.read_bytes()
    try:
        header = json.loads(content[:HEADER_BYTES])
        is_ring = header["magic"] == MAGIC
    except (ValueError, KeyError, TypeError):
        is_ring = False
    if not is_ring:
        raise TimelineError(f"{path}: this is no ring file of hvdlite: name a directory written by --timeline")
    whole = (len(content) - HEADER_BYTES) // RECORD.size
    slots = np.frombuffer(content, _DTYPE, count=min(whole, header["capacity"]), offset=HEADER_BYTES)
    numbers = slots["sequence"].astype(np.int64) - 1
    # Record k lies at slot k % capacity: anything else there is not from this writer.
    valid = (numbers >= 0) & (numbers % header["capacity"] == np.arange(len(slots)))
    names = _read_names(path)
    valid &= slots["name"] < len(names)
    kept = slots[valid][np.argsort(numbers[valid])]
    newest = int(numbers[valid].max(initial=-1)) + 1
    written = (slots["sequence"] != 0) | (slots["end_ns"] != 0)
    return Ring(path, header, kept, names, max(0, newest - header["capacity"]), int((written & ~valid).sum()))


def read_directory(directory: Path | str) -> list[Ring]:
    """Read every ring of a job, in rank order. Raises: TimelineError when there is none."""
    paths = sorted(Path(directory).glob("ring-*.hvdring"))
    if not paths:
        raise TimelineError(f"{directory}: no ring file in it: record with hvdrun --timeline DIR")
    return [read_ring(path) for path in paths]


def missing_ranks(rings: list[Ring]) -> list[int]:
    """The ranks of the job that left no ring."""
    size = max(ring.header["size"] for ring in rings)
    return sorted(set(range(size)) - {ring.header["rank"] for ring in rings})


def _read_names(path: Path) -> list[str]:
    lines = Path(f"{path}.names").read_text(encoding="ascii").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # the last one is empty, or cut in the middle
