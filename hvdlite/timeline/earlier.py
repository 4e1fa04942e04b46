"""Earlier recordings: what lies where a job is about to record moves to ``earlier/<job>/`` beside it; nothing is overwritten.

So a directory always holds the last job's recording, and those before it can be read in folders of their own. A recording's
name is in the headers of its rings, the same on all ranks: each rank moves its own files, and they meet again without a word
between the ranks.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

#: The folder for recordings of earlier jobs, inside that of the last one.
FOLDER = "earlier"
#: What rank 0 makes of all rings at shutdown.
MERGED = "merged.json"


def new_job() -> str:
    """A name for a job: when it began, and what tells it from others of that second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def put_aside(ring: Path) -> Path | None:
    """Move a ring that is in the way, with its names; tell where to. Raises: OSError where it can't be moved.

    What another process moves at the same time it need not move.
    """
    try:
        folder = ring.parent / FOLDER / _job_of(ring)
    except FileNotFoundError:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for path in (ring, ring.with_name(f"{ring.name}.names")):
        try:
            path.rename(folder / path.name)
        except FileNotFoundError:
            pass
    return folder


def clear(directory: Path, rank: int, size: int) -> Path | None:
    """Put aside what an earlier recording left of a rank, and of ranks that a job of ``size`` ranks does not have.

    Returns: where that is now, None where there was nothing.
    """
    moved = [put_aside(ring) for ring in sorted(directory.glob("ring-*.hvdring")) if _is_in_the_way(ring, rank, size)]
    folder = next((one for one in moved if one is not None), None)
    if rank == 0 and folder is not None and (directory / MERGED).exists():
        (directory / MERGED).rename(folder / MERGED)
    return folder


def _is_in_the_way(ring: Path, rank: int, size: int) -> bool:
    number = ring.name.split("-")[1]
    return number.isdecimal() and (int(number) == rank or int(number) >= size)


def _job_of(ring: Path) -> str:
    """The name of a ring's recording; where it does not tell, one made of the time it was written last."""
    try:
        with open(ring, "rb") as file:
            name = json.loads(file.read(4096))["job"]
        if name and name == os.path.basename(name):
            return str(name)
    except (ValueError, KeyError, TypeError):
        pass
    return f"unknown-{ring.stat().st_mtime_ns}"
